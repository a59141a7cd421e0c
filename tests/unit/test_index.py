from __future__ import annotations

import contextlib
import itertools
import math
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import BadInputError, CorruptError, UnsupportedFormatError
from ckpt.index import (
    ChunkEntry,
    IndexReader,
    ShardEntry,
    TensorEntry,
    TensorInfo,
    decode_index,
    encode_index,
    find_overlap,
    row_bytes,
    row_count,
)
from ckpt.types import DIGEST_NAMES, ITEMSIZE

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@st.composite
def shards(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> ShardEntry:
    offsets, sizes = [], []
    for n in shape:
        offsets.append(draw(st.integers(0, n)))
        sizes.append(draw(st.integers(0, n - offsets[-1])))
    box = tuple(sizes)
    chunks, row = [], 0
    while row < row_count(box):
        rows = draw(st.integers(1, row_count(box) - row))
        codec: Any = draw(st.sampled_from(["raw", "zstd"]))
        stored = rows * row_bytes(box, dtype) if codec == "raw" else draw(st.integers(1, 2**40))
        chunks.append(
            ChunkEntry(
                row,
                rows,
                draw(st.integers(0, 2**40)),
                stored,
                codec,
                draw(st.binary(min_size=32, max_size=32)),
            )
        )
        row += rows
    return ShardEntry(tuple(offsets), box, tuple(chunks))


@st.composite
def tensors(draw: st.DrawFn) -> TensorEntry:
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    kind: Any = draw(st.sampled_from(["sharded", "replicated", "per_rank"]))
    return TensorEntry(
        draw(text), kind, dtype, shape, tuple(draw(st.lists(shards(dtype, shape), max_size=3)))
    )


def small_index() -> bytes:
    chunks = tuple(ChunkEntry(r, 1, 4096 * r, 16, "raw", bytes(32)) for r in range(2))
    shard = ShardEntry((1, 0), (2, 4), chunks)
    scalar = ShardEntry((), (), (ChunkEntry(0, 1, 8192, 8, "raw", bytes(32)),))
    return encode_index(
        [
            TensorEntry("table.weight", "sharded", "float32", (5, 4), (shard,)),
            TensorEntry("step", "replicated", "int64", (), (scalar,)),
            TensorEntry("empty", "per_rank", "bool", (0, 3), (ShardEntry((0, 0), (0, 3), ()),)),
        ],
        "xxh3-128",
    )


def resealed(data: bytes) -> bytes:
    """The same bytes with a checksum that fits: written badly, not damaged later."""
    return data[:-16] + xxhash.xxh3_128_digest(data[:-16])


@given(st.lists(tensors(), max_size=4), st.sampled_from(DIGEST_NAMES))
def test_round_trip(entries: list[TensorEntry], digest: Any) -> None:
    data = encode_index(entries, digest)
    for buffer in (data, bytearray(data), memoryview(data)):
        assert decode_index(buffer, "k") == (entries, digest)


def test_one_reader_reads_the_indexes_of_ranks_with_the_same_tensors_and_with_others() -> None:
    def index(name: str, first: int) -> bytes:
        chunk = ChunkEntry(0, 2, 8192 * first, 8, "raw", bytes(32))
        shard = ShardEntry((first,), (2,), (chunk,))
        return encode_index([TensorEntry(name, "sharded", "float32", (9,), (shard,))], "sha256")

    reader = IndexReader()
    for name, first in (("a", 0), ("a", 2), ("b", 4), ("a", 6)):
        found = reader.read(index(name, first), "k")
        assert found.tensors == decode_index(index(name, first), "k")[0]
        assert (found.tensors[0].fqn, found.tensors[0].shards[0].offsets) == (name, (first,))
        assert (found.digest, found.data_bytes) == ("sha256", 8192 * first + 8)
    with pytest.raises(CorruptError):
        reader.read(index("a", 8), "k")  # passes the end of the tensor
    assert reader.read(encode_index([], "sha256"), "k").data_bytes == 0


def test_chunks_are_a_sequence() -> None:
    entries = tuple(ChunkEntry(r, 1, 4096 * r, 16, "raw", bytes([r]) * 32) for r in range(3))
    tensor = TensorEntry("t", "sharded", "float32", (3, 4), (ShardEntry((0, 0), (3, 4), entries),))
    chunks = decode_index(encode_index([tensor, tensor], "sha256"), "k")[0][1].shards[0].chunks
    assert len(chunks) == 3
    assert (chunks[0], chunks[2], chunks[-1], chunks[1:]) == (
        *(entries[0], entries[2], entries[2], entries[1:]),
    )
    assert list(chunks) == list(entries)
    assert chunks == entries
    assert hash(chunks) == hash(entries)
    assert chunks != entries[1:]
    with pytest.raises(IndexError):
        chunks[3]


def test_chunks_of_shards_that_are_mixed_are_found_all_the_same() -> None:
    chunks = [ChunkEntry(0, 1, 0, 4, "raw", bytes(32)), ChunkEntry(1, 1, 4096, 4, "raw", bytes(32))]
    shards = tuple(ShardEntry((at,), (2,), tuple(chunks)) for at in (0, 2))
    tensor = TensorEntry("t", "sharded", "float32", (4,), shards)
    data = encode_index([tensor], "sha256")
    body, records = data[: -16 - 4 * 69], data[-16 - 4 * 69 : -16]
    first, second, third, fourth = (records[n * 69 : (n + 1) * 69] for n in range(4))
    mixed = body + third + first + second + fourth + bytes(16)
    assert decode_index(resealed(mixed), "k")[0] == [tensor]
    with pytest.raises(CorruptError, match="row 0 next"):
        decode_index(resealed(body + second + first + third + fourth + bytes(16)), "k")


def test_a_chunk_costs_69_bytes() -> None:
    """Millions of chunks must stay a matter of hundreds of megabytes."""

    def size(rows: int) -> int:
        chunks = tuple(ChunkEntry(r, 1, 0, 4, "raw", bytes(32)) for r in range(rows))
        shard = ShardEntry((0,), (rows,), chunks)
        return len(
            encode_index([TensorEntry("t", "sharded", "float32", (rows,), (shard,))], "sha256")
        )

    assert size(101) - size(1) == 100 * 69


def test_every_truncation_is_corrupt() -> None:
    data = small_index()
    for n in range(len(data)):
        with pytest.raises(CorruptError, match=r"^some/key: "):
            decode_index(data[:n], "some/key")


def test_every_flipped_bit_is_found() -> None:
    data = small_index()
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises((CorruptError, UnsupportedFormatError), match=r"^some/key: "):
                decode_index(damaged, "some/key")


def test_wrong_bytes_under_a_fitting_checksum_give_our_errors() -> None:
    data = small_index()
    for at in range(len(data) - 16):
        for value in {0, 1, 127, 255, data[at] ^ 1, data[at] ^ 128}:
            damaged = bytearray(data)
            damaged[at] = value
            # Most of these still decode; the others must say so in our terms.
            with contextlib.suppress(CorruptError, UnsupportedFormatError):
                decode_index(resealed(bytes(damaged)), "some/key")


@given(st.binary(max_size=300))
def test_any_bytes_give_our_errors(data: bytes) -> None:
    for damaged in (data, b"SSIX\0\0\0\0" + data, resealed(b"SSIX\0\0\0\0" + data + bytes(16))):
        with contextlib.suppress(CorruptError):
            decode_index(damaged, "k")


def test_huge_counts_are_refused_without_being_believed() -> None:
    head = struct.pack("<4sHHIII", b"SSIX", 0, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    with pytest.raises(CorruptError, match="broken chunk index"):
        decode_index(resealed(head + bytes(16)), "k")


def test_another_version_is_named() -> None:
    data = bytearray(small_index())
    struct.pack_into("<H", data, 4, 1)
    with pytest.raises(
        UnsupportedFormatError, match=r"^k: index format 1, but this version reads 0"
    ):
        decode_index(resealed(bytes(data)), "k")


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (ShardEntry((4, 0), (2, 4), ()), "is outside shape"),
        (ShardEntry((0, 0), (2, 4), ()), "chunks cover 0 of 2 rows"),
        (ShardEntry((0, 0), (1, 4), (ChunkEntry(1, 1, 0, 16, "raw", bytes(32)),)), "row 0 next"),
        (ShardEntry((0, 0), (1, 4), (ChunkEntry(0, 2, 0, 32, "raw", bytes(32)),)), "cover 2 of 1"),
        (
            ShardEntry((0, 0), (1, 4), (ChunkEntry(0, 1, 0, 15, "raw", bytes(32)),)),
            "15 bytes for 1",
        ),
        (ShardEntry((0, 0), (1, 4), (ChunkEntry(0, 0, 0, 0, "raw", bytes(32)),)), "row 0 next"),
    ],
)
def test_boxes_and_chunks_must_fit(shard: ShardEntry, words: str) -> None:
    data = encode_index([TensorEntry("t", "sharded", "float32", (5, 4), (shard,))], "xxh3-128")
    with pytest.raises(CorruptError, match=f"^k: broken chunk index: t: .*{words}"):
        decode_index(data, "k")


