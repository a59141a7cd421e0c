"""The inputs that a program could have, and the way from them back to the model's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ckpt.schema import InputKind, LookupSpec
from trainer.description.request import Feature, Request, offsets_of
from trainer.description.shadow import Call, Feed

BATCH = "batch"


@dataclass(frozen=True)
class ProgramInput:
    """A positional input, as `ckpt.schema.InputSpec` says. Its dimension 0 has the size `size`."""

    name: str
    kind: InputKind
    of: tuple[str, ...]
    size: str
    example: Tensor

    @property
    def key(self) -> tuple[str, ...]:
        return (self.kind, *(self.of or (self.name,)))


class InputIds(KeyedJaggedTensor):
    """A sparse argument while tracing: each feature has tensors of its own.

    A KeyedJaggedTensor holds its features in one tensor, and cutting that depends on data.

    Args:
        features: key -> (values, lengths, weights or None).
        stride: the batch size.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> InputIds:
        return object.__new__(cls)

    def __init__(
        self, features: Mapping[str, tuple[Tensor, Tensor, Tensor | None]], stride: Any
    ) -> None:
        self._features = features
        weights = [w for _, _, w in features.values() if w is not None]
        super().__init__(
            keys=list(features),
            values=torch.cat([v for v, _, _ in features.values()]),
            lengths=torch.cat([n for _, n, _ in features.values()]),
            weights=torch.cat(weights) if weights else None,
            stride=stride,
        )

    def __getitem__(self, key: str) -> Any:
        values, lengths, weights = self._features[key]
        return JaggedTensor(values, weights, lengths, offsets_of(lengths))

    def to_dict(self, compute_offsets: bool = True) -> dict[str, Any]:
        return {key: self[key] for key in self._features}

    def offsets(self) -> Tensor:
        return offsets_of(self.lengths())

    def length_per_key(self) -> list[int]:
        return [values.size(0) for values, _, _ in self._features.values()]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> Any:
        keys = list(self._features)
        return InputIds({keys[i]: self._features[keys[i]] for i in indices}, self._stride)

    def split(self, segments: list[int]) -> list[Any]:
        keys, out, at = list(self._features), [], 0
        for n in segments:
            part = {key: self._features[key] for key in keys[at : at + n]}
            out.append(InputIds(part, self._stride) if part else KeyedJaggedTensor.empty())
            at += n
        return out


