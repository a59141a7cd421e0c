"""Writes an index. The layout is in ckpt/index/__init__.py and docs/format.md."""

from __future__ import annotations

import struct

import xxhash

from ckpt.errors import BadInputError
from ckpt.index.entries import CODECS, KINDS, TensorEntry
from ckpt.manifest import FORMAT_VERSION
from ckpt.types import DIGEST_NAMES, DigestName

MAGIC = b"SSIX"
HEAD = struct.Struct("<4sHHIII")
CHUNK = struct.Struct("<IQQQQB32s")
_MAX_NAME_BYTES = 65535


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
        head += struct.pack("<BB", KINDS.index(tensor.kind), len(dtype)) + dtype
        head += struct.pack(f"<B{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        for shard in tensor.shards:
            shards += struct.pack(f"<I{2 * len(tensor.shape)}Q", t, *shard.offsets, *shard.sizes)
            for c in shard.chunks:
                codec = CODECS.index(c.codec)
                chunks += CHUNK.pack(
                    n_shards, c.row, c.rows, c.offset, c.stored_bytes, codec, c.digest
                )
                n_chunks += 1
            n_shards += 1
    body = HEAD.pack(
        MAGIC, FORMAT_VERSION, DIGEST_NAMES.index(digest), len(tensors), n_shards, n_chunks
    )
    body += bytes(head + shards + chunks)
    return body + xxhash.xxh3_128_digest(body)
