"""What a trainer's state is like, without its bytes: to ask of a checkpoint what a restore would do.

A description has what a checkpoint's indexes and values have: the tensors with dtype, shape and boxes, the
value trees, the number of ranks. So another checkpoint is one, and so is the header of a safetensors file. As
a file it is JSON, see docs/format.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ckpt.canonical.keyed import is_keyed
from ckpt.canonical.optimizers import is_optimizer, parameters
from ckpt.errors import BadInputError
from ckpt.index import TensorInfo
from ckpt.manifest import canonical
from ckpt.tree import FlatState
from ckpt.united import UnitedValues
from ckpt.values import decode_value, encode_value

FORMAT = "sidestage.state/1"


@dataclass(frozen=True)
class DescribedObject:
    """A part of a state that saves itself.

    shapes: of an optimizer's parameters, in the order of its groups. Those of TorchRec's go by key.
    """

    path: str
    kind: Literal["module", "optimizer", "other"]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StateDescription:
    """per_rank: of each rank the value trees that it has for itself. objects: by path; None: nobody knows
    which parts save themselves, as of a checkpoint.
    """

    tensors: Mapping[str, TensorInfo]
    values: Any
    per_rank: Sequence[Mapping[str, Any]]
    objects: Mapping[str, DescribedObject] | None = None

    @property
    def world_size(self) -> int:
        return len(self.per_rank)


@dataclass(frozen=True)
class DescribedTensor:
    """As it is written. boxes: (offsets, sizes) of each shard."""

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], ...], ...]


def of_rank(flat: FlatState) -> dict[str, Any]:
    """One rank's part of a description, as JSON."""
    tensors = [
        asdict(
            DescribedTensor(
                n, x.kind, x.dtype, x.shape, tuple((s.offsets, s.sizes) for s in x.shards)
            )
        )
        for n, x in flat.leaves.items()
    ]
    part = {
        "tensors": tensors,
        "objects": [asdict(_object(path, one)) for path, one in flat.objects.items()],
        "values": encode_value(flat.values),
        "per_rank": {k: encode_value(v, k) for k, v in flat.per_rank.items()},
    }
    found: dict[str, Any] = json.loads(canonical(part))  # as the other ranks' parts come
    return found


def _object(path: str, value: Any) -> DescribedObject:
    if isinstance(value, torch.nn.Module):
        return DescribedObject(path, "module", ())
    if is_optimizer(value) and not is_keyed(value):
        return DescribedObject(path, "optimizer", tuple(tuple(p.shape) for p in parameters(value)))
    return DescribedObject(path, "other", ())


def united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of all ranks as one description, as JSON. BadInputError where they don't go together."""
    values = UnitedValues()
    tensors: dict[str, dict[str, Any]] = {}
    objects: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        for one in part["objects"]:
            objects.setdefault(one["path"], one)
        values.add(rank, decode_value(part["values"], f"values of rank {rank}"))
        for tensor in part["tensors"]:
            known = tensors.setdefault(tensor["key"], {**tensor, "boxes": []})
            if [known[k] for k in ("kind", "dtype", "shape")] != [
                tensor[k] for k in ("kind", "dtype", "shape")
            ]:
                raise BadInputError(f"{tensor['key']}: rank {rank} has it otherwise than others")
            known["boxes"] += [b for b in tensor["boxes"] if b not in known["boxes"]]
    return {
        "format": FORMAT,
        "tensors": list(tensors.values()),
        "objects": list(objects.values()),
        "values": encode_value(values.tree),
        "per_rank": [part["per_rank"] for part in parts],
    }
