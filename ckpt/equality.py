"""Are two checkpoints equal, bit for bit? Whatever layout each was saved with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.restore import CheckpointReader
from ckpt.tree import torch_dtype
from ckpt.values import PerRankRef, TensorRef, encode_value, parts_of

_MOST_ELEMENTS = 1 << 20  # in double precision at once
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Difference:
    """One entry that differs.

    key: of the tensor or value; parts that a rank has for itself end in `@rank`.
    said: how, in words.
    only_in: 0 or 1 for an entry that only one of the two has.
    relative: of tensors of floating point numbers, the greatest difference over the greatest magnitude; None
        where one that differs is infinite or no number.
    tensor: of two tensors of one dtype and shape, by how much.
    """

    key: str
    said: str
    only_in: int | None = None
    relative: float | None = None
    tensor: TensorDifference | None = None


@dataclass(frozen=True)
class TensorDifference:
    """By how much two tensors differ.

    elements, rows: how many differ, by their bits; a scalar is one row. of_elements, of_rows: of how many.
    norms: the Euclidean norms of both and of their difference, over all elements, in double precision; None
        where that isn't finite.
    largest: the greatest difference of an element, of those that are finite in both.
    not_finite: elements that differ and are infinite, or no number, in one or both.
    """

    elements: int
    of_elements: int
    rows: int
    of_rows: int
    norms: tuple[float | None, float | None, float | None]
    largest: float
    not_finite: int


@dataclass(frozen=True)
class Comparison:
    """entries: tensors and values that either has. differences: in the order of the state."""

    entries: int
    differences: tuple[Difference, ...]


def compare(a: CheckpointReader, b: CheckpointReader) -> Comparison:
    """Compare all tensors and values of two checkpoints, NaNs by their bits; not the annotations.

    Holds a chunk of each column shard at a time (16 MiB by default), and doesn't read what the digests say
    is equal. Raises CorruptError if one is damaged.
    """
    sides = [dict(_entries(reader)) for reader in (a, b)]
    keys = [*sides[0], *(k for k in sides[1] if k not in sides[0])]
    found = (_differ(key, (a, b), sides) for key in keys)
    return Comparison(len(keys), tuple(d for d in found if d is not None))


def _entries(reader: CheckpointReader) -> Iterator[tuple[str, Any]]:
    for key, leaf in _leaves(reader.values(), ""):
        if not isinstance(leaf, PerRankRef):
            yield key, leaf
            continue
        for rank in range(reader.record.world_size):
            tree = reader.per_rank_values(rank).get(leaf.fqn)
            for inner, own in _leaves(tree, key):
                yield f"{inner}@{rank}", own


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors and values by their path; a list of numbers is one value."""
    parts = parts_of(value)
    if not parts or (isinstance(value, list | tuple) and not any(map(_holds, value))):
        yield path, value
        return
    for k, part in parts:
        yield from _leaves(part, f"{path}.{k}" if path else str(k))


def _holds(value: Any) -> bool:
    return isinstance(value, TensorRef | PerRankRef) or parts_of(value) is not None


def _differ(
    key: str, readers: tuple[CheckpointReader, CheckpointReader], sides: list[dict[str, Any]]
) -> Difference | None:
    for n, side in enumerate(sides):
        if key not in side:
            return Difference(key, f"is only in the {('second', 'first')[n]}", only_in=1 - n)
    x, y = (side[key] for side in sides)
    if isinstance(x, TensorRef) and isinstance(y, TensorRef):
        return _tensors_differ(key, readers, (x.fqn, y.fqn))
    if type(x) is type(y) and _written(x) == _written(y):
        return None
    return Difference(key, f"{_shown(x)} and {_shown(y)}")