class Arguments:
    """All inputs that the program could have, and what becomes of them.

    Args:
        request: the golden request. feed: what the probe saw; gets the stand-ins' answers.
        lookups: the schema of the feed's calls.
    """

    def __init__(self, request: Request, feed: Feed, lookups: Sequence[LookupSpec]) -> None:
        self._request = request
        self._feed = feed
        self._calls = list(zip(feed.calls, lookups, strict=True))
        self._features = {f.name: f for f in request.features}
        self._same: dict[str, str] = {}

    def unify(self, same: Mapping[str, str]) -> None:
        """From now on these sizes are one: `ids:<feature>` -> the size that it always equals."""
        self._same = {**{a: same.get(b, b) for a, b in self._same.items()}, **same}

    def one_a_row(self) -> set[str]:
        """Features that have as many ids as the batch has rows, always: what `unify` has told so far."""
        return {f.name for f in self._request.features if self._same.get(f.size) == BATCH}

    def candidates(self) -> list[ProgramInput]:
        found = [
            ProgramInput(name, "dense", (), BATCH, _host(tensor))
            for name, tensor in self._request.dense.items()
        ]
        for call, lookup in self._calls:
            if call.pooled is not None:
                found.append(ProgramInput(call.name, "lookup", (), BATCH, _host(call.pooled)))
                continue
            for spec in lookup.features:
                of, jagged = (call.name, spec.output), call.sequences[spec.output]
                size = self._features[spec.feature].size
                path = f"{call.name}.{spec.output}"
                rows = _host(jagged.values())
                found.append(ProgramInput(f"{path}.rows", "rows", of, size, rows))
                indices = jagged.weights_or_none()
                if indices is not None:
                    ids = _host(indices).long()
                    found.append(ProgramInput(f"{path}.row_ids", "row_ids", of, size, ids))
        for f in self._request.features:
            values, lengths = _host(f.ids.values()).long(), _host(f.ids.lengths()).long()
            found.append(ProgramInput(f"{f.name}.values", "values", (f.name,), f.size, values))
            found.append(ProgramInput(f"{f.name}.lengths", "lengths", (f.name,), BATCH, lengths))
            weights = f.ids.weights_or_none()
            if weights is not None:
                given = _host(weights).float()
                found.append(ProgramInput(f"{f.name}.weights", "weights", (f.name,), f.size, given))
        return found

    def call(self, model: Any, inputs: Sequence[ProgramInput], tensors: Sequence[Tensor]) -> Any:
        """The output of the shadow, by inputs alone.

        What isn't an input reaches no output: any value of the right shape will do for it.
        """
        given = {i.key: t for i, t in zip(inputs, tensors, strict=True)}
        sizes: dict[str, Any] = {i.size: t.size(0) for i, t in zip(inputs, tensors, strict=True)}
        sizes |= {a: sizes[b] for a, b in self._same.items() if b in sizes}
        fill = _Filler(given, sizes)
        answers = {c.name: self._answer(c, lookup, fill) for c, lookup in self._calls}
        self._feed.begin(lambda call, _: answers[call.name])
        leaves: dict[str, Any] = {}
        for name, leaf in self._request.leaves.items():
            if isinstance(leaf, KeyedJaggedTensor):
                own = [f for f in self._request.features if f.argument == name]
                leaves[name] = InputIds({f.key: _parts(f, fill) for f in own}, sizes[BATCH])
            elif isinstance(leaf, Tensor):
                leaves[name] = fill.take(("dense", name), BATCH, leaf)
            else:
                leaves[name] = leaf
        return self._request.call(model, leaves)

    def _answer(self, call: Call, lookup: LookupSpec, fill: _Filler) -> Any:
        if call.pooled is not None:
            pooled = fill.take(("lookup", call.name), BATCH, call.pooled)
            return KeyedTensor(list(call.keys), list(call.dims), pooled)
        out = {}
        for spec in lookup.features:
            jagged, feature = call.sequences[spec.output], self._features[spec.feature]
            at = (call.name, spec.output)
            lengths = fill.take(("lengths", feature.name), BATCH, jagged.lengths())
            indices = jagged.weights_or_none()
            out[spec.output] = JaggedTensor(
                values=fill.take(("rows", *at), feature.size, jagged.values()),
                weights=None
                if indices is None
                else fill.take(("row_ids", *at), feature.size, indices),
                lengths=lengths,
                offsets=offsets_of(lengths),
            )
        return out


@dataclass(frozen=True)
class _Filler:
    """Inputs by their key, or zeros in their place. sizes: what the sizes are in this call."""

    given: Mapping[tuple[str, ...], Tensor]
    sizes: Mapping[str, Any]

    def take(self, key: tuple[str, ...], size: str, like: Tensor) -> Tensor:
        if key in self.given:
            return self.given[key].to(like.dtype)
        return torch.zeros(self.sizes.get(size, len(like)), *like.shape[1:], dtype=like.dtype)


def _parts(feature: Feature, fill: _Filler) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, lengths and weights of a feature, as inputs or zeros."""
    weights = feature.ids.weights_or_none()
    return (
        fill.take(("values", feature.name), feature.size, feature.ids.values()),
        fill.take(("lengths", feature.name), BATCH, feature.ids.lengths()),
        None if weights is None else fill.take(("weights", feature.name), feature.size, weights),
    )


def unified(inputs: Sequence[ProgramInput], same: Mapping[str, str]) -> list[ProgramInput]:
    """The inputs with some sizes replaced by those that they always equal."""
    return [replace(i, size=same.get(i.size, i.size)) for i in inputs]


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
