"""What a request must look like, checked before anything is computed from it.

A request is the flat mapping of tensors that `ckpt.schema` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from ckpt.errors import BadInputError, CorruptError
from ckpt.idmaps import Ids
from ckpt.schema import InputSpec, RequestFeature, ServingDescription

Request = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class RequestIds:
    """The sparse part of a checked request, by the features of its RequestSpec, in order.

    batch: how many rows the request has.
    values: each feature's ids, int64. lengths: int64, (features, batch).
    weights: each feature's weights, float32, as many as ids; None for features without.
    """

    batch: int
    values: list[Ids]
    lengths: Ids
    weights: list[torch.Tensor | None]


class RequestSpec:
    """The tensors of a request: names, dtypes, and shapes with `batch` and `ids` as free sizes.

    Args:
        dense: its dense inputs.
        features: its sparse features.
    """

    def __init__(self, dense: tuple[InputSpec, ...], features: tuple[RequestFeature, ...]) -> None:
        self.dense = dense
        self.features = features
        self._names = self.names()
        self._expected = frozenset(self._names)
        self._dense = [(i.name, torch_dtype(i.dtype), i.shape) for i in dense]
        self._keys = [
            (values_of(f.name), lengths_of(f.name), weights_of(f.name) if f.weighted else None)
            for f in features
        ]

    @staticmethod
    def of(description: ServingDescription) -> RequestSpec:
        """Of what the model reads: features that neither a lookup nor an input uses are left out."""
        used = {f.feature for lk in description.lookups for f in lk.features}
        used |= {i.of[0] for i in description.inputs if i.kind in ("values", "lengths", "weights")}
        features = tuple(f for f in description.features if f.name in used)
        return RequestSpec(tuple(i for i in description.inputs if i.kind == "dense"), features)

    def names(self) -> list[str]:
        """All tensors of a request."""
        names = [i.name for i in self.dense]
        for f in self.features:
            names += [values_of(f.name), lengths_of(f.name)]
            if f.weighted:
                names.append(weights_of(f.name))
        return names

    def select(self, tensors: Request) -> Request:
        """Without what the model doesn't read: the golden request may hold more than it needs."""
        return {n: tensors[n] for n in self._names if n in tensors}

    def check(self, request: Request) -> int:
        """The batch size; BadInputError names what is wrong, and its numbers."""
        return self.read(request).batch

    def read(self, request: Request) -> RequestIds:
        """Check a request and take out its ids; BadInputError names what is wrong, and its numbers.

        One pass over all features at once; only a request that fails it is looked at one by one.
        """
        if request.keys() != self._expected:
            self._refuse_names(request)
        for name, tensor in request.items():
            if not (isinstance(tensor, torch.Tensor) and tensor.is_cpu) or tensor.is_sparse:
                _refuse_kind(name, tensor)
        batches = set()
        for name, dtype, shape in self._dense:
            tensor = request[name]
            if tensor.dtype is not dtype or len(tensor.shape) != len(shape):
                self._refuse(request)
            for want, got in zip(shape, tensor.shape, strict=True):
                if want == "batch":
                    batches.add(got)
                elif want != got:
                    self._refuse(request)
        values, all_lengths, weights = [], [], []
        for value_key, length_key, weight_key in self._keys:
            ids, lengths = request[value_key], request[length_key]
            if ids.dtype is not torch.int64 or lengths.dtype is not torch.int64:
                self._refuse(request)
            id_array, length_array = ids.numpy(), lengths.numpy()
            if id_array.ndim != 1 or length_array.ndim != 1:
                self._refuse(request)
            values.append(id_array)
            all_lengths.append(length_array)
            batches.add(len(length_array))
            weight = None if weight_key is None else request[weight_key]
            if weight is not None and (
                weight.dtype is not torch.float32 or weight.shape != ids.shape
            ):
                self._refuse(request)
            weights.append(weight)
        if len(batches) > 1 or 0 in batches:
            self._refuse(request)
        batch = int(batches.pop()) if batches else 1
        stacked = np.empty((0, batch), np.int64)
        if values:
            stacked = np.concatenate(all_lengths).reshape(len(values), batch)
            counts = [len(v) for v in values]
            # Each length alone is bounded first, so that the sums can't wrap.
            bounded = stacked.min() >= 0 and stacked.max() <= max(counts)
            if not bounded or stacked.sum(1).tolist() != counts:
                self._refuse(request)
        return RequestIds(batch, values, stacked, weights)

    def _refuse_names(self, request: Request) -> NoReturn:
        missing = [n for n in self._names if n not in request]
        unknown = [str(n) for n in request if n not in self._expected]
        raise BadInputError(
            f"request: missing {', '.join(missing) or 'nothing'}; "
            f"unknown {', '.join(unknown) or 'nothing'}; expected {', '.join(self._names)}"
        )

    def _refuse(self, request: Request) -> NoReturn:
        """Say what is wrong with a request that didn't pass."""
        sizes: dict[str, int] = {}
        for spec in self.dense:
            batch_size = _dense_batch(spec, request[spec.name])
            if batch_size is not None:
                sizes[spec.name] = batch_size
        for feature in self.features:
            sizes[lengths_of(feature.name)] = _check_bags(feature, request)
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{n} has {b}" for n, b in sizes.items())
            raise BadInputError(f"request: batch sizes differ: {told}")
        raise BadInputError("request: a batch of 0 rows; send at least 1")


