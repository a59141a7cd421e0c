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

from ckpt.index.decoding import Index, IndexReader, decode_index
from ckpt.index.encoding import encode_index
from ckpt.index.entries import (
    Box,
    ChunkEntry,
    Codec,
    ShardEntry,
    TensorEntry,
    TensorInfo,
    TensorKind,
    find_overlap,
    row_bytes,
    row_count,
)

__all__ = [
    "Box",
    "ChunkEntry",
    "Codec",
    "Index",
    "IndexReader",
    "ShardEntry",
    "TensorEntry",
    "TensorInfo",
    "TensorKind",
    "decode_index",
    "encode_index",
    "find_overlap",
    "row_bytes",
    "row_count",
]
