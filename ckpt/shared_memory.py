"""Two keys of a state may be one memory: then the checkpoint must have the same values for both.

Tied weights, views of one buffer, a tensor that is in the state twice. What would be filled last would
otherwise decide for both, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ckpt.errors import BadInputError
from ckpt.pieces import Piece
from ckpt.restore import CheckpointReader
from ckpt.terms import Spell
from ckpt.tree import Shard

_ALIGNED = 64  # bytes: more than any element has


class _Span(NamedTuple):
    """The bytes [start, stop) of a device that a shard lies in."""

    device: str
    start: int
    stop: int
    piece: Piece
    shard: Shard


def check_shared_memory(reader: CheckpointReader, pieces: Sequence[Piece], spell: Spell) -> None:
    """BadInputError names two keys that share memory and have different values in the checkpoint."""
    for a, b in _overlapping(pieces):
        if not _agree(reader, a, b):
            raise BadInputError(
                f"{a.piece.key} and {b.piece.key}: share memory in this state, and the checkpoint has "
                f"different values for them: they were two tensors at the save. Nothing was changed; untie "
                f"them, or leave one out: {spell('exclude', [b.piece.key])}"
            )


def _overlapping(pieces: Sequence[Piece]) -> Iterator[tuple[_Span, _Span]]:
    spans = sorted(
        (_span(p, s) for p in pieces for s in p.shards if s.tensor.numel()), key=lambda s: s[:3]
    )
    opened: list[_Span] = []
    for span in spans:
        opened = [o for o in opened if o.device == span.device and o.stop > span.start]
        for other in opened:
            yield other, span
        opened.append(span)


def _span(piece: Piece, shard: Shard) -> _Span:
    t = shard.tensor
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return _Span(
        str(t.device), t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), piece, shard
    )


def _agree(reader: CheckpointReader, a: _Span, b: _Span) -> bool:
    """Would `a` be what it is to be, after `b` is filled too? Tried in memory of our own."""
    if reader.same_chunks(a.piece.stored, b.piece.stored) and _alike(a, b):
        return True
    start = min(a.start, b.start) // _ALIGNED * _ALIGNED
    memory = torch.empty(max(a.stop, b.stop) - start, dtype=torch.uint8, device="cpu")
    here = [_view(memory, s, start) for s in (a, b)]
    stored = torch.empty(a.shard.sizes, dtype=a.shard.tensor.dtype, device="cpu")
    reader.read_into(a.piece.stored, stored, a.shard.offsets)
    here[0].copy_(stored)
    before = here[0].clone()
    other = torch.empty(b.shard.sizes, dtype=b.shard.tensor.dtype, device="cpu")
    reader.read_into(b.piece.stored, other, b.shard.offsets)
    here[1].copy_(other)
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (before, here[0]))
    return bool(torch.equal(*flat))


def _alike(a: _Span, b: _Span) -> bool:
    x, y = a.shard, b.shard
    return (
        (a.start, a.stop, x.offsets, x.sizes) == (b.start, b.stop, y.offsets, y.sizes)
        and x.tensor.dtype == y.tensor.dtype
        and x.tensor.stride() == y.tensor.stride()
    )


def _view(memory: torch.Tensor, span: _Span, start: int) -> torch.Tensor:
    t = span.shard.tensor
    part = memory[span.start - start : span.stop - start].view(t.dtype)
    return part.as_strided(t.shape, t.stride(), part.storage_offset())
