"""What a trainer's state is like, without its bytes: to ask of a checkpoint what a restore would do.

A description has what a checkpoint's indexes and values have: the tensors with dtype, shape and boxes, the
value trees, the number of ranks. So another checkpoint is one, and so is the header of a safetensors file. As
a file it is JSON, see docs/format.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.errors import BadInputError
from ckpt.index import TensorInfo
from ckpt.tree import FlatState
from ckpt.united import UnitedValues
from ckpt.values import decode_value, encode_value

FORMAT = "sidestage.state/1"


@dataclass(frozen=True)
class StateDescription:
    """per_rank: of each rank the value trees that it has for itself."""

    tensors: Mapping[str, TensorInfo]
    values: Any
    per_rank: Sequence[Mapping[str, Any]]

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
    return {
        "tensors": tensors,
        "values": encode_value(flat.values),
        "per_rank": {k: encode_value(v, k) for k, v in flat.per_rank.items()},
    }


def united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of all ranks as one description, as JSON. BadInputError where they don't go together."""
    values = UnitedValues()
    tensors: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
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
        "values": encode_value(values.tree),
        "per_rank": [part["per_rank"] for part in parts],
    }
