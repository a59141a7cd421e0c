"""The store did it, and its answer never came: whose is the object that is there now?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckpt.config import MIB
from ckpt.errors import ConflictError
from ckpt.storage.s3 import S3Storage
from tests.s3.fake import FakeS3
from tests.s3.proxy import CuttingProxy
from tests.s3.server import SeaweedFS


@pytest.mark.parametrize("size", [0, 100, 12 * MIB])
def test_our_own_create_is_recognised(credentials: None, size: int) -> None:
    with FakeS3() as server:
        storage = server.storage()
        server.on("PUT" if size < MIB else "POST", "/k" if size < MIB else "uploadId").lose_reply()
        info = storage.create("k", b"x" * size)
        assert storage.stat("k") == info
        assert server.objects["k"].data == b"x" * size
        assert server.uploads == {}


def test_our_own_create_is_recognised_by_a_real_server(
    storage: S3Storage, through: Callable[[str], S3Storage], seaweedfs: SeaweedFS, root: str
) -> None:
    with CuttingProxy(seaweedfs.port) as proxy:
        near = through(proxy.endpoint)
        for key, size in (("small", 100), ("large", 12 * MIB)):
            method = "PUT" if size < MIB else "POST"
            query = "" if size < MIB else "?uploadId"
            proxy.lose_reply(f"{method} /ckpt/{root}/{key}{query}")
            assert near.create(key, b"x" * size) == storage.stat(key)
        assert proxy.cuts == 2
    assert list(storage.unfinished()) == []


def test_equal_bytes_of_another_are_not_ours(credentials: None) -> None:
    """Two that create an empty lock: a token tells them apart, the content can't."""
    with FakeS3() as server:
        server.storage().create("lock", b"")
        server.on("PUT", "/lock").hang_up()
        with pytest.raises(ConflictError, match="s3://fake/lock: exists already"):
            server.storage().create("lock", b"")


def test_our_own_replacement_is_recognised(credentials: None) -> None:
    with FakeS3() as server:
        storage = server.storage()
        etag = storage.create("k", b"one").etag
        server.on("PUT", "/k").lose_reply()
        info = storage.replace_if("k", b"two", etag)
        assert storage.stat("k") == info
        with pytest.raises(ConflictError, match="read it again"):
            storage.replace_if("k", b"three", etag)


def test_a_put_and_a_delete_are_just_repeated(credentials: None) -> None:
    with FakeS3() as server:
        storage = server.storage()
        server.on("PUT", "/k").lose_reply()
        storage.put("k", b"one")
        server.on("DELETE", "/k").lose_reply()
        storage.delete("k")
        assert server.objects == {}


def test_a_late_racer_loses_its_parts(credentials: None) -> None:
    with FakeS3() as server:
        storage = server.storage()

        def write_late() -> None:
            with storage.writer("k") as out:
                out.write(b"x" * 12 * MIB)
                storage.create("k", b"first")

        with pytest.raises(ConflictError):
            write_late()
        assert server.objects["k"].data == b"first"
        assert server.uploads == {}
