"""What an index says: tensors, their shards and chunks; and what the boxes of shards tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckpt.types import ITEMSIZE

TensorKind = Literal["sharded", "replicated", "per_rank"]
KINDS: tuple[TensorKind, ...] = get_args(TensorKind)
Codec = Literal["raw", "zstd"]
CODECS: tuple[Codec, ...] = get_args(Codec)
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
    chunks: Sequence[ChunkEntry]


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
    ordered = sorted(filled, key=lambda b: b[0][axis])
    if all(a[0][axis] + a[1][axis] <= b[0][axis] for a, b in itertools.pairwise(ordered)):
        return None  # slices, as nearly all tables are cut
    opened: list[Box] = []
    for box in ordered:
        opened = [b for b in opened if b[0][axis] + b[1][axis] > box[0][axis]]
        for other in opened:
            if all(a < b + n and b < a + m for a, m, b, n in zip(*box, *other, strict=True)):
                return other, box
        opened.append(box)
    return None
