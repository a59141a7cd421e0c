"""Where a description of a state comes from: another checkpoint, a safetensors file, or one as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ckpt.belonging import missing_tensors
from ckpt.description import FORMAT, DescribedTensor, StateDescription
from ckpt.errors import BadInputError, CorruptError, NotFoundError, StorageError
from ckpt.foreign import detect, open_foreign
from ckpt.index import TensorInfo, find_overlap
from ckpt.restore import CheckpointReader
from ckpt.typed import decode_stored
from ckpt.types import ITEMSIZE
from ckpt.values import TensorRef, decode_value

_MOST_ELEMENTS = 1 << 62


@dataclass(frozen=True)
class _File:
    format: str
    tensors: tuple[DescribedTensor, ...]


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


def _checked(t: DescribedTensor, what: str) -> TensorInfo:
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
