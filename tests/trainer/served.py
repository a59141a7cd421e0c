"""A publisher in a few lines: runs a stored description on requests, from the tensors of a checkpoint."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt.layout import description_prefix
from ckpt.schema import FeatureSpec, ServingDescription, decode_description
from ckpt.storage import Storage
from trainer.description.lookups import request_features


def read_description(storage: Storage, description_id: str) -> ServingDescription:
    key = f"{description_prefix(description_id)}description.json"
    return decode_description(storage.read(key), key)


def serve(
    storage: Storage,
    description: ServingDescription,
    checkpoint: Mapping[str, Tensor],
    names: list[str],
    args: tuple[Any, ...],
) -> dict[str, Tensor]:
    """Outputs by name. `checkpoint`: key -> whole tensor; `names`, `args`: the request's arguments."""
    program = torch.export.load(io.BytesIO(storage.read(description.program_key)))
    constants = dict(program.state_dict)
    for c in description.constants:
        if c.fqn is not None:
            constants[c.name] = checkpoint[c.fqn]
        assert tuple(constants[c.name].shape) == c.shape
        assert str(constants[c.name].dtype) == f"torch.{c.dtype}"
    module = program.module()
    module.load_state_dict(constants)
    features = request_features(names, args)
    lookups = {
        lk.input: torch.cat([_pool(f, features[f.feature], checkpoint) for f in lk.features], 1)
        for lk in description.lookups
    }
    dense = dict(zip(names, args, strict=True))
    inputs = [lookups[i.name] if i.kind == "lookup" else dense[i.name] for i in description.inputs]
    with torch.no_grad():
        outputs = module(*inputs)
    return {spec.name: t for spec, t in zip(description.outputs, outputs, strict=True)}


def _pool(f: FeatureSpec, jagged: Any, checkpoint: Mapping[str, Tensor]) -> Tensor:
    table = checkpoint[f.table_fqn]
    assert table.shape == (f.rows, f.dim)
    lengths = jagged.lengths()
    offsets = lengths.cumsum(0) - lengths
    return torch.nn.functional.embedding_bag(
        jagged.values(), table, offsets, mode=f.pooling, include_last_offset=False
    )