def test_an_unknown_dtype_is_corrupt() -> None:
    entry = TensorEntry("t", "sharded", "float128", (0,), ())
    with pytest.raises(CorruptError, match="t: unknown dtype 'float128'"):
        decode_index(encode_index([entry], "xxh3-128"), "k")


def test_names_that_do_not_fit_are_refused() -> None:
    for entry in (
        TensorEntry("n" * 65_536, "sharded", "float32", (1,), ()),
        TensorEntry("t", "sharded", "float32", (1,) * 256, ()),
    ):
        with pytest.raises(BadInputError, match="at most"):
            encode_index([entry], "xxh3-128")
    longest = TensorEntry("n" * 65_535, "sharded", "float32", (1,), ())
    assert decode_index(encode_index([longest], "xxh3-128"), "k")[0] == [longest]


def test_rows() -> None:
    assert (row_count(()), row_bytes((), "int64")) == (1, 8)
    assert (row_count((5,)), row_bytes((5,), "int8")) == (5, 1)
    assert (row_count((5, 3, 2)), row_bytes((5, 3, 2), "bfloat16")) == (5, 12)
    assert (row_count((5, 0)), row_count((0, 5))) == (0, 0)


def test_a_tensors_size() -> None:
    info = TensorInfo("t", "sharded", "float16", (3, 5), ())
    assert info.nbytes == math.prod((3, 5)) * 2


@st.composite
def some_boxes(draw: st.DrawFn) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    dims = draw(st.integers(1, 3))
    numbers = st.tuples(*[st.integers(0, 4)] * dims)
    return draw(st.lists(st.tuples(numbers, numbers), max_size=6))


@given(some_boxes())
def test_overlapping_boxes_are_found(boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    elements = [
        set(itertools.product(*(range(o, o + s) for o, s in zip(*b, strict=True)))) for b in boxes
    ]
    pairs = itertools.combinations(range(len(boxes)), 2)
    overlap = any(elements[i] & elements[j] for i, j in pairs)
    found = find_overlap(boxes)
    assert (found is not None) == overlap
    if found:
        a, b = (elements[boxes.index(box)] for box in found)
        assert a & b


def test_a_large_grid_of_boxes_is_checked_quickly() -> None:
    grid = [((r * 10, c), (10, 1)) for r in range(2000) for c in range(10)]
    assert find_overlap(grid) is None
    assert find_overlap([*grid, ((5, 3), (1, 1))]) is not None
    assert find_overlap([((), ())] * 2) is not None
