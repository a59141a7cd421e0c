"""Checkpoints made to mislead a reader: everything in them is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import zstandard

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.digest import digest_of
from ckpt.errors import CorruptError
from ckpt.index import ShardEntry, TensorEntry, decode_index, encode_index
from ckpt.manifest import CommitRecord
from ckpt.restore import CheckpointReader
from ckpt.storage.memory import MemoryStorage
from ckpt.types import FileEntry


def committed(storage: MemoryStorage, tensor: torch.Tensor) -> CommitRecord:
    with Checkpointer(storage) as c:
        ref = c.save(1, {"t": tensor}).committed.result()
    return Catalog(storage).read(ref)


def forged(
    storage: MemoryStorage, record: CommitRecord, change: Callable[[TensorEntry], TensorEntry]
) -> CommitRecord:
    """The commit with another index, sealed as a forger would who can write to the store."""
    key = next(f.key for f in record.files if f.key.endswith(".idx"))
    tensors, _ = decode_index(storage.read(key), key)
    data = encode_index([change(t) for t in tensors], "xxh3-128")
    storage.put(key, data)
    entry = FileEntry(key, len(data), digest_of(data))
    return replace(record, files=tuple(entry if f.key == key else f for f in record.files))


def test_shards_that_overlap_are_refused_though_their_number_of_elements_is_right() -> None:
    storage = MemoryStorage()
    record = committed(storage, torch.ones(4, 2))

    def twice_the_first_half(t: TensorEntry) -> TensorEntry:
        (chunk,) = t.shards[0].chunks
        half = replace(chunk, rows=2, stored_bytes=16)
        return replace(t, shards=(ShardEntry((0, 0), (2, 2), (half,)),) * 2)

    with pytest.raises(CorruptError, match="^t: two shards overlap"):
        CheckpointReader(storage, forged(storage, record, twice_the_first_half))


def test_a_frame_that_grows_to_more_than_its_rows_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    record = committed(storage, torch.zeros(100, 100))
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    key = next(f.key for f in record.files if f.key.endswith(".bin"))
    storage.put(key, bomb)
    digest = bytes.fromhex(digest_of(bomb).partition(":")[2]).ljust(32, b"\0")

    def point_at_it(t: TensorEntry) -> TensorEntry:
        (shard,) = t.shards
        chunk = replace(shard.chunks[0], stored_bytes=len(bomb), digest=digest)
        return replace(t, shards=(replace(shard, chunks=(chunk,)),))

    files = [FileEntry(key, len(bomb), digest_of(bomb)), *record.files[1:]]
    record = forged(storage, replace(record, files=tuple(files)), point_at_it)
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("was unpacked"))
    with pytest.raises(CorruptError, match="holds 50000000 bytes, expected 40000"):
        CheckpointReader(storage, record).read("t")


def test_chunks_past_the_end_of_their_data_file_are_refused_before_memory_is_taken() -> None:
    storage = MemoryStorage()
    record = committed(storage, torch.zeros(100, 100))

    def huge(t: TensorEntry) -> TensorEntry:
        (shard,) = t.shards
        chunk = replace(shard.chunks[0], codec="zstd", stored_bytes=1 << 60)
        return replace(t, shards=(replace(shard, chunks=(chunk,)),))

    with pytest.raises(CorruptError, match=f"t ends at byte {1 << 60}, the file has"):
        CheckpointReader(storage, forged(storage, record, huge))


def test_a_data_file_that_the_commit_does_not_list_is_not_read() -> None:
    storage = MemoryStorage()
    record = committed(storage, torch.zeros(100, 100))
    files = tuple(f for f in record.files if not f.key.endswith(".bin"))
    with pytest.raises(CorruptError, match="the commit lists no data file beside it"):
        CheckpointReader(storage, replace(record, files=files))
