"""A publisher in a few lines: answers requests by a stored description and the tensors of a checkpoint.

Plain torch and Python, written from `ckpt.schema` alone: what others build must agree with it.
"""

import io
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ckpt.digest import check_digest
from ckpt.idmaps import hashed
from ckpt.layout import description_prefix
from ckpt.schema import (
    CollisionSpec,
    FeatureSpec,
    HashedIds,
    RequestFeature,
    ServingDescription,
    VocabularyIds,
    decode_description,
)
from ckpt.storage import Storage

Request = Mapping[str, Tensor]


def read_description(storage: Storage, description_id: str) -> ServingDescription:
    key = f"{description_prefix(description_id)}description.json"
    return decode_description(storage.read(key), key)


def request_of(description: ServingDescription, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arguments of a model, by name, as the schema lays a request out."""
    known = {f.name: f for f in description.features}
    out: dict[str, Tensor] = {}
    leaves, _ = pytree.tree_flatten_with_path(dict(arguments), is_leaf=_is_kjt)
    for path, leaf in leaves:
        name = ".".join(str(getattr(p, "key", getattr(p, "name", p))) for p in path)
        if isinstance(leaf, Tensor):
            out[name] = leaf
        elif _is_kjt(leaf):
            for key, jagged in leaf.to_dict().items():
                feature = known.get(key) or known.get(f"{name}.{key}")
                if feature is None:
                    continue
                out[f"{feature.name}.values"] = jagged.values().long()
                out[f"{feature.name}.lengths"] = jagged.lengths().long()
                if feature.weighted:
                    out[f"{feature.name}.weights"] = jagged.weights()
    return out


def serve(
    storage: Storage,
    description: ServingDescription,
    checkpoint: Mapping[str, Tensor],
    request: Request,
) -> dict[str, Tensor]:
    """Outputs by name. `checkpoint`: key -> whole tensor."""
    program = torch.export.load(io.BytesIO(storage.read(description.program_key)))
    constants = dict(program.state_dict)
    for c in description.constants:
        if c.fqn is not None:
            constants[c.name] = checkpoint[c.fqn]
        assert tuple(constants[c.name].shape) == c.shape
        assert str(constants[c.name].dtype) == f"torch.{c.dtype}"
    module = program.module()
    module.load_state_dict(constants)
    inputs = _inputs(storage, description, checkpoint, request)
    _check_sizes(description, request, inputs)
    with torch.no_grad():
        outputs = module(*inputs)
    return {spec.name: t for spec, t in zip(description.outputs, outputs, strict=True)}


def model_ids(storage: Storage, feature: RequestFeature, raw: Tensor) -> Tensor:
    """The ids that the trained model gets; -1 for unknown ones."""
    if isinstance(feature.ids, HashedIds):
        return torch.from_numpy(hashed(raw.numpy(), feature.ids))
    if isinstance(feature.ids, VocabularyIds):
        data = storage.read(feature.ids.key)
        check_digest(data, feature.ids.digest, feature.ids.key)
        stored = safetensors.torch.load(data)
        assert stored["raw"].tolist() == sorted(stored["raw"].tolist())
        assert len(stored["raw"]) == feature.ids.size
        rows = dict(zip(stored["raw"].tolist(), stored["row"].tolist(), strict=True))
        unknown = -1 if feature.unknown_row is None else feature.unknown_row
        return torch.tensor([rows.get(r, unknown) for r in raw.tolist()], dtype=torch.int64)
    return raw


def _inputs(
    storage: Storage,
    description: ServingDescription,
    checkpoint: Mapping[str, Tensor],
    request: Request,
) -> list[Tensor]:
    ids = {f.name: model_ids(storage, f, request[f"{f.name}.values"]) for f in description.features}
    collisions = {c.name: c for c in description.collisions}
    given: dict[tuple[str, ...], Tensor] = {}
    for lookup in description.lookups:
        pooled = []
        for spec in lookup.features:
            rows = ids[spec.feature]
            if spec.collision is not None:
                rows = _collided(rows, collisions[spec.collision], checkpoint)
            vectors = _vectors(rows, spec, checkpoint)
            given["rows", lookup.input, spec.output] = vectors
            given["row_ids", lookup.input, spec.output] = rows
            if spec.pooling != "none":
                pooled.append(_pool(vectors, spec, checkpoint, request))
        if pooled:
            given["lookup", lookup.input] = torch.cat(pooled, 1)
    for name, tensor in request.items():
        feature, _, part = name.rpartition(".")
        given["dense", name] = tensor
        given[part, feature] = ids[feature] if part == "values" and feature in ids else tensor
    return [given[i.kind, *(i.of or (i.name,))] for i in description.inputs]


def _vectors(rows: Tensor, spec: FeatureSpec, checkpoint: Mapping[str, Tensor]) -> Tensor:
    table = checkpoint[spec.table_fqn]
    assert table.shape == (spec.rows, spec.dim)
    known = (rows >= 0) & (rows < spec.rows)
    return table[rows * known] * known[:, None]


def _pool(
    vectors: Tensor, spec: FeatureSpec, checkpoint: Mapping[str, Tensor], request: Request
) -> Tensor:
    lengths = request[f"{spec.feature}.lengths"].tolist()
    out, at = [], 0
    for n in lengths:
        bag = vectors[at : at + n]
        if spec.weights == "request":
            bag = bag * request[f"{spec.feature}.weights"][at : at + n, None]
        elif spec.weights == "position":
            assert spec.position_fqn is not None
            bag = bag * checkpoint[spec.position_fqn][:n, None]
        total = bag.sum(0)
        out.append(total / n if spec.pooling == "mean" and n else total)
        at += n
    return torch.stack(out)


def _collided(raw: Tensor, spec: CollisionSpec, checkpoint: Mapping[str, Tensor]) -> Tensor:
    raw_ids, rows = checkpoint[spec.raw_ids_fqn].tolist(), checkpoint[spec.rows_fqn].tolist()
    assert len(raw_ids) == len(rows) == spec.size
    own = {r: row for r, row in zip(raw_ids, rows, strict=True) if r != 2**63 - 1}
    out = []
    for r in raw.tolist():
        unsigned, n = r % 2**64, len(spec.unknown_rows)
        block = unsigned // spec.block if spec.block else 0
        out.append(own.get(r, spec.unknown_rows[block if block < n else unsigned % n]))
    return torch.tensor(out, dtype=torch.int64)


def _check_sizes(description: ServingDescription, request: Request, inputs: list[Tensor]) -> None:
    """Every input has the dtype, and the sizes, that the schema says."""
    sizes = {f"ids:{f.name}": len(request[f"{f.name}.values"]) for f in description.features}
    sizes["batch"] = len(request[f"{description.features[0].name}.lengths"])
    for spec, tensor in zip(description.inputs, inputs, strict=True):
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
        assert tuple(tensor.shape) == shape, spec
        assert str(tensor.dtype) == f"torch.{spec.dtype}", spec


def _is_kjt(value: Any) -> bool:
    return hasattr(value, "length_per_key") and hasattr(value, "lengths")
