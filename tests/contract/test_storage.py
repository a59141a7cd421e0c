"""What every storage backend promises. A new backend joins by a branch in conftest's fixture."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.config import S3Settings
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError
from ckpt.storage import Storage, near
from ckpt.storage.protocol import OffsetWriter

from .conftest import Backend

ODD_KEYS = [
    "with space/ and more ",
    "a[1]",
    "a[1]/b*?.json",
    "é/ü-日本語.bin",
    "100%25/%2F",
    "hash#tag?query=1&x",
    "back\\slash",
    "new\nline",
    "quote'\"",
    "-leading-dash",
    ".hidden/.file",
    "~tilde",
    "x" * 255,
    f"{'y' * 200}/{'é' * 127}",
    "trailing.",
    "a/b/c/d/e/f/g/h",
]
BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "./a",
    "a/..",
    "a\0b",
    ".tmp-x",
    "a/.tmp-x/b",
    ".sidestage-lock",
    "x" * 256,
    "lone-\ud800",
]


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [info.key for info in storage.list(prefix)]


def create_mine(storage: Storage, i: int) -> int | None:
    """Try to create the same ten objects as every other worker; which ones this one won."""
    won = 0
    for n in range(10):
        try:
            storage.create(f"race/{n}", f"{i}".encode() * 1000)
            won |= 1 << n
        except ConflictError:
            pass
    return won


def stream_mine(storage: Storage, i: int) -> bool:
    try:
        with storage.writer("race/stream") as out:
            out.write(bytes([i]) * 100_000)
            out.write(bytes([i]) * 100_000)
    except ConflictError:
        return False
    return True


def increment(storage: Storage, i: int) -> int:
    """Add 1 to a counter 25 times by compare-and-set; how often another was faster."""
    lost = 0
    for _ in range(25):
        while True:
            etag = storage.stat("counter").etag
            value = int(storage.read("counter"))
            try:
                # Same length on purpose: only the etag can tell the versions apart.
                storage.replace_if("counter", f"{value + 1:09d}".encode(), etag)
                break
            except ConflictError:
                lost += 1
    return lost


def overwrite(storage: Storage, i: int) -> None:
    for _ in range(20):
        storage.put("shared", bytes([i]) * (10_000 + i))


class TestCreate:
    def test_then_read(self, storage: Storage) -> None:
        info = storage.create("a/b", b"hello")
        assert (info.key, info.size_bytes) == ("a/b", 5)
        assert storage.read("a/b") == b"hello"
        assert storage.stat("a/b") == info
        assert list(storage.list()) == [info]

    def test_refuses_a_taken_key_and_keeps_its_content(self, storage: Storage) -> None:
        info = storage.create("k", b"first")
        with pytest.raises(ConflictError, match="k"):
            storage.create("k", b"second")
        assert storage.read("k") == b"first"
        assert storage.stat("k") == info

    def test_one_of_many_racers_wins(self, backend: Backend) -> None:
        won = backend.race(create_mine, 8)
        for n in range(10):
            winners = [i for i in range(8) if won[i] >> n & 1]
            assert len(winners) == 1
            assert backend.storage.read(f"race/{n}") == f"{winners[0]}".encode() * 1000

    def test_zero_bytes(self, storage: Storage) -> None:
        assert storage.create("empty", b"").size_bytes == 0
        assert storage.read("empty") == b""
        assert storage.read("empty", 0, 0) == b""
        with pytest.raises(ConflictError):
            storage.create("empty", b"")

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_takes_any_buffer(self, storage: Storage, kind: Callable[[bytes], object]) -> None:
        storage.create("k", kind(b"abc"))  # type: ignore[arg-type]
        assert storage.read("k") == b"abc"

    def test_keeps_a_copy(self, storage: Storage) -> None:
        data = bytearray(b"abc")
        storage.create("k", data)
        data[:] = b"xyz"
        assert storage.read("k") == b"abc"

    def test_takes_a_memoryview_of_wider_items(self, storage: Storage) -> None:
        view = memoryview(bytes(range(16))).cast("I")
        assert storage.create("k", view).size_bytes == 16
        assert storage.read("k") == bytes(range(16))


class TestWriter:
    def test_streams(self, storage: Storage) -> None:
        with storage.writer("a/stream") as out:
            out.write(b"one")
            out.write(memoryview(b"two"))
            out.write(b"")
            assert keys(storage) == []  # not visible before its end
            with pytest.raises(NotFoundError):
                storage.stat("a/stream")
        assert storage.read("a/stream") == b"onetwo"

    def test_writes_zero_bytes(self, storage: Storage) -> None:
        with storage.writer("empty"):
            pass
        assert storage.stat("empty").size_bytes == 0

    def test_an_exception_leaves_nothing(self, storage: Storage) -> None:
        def write_half() -> None:
            with storage.writer("k") as out:
                out.write(b"half")
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            write_half()
        assert keys(storage) == []
        storage.create("k", b"free")

    def test_the_callers_own_os_error_passes_unchanged(self, storage: Storage) -> None:
        error = FileNotFoundError(2, "the caller's own")
        with pytest.raises(FileNotFoundError) as caught, storage.writer("k"):
            raise error
        assert caught.value is error

    def test_conflicts_at_its_end(self, storage: Storage) -> None:
        def write_late() -> None:
            with storage.writer("k") as out:
                out.write(b"late")
                storage.create("k", b"first")

        with pytest.raises(ConflictError):
            write_late()
        assert storage.read("k") == b"first"
        assert keys(storage) == ["k"]

    def test_one_of_many_racers_wins(self, backend: Backend) -> None:
        won = backend.race(stream_mine, 4)
        assert sum(won) == 1
        assert backend.storage.read("race/stream") == bytes([won.index(True)]) * 200_000

    def test_is_over_after_its_block(self, storage: Storage) -> None:
        with storage.writer("k") as out:
            out.write(b"abc")
        with pytest.raises(BadInputError):
            out.write(b"more")
        assert storage.read("k") == b"abc"


class TestOffsetWriter:
    """Of the stores whose writers offer it: `write_at` in any order, from several threads."""

    @pytest.fixture
    def storage(self, backend: Backend) -> Storage:
        with backend.storage.writer("asked") as out:
            offers = isinstance(out, OffsetWriter)
        backend.storage.delete("asked")
        assert offers == (backend.name != "s3")
        if not offers:
            pytest.skip("an S3 upload is sent in order")
        return backend.storage

    @pytest.mark.parametrize("aligned", [True, False])
    def test_parts_in_any_order_make_the_whole(self, storage: Storage, aligned: bool) -> None:
        part, tail = 512 * 1024, 1234
        size = 8 * part + tail
        memory = mmap.mmap(-1, size + 1)
        data = memoryview(memory)[:size] if aligned else memoryview(memory)[1:]
        data[:] = random.Random(1).randbytes(size)
        starts = list(range(0, size, part))
        random.Random(2).shuffle(starts)
        with storage.writer("k") as out:
            assert isinstance(out, OffsetWriter)
            with ThreadPoolExecutor(3) as pool:
                for _ in pool.map(lambda at: out.write_at(at, data[at : at + part]), starts):
                    pass
            assert keys(storage) == []
        assert storage.stat("k").size_bytes == size
        assert storage.read("k") == data

    def test_is_over_after_its_block(self, storage: Storage) -> None:
        with storage.writer("k") as out:
            assert isinstance(out, OffsetWriter)
            out.write_at(0, b"abc")
        with pytest.raises(BadInputError):
            out.write_at(3, b"more")
        assert storage.read("k") == b"abc"


def test_upload_memory_is_stated(backend: Backend) -> None:
    settings = S3Settings()
    most = (settings.parallel + 1) * settings.part_bytes
    assert backend.storage.upload_bytes == (most if backend.name == "s3" else 0)


class TestPut:
    def test_replaces(self, storage: Storage) -> None:
        first = storage.put("k", b"one")
        second = storage.put("k", b"two")
        assert first.etag != second.etag
        assert storage.read("k") == b"two"
        assert storage.stat("k") == second

    def test_an_object_that_is_near_fills_buffers_in_order(self, backend: Backend) -> None:
        data = random.Random(1).randbytes(10_000)
        backend.storage.put("object", data)
        found = near(backend.storage, "object")
        if found is None:
            pytest.skip("this store isn't near")
        buffers = [memoryview(bytearray(n)) for n in (3000, 1, 4096)]
        seen: list[bytes] = []
        with found:
            found.read_each(17, buffers, lambda buffer: seen.append(bytes(buffer)))
            assert b"".join(seen) == b"".join(buffers) == data[17 : 17 + 7097]
            seen.clear()
            with pytest.raises(CorruptError, match="10000 bytes"):
                found.read_each(4000, buffers, lambda buffer: seen.append(bytes(buffer)))
        assert seen == [data[4000:7000], data[7000:7001]]

    def test_readers_see_whole_versions_only(self, backend: Backend) -> None:
        storage = backend.storage
        storage.put("shared", b"\0" * 10_000)
        done = threading.Event()
        torn: list[str] = []

        def look() -> None:
            while not done.is_set():
                data = storage.read("shared")
                if set(data) != {data[0]} or len(data) != 10_000 + data[0]:
                    torn.append(f"{len(data)} bytes of {set(data)}")

        reader = threading.Thread(target=look)
        reader.start()
        try:
            backend.race(overwrite, 3)
        finally:
            done.set()
            reader.join()
        assert torn == []


class TestReplaceIf:
    def test_replaces_the_version_it_names(self, storage: Storage) -> None:
        first = storage.create("k", b"one")
        second = storage.replace_if("k", b"two", first.etag)
        assert storage.read("k") == b"two"
        assert storage.stat("k") == second

    def test_refuses_another_version(self, storage: Storage) -> None:
        first = storage.create("k", b"one")
        second = storage.replace_if("k", b"two", first.etag)
        with pytest.raises(ConflictError, match="read it again"):
            storage.replace_if("k", b"three", first.etag)
        assert storage.stat("k") == second

    def test_equal_content_still_counts_as_replaced(self, backend: Backend) -> None:
        etags = {backend.storage.put("k", b"same").etag for _ in range(50)}
        assert len(etags) == (50 if backend.versioned_etags else 1)

    def test_of_nothing(self, storage: Storage) -> None:
        with pytest.raises(NotFoundError):
            storage.replace_if("nowhere/k", b"x", "etag")
        etag = storage.create("k", b"x").etag
        storage.delete("k")
        with pytest.raises(NotFoundError):
            storage.replace_if("k", b"y", etag)
        assert keys(storage) == []

    def test_a_counter_loses_no_increment(self, backend: Backend) -> None:
        backend.storage.create("counter", f"{0:09d}".encode())
        backend.race(increment, 4)
        assert int(backend.storage.read("counter")) == 100


class TestRead:
    def test_ranges(self, storage: Storage) -> None:
        data = random.Random(1).randbytes(100_000)
        storage.create("k", data)
        for start, length in [(0, 10), (5, 0), (99_990, 10), (100_000, 0), (17, 70_000)]:
            assert storage.read("k", start, length) == data[start : start + length]
            buffer = bytearray(length)
            storage.read_into("k", start, memoryview(buffer))
            assert buffer == data[start : start + length]
        assert storage.read("k", 99_000) == data[99_000:]

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (5, 6), (10, 1), (11, 0), (11, None)])
    def test_past_the_end_is_corrupt(
        self, storage: Storage, start: int, length: int | None
    ) -> None:
        storage.create("k", b"0123456789")
        with pytest.raises(CorruptError, match="10 bytes"):
            storage.read("k", start, length)
        if length:
            with pytest.raises(CorruptError, match="10 bytes"):
                storage.read_into("k", start, memoryview(bytearray(length)))

    @pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1)])
    def test_refuses_negative_ranges(self, storage: Storage, start: int, length: int) -> None:
        storage.create("k", b"0123456789")
        with pytest.raises(BadInputError):
            storage.read("k", start, length)

    def test_into_wider_items(self, storage: Storage) -> None:
        storage.create("k", bytes(range(16)))
        buffer = bytearray(8)
        storage.read_into("k", 4, memoryview(buffer).cast("I"))
        assert buffer == bytes(range(4, 12))

    def test_of_nothing(self, storage: Storage) -> None:
        with pytest.raises(NotFoundError, match="nowhere/k"):
            storage.read("nowhere/k")
        with pytest.raises(NotFoundError):
            storage.read_into("k", 0, memoryview(bytearray(1)))
        with pytest.raises(NotFoundError):
            storage.stat("k")

    def test_a_prefix_is_no_object(self, storage: Storage) -> None:
        storage.create("a/b", b"x")
        with pytest.raises(NotFoundError):
            storage.read("a")
        with pytest.raises(NotFoundError):
            storage.stat("a")
        with pytest.raises(NotFoundError):
            storage.read("a/b/c")


class TestList:
    def test_an_empty_store(self, storage: Storage) -> None:
        assert keys(storage) == []
        assert keys(storage, "commits/") == []

    def test_key_order_is_that_of_the_bytes(self, storage: Storage) -> None:
        made = ["a/b", "a-b", "a.b", "a0", "a/b-c", "a/b0/c", "a/B", "é", "z", "\U0001f600", "ﬀ"]
        random.Random(2).shuffle(made)
        for key in made:
            storage.create(key, b"")
        assert keys(storage) == sorted(made, key=str.encode)

    def test_prefixes_are_strings(self, storage: Storage) -> None:
        for key in ["commits/000001/1", "commits/000010/2", "commits/000011/3", "commits-old/4"]:
            storage.create(key, b"")
        assert keys(storage, "commits/00001") == ["commits/000010/2", "commits/000011/3"]
        assert keys(storage, "commits/000001/") == ["commits/000001/1"]
        assert keys(storage, "commits/000001/1") == ["commits/000001/1"]
        assert len(keys(storage, "commits")) == 4
        assert len(keys(storage, "commits/")) == 3
        assert keys(storage, "commits/000001/12") == []
        assert keys(storage, "commits/000001/1/") == []
        assert keys(storage, "nowhere/") == []

    def test_is_fresh(self, storage: Storage) -> None:
        storage.create("a/1", b"")
        assert keys(storage, "a/") == ["a/1"]
        storage.create("a/2", b"")
        assert keys(storage, "a/") == ["a/1", "a/2"]
        storage.delete("a/1")
        assert keys(storage, "a/") == ["a/2"]

    def test_gives_current_sizes_and_etags(self, storage: Storage) -> None:
        storage.put("k", b"1")
        info = storage.put("k", b"22")
        assert list(storage.list("k")) == [info]

    @pytest.mark.parametrize("prefix", ["/", "/a", "a//b", "../", "a/../", "a\0"])
    def test_refuses_what_no_key_starts_with(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(BadInputError):
            storage.list(prefix)


class TestDelete:
    def test_is_idempotent(self, storage: Storage) -> None:
        storage.create("a/b", b"x")
        storage.delete("a/b")
        storage.delete("a/b")
        storage.delete("never/was")
        assert keys(storage) == []
        storage.create("a/b", b"y")
        assert storage.read("a/b") == b"y"

    def test_of_a_prefix_deletes_nothing(self, storage: Storage) -> None:
        storage.create("a/b", b"x")
        storage.delete("a")
        assert keys(storage) == ["a/b"]


class TestKeys:
    def test_odd_ones_work_everywhere(self, backend: Backend) -> None:
        storage = backend.storage
        odd = [k for k in ODD_KEYS if k != "a[1]"]  # also a folder in this list
        odd = [k for k in odd if backend.backslashes or "\\" not in k]
        for key in odd:
            storage.create(key, key.encode())
            with pytest.raises(ConflictError):
                storage.create(key, b"")
        assert keys(storage) == sorted(odd, key=str.encode)
        for key in odd:
            assert keys(storage, key) == [key]
            assert storage.read(key) == key.encode()
            etag = storage.put(key, b"new").etag
            assert storage.replace_if(key, b"newer", etag).key == key
            storage.delete(key)
        assert keys(storage) == []

    def test_brackets_are_not_a_pattern(self, storage: Storage) -> None:
        storage.create("a1", b"other")
        storage.create("a[1]", b"mine")
        assert storage.read("a[1]") == b"mine"
        assert keys(storage, "a[") == ["a[1]"]
        storage.delete("a[1]")
        assert keys(storage) == ["a1"]

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_ones_are_refused_by_every_call(self, storage: Storage, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: storage.put(key, b""),
            lambda: storage.create(key, b""),
            lambda: storage.replace_if(key, b"", "etag"),
            lambda: storage.writer(key).__enter__(),
            lambda: storage.read(key),
            lambda: storage.read_into(key, 0, memoryview(bytearray(1))),
            lambda: storage.stat(key),
            lambda: storage.delete(key),
        ]
        for call in calls:
            with pytest.raises(BadInputError):
                call()
        assert keys(storage) == []


def test_satisfies_the_protocol(storage: Storage) -> None:
    assert isinstance(storage, Storage)
    assert isinstance(storage.url, str)
