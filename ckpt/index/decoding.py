"""Reads indexes, with every number checked before it is used.

A checkpoint of a large job has thousands of indexes with millions of chunks, so what all of
them have alike is checked in a few calls, and chunks are unpacked when somebody asks for them.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import xxhash

from ckpt.errors import CorruptError, UnsupportedFormatError
from ckpt.index.encoding import CHUNK, HEAD, MAGIC
from ckpt.index.entries import (
    CODECS,
    KINDS,
    ChunkEntry,
    ShardEntry,
    TensorEntry,
    TensorKind,
    row_bytes,
    row_count,
)
from ckpt.manifest import FORMAT_VERSION
from ckpt.types import DIGEST_NAMES, ITEMSIZE, Buffer

_RECORD = [
    *(("shard", "<u4"), ("row", "<u8"), ("rows", "<u8"), ("offset", "<u8"), ("stored", "<u8")),
    *(("codec", "u1"), ("digest", "V32")),
]
_NUMBER = struct.Struct("<I")
_RAW = CODECS.index("raw")
_SAFE = 1 << 62  # two of these still add up in 64 bits


class Index(NamedTuple):
    """A decoded index. `digest` is the algorithm of the chunks; `data_bytes` is where the last one ends."""

    tensors: list[TensorEntry]
    digest: str
    data_bytes: int


class PackedChunks(Sequence[ChunkEntry]):
    """Chunks as they lie in an index, checked and not yet unpacked: opening needs none of 5 million."""

    __slots__ = ("_records", "_start", "_stop")

    def __init__(self, records: memoryview, start: int, stop: int) -> None:
        """Those from `start` to before `stop` of the records of an index."""
        self._records = records
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[ChunkEntry]:
        mine = self._records[self._start * CHUNK.size : self._stop * CHUNK.size]
        for _, row, rows, offset, stored, codec, digest in CHUNK.iter_unpack(mine):
            yield ChunkEntry(row, rows, offset, stored, CODECS[codec], digest)

    @overload
    def __getitem__(self, at: int) -> ChunkEntry: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[ChunkEntry, ...]: ...
    def __getitem__(self, at: int | slice) -> ChunkEntry | tuple[ChunkEntry, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        start = range(self._start, self._stop)[at] * CHUNK.size
        _, row, rows, offset, stored, codec, digest = CHUNK.unpack_from(self._records, start)
        return ChunkEntry(row, rows, offset, stored, CODECS[codec], digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class _Head:
    """What an index says of a tensor itself, the bytes of its rows aside."""

    fqn: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    layout: struct.Struct

    @classmethod
    def of(cls, fqn: str, kind: TensorKind, dtype: str, shape: tuple[int, ...]) -> _Head:
        """`layout` is that of one of its shards: number of the tensor, offsets, sizes."""
        return cls(fqn, kind, dtype, shape, struct.Struct(f"<I{2 * len(shape)}Q"))


_Placed = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A shard without its chunks: position of its tensor, offsets, sizes."""


class IndexReader:
    """Reads the indexes of one checkpoint. Most ranks have the same tensors: these are read once."""

    def __init__(self) -> None:
        self._heads: list[_Head] = []
        self._spelled = b""

    def read(self, data: Buffer, key: str) -> Index:
        """What an index says. Raises CorruptError, UnsupportedFormatError."""
        view = memoryview(data)
        if len(view) < HEAD.size + 16 or bytes(view[:4]) != MAGIC:
            raise CorruptError(f"{key}: not a chunk index ({len(view)} bytes)")
        _, version, algorithm, n_tensors, n_shards, n_chunks = HEAD.unpack_from(view)
        if version != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{key}: index format {version}, but this version reads {FORMAT_VERSION}"
            )
        if xxhash.xxh3_128_digest(view[:-16]) != bytes(view[-16:]):
            raise CorruptError(f"{key}: chunk index doesn't match its checksum; take another copy")
        view = view[:-16]
        try:
            digest = DIGEST_NAMES[algorithm]
            heads, at = self._read_heads(view, n_tensors)
            shards, at = _read_shards(view, at, n_shards, heads)
            if len(view) - at != n_chunks * CHUNK.size:
                raise ValueError(f"{len(view) - at} bytes left for {n_chunks} chunks")
            chunks, data_bytes = _read_chunks(view[at:], heads, shards)
        except (struct.error, ValueError, IndexError, KeyError) as e:
            raise CorruptError(f"{key}: broken chunk index: {e}") from None
        of_tensor: list[list[ShardEntry]] = [[] for _ in heads]
        for (t, offsets, sizes), of_shard in zip(shards, chunks, strict=True):
            of_tensor[t].append(ShardEntry(offsets, sizes, of_shard))
        tensors = [
            TensorEntry(h.fqn, h.kind, h.dtype, h.shape, tuple(s))
            for h, s in zip(heads, of_tensor, strict=True)
        ]
        return Index(tensors, digest, data_bytes)

    def _read_heads(self, view: memoryview, count: int) -> tuple[list[_Head], int]:
        """The tensors of an index, and where they end in it."""
        end = HEAD.size + len(self._spelled)
        if count == len(self._heads) and bytes(view[HEAD.size : end]) == self._spelled:
            return self._heads, end
        heads, at = [], HEAD.size
        for _ in range(count):
            (n,) = struct.unpack_from("<H", view, at)
            name = str(view[at + 2 : at + 2 + n], "utf-8")
            at += 2 + n
            kind, n = struct.unpack_from("<BB", view, at)
            dtype = str(view[at + 2 : at + 2 + n], "ascii")
            at += 2 + n
            ndim = view[at]
            shape = struct.unpack_from(f"<{ndim}Q", view, at + 1)
            at += 1 + 8 * ndim
            if dtype not in ITEMSIZE:
                raise ValueError(f"{name}: unknown dtype {dtype!r}")
            heads.append(_Head.of(name, KINDS[kind], dtype, shape))
        self._heads, self._spelled = heads, bytes(view[HEAD.size : at])
        return heads, at


