"""Stores that ignore conditions, or refuse them: found at start, and one writer is still safe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.config import MIB
from ckpt.errors import ConflictError, NotFoundError, StorageError
from ckpt.storage.s3 import S3Storage
from tests.s3.fake import FakeS3

with_credentials = pytest.mark.usefixtures("credentials")


def test_a_real_store_honours_them(seaweedfs: object, storage: S3Storage) -> None:
    assert storage.probe() is True
    assert storage._probe.assumed.finish
    assert list(storage._client.run(storage._all(storage._prefix))) == []
    assert list(storage.unfinished()) == []


@with_credentials
@pytest.mark.parametrize(
    ("conditions", "honoured", "finish"),
    [("honour", True, True), ("put only", True, False), ("ignore", False, False)],
)
def test_it_asks_and_cleans_up(conditions: str, honoured: bool, finish: bool) -> None:
    with FakeS3(conditions=conditions) as server:
        storage = server.storage("run")
        assert storage.probe() is honoured
        assert storage._probe.assumed.finish is finish
        assert (server.objects, server.uploads) == ({}, {})
        asked = len(server.requests)
        assert storage.probe() is honoured
        assert len(server.requests) == asked


@with_credentials
def test_a_lost_reply_to_the_probe_itself_is_no_evidence() -> None:
    with FakeS3() as server:
        server.on("PUT", "probe").lose_reply()
        assert server.storage().probe() is True


@with_credentials
def test_without_permission_it_says_what_to_allow() -> None:
    with FakeS3() as server:
        server.on("PUT").always().answer(403, "AccessDenied")
        with pytest.raises(StorageError, match="allow s3:PutObject"):
            server.storage().probe()


@with_credentials
@pytest.mark.parametrize("conditions", ["ignore", "reject"])
class TestOneWriter:
    def test_sees_what_exists(self, conditions: str) -> None:
        with FakeS3(conditions=conditions) as server:
            storage = server.storage("run")
            assert not storage.probe()
            etag = storage.create("k", b"one").etag
            with pytest.raises(ConflictError, match="exists already"):
                storage.create("k", b"two")
            new = storage.replace_if("k", b"two", etag).etag
            with pytest.raises(ConflictError, match="read it again"):
                storage.replace_if("k", b"three", etag)
            assert storage.stat("k").etag == new
            with pytest.raises(NotFoundError):
                storage.replace_if("none", b"", etag)

    def test_streams(self, conditions: str) -> None:
        with FakeS3(conditions=conditions) as server:
            storage = server.storage("run")
            assert not storage.probe()
            with storage.writer("k") as out:
                out.write(b"x" * 12 * MIB)

            def again() -> None:
                with storage.writer("k") as out:
                    out.write(b"y" * 12 * MIB)

            with pytest.raises(ConflictError, match="exists already"):
                again()
            assert server.uploads == {}

    def test_is_told_of_another_that_wrote_at_the_same_time(self, conditions: str) -> None:
        with FakeS3(conditions=conditions) as server:
            storage, other = server.storage("run"), server.storage("run")
            assert not storage.probe()
            assert not other.probe()
            theirs = server.on("PUT", "/run/k").block()
            server.on("HEAD", "/run/k").times(2)  # each looks once, and finds nothing
            check = server.on("HEAD", "/run/k").block()
            with ThreadPoolExecutor(2) as pool:
                late = pool.submit(other.create, "k", b"theirs")
                theirs.wait_reached()
                mine = pool.submit(storage.create, "k", b"mine")
                check.wait_reached()
                theirs.open()  # their write comes after mine, and mine is checked after theirs
                late.result(30)
                check.open()
                with pytest.raises(ConflictError, match="let only one process write"):
                    mine.result(30)
            assert server.objects["run/k"].data == b"theirs"


def test_a_store_that_refuses_conditions_is_probed_by_its_first_create() -> None:
    """Ranks that no one told to probe must be able to write, too."""
    with FakeS3(conditions="reject") as server:
        storage = server.storage("run")
        storage.create("k", b"one")
        with storage.writer("large") as out:
            out.write(b"x" * 12 * MIB)
        assert set(server.objects) == {"run/k", "run/large"}
        with pytest.raises(ConflictError):
            storage.create("k", b"two")


@with_credentials
def test_parts_alone_may_be_unconditional() -> None:
    """Ceph honours If-None-Match for PutObject, and ignores it when parts are put together."""
    with FakeS3(conditions="put only") as server:
        storage = server.storage("run")
        assert storage.probe()
        storage.create("k", b"small")
        with pytest.raises(ConflictError, match="exists already"):
            storage.create("k", b"x" * 12 * MIB)
        assert server.objects["run/k"].data == b"small"
        assert server.uploads == {}
