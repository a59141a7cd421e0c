"""What a request must look like, checked before anything is computed from it.

A request is the flat mapping of tensors that `ckpt.schema` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckpt.errors import BadInputError, CorruptError
from ckpt.schema import FeatureSpec, InputSpec, ServingDescription

Request = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RequestSpec:
    """The tensors of a request: names, dtypes, and shapes with `batch` and `ids` as free sizes.

    `features` holds one entry for each feature name; those of several lookups share it.
    """

    dense: tuple[InputSpec, ...]
    features: tuple[FeatureSpec, ...]

    @staticmethod
    def of(description: ServingDescription) -> RequestSpec:
        features = {f.feature: f for lk in description.lookups for f in lk.features}
        dense = tuple(i for i in description.inputs if i.kind == "dense")
        return RequestSpec(dense, tuple(features.values()))

    def names(self) -> list[str]:
        ids = [n for f in self.features for n in (values_of(f.feature), lengths_of(f.feature))]
        return [i.name for i in self.dense] + ids

    def select(self, tensors: Request) -> Request:
        """Without what the model doesn't read: the golden request may hold more than it needs."""
        return {n: tensors[n] for n in self.names() if n in tensors}

    def check(self, request: Request) -> int:
        """The batch size; BadInputError names what is wrong, and its numbers."""
        expected = self.names()
        missing = [n for n in expected if n not in request]
        unknown = [str(n) for n in request if n not in set(expected)]
        if missing or unknown:
            raise BadInputError(
                f"request: missing {', '.join(missing) or 'nothing'}; "
                f"unknown {', '.join(unknown) or 'nothing'}; expected {', '.join(expected)}"
            )
        sizes: dict[str, int] = {}
        for spec in self.dense:
            batch_size = _dense_batch(spec, request[spec.name])
            if batch_size is not None:
                sizes[spec.name] = batch_size
        for feature in self.features:
            sizes[lengths_of(feature.feature)] = _check_bags(feature.feature, request)
        batches = set(sizes.values())
        if len(batches) > 1:
            told = ", ".join(f"{n} has {b}" for n, b in sizes.items())
            raise BadInputError(f"request: batch sizes differ: {told}")
        batch = batches.pop() if batches else 1
        if batch < 1:
            raise BadInputError("request: a batch of 0 rows; send at least 1")
        return batch


def values_of(feature: str) -> str:
    return f"{feature}.values"


def lengths_of(feature: str) -> str:
    return f"{feature}.lengths"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a description spells `name`; CorruptError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"serving description: {name!r} is no dtype")
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dense_batch(spec: InputSpec, tensor: torch.Tensor) -> int | None:
    """The batch size that a checked dense input has; None if its shape is fixed."""
    if dtype_name(tensor) != spec.dtype:
        raise BadInputError(f"{spec.name}: dtype is {dtype_name(tensor)}, expected {spec.dtype}")
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape) and all(
        want in ("batch", got) for want, got in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        want = ", ".join(map(str, spec.shape))
        raise BadInputError(f"{spec.name}: shape is {shape}, expected ({want})")
    sizes = (got for want, got in zip(spec.shape, shape, strict=True) if want == "batch")
    return next(sizes, None)


def _check_bags(feature: str, request: Request) -> int:
    values, lengths = request[values_of(feature)], request[lengths_of(feature)]
    for name, tensor in ((values_of(feature), values), (lengths_of(feature), lengths)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise BadInputError(
                f"{name}: {dtype_name(tensor)} of shape {tuple(tensor.shape)}, "
                f"expected int64 of one dimension"
            )
    if lengths.numel():
        low, high = (int(x) for x in torch.aminmax(lengths))
        if low < 0:
            raise BadInputError(f"{lengths_of(feature)}: holds {low}; lengths can't be negative")
        # Each alone is bounded first, so that the sum below can't wrap.
        if high > values.numel() or int(lengths.sum()) != values.numel():
            raise BadInputError(
                f"{lengths_of(feature)}: lengths sum to {sum(lengths.tolist())}, but "
                f"{values_of(feature)} has {values.numel()} ids"
            )
    elif values.numel():
        raise BadInputError(
            f"{lengths_of(feature)}: is empty, but {values_of(feature)} has {values.numel()} ids"
        )
    return int(lengths.numel())