def decode_index(data: Buffer, key: str) -> tuple[list[TensorEntry], str]:
    """(tensors, digest algorithm of the chunks) of a single index; see IndexReader."""
    return IndexReader().read(data, key)[:2]


def _read_shards(
    view: memoryview, at: int, count: int, heads: list[_Head]
) -> tuple[list[_Placed], int]:
    """The shards of an index, and where they end in it."""
    shards = []
    for _ in range(count):
        (t,) = _NUMBER.unpack_from(view, at)
        head = heads[t]
        numbers = head.layout.unpack_from(view, at)
        at += head.layout.size
        edge = 1 + len(head.shape)
        offsets, sizes = numbers[1:edge], numbers[edge:]
        for o, n, size in zip(offsets, sizes, head.shape, strict=True):
            if o + n > size:
                raise ValueError(
                    f"{head.fqn}: shard {offsets}+{sizes} is outside shape {head.shape}"
                )
        shards.append((t, offsets, sizes))
    return shards, at


def _read_chunks(
    records: memoryview, heads: list[_Head], shards: list[_Placed]
) -> tuple[Sequence[Sequence[ChunkEntry]], int]:
    """The chunks of each shard, and where the last one ends in the data file."""
    spans = [(row_count(sizes), row_bytes(sizes, heads[t].dtype)) for t, _, sizes in shards]
    return _packed(records, spans) or _unpacked(records, heads, shards)


def _packed(
    records: memoryview, sizes: list[tuple[int, int]]
) -> tuple[list[PackedChunks], int] | None:
    """The chunks of each shard, whose (rows, row bytes) are `sizes`, and the end of the last chunk.

    All at once, by the rules of `_check_chunks`. None where one isn't kept, where shards are mixed
    or numbers beyond what is added here safely: `_unpacked` then looks at each chunk.
    """
    import numpy as np  # listing checkpoints does without

    n = len(records) // CHUNK.size
    if not n or any(rows * width > _SAFE for rows, width in sizes):
        return None
    table: Any = np.frombuffer(records, _RECORD)
    shard, row, rows, stored = (table[c] for c in ("shard", "row", "rows", "stored"))
    if int(shard[-1]) >= len(sizes) or (shard[1:] < shard[:-1]).any():
        return None
    if max(int(table[c].max()) for c in ("row", "rows", "offset", "stored")) > _SAFE:
        return None
    limits = np.array([rows for rows, _ in sizes], np.uint64)
    widths = np.array([width if rows else 0 for rows, width in sizes], np.uint64)
    edges = np.searchsorted(shard, np.arange(len(sizes) + 1, dtype=np.uint32))
    ends = row + rows
    expected = np.concatenate([ends[:1] * 0, ends[:-1]])
    filled = edges[1:] > edges[:-1]
    expected[edges[:-1][filled]] = 0
    good = (
        (row == expected).all()
        and (rows > 0).all()
        and (table["codec"] < len(CODECS)).all()
        and ((table["codec"] != _RAW) | (stored == rows * widths[shard])).all()
        and (ends[edges[1:][filled] - 1] == limits[filled]).all()
        and not limits[~filled].any()
    )
    if not good:
        return None
    chunks = [PackedChunks(records, a, b) for a, b in itertools.pairwise(edges.tolist())]
    return chunks, int((table["offset"] + stored).max())


def _unpacked(
    records: memoryview, heads: list[_Head], shards: list[_Placed]
) -> tuple[list[tuple[ChunkEntry, ...]], int]:
    """The same, one by one. Raises ValueError about the first chunk that is wrong."""
    chunks: list[list[ChunkEntry]] = [[] for _ in shards]
    for s, row, rows, offset, stored, codec, digest in CHUNK.iter_unpack(records):
        chunks[s].append(ChunkEntry(row, rows, offset, stored, CODECS[codec], digest))
    for (t, _, sizes), of_shard in zip(shards, chunks, strict=True):
        _check_chunks(heads[t].fqn, heads[t].dtype, sizes, of_shard)
    end = max((c.offset + c.stored_bytes for of_shard in chunks for c in of_shard), default=0)
    return [tuple(of_shard) for of_shard in chunks], end


def _check_chunks(fqn: str, dtype: str, sizes: tuple[int, ...], chunks: list[ChunkEntry]) -> None:
    """Each row of a shard is covered exactly once, and raw chunks have the right length."""
    row, width = 0, row_bytes(sizes, dtype)
    for c in chunks:
        if c.row != row or c.rows < 1:
            raise ValueError(f"{fqn}: chunk of rows {c.row}+{c.rows}, expected row {row} next")
        if c.codec == "raw" and c.stored_bytes != c.rows * width:
            raise ValueError(f"{fqn}: {c.stored_bytes} bytes for {c.rows} rows of {width}")
        row += c.rows
    if row != row_count(sizes):
        raise ValueError(f"{fqn}: chunks cover {row} of {row_count(sizes)} rows")
