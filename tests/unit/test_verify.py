from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckpt import layout, verify
from ckpt.digest import digest_of
from ckpt.errors import StorageError
from ckpt.index import TensorEntry, decode_index, encode_index
from ckpt.manifest import CommitRecord, Receipt, decode, encode
from ckpt.storage import MemoryStorage
from ckpt.types import DigestName, FileEntry
from ckpt.verify import Level, VerifyReport, verify_commit
from tests.fake_run import FakeRun
from tests.faults import FaultyStorage

PREFIX = layout.data_prefix(1, 10, "000001")
DATA = layout.rank_data_key(PREFIX, 0)
INDEX = layout.rank_index_key(PREFIX, 0)
OBJECTS = layout.rank_objects_key(PREFIX, 1)
RECEIPT = layout.rank_receipt_key(PREFIX, 1)
LEVELS: list[Level] = ["quick", "full"]


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def record(storage: MemoryStorage) -> CommitRecord:
    run = FakeRun(storage)
    run.commit(1, 10)
    return run.record(1, 10)


def flip(storage: MemoryStorage, key: str, at: int) -> None:
    data = bytearray(storage.read(key))
    data[at] ^= 1
    storage.put(key, data)


def restored(record: CommitRecord, storage: MemoryStorage, key: str, data: bytes) -> CommitRecord:
    """Store `data` under a key of the commit, and the commit as if it had always been so."""
    storage.put(key, data)
    entry = FileEntry(key, len(data), digest_of(data))

    def swap(entries: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        return tuple(entry if f.key == key else f for f in entries)

    return replace(record, receipts=swap(record.receipts), files=swap(record.files))


def full(storage: MemoryStorage, record: CommitRecord) -> VerifyReport:
    return verify_commit(storage, record, level="full")


class TestSound:
    @pytest.mark.parametrize("digest", ["xxh3-128", "sha256"])
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("rows", [0, 1, 5])
    def test_passes(
        self, storage: MemoryStorage, digest: DigestName, level: Level, rows: int
    ) -> None:
        run = FakeRun(storage, digest=digest)
        run.commit(1, 10, rows=rows)
        report = verify_commit(storage, run.record(1, 10), level=level)
        assert report == VerifyReport([], 8, report.bytes)
        assert report.ok

    def test_full_reads_each_byte_once_and_quick_no_data(
        self, storage: MemoryStorage, record: CommitRecord
    ) -> None:
        receipts = sum(f.size_bytes for f in record.receipts)
        data = sum(f.size_bytes for f in record.files if f.key.endswith(".bin"))
        expectations: list[tuple[Level, int]] = [
            ("full", record.stored_bytes),
            ("quick", record.stored_bytes - data),
        ]
        for level, expected in expectations:
            steps: list[int] = []
            report = verify_commit(storage, record, level=level, progress=steps.append)
            assert sum(steps) == expected
            assert report.bytes == expected + receipts
        faulty = FaultyStorage(storage)
        verify_commit(faulty, record, level="quick")
        assert not [c for c in faulty.calls if c[1].endswith(".bin")]
        assert [c for c in faulty.calls if c[0] == "list"] == [("list", PREFIX)]

    @pytest.mark.parametrize("piece_bytes", [1, 255, 256, 257, 4096, 5000])
    def test_chunks_may_lie_across_pieces(
        self,
        storage: MemoryStorage,
        record: CommitRecord,
        monkeypatch: pytest.MonkeyPatch,
        piece_bytes: int,
    ) -> None:
        monkeypatch.setattr(verify, "_PIECE_BYTES", piece_bytes)
        assert full(storage, record).ok
        flip(storage, DATA, 4096 + 255)
        problems = full(storage, record).problems
        assert len(problems) == 2
        assert problems[0].startswith(f"{DATA}: doesn't match its digest xxh3-128:")
        assert problems[1] == f"{DATA}: table.weight rows 1+1 at 4096: doesn't match its digest"


@pytest.mark.parametrize("level", LEVELS)
class TestDamageThatQuickFinds:
    def test_missing_files(
        self, storage: MemoryStorage, record: CommitRecord, level: Level
    ) -> None:
        for key in (DATA, INDEX, OBJECTS, RECEIPT):
            storage.delete(key)
        problems = verify_commit(storage, record, level=level).problems
        assert len(problems) == 4
        for key in (DATA, INDEX, OBJECTS, RECEIPT):
            assert any(p.startswith(f"{key}: missing; the commit says ") for p in problems)

    @pytest.mark.parametrize("key", [DATA, INDEX, OBJECTS, RECEIPT])
    @pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: b""])
    def test_other_sizes(
        self,
        storage: MemoryStorage,
        record: CommitRecord,
        level: Level,
        key: str,
        change: Callable[[bytes], bytes],
    ) -> None:
        size = storage.stat(key).size_bytes
        new = storage.put(key, change(storage.read(key))).size_bytes
        problems = verify_commit(storage, record, level=level).problems
        assert problems == [f"{key}: has {new} bytes, the commit says {size}"]

    @pytest.mark.parametrize("key", [INDEX, OBJECTS, RECEIPT])
    def test_a_flipped_bit_in_a_small_file(
        self, storage: MemoryStorage, record: CommitRecord, level: Level, key: str
    ) -> None:
        flip(storage, key, 30)
        problems = verify_commit(storage, record, level=level).problems
        assert len(problems) == 1
        assert problems[0].startswith(f"{key}: digest is xxh3-128:")

    def test_receipts_that_disagree_with_the_commit(
        self, storage: MemoryStorage, record: CommitRecord, level: Level
    ) -> None:
        receipt = decode(Receipt, storage.read(RECEIPT), RECEIPT)
        for other, words in [
            (replace(receipt, step=9), r"is of (epoch, step, save, ranks) (1, 9, '000001', 2)"),
            (replace(receipt, files=receipt.files[:-1]), f"{OBJECTS}: not the same file in its"),
        ]:
            changed = restored(record, storage, RECEIPT, encode(other))
            problems = verify_commit(storage, changed, level=level).problems
            assert len(problems) == 1
            assert words in problems[0]

    def test_a_rank_without_a_receipt(
        self, storage: MemoryStorage, record: CommitRecord, level: Level
    ) -> None:
        fewer = replace(record, receipts=record.receipts[:1])
        problems = verify_commit(storage, fewer, level=level).problems
        assert problems == ["the commit lists 1 receipts for 2 ranks"]

    def test_a_receipt_that_is_something_else(
        self, storage: MemoryStorage, record: CommitRecord, level: Level
    ) -> None:
        changed = restored(record, storage, RECEIPT, b"{}")
        problems = verify_commit(storage, changed, level=level).problems
        assert problems[0].startswith(f"{RECEIPT}: not a Sidestage record")

    def test_odd_entries_are_problems_and_not_exceptions(
        self, storage: MemoryStorage, record: CommitRecord, level: Level
    ) -> None:
        odd = (
            FileEntry("../outside", 1, "sha256:00"),
            FileEntry("", 0, "sha256:00"),
            replace(record.files[-1], digest="md5:00"),
        )
        problems = verify_commit(
            storage, replace(record, files=record.files[:-1] + odd), level=level
        ).problems
        text = "\n".join(problems)
        assert "../outside: missing" in text
        assert ": missing; the commit says 0 bytes" in text
        assert "unknown digest algorithm 'md5'" in text
        assert all("\n" not in p for p in problems)