def _tensors_differ(
    key: str, readers: tuple[CheckpointReader, CheckpointReader], names: tuple[str, str]
) -> Difference | None:
    infos = [reader.info(name) for reader, name in zip(readers, names, strict=True)]
    kinds = [(info.dtype, tuple(info.shape)) for info in infos]
    if kinds[0] != kinds[1]:
        return Difference(key, " and ".join(f"{dtype} {list(shape)}" for dtype, shape in kinds))
    if readers[0].same_chunks(names[0], names[1], readers[1]):
        return None
    seen = _Seen()
    for x, y in _pieces(readers, names):
        seen.add(x, y)
    if not seen.elements:
        return None
    shape = torch.Size(infos[0].shape)
    a, b, apart = (math.sqrt(x) if math.isfinite(x) else None for x in seen.squares)
    found = TensorDifference(
        *(seen.elements, shape.numel(), seen.rows, shape[0] if shape else 1, (a, b, apart)),
        *(seen.largest, seen.not_finite),
    )
    is_float = torch_dtype(infos[0].dtype).is_floating_point
    relative = seen.largest / seen.magnitude if is_float and seen.magnitude else None
    by = "" if relative is None else f", by {relative:.1e} of the largest at most"
    if seen.not_finite:
        by, relative = f", {seen.not_finite} of them infinite or no number", None
    said = f"{seen.elements} of {max(1, found.of_elements)} elements{by}"
    return Difference(key, said, relative=relative, tensor=found)


class _Seen:
    """What is known of two tensors after some of their rows."""

    def __init__(self) -> None:
        self.elements = self.rows = self.not_finite = 0
        self.squares = [0.0, 0.0, 0.0]
        self.largest = self.magnitude = 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        a, b = (_numbers(t) for t in (x, y))
        for n, t in enumerate((a, b)):
            self.squares[n] += float(t.square().sum())
        self.magnitude = max(self.magnitude, float(a.where(a.isfinite(), 0.0).abs().max()))
        unequal = _bytes(x).ne(_bytes(y)).any(1)
        if not bool(unequal.any()):
            return
        self.elements += int(unequal.sum())
        self.rows += int(unequal.view(x.shape[0], -1).any(1).sum()) if x.dim() else 1
        # Elements of the same bits are equal, whatever NaNs and infinities are to arithmetic.
        unequal = unequal.view(x.shape)
        apart = _apart(x, y, a, b)[unequal]
        self.squares[2] += float(apart.square().sum())
        finite = (a.isfinite() & b.isfinite())[unequal]
        self.not_finite += int((~finite).reshape(len(finite), -1).any(1).sum())
        self.largest = max(self.largest, float(apart.where(finite, 0.0).abs().max()))


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision; of complex ones both parts."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _apart(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elements of x less those of y. a, b: both in double precision, too coarse for neighbours of 64 bits."""
    apart = a - b
    if x.dtype not in (torch.int64, torch.uint64):
        return apart
    exact = (x.view(torch.int64) - y.view(torch.int64)).double()  # modulo 2 ** 64
    return torch.where(apart.abs() < 2.0**62, exact, apart)


def _pieces(
    readers: tuple[CheckpointReader, CheckpointReader], names: tuple[str, str]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same rows of both, some at a time. However they are cut, each chunk is read once."""
    sides = [iter(reader.iter_rows(name)) for reader, name in zip(readers, names, strict=True)]
    held: list[torch.Tensor | None] = [None, None]
    while True:
        for n, side in enumerate(sides):
            if held[n] is None:
                found = next(side, None)
                if found is None:
                    return
                held[n] = found[1]
                del found  # the next chunk takes its place
        x, y = held
        assert x is not None
        assert y is not None
        if not x.dim():
            yield x, y
            return
        rows = min(len(x), len(y), max(1, _MOST_ELEMENTS // max(1, x[0].numel())))
        yield x[:rows], y[:rows]
        held = [t[rows:] if len(t) > rows else None for t in (x, y)]
        del x, y


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 (elements, bytes of one)."""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


def _written(value: Any) -> str:
    return json.dumps(encode_value(value), sort_keys=True)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