def values_of(feature: str) -> str:
    return f"{feature}.values"


def lengths_of(feature: str) -> str:
    return f"{feature}.lengths"


def weights_of(feature: str) -> str:
    return f"{feature}.weights"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a description spells `name`; CorruptError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"serving description: {name!r} is no dtype")
    return dtype


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse_kind(name: str, tensor: object) -> NoReturn:
    kind = f"a {type(tensor).__name__}"
    if isinstance(tensor, torch.Tensor):
        kind = f"{str(tensor.layout).removeprefix('torch.')}, on {tensor.device}"
    raise BadInputError(f"{name}: is {kind}; send a dense tensor on the CPU: tensor.cpu()")


def _dense_batch(spec: InputSpec, tensor: torch.Tensor) -> int | None:
    """The batch size that a dense input has; None if its shape is fixed."""
    if dtype_name(tensor) != spec.dtype:
        raise BadInputError(f"{spec.name}: dtype is {dtype_name(tensor)}, expected {spec.dtype}")
    shape = tuple(tensor.shape)
    fits = len(shape) == len(spec.shape) and all(
        want in ("batch", got) for want, got in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        want = ", ".join(map(str, spec.shape))
        raise BadInputError(f"{spec.name}: shape is {shape}, expected ({want})")
    sizes = {got for want, got in zip(spec.shape, shape, strict=True) if want == "batch"}
    if len(sizes) > 1:
        raise BadInputError(f"{spec.name}: shape is {shape}, but its batch sizes must be equal")
    return next(iter(sizes), None)


def _check_bags(feature: RequestFeature, request: Request) -> int:
    values_name, lengths_name = values_of(feature.name), lengths_of(feature.name)
    values, lengths = request[values_name], request[lengths_name]
    for name, tensor in ((values_name, values), (lengths_name, lengths)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            raise BadInputError(
                f"{name}: {dtype_name(tensor)} of shape {tuple(tensor.shape)}, "
                f"expected int64 of one dimension"
            )
    if feature.weighted:
        weights = request[weights_of(feature.name)]
        if weights.dtype != torch.float32 or weights.shape != values.shape:
            raise BadInputError(
                f"{weights_of(feature.name)}: {dtype_name(weights)} of shape {tuple(weights.shape)}, "
                f"expected float32 of shape ({values.numel()},): one for each id"
            )
    total = sum(lengths.tolist())
    if not lengths.numel() and values.numel():
        raise BadInputError(f"{lengths_name}: is empty, but {values_name} has {values.numel()} ids")
    if lengths.numel() and (low := int(lengths.min())) < 0:
        raise BadInputError(f"{lengths_name}: holds {low}; lengths can't be negative")
    if total != values.numel():
        raise BadInputError(
            f"{lengths_name}: lengths sum to {total}, but {values_name} has {values.numel()} ids"
        )
    return int(lengths.numel())
