"""Ranges of a tensor's rows from any sharding: right, in order, in bounded blocks and memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.digest import digest_of, new_hasher
from ckpt.errors import BadInputError, CorruptError
from ckpt.index import ChunkEntry, ShardEntry, TensorEntry, encode_index
from ckpt.manifest import CommitRecord
from ckpt.restore import CheckpointReader
from ckpt.storage import MemoryStorage
from ckpt.types import FileEntry

Boxes = Sequence[tuple[tuple[int, int], tuple[int, int], int]]
"""(offsets, sizes, rows in a chunk) of each shard."""


def reader_of(table: torch.Tensor, boxes: Boxes, *, packed: bool = False) -> CheckpointReader:
    """A checkpoint of `t`, sharded as said."""
    storage, data, shards = MemoryStorage(), bytearray(), []
    for offsets, sizes, step in boxes:
        chunks = []
        for row in range(0, sizes[0], step):
            rows = min(step, sizes[0] - row)
            first = offsets[0] + row
            block = table[first : first + rows, offsets[1] : offsets[1] + sizes[1]].contiguous()
            stored = block.numpy().tobytes()
            if packed:
                stored = zstandard.ZstdCompressor().compress(stored)
            digest = new_hasher("xxh3-128")
            digest.update(stored)
            chunks.append(
                ChunkEntry(
                    row,
                    rows,
                    len(data),
                    len(stored),
                    "zstd" if packed else "raw",
                    digest.digest().ljust(32, b"\0"),
                )
            )
            data += stored
        shards.append(ShardEntry(offsets, sizes, tuple(chunks)))
    entry = TensorEntry("t", "sharded", "float32", tuple(table.shape), tuple(shards))
    files = {"r.bin": bytes(data), "r.idx": encode_index([entry], "xxh3-128")}
    for key, content in files.items():
        storage.create(key, content)
    listed = tuple(FileEntry(k, len(v), digest_of(v)) for k, v in files.items())
    record = CommitRecord(
        "run", 1, "token", 1, "s0", 1, None, 0.0, 0.0, len(data), len(data), {}, (), listed
    )
    return CheckpointReader(storage, record)


ROWS, COLUMNS = 60, 6
TABLE = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
WHOLE: Boxes = [((0, 0), (ROWS, COLUMNS), 16)]
ROW_SHARDS: Boxes = [((25, 0), (35, COLUMNS), 10), ((0, 0), (25, COLUMNS), 7)]
COLUMN_SHARDS: Boxes = [((0, 0), (ROWS, 2), 23), ((0, 2), (ROWS, 4), 16)]
GRID: Boxes = [
    ((0, 0), (30, 3), 7),
    ((30, 0), (30, 3), 11),
    ((0, 3), (30, 3), 30),
    ((30, 3), (30, 3), 4),
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([WHOLE, ROW_SHARDS, COLUMN_SHARDS, GRID]),
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted),
    st.none() | st.integers(1, 20),
)
def test_any_range_of_rows(boxes: Boxes, span: list[int], most_rows: int | None) -> None:
    first, last = span
    at, got = first, [TABLE[:0]]
    for row, block in reader_of(TABLE, boxes).iter_rows(
        "t", first, last - first, most_rows=most_rows
    ):
        assert row == at
        assert 0 < len(block) <= (most_rows or ROWS)
        got.append(block.clone())
        at += len(block)
    assert torch.equal(torch.cat(got), TABLE[first:last])


def test_a_range_reads_only_the_chunks_that_hold_it() -> None:
    reader = reader_of(TABLE, WHOLE)
    loaded: list[int] = []
    load = reader.load_chunk
    reader.load_chunk = lambda info, stored, chunk: (
        loaded.append(chunk.row) or load(info, stored, chunk)
    )  # type: ignore
    list(reader.iter_rows("t", 17, 20, most_rows=3))
    assert loaded == [16, 32]


def test_memory_that_rows_need() -> None:
    assert reader_of(TABLE, WHOLE).held_bytes("t") == 16 * 24
    assert reader_of(TABLE, COLUMN_SHARDS).held_bytes("t") == 23 * 8 + 16 * 16
    packed = reader_of(TABLE, WHOLE, packed=True)
    assert packed.held_bytes("t") > 2 * 16 * 24
    assert torch.equal(torch.cat([b for _, b in packed.iter_rows("t")]), TABLE)


def test_ranges_and_bytes_that_are_wrong() -> None:
    reader = reader_of(TABLE, WHOLE)
    for first, rows in ((-1, 2), (59, 2), (3, -1)):
        with pytest.raises(BadInputError, match=r"t: no rows \["):
            list(reader.iter_rows("t", first, rows))
    data = bytearray(reader._storage.read("r.bin"))
    data[20 * 24] ^= 1
    reader._storage.put("r.bin", bytes(data))
    list(reader.iter_rows("t", 0, 16))
    with pytest.raises(CorruptError, match=r"t rows 16\+16: bytes don't match"):
        list(reader.iter_rows("t", 31, 1))