class TestDamageThatFullFinds:
    @pytest.mark.parametrize("at", [0, 255, 4096, 2 * 4096 + 255])
    def test_a_flipped_bit_in_a_chunk_is_named(
        self, storage: MemoryStorage, record: CommitRecord, at: int
    ) -> None:
        flip(storage, DATA, at)
        assert verify_commit(storage, record, level="quick").ok
        problems = full(storage, record).problems
        assert len(problems) == 2
        row = at // 4096
        assert problems[1].startswith(f"{DATA}: table.weight rows {row}+1 at {row * 4096}: doesn't")

    def test_a_flipped_bit_between_chunks(
        self, storage: MemoryStorage, record: CommitRecord
    ) -> None:
        flip(storage, DATA, 1000)
        problems = full(storage, record).problems
        assert [p.startswith(f"{DATA}: doesn't match its digest") for p in problems] == [True]

    def test_a_data_file_swapped_for_another_ranks(
        self, storage: MemoryStorage, record: CommitRecord
    ) -> None:
        other = storage.read(layout.rank_data_key(PREFIX, 1))
        # Even if the commit vouched for the file, the index does not for its chunks.
        changed = restored(record, storage, DATA, other)
        problems = [p for p in full(storage, changed).problems if "receipt" not in p]
        assert len(problems) == 3
        assert all("table.weight rows" in p for p in problems)

    def test_an_index_that_points_outside_its_data_file(
        self, storage: MemoryStorage, record: CommitRecord
    ) -> None:
        for offsets, words in [
            ((0, 4096, 1 << 40), "rows 2+1 at 1099511627776: bytes [1099511627776, "),
            ((0, 4096, 8193), "pass the end of the data file at 8448"),
            ((0, 255, 8192), "rows 1+1 at 255: bytes [255, 511) overlap another chunk"),
        ]:
            changed = restored(record, storage, INDEX, moved(storage.read(INDEX), offsets))
            problems = [p for p in full(storage, changed).problems if "receipt" not in p]
            assert len(problems) == 1
            assert problems[0].startswith(f"{INDEX}: table.weight ")
            assert words in problems[0]

    def test_an_index_that_is_something_else(
        self, storage: MemoryStorage, record: CommitRecord
    ) -> None:
        changed = restored(record, storage, INDEX, b"not an index")
        problems = [p for p in full(storage, changed).problems if "receipt" not in p]
        assert problems == [f"{INDEX}: not a chunk index (12 bytes)"]

    @pytest.mark.parametrize(("dropped", "kept"), [(DATA, INDEX), (INDEX, DATA)])
    def test_half_a_pair(
        self, storage: MemoryStorage, record: CommitRecord, dropped: str, kept: str
    ) -> None:
        changed = replace(record, files=tuple(f for f in record.files if f.key != dropped))
        assert f"{kept}: the commit lists no {dropped} beside it" in full(storage, changed).problems

    def test_many_problems_of_one_file_are_summed_up(self, storage: MemoryStorage) -> None:
        run = FakeRun(storage)
        run.commit(1, 10, rows=30)
        storage.put(DATA, bytes(storage.stat(DATA).size_bytes))
        problems = full(storage, run.record(1, 10)).problems
        assert len(problems) == 1 + 10 + 1
        assert problems[-1] == f"{DATA}: and 20 more like these"

    def test_all_damage_is_found_in_one_run(
        self, storage: MemoryStorage, record: CommitRecord
    ) -> None:
        flip(storage, DATA, 0)
        flip(storage, OBJECTS, 3)
        storage.delete(layout.rank_data_key(PREFIX, 1))
        text = "\n".join(full(storage, record).problems)
        assert f"{DATA}: doesn't match" in text
        assert f"{OBJECTS}: digest is" in text
        assert f"{layout.rank_data_key(PREFIX, 1)}: missing" in text


@pytest.mark.parametrize(
    ("op", "pattern"),
    [("list", "*"), ("read", "*.idx"), ("read", "*.receipt.json"), ("read_into", "*")],
)
def test_a_failing_store_is_raised_and_is_no_damage(
    storage: MemoryStorage, record: CommitRecord, op: str, pattern: str
) -> None:
    faulty = FaultyStorage(storage)
    faulty.on(op, pattern).fail(StorageError("down"))
    with pytest.raises(StorageError, match="down"):
        verify_commit(faulty, record, level="full")
    assert verify_commit(faulty, record, level="full").ok


def moved(index: bytes, offsets: tuple[int, ...]) -> bytes:
    """The same index with its chunks at other places of the data file."""
    [tensor], _ = decode_index(index, INDEX)
    [shard] = tensor.shards
    chunks = tuple(replace(c, offset=o) for c, o in zip(shard.chunks, offsets, strict=True))
    changed: TensorEntry = replace(tensor, shards=(replace(shard, chunks=chunks),))
    return encode_index([changed], "xxh3-128")
