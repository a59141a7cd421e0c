"""From the probe to the schema: which request feature reads which table, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ckpt.errors import BadInputError
from ckpt.schema import FeatureSpec, LookupSpec
from trainer.description.shadow import Call

TOLERANCE = 1e-4
"""Largest accepted error, relative to values above 1."""

_POOLING = {"SUM": "sum", "MEAN": "mean"}


def lookup_of(
    call: Call, request: Mapping[str, Any], prefix: str, checkpoint_keys: Collection[str]
) -> LookupSpec:
    """The schema of one call. The features are in the order of the collection's output.

    Args:
        call: what the probe saw.
        request: feature -> JaggedTensor of the request's ids.
        prefix: what stands before the model's own names in checkpoint keys.
        checkpoint_keys: the tensors that a checkpoint holds.
    """
    configs: list[Any] = list(call.collection._embedding_bag_configs)  # type: ignore[arg-type]
    uses = Counter(f for c in configs for f in c.feature_names)
    outputs = {
        (f if uses[f] == 1 else f"{f}@{c.name}"): (f, c) for c in configs for f in c.feature_names
    }
    if set(call.keys) != set(outputs):
        raise BadInputError(
            f"{call.name}: looks up {sorted(call.keys)}, its tables say {sorted(outputs)}"
        )
    given = call.features.to_dict()
    features = []
    for key in call.keys:
        feature, config = outputs[key]
        _check_unchanged(call.name, feature, given[feature], request)
        pooling = _POOLING.get(config.pooling.name)
        if pooling is None:
            raise BadInputError(
                f"{call.name}: table {config.name} is pooled by {config.pooling.name}; only SUM "
                f"and MEAN can be described"
            )
        fqn = f"{prefix}{call.path}.embedding_bags.{config.name}.weight"
        if fqn not in checkpoint_keys:
            raise BadInputError(
                f"{call.name}: a checkpoint of this state has no {fqn}; pass the prefix of the "
                f"model's keys"
            )
        features.append(
            FeatureSpec(feature, fqn, config.num_embeddings, config.embedding_dim, pooling)  # type: ignore[arg-type]
        )
    return LookupSpec(call.name, tuple(features))


def check_pooling(call: Call, lookup: LookupSpec) -> None:
    """Prove that the collection does what the schema says: right rows, right pooling, right columns.

    Looks up every id of the request in a bag of its own, pools the rows as the schema says, and
    compares. Collective. BadInputError naming the feature that differs.

    It does happen: TorchRec 1.8 divides means twice, where a row-wise table with MEAN shares its
    collection with tables cut otherwise, so the live model isn't what its configuration says.
    """
    given = call.features.to_dict()
    keys = list(given)
    counts = [given[k].values().numel() for k in keys]
    most = max(*counts, 1)
    lengths = torch.zeros(len(keys), most, dtype=call.features.lengths().dtype)
    for row, count in zip(lengths, counts, strict=True):
        row[:count] = 1
    values = torch.cat([given[k].values() for k in keys])
    single = KeyedJaggedTensor(keys, values, lengths=lengths.reshape(-1).to(values.device))
    out = call.collection(single)
    rows = (out.wait() if hasattr(out, "wait") else out).values()
    column = 0
    for spec in lookup.features:
        columns = slice(column, column + spec.dim)
        column += spec.dim
        jagged = given[spec.feature]
        bags = jagged.lengths().long()
        bag_of = torch.repeat_interleave(torch.arange(len(bags), device=bags.device), bags)
        pooled = torch.zeros(len(bags), spec.dim, dtype=rows.dtype, device=rows.device)
        pooled.index_add_(0, bag_of, rows[: len(bag_of), columns])
        if spec.pooling == "mean":
            pooled /= bags.clamp(min=1)[:, None]
        got = call.output[:, columns]
        error = float((pooled - got).abs().max())
        if not error <= TOLERANCE * max(1.0, float(got.abs().max())):
            raise BadInputError(
                f"{call.name}: feature {spec.feature!r} isn't the {spec.pooling} of its rows (off by "
                f"{error:.3g}); in TorchRec 1.8, row-wise tables with MEAN need a collection of their own"
            )


def request_features(names: list[str], args: tuple[Any, ...]) -> dict[str, Any]:
    """JaggedTensor of each feature, over all sparse arguments."""
    features: dict[str, Any] = {}
    for name, arg in zip(names, args, strict=True):
        if isinstance(arg, Tensor):
            continue
        if arg.weights_or_none() is not None:
            raise BadInputError(f"argument {name}: weighted ids can't be described yet")
        if arg.variable_stride_per_key():
            raise BadInputError(f"argument {name}: a batch size of its own per feature can't be")
        for feature, jagged in arg.to_dict().items():
            if feature in features:
                raise BadInputError(
                    f"feature {feature!r} is in two arguments; give each its own name"
                )
            features[feature] = jagged
    return features


def _check_unchanged(where: str, feature: str, given: Any, request: Mapping[str, Any]) -> None:
    sent = request.get(feature)
    if sent is None or not (
        torch.equal(sent.values(), given.values()) and torch.equal(sent.lengths(), given.lengths())
    ):
        raise BadInputError(
            f"{where}: feature {feature!r} isn't looked up with the ids of the request: the model "
            f"renames or rewrites it; do that in the input pipeline, before the model"
        )
