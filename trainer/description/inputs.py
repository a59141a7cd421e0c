"""The inputs that a program could have, and the way from them back to the model's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
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


Parts = tuple[Tensor, Tensor, Tensor | None]
"""A feature's values, lengths, and weights if it has any."""

_JOINED = ("_values", "_lengths", "_weights")


class InputIds(KeyedJaggedTensor):
    """A sparse argument while tracing: each feature has tensors of its own, made when they are read.

    A KeyedJaggedTensor holds its features in one tensor, and cutting that depends on data.

    Args:
        features: key -> what makes its parts, equal ones at each call.
        stride: the batch size.
        weighted: have the features weights?
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> InputIds:
        return object.__new__(cls)

    def __init__(
        self, features: Mapping[str, Callable[[], Parts]], stride: Any, *, weighted: bool
    ) -> None:
        self._features = features
        self._weighted = weighted
        super().__init__(keys=list(features), values=torch.empty(0), stride=stride)
        for name in _JOINED:  # from here on they are asked of __getattr__
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        """All features in one tensor, where the model reads them so."""
        if name not in _JOINED:
            raise AttributeError(name)
        joined = None
        if name != "_weights" or self._weighted:
            at = _JOINED.index(name)
            joined = torch.cat([part()[at] for part in self._features.values()])  # type: ignore[misc]
        setattr(self, name, joined)
        return joined

    def __getitem__(self, key: str) -> Any:
        values, lengths, weights = self._features[key]()
        return JaggedTensor(values, weights, lengths, offsets_of(lengths))

    def to_dict(self, compute_offsets: bool = True) -> dict[str, Any]:
        return {key: self[key] for key in self._features}

    def stride(self) -> Any:
        return self._stride

    def offsets(self) -> Tensor:
        return offsets_of(self.lengths())

    def length_per_key(self) -> list[int]:
        return [part()[0].size(0) for part in self._features.values()]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> Any:
        keys = list(self._features)
        return self._some([keys[i] for i in indices])

    def split(self, segments: list[int]) -> list[Any]:
        keys, out, at = list(self._features), [], 0
        for n in segments:
            out.append(self._some(keys[at : at + n]) if n else KeyedJaggedTensor.empty())
            at += n
        return out

    def _some(self, keys: Sequence[str]) -> InputIds:
        parts = {key: self._features[key] for key in keys}
        return InputIds(parts, self._stride, weighted=self._weighted)


class Arguments:
    """All inputs that the program could have, and what becomes of them.

    What the dense part does with a feature that it doesn't read needs no trace to be known: such a
    feature is looked up, or ignored, and tracing takes time for each candidate.

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
        self._expected = set(self._features)
        self._read: set[str] = set()

    def watch(self, model: Any) -> None:
        """Run the shadow on the golden request; features that it doesn't read are no candidates anymore."""
        inputs = self.candidates()
        try:
            with torch.no_grad():
                self.call(model, inputs, [i.example.clone() for i in inputs])
        except Exception:  # tracing will say what is wrong with it, if anything is
            return
        rows = {
            f.feature
            for call, lookup in self._calls
            if call.pooled is None
            for f in lookup.features
        }
        self._expected = self._read | rows
        self._read = set()

    def surprised(self) -> bool:
        """Has the model read a feature that `watch` hasn't seen it read? Then all are candidates again."""
        if self._read <= self._expected:
            return False
        self._expected = set(self._features)
        return True

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
            if f.name not in self._expected:
                continue
            values, lengths = _host(f.ids.values()).long(), _host(f.ids.lengths()).long()
            found.append(ProgramInput(f"{f.name}.values", "values", (f.name,), f.size, values))
            found.append(ProgramInput(f"{f.name}.lengths", "lengths", (f.name,), BATCH, lengths))
            weights = f.ids.weights_or_none()
            if weights is not None:
                given = _host(weights).float()
                found.append(ProgramInput(f"{f.name}.weights", "weights", (f.name,), f.size, given))
        return unified(found, self._same)

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
                leaves[name] = InputIds(
                    {f.key: cache(partial(self._parts, f, fill)) for f in own},
                    sizes[BATCH],
                    weighted=leaf.weights_or_none() is not None,
                )
            elif isinstance(leaf, Tensor):
                leaves[name] = fill.take(("dense", name), BATCH, leaf)
            else:
                leaves[name] = leaf
        return self._request.call(model, leaves)

    def _parts(self, feature: Feature, fill: _Filler) -> Parts:
        """Of a feature that the model reads, as inputs or zeros."""
        self._read.add(feature.name)
        ids, name, size = feature.ids, feature.name, feature.size
        weights = ids.weights_or_none()
        return (
            fill.take(("values", name), size, ids.values()),
            fill.take(("lengths", name), BATCH, ids.lengths()),
            None if weights is None else fill.take(("weights", name), size, weights),
        )

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


def unified(inputs: Sequence[ProgramInput], same: Mapping[str, str]) -> list[ProgramInput]:
    """The inputs with some sizes replaced by those that they always equal."""
    return [replace(i, size=same.get(i.size, i.size)) for i in inputs]


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
