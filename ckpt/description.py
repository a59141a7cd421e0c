"""What a trainer's state is like, without its bytes: to ask of a checkpoint what a restore would do.

A description has what a checkpoint's indexes and values have: the tensors with dtype, shape and boxes, the
value trees, the number of ranks. So another checkpoint is one, and so is the header of a safetensors file. As
a file it is JSON, see docs/format.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.belonging import missing_tensors
from ckpt.errors import BadInputError, CorruptError, NotFoundError, StorageError
from ckpt.foreign import detect, open_foreign
from ckpt.index import TensorInfo, find_overlap
from ckpt.restore import CheckpointReader
from ckpt.tree import FlatState
from ckpt.typed import decode_stored
from ckpt.types import ITEMSIZE
from ckpt.united import UnitedValues
from ckpt.values import TensorRef, decode_value, encode_value

FORMAT = "sidestage.state/1"
_MOST_ELEMENTS = 1 << 62


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
class _Tensor:
    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class _File:
    format: str
    tensors: tuple[_Tensor, ...]


def of_rank(flat: FlatState) -> dict[str, Any]:
    """One rank's part of a description, as JSON."""
    tensors = [
        asdict(_Tensor(n, x.kind, x.dtype, x.shape, tuple((s.offsets, s.sizes) for s in x.shards)))
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


def of_checkpoint(reader: CheckpointReader) -> StateDescription:
    ranks = range(reader.record.world_size)
    return StateDescription(
        reader.tensors, reader.values(), [reader.per_rank_values(r) for r in ranks]
    )


def of_file(path: Path) -> StateDescription:
    """Of a description as JSON, or of a safetensors file, of which no tensor is read.

    Raises NotFoundError, BadInputError for anything else, CorruptError for damage.
    """
    try:
        with open(path, "rb") as fh:
            is_json = fh.read(1) == b"{"
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file, and no root; check the path") from None
    except OSError as e:
        raise StorageError(f"{path}: can't be read: {e}") from e
    if not is_json and detect(path) != "safetensors":
        raise BadInputError(f"{path}: neither a root, a state description nor a safetensors file")
    return _of_json(path) if is_json else _of_safetensors(path)


def _of_safetensors(path: Path) -> StateDescription:
    with open_foreign(path, "safetensors") as foreign:
        tensors = {
            k: TensorInfo(k, "replicated", t.dtype, t.shape, (((0,) * len(t.shape), t.shape),))
            for k, t in foreign.tensors.items()
        }
        values = foreign.values or {k: TensorRef(k) for k in tensors}
    return StateDescription(tensors, values, [{}])


def _of_json(path: Path) -> StateDescription:
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{path}: not JSON: {e}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadInputError(f"{path}: isn't a state description of format {FORMAT}")
    listed = {k: v for k, v in body.items() if k in ("format", "tensors")}
    tensors: dict[str, TensorInfo] = {}
    for t in decode_stored(_File, listed, str(path)).tensors:
        if t.key in tensors:
            raise CorruptError(f"{path}: {t.key} is listed twice")
        tensors[t.key] = _checked(t, str(path))
    per_rank = body.get("per_rank")
    if (
        not isinstance(per_rank, list)
        or not per_rank
        or not all(isinstance(p, dict) for p in per_rank)
    ):
        raise CorruptError(f"{path}: per_rank: expected a dict of each rank")
    trees = [{k: decode_value(v, f"{path}: {k}") for k, v in part.items()} for part in per_rank]
    values = decode_value(body.get("values"), f"{path}: values")
    for tree in (values, *(tree for part in trees for tree in part.values())):
        for problem in missing_tensors(tree, tensors):
            raise CorruptError(
                f"{path}: {problem.key}: a value names it, and it isn't among the tensors"
            )
    return StateDescription(tensors, values, trees)


def _checked(t: _Tensor, what: str) -> TensorInfo:
    boxes = []
    if t.kind not in ("replicated", "sharded", "per_rank") or t.dtype not in ITEMSIZE:
        raise CorruptError(f"{what}: {t.key}: kind {t.kind}, dtype {t.dtype}")
    if math.prod(t.shape) > _MOST_ELEMENTS:
        raise CorruptError(f"{what}: {t.key}: no tensor has shape {list(t.shape)}")
    for box in t.boxes:
        if (
            len(box) != 2
            or {len(part) for part in box} != {len(t.shape)}
            or any(o + n > size for o, n, size in zip(*box, t.shape, strict=True))
        ):
            raise CorruptError(f"{what}: {t.key}: a box {box} of shape {list(t.shape)}")
        boxes.append((box[0], box[1]))
    if pair := find_overlap(boxes):
        raise CorruptError(f"{what}: {t.key}: two boxes overlap: {pair[0]} and {pair[1]}")
    return TensorInfo(t.key, t.kind, t.dtype, t.shape, tuple(boxes))  # type: ignore[arg-type]
