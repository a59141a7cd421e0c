"""What a foreign checkpoint is to an import: tensors in pieces that are read one at a time, and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import BadInputError, CorruptError
from ckpt.tree import leaf_of
from ckpt.types import ITEMSIZE
from ckpt.values import Instance, TensorRef, encode_value


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor. `load` gives it in host memory, of shape `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of a foreign checkpoint: torch's name of its dtype, its shape, and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass
class Content:
    """What a reader found: a nested dict with tensors in it, and tensors whose place nobody knows."""

    tree: Mapping[Any, Any] = field(default_factory=dict)
    loose: Mapping[str, ForeignTensor] = field(default_factory=dict)


@dataclass
class Foreign:
    """A foreign checkpoint, taken apart as our own are: `values` has TensorRefs to `tensors`."""

    format: str
    tensors: dict[str, ForeignTensor] = field(default_factory=dict)
    values: Any = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def gather(form: str, content: Content, under: str | None) -> Foreign:
    """Name each tensor by its path, and refuse by its path what can't be stored."""
    tree, loose = content.tree, content.loose
    if under is not None:
        if taken := sorted(set(tree) & set(loose)):
            raise BadInputError(f"{taken[0]}: two tensors have this key")
        tree, loose = {under: {**tree, **loose}}, {}
    foreign = Foreign(form)
    foreign.values = _take(tree, "", foreign.tensors)
    for key, tensor in loose.items():
        _add(key, tensor, foreign.tensors)
    encode_value(foreign.values)  # raises for what isn't plain
    return foreign


def whole(tensor: torch.Tensor, what: str) -> ForeignTensor:
    """A plain tensor in memory, or BadInputError naming `what` if it is of a kind that isn't stored."""
    leaf = leaf_of(what, tensor, per_rank=False)
    if leaf.kind != "replicated":
        raise BadInputError(f"{what}: a {type(tensor).__name__} spans ranks; save plain tensors")
    (shard,) = leaf.shards
    return ForeignTensor(
        leaf.dtype, leaf.shape, (Piece(shard.offsets, shard.sizes, lambda: shard.tensor),)
    )


def check_tiling(key: str, tensor: ForeignTensor) -> None:
    """Raise CorruptError unless the pieces of a tensor cover each of its elements exactly once."""
    shape = tensor.shape
    boxes = [(p.offsets, p.sizes) for p in tensor.pieces if 0 not in p.sizes]
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptError(f"{key}: a piece at {offsets} for a tensor of shape {shape}")
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise CorruptError(f"{key}: the piece {offsets}+{sizes} passes its shape {shape}")
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    if volume != math.prod(shape) or not tensor.pieces:
        raise CorruptError(f"{key}: its pieces hold {volume} of {math.prod(shape)} elements")
    # With the volume right, a hole means an overlap. Sweep along the most divided dimension.
    cuts = [len({offsets[d] for offsets, _ in boxes}) for d in range(len(shape))]
    dim = cuts.index(max(cuts)) if cuts else 0
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for box in sorted(boxes, key=lambda b: b[0][dim : dim + 1]):
        active = [b for b in active if b[0][dim] + b[1][dim] > box[0][dim]] if shape else active
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(box[0], box[1], other[0], other[1], strict=True)
            ):
                raise CorruptError(f"{key}: the pieces at {other[0]} and {box[0]} overlap")
        active.append(box)


def _take(value: Any, path: str, tensors: dict[str, ForeignTensor]) -> Any:
    """The tree of `value` with TensorRefs; what they stand for goes into `tensors`."""
    if isinstance(value, ForeignTensor | torch.Tensor):
        found = value if isinstance(value, ForeignTensor) else whole(value, path)
        _add(path, found, tensors)
        return TensorRef(path)
    if isinstance(value, Mapping):
        return {k: _take(v, f"{path}.{k}" if path else str(k), tensors) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take(v, f"{path}.{i}", tensors) for i, v in enumerate(value))
    if isinstance(value, Instance) and value.walks:
        return value.having([_take(v, f"{path}.{k}", tensors) for k, v in value.fields])
    return value


def _add(key: str, tensor: ForeignTensor, tensors: dict[str, ForeignTensor]) -> None:
    if key in tensors:
        raise BadInputError(f"{key}: two tensors have this key; rename one")
    tensors[key] = tensor
