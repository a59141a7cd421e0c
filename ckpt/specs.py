"""Where a description of a state comes from: another checkpoint, a safetensors file, or one as JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from ckpt.belonging import missing_tensors
from ckpt.description import FORMAT, DescribedObject, DescribedTensor, StateDescription
from ckpt.errors import BadInputError, CorruptError, NotFoundError, StorageError
from ckpt.foreign import open_foreign, safetensors_file
from ckpt.index import TensorInfo, find_overlap
from ckpt.restore import CheckpointReader
from ckpt.typed import decode_stored
from ckpt.types import ITEMSIZE
from ckpt.values import decode_value

_MOST_ELEMENTS = 1 << 62
_MOST_DIMENSIONS = 64  # of a tensor of torch
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class _File:
    format: str
    tensors: tuple[DescribedTensor, ...]
    objects: tuple[DescribedObject, ...]


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
            head = fh.read(16)
            size_bytes = os.fstat(fh.fileno()).st_size
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file, and no root; check the path") from None
    except OSError as e:
        raise StorageError(f"{path}: can't be read: {e}") from e
    if safetensors_file.recognises(head, size_bytes):  # whose first byte may be a brace, too
        return _of_safetensors(path)
    if not head.startswith(b"{"):
        raise BadInputError(f"{path}: neither a root, a state description nor a safetensors file")
    if size_bytes > _MOST_BYTES:
        raise BadInputError(
            f"{path}: {size_bytes} bytes are no description; see Checkpointer.describe"
        )
    return _of_json(path)


def _of_safetensors(path: Path) -> StateDescription:
    with open_foreign(path, "safetensors") as foreign:
        for key, t in foreign.tensors.items():
            _check_shape(key, t.shape, str(path))
        tensors = {
            k: TensorInfo(k, "replicated", t.dtype, t.shape, (((0,) * len(t.shape), t.shape),))
            for k, t in foreign.tensors.items()
        }
    return StateDescription(tensors, foreign.values, [{}])


def _of_json(path: Path) -> StateDescription:
    try:
        body = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{path}: not JSON: {e}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadInputError(f"{path}: isn't a state description of format {FORMAT}")
    listed = {k: v for k, v in body.items() if k in ("format", "tensors", "objects")}
    file = decode_stored(_File, listed, str(path))
    tensors: dict[str, TensorInfo] = {}
    for t in file.tensors:
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
    for one in file.objects:
        for shape in one.shapes:
            _check_shape(one.path, shape, str(path))
    return StateDescription(tensors, values, trees, {o.path: o for o in file.objects})


def _check_shape(key: str, shape: tuple[int, ...], what: str) -> None:
    """CorruptError for what torch has no tensor of, whatever else is 0 in it."""
    few = shape[:_MOST_DIMENSIONS]
    if few != shape or math.prod(max(n, 1) for n in few) > _MOST_ELEMENTS:
        raise CorruptError(f"{what}: {key}: no tensor has shape {list(few)}")


def _checked(t: DescribedTensor, what: str) -> TensorInfo:
    boxes = []
    if t.kind not in ("replicated", "sharded", "per_rank") or t.dtype not in ITEMSIZE:
        raise CorruptError(f"{what}: {t.key}: kind {t.kind}, dtype {t.dtype}")
    _check_shape(t.key, t.shape, what)
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
