"""The fault injector itself."""

from __future__ import annotations

import threading

import pytest

from ckpt.errors import ConflictError, NotFoundError, StorageError
from ckpt.storage import MemoryStorage, Storage
from tests.faults import FaultyStorage


@pytest.fixture
def faulty() -> FaultyStorage:
    return FaultyStorage(MemoryStorage())


def write(storage: Storage, key: str, data: bytes) -> None:
    with storage.writer(key) as out:
        out.write(data)


def test_passes_everything_through_without_rules(faulty: FaultyStorage) -> None:
    assert isinstance(faulty, Storage)
    etag = faulty.create("a", b"1").etag
    etag = faulty.replace_if("a", b"2", etag).etag
    assert faulty.stat("a").etag == etag
    faulty.put("a", b"34")
    write(faulty, "b", b"x")
    buffer = bytearray(1)
    faulty.read_into("a", 1, memoryview(buffer))
    assert (bytes(buffer), faulty.read("b")) == (b"4", b"x")
    faulty.delete("a")
    assert [info.key for info in faulty.list()] == ["b"]
    expected = "create replace_if stat put writer write finish read_into read delete list"
    assert " ".join(op for op, _ in faulty.calls) == expected


def test_fails_the_nth_matching_call_before_it_takes_effect(faulty: FaultyStorage) -> None:
    faulty.on("create", "commits/*").nth(2).times(2).fail(StorageError("full"))
    faulty.create("commits/1", b"")
    faulty.create("data/1", b"")
    for _ in range(2):
        with pytest.raises(StorageError, match="full"):
            faulty.create("commits/2", b"")
    faulty.create("commits/2", b"")


def test_loses_the_reply_of_what_took_effect(faulty: FaultyStorage) -> None:
    faulty.on("create").lose_reply()
    with pytest.raises(StorageError, match="reply was lost"):
        faulty.create("k", b"mine")
    assert faulty.read("k") == b"mine"
    with pytest.raises(ConflictError):
        faulty.create("k", b"again")


def test_fails_a_writer_at_each_of_its_points(faulty: FaultyStorage) -> None:
    for op in ("writer", "write", "finish"):
        faulty.on(op, "k").fail(StorageError(op))
        with pytest.raises(StorageError, match=op):
            write(faulty, "k", b"x")
        with pytest.raises(NotFoundError):
            faulty.stat("k")
    faulty.on("finish", "k").lose_reply()
    with pytest.raises(StorageError, match="reply was lost"):
        write(faulty, "k", b"x")
    assert faulty.read("k") == b"x"


def test_holds_a_call_at_a_gate(faulty: FaultyStorage) -> None:
    gate = faulty.on("put", "k").block()
    thread = threading.Thread(target=faulty.put, args=("k", b"x"))
    thread.start()
    gate.wait_reached()
    assert list(faulty.list()) == []
    gate.open()
    thread.join()
    assert faulty.read("k") == b"x"


def test_always(faulty: FaultyStorage) -> None:
    faulty.on("read").always().fail(StorageError("down"))
    for _ in range(5):
        with pytest.raises(StorageError):
            faulty.read("k")


def test_an_unknown_operation_is_a_mistake_in_the_test(faulty: FaultyStorage) -> None:
    with pytest.raises(AssertionError, match="unknown operation"):
        faulty.on("rename")
