"""D39 (s3fs#95): an exception while writing left a valid, truncated object."""

from __future__ import annotations

import threading

import pytest

from ckpt.config import MIB
from ckpt.errors import NotFoundError, StorageError
from ckpt.storage.s3 import S3Storage
from tests.s3.fake import FakeS3


@pytest.mark.parametrize("size", [0, 1000, 12 * MIB])
def test_d39_an_exception_leaves_no_object_and_no_upload(storage: S3Storage, size: int) -> None:
    def fail_late() -> None:
        with storage.writer("k") as out:
            out.write(b"x" * size)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_late()
    with pytest.raises(NotFoundError):
        storage.stat("k")
    assert list(storage.unfinished()) == []
    storage.create("k", b"free")


def test_d39_a_failed_part_leaves_nothing_even_if_its_error_is_swallowed(
    credentials: None,
) -> None:
    with FakeS3() as server:
        server.on("PUT", "partNumber=2").always().answer(403, "AccessDenied")
        storage = server.storage()

        def swallow() -> None:
            with storage.writer("k") as out:
                for _ in range(8):
                    try:
                        out.write(b"x" * 5 * MIB)
                    except StorageError:
                        return

        with pytest.raises(StorageError, match="access denied"):
            swallow()
        assert (server.objects, server.uploads) == ({}, {})


def test_d39_parts_under_way_are_stopped(credentials: None) -> None:
    """Parts that arrive after the abort would be kept, and paid for."""
    with FakeS3() as server:
        gate = server.on("PUT", "partNumber=1").block()
        storage = server.storage()

        def fail() -> None:
            with storage.writer("k") as out:
                out.write(b"x" * 11 * MIB)
                gate.wait_reached()
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            fail()
        assert (server.objects, server.uploads) == ({}, {})
        gate.open()
        storage.create("k", b"free")


def test_memory_is_bounded_by_the_parts_under_way(credentials: None) -> None:
    with FakeS3() as server:
        gate = server.on("PUT", "partNumber=").always().block()
        storage = server.storage()
        taken: list[int] = []
        full = threading.Event()

        def write() -> None:
            with storage.writer("k") as out:
                for n in range(10):
                    # Four parts are on their way and one is filled: the sixth has to wait.
                    if n == 5:
                        full.set()
                    out.write(bytes([n]) * 5 * MIB)
                    taken.append(n)

        thread = threading.Thread(target=write)
        thread.start()
        gate.wait_reached()
        assert full.wait(30)
        thread.join(0.3)
        assert taken == [0, 1, 2, 3, 4]
        assert len(server.seen("PUT", "partNumber=")) == 4
        gate.open()
        thread.join(60)
        assert server.objects["k"].data == b"".join(bytes([n]) * 5 * MIB for n in range(10))
