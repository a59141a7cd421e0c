"""The binary chunk index of one rank's data file: compact, read only as needed.

4,096 ranks of 20 GiB in 16 MiB chunks are 5 million chunks; as JSON they would be 1 GB.
Little-endian layout (docs/format.md):

    magic "SSIX", u16 format, u16 digest algorithm, u32 tensors, u32 shards, u32 chunks
    tensor: u16 name length, name (UTF-8), u8 kind, u8 dtype length, dtype, u8 ndim, ndim x u64 shape
    shard:  u32 tensor, ndim x u64 offsets, ndim x u64 sizes
    chunk:  u32 shard, u64 first row, u64 rows, u64 file offset, u64 stored bytes, u8 codec, 32 bytes digest
    16 bytes xxh3-128 of all before

A chunk holds whole rows (the shard's first dimension) in C order. A 0-d tensor is one row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import xxhash

from ckpt.errors import BadInputError, CorruptError, UnsupportedFormatError
from ckpt.manifest import FORMAT_VERSION
from ckpt.types import DIGEST_NAMES, ITEMSIZE, Buffer, DigestName

_MAGIC = b"SSIX"
_MAX_NAME_BYTES = 65535
_HEAD = struct.Struct("<4sHHIII")
_CHUNK = struct.Struct("<IQQQQB32s")

TensorKind = Literal["sharded", "replicated", "per_rank"]
_KINDS: tuple[TensorKind, ...] = get_args(TensorKind)
Codec = Literal["raw", "zstd"]
_CODECS: tuple[Codec, ...] = get_args(Codec)
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, in each dimension."""


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Rows [row, row + rows) of a shard, at `offset` of the data file. `digest` covers the stored bytes."""

    row: int
    rows: int
    offset: int
    stored_bytes: int
    codec: Codec
    digest: bytes


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A box of a tensor: its offsets and sizes in each dimension, and its chunks in row order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    chunks: tuple[ChunkEntry, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as one rank knows it: global shape, and the shards that this rank wrote."""

    fqn: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor. `boxes` are the (offsets, sizes) it was saved in, over all ranks."""

    fqn: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def row_bytes(sizes: tuple[int, ...], dtype: str) -> int:
    """Bytes of one row of a shard."""
    return math.prod(sizes[1:]) * ITEMSIZE[dtype]


def row_count(sizes: tuple[int, ...]) -> int:
    """Rows of a shard: its first dimension; 1 for a 0-d tensor; 0 if it holds nothing."""
    return 0 if 0 in sizes else (sizes[0] if sizes else 1)


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one tensor that have an element in common, if there are any."""
    filled = [b for b in boxes if 0 not in b[1]]
    if len(filled) < 2:
        return None
    starts = [len(set(column)) for column in zip(*(b[0] for b in filled), strict=True)]
    if not starts:
        return filled[0], filled[1]
    axis = starts.index(max(starts))  # swept along the dimension that is cut most, few are open
    opened: list[Box] = []
    for box in sorted(filled, key=lambda b: b[0][axis]):
        opened = [b for b in opened if b[0][axis] + b[1][axis] > box[0][axis]]
        for other in opened:
            if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *other, strict=True)):
                return other, box
        opened.append(box)
    return None


def encode_index(tensors: list[TensorEntry], digest: DigestName) -> bytes:
    """The index file of one rank."""
    head, shards, chunks = bytearray(), bytearray(), bytearray()
    n_shards = n_chunks = 0
    for t, tensor in enumerate(tensors):
        name, dtype = tensor.fqn.encode(), tensor.dtype.encode()
        if len(name) > _MAX_NAME_BYTES or len(tensor.shape) > 255:
            raise BadInputError(
                f"{tensor.fqn[:80]}...: a tensor's key has at most {_MAX_NAME_BYTES} bytes and it at "
                f"most 255 dimensions, not {len(name)} and {len(tensor.shape)}"
            )
        head += struct.pack("<H", len(name)) + name
        head += struct.pack("<BB", _KINDS.index(tensor.kind), len(dtype)) + dtype
        head += struct.pack(f"<B{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        for shard in tensor.shards:
            shards += struct.pack(f"<I{2 * len(tensor.shape)}Q", t, *shard.offsets, *shard.sizes)
            for c in shard.chunks:
                codec = _CODECS.index(c.codec)
                chunks += _CHUNK.pack(
                    n_shards, c.row, c.rows, c.offset, c.stored_bytes, codec, c.digest
                )
                n_chunks += 1
            n_shards += 1
    body = _HEAD.pack(
        _MAGIC, FORMAT_VERSION, DIGEST_NAMES.index(digest), len(tensors), n_shards, n_chunks
    )
    body += bytes(head + shards + chunks)
    return body + xxhash.xxh3_128_digest(body)


def decode_index(data: Buffer, key: str) -> tuple[list[TensorEntry], str]:
    """(tensors, digest algorithm of the chunks), every number checked before it is used."""
    view = memoryview(data)
    if len(view) < _HEAD.size + 16 or bytes(view[:4]) != _MAGIC:
        raise CorruptError(f"{key}: not a chunk index ({len(view)} bytes)")
    _, version, algorithm, n_tensors, n_shards, n_chunks = _HEAD.unpack_from(view)
    if version != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{key}: index format {version}, but this version reads {FORMAT_VERSION}"
        )
    if xxhash.xxh3_128_digest(view[:-16]) != bytes(view[-16:]):
        raise CorruptError(f"{key}: chunk index doesn't match its checksum; take another copy")
    try:
        name = DIGEST_NAMES[algorithm]
        return _decode_body(view[:-16], n_tensors, n_shards, n_chunks), name
    except (struct.error, ValueError, IndexError, KeyError) as e:
        raise CorruptError(f"{key}: broken chunk index: {e}") from None


def _decode_body(
    view: memoryview, n_tensors: int, n_shards: int, n_chunks: int
) -> list[TensorEntry]:
    at = _HEAD.size
    heads: list[tuple[str, TensorKind, str, tuple[int, ...]]] = []
    for _ in range(n_tensors):
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
        heads.append((name, _KINDS[kind], dtype, shape))
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for _ in range(n_shards):
        (t,) = struct.unpack_from("<I", view, at)
        shape = heads[t][3]
        numbers = struct.unpack_from(f"<{2 * len(shape)}Q", view, at + 4)
        at += 4 + 16 * len(shape)
        offsets, sizes = numbers[: len(shape)], numbers[len(shape) :]
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{heads[t][0]}: shard {offsets}+{sizes} is outside shape {shape}")
        boxes.append((t, offsets, sizes))
    if len(view) - at != n_chunks * _CHUNK.size:
        raise ValueError(f"{len(view) - at} bytes left for {n_chunks} chunks")
    chunks: list[list[ChunkEntry]] = [[] for _ in boxes]
    for s, row, rows, offset, stored, codec, digest in _CHUNK.iter_unpack(view[at:]):
        chunks[s].append(ChunkEntry(row, rows, offset, stored, _CODECS[codec], digest))
    shards: list[list[ShardEntry]] = [[] for _ in heads]
    for (t, offsets, sizes), of_shard in zip(boxes, chunks, strict=True):
        _check_chunks(heads[t][0], heads[t][2], sizes, of_shard)
        shards[t].append(ShardEntry(offsets, sizes, tuple(of_shard)))
    return [TensorEntry(*h, tuple(s)) for h, s in zip(heads, shards, strict=True)]


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
