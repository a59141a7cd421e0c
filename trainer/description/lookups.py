"""From the probe to the schema: which request feature reads which table, in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)

from ckpt.errors import BadInputError
from ckpt.schema import FeatureSpec, LookupSpec, Pooling, WeightSource
from trainer.description.embeddings import Embeddings, join
from trainer.description.request import Feature
from trainer.description.shadow import Call

_POOLING: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}


def lookup_of(
    call: Call, request: Sequence[Feature], prefix: str, checkpoint_keys: Collection[str]
) -> LookupSpec:
    """The schema of one call. The features are in the order of the collection's output.

    Args:
        call: what the probe saw.
        request: the request's features.
        prefix: what stands before the model's own names in checkpoint keys.
        checkpoint_keys: the tensors that a checkpoint holds.

    BadInputError names the feature or table that can't be described.
    """
    embeddings = call.embeddings
    outputs = embeddings.outputs()
    if set(call.keys) != set(outputs):
        raise BadInputError(
            f"{call.name}: looks up {sorted(call.keys)}, its tables say {sorted(outputs)}"
        )
    given = call.features.to_dict()
    features = []
    for key in call.keys:
        name, config = outputs[key]
        source = _source(call.name, name, given[name], request)
        weights, position = _weights(call, name, given[name], source, prefix)
        table = f"{prefix}{embeddings.tables}.{config.name}.weight"
        for fqn in filter(None, (table, position)):
            if fqn not in checkpoint_keys:
                raise BadInputError(
                    f"{call.name}: a checkpoint of this state has no {fqn}; pass the prefix of the "
                    f"model's keys"
                )
        features.append(
            FeatureSpec(
                feature=source.name,
                table_fqn=table,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                pooling=_pooling(call, config),
                output=key,
                weights=weights,
                position_fqn=position,
                collision=collision_name(embeddings, config.name)
                if embeddings.collisions
                else None,
            )
        )
    return LookupSpec(call.name, tuple(features))


def collision_name(embeddings: Embeddings, table: str) -> str:
    return join(embeddings.path, table)


def _pooling(call: Call, config: Any) -> Pooling:
    if not call.embeddings.pooled:
        return "none"
    pooling = _POOLING.get(config.pooling.name)
    if pooling is None:
        raise BadInputError(
            f"{call.name}: table {config.name} is pooled by {config.pooling.name}; only SUM and MEAN "
            f"can be described"
        )
    return pooling


def _source(where: str, name: str, given: Any, request: Sequence[Feature]) -> Feature:
    """The request's feature with the ids that the collection was given; of its own name if it can be."""
    equal = [
        f
        for f in request
        if torch.equal(f.ids.values(), given.values().to(f.ids.values().dtype))
        and torch.equal(f.ids.lengths(), given.lengths().to(f.ids.lengths().dtype))
    ]
    found = [f for f in equal if f.key == name] or equal
    if not found:
        raise BadInputError(
            f"{where}: feature {name!r} isn't looked up with the ids of the request: the model "
            f"rewrites them; do that in the input pipeline, before the model"
        )
    if len(found) > 1:
        raise BadInputError(
            f"{where}: feature {name!r} has the ids of {' and of '.join(f.name for f in found)} in the "
            f"golden request; give one whose features all differ"
        )
    return found[0]


def _weights(
    call: Call, name: str, given: Any, source: Feature, prefix: str
) -> tuple[WeightSource, str | None]:
    """Where the weight of each id comes from, and the checkpoint key of position weights."""
    embeddings = call.embeddings
    if embeddings.processors is not None:
        processors, path = embeddings.processors, f"{prefix}{embeddings.processors_path}"
        if isinstance(processors, PositionWeightedModuleCollection):
            known = name in processors.position_weights
            return ("position", f"{path}.position_weights.{name}") if known else ("none", None)
        processor = processors[name] if name in getattr(processors, "_modules", {}) else processors
        if type(processor) is not PositionWeightedModule:
            raise BadInputError(
                f"{call.name}: feature {name!r} is processed by {type(processor).__name__}; only "
                f"PositionWeightedModule and PositionWeightedModuleCollection can be described"
            )
        return "position", f"{path}.{name}.position_weight"
    weights = given.weights_or_none()
    if not embeddings.weighted:
        return "none", None
    sent = source.ids.weights_or_none()
    if weights is None:
        raise BadInputError(f"{call.name}: feature {name!r} has no weights in the golden request")
    if sent is None or not torch.equal(sent, weights):
        raise BadInputError(
            f"{call.name}: the weights of feature {name!r} aren't those of the request: the model "
            f"computes them; do that in the input pipeline, before the model"
        )
    return "request", None
