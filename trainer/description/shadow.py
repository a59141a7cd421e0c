"""A copy of a model whose embedding collections are stand-ins: no table and no process group in it.

`copy.deepcopy` gets a memo in which each collection is already "copied" to its stand-in, so
every reference to it is caught, registered or not, and the live model stays untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ckpt.errors import BadInputError

_WRAPPERS = ("DistributedModelParallel", "DMPCollection", "DistributedDataParallel")


@dataclass(frozen=True)
class Call:
    """One call of one collection, as the probe saw it.

    path: the collection in the model. index: which call of it. features: the ids it was given.
    keys, dims: its output's columns in order, which under sharding is the plan's order.
    output: float (batch, sum of dims).
    """

    path: str
    index: int
    collection: nn.Module
    features: Any
    keys: tuple[str, ...]
    dims: tuple[int, ...]
    output: Tensor

    @property
    def name(self) -> str:
        return self.path if self.index == 0 else f"{self.path}#{self.index}"


@dataclass
class Feed:
    """How the stand-ins answer: by the real collection, recording; or, in a trace, by inputs."""

    calls: list[Call] = field(default_factory=list)
    inputs: dict[str, Tensor] | None = None
    _count: dict[str, int] = field(default_factory=dict)

    def begin(self, inputs: dict[str, Tensor] | None) -> None:
        """Start one run of the shadow. `inputs`: call name -> lookup output; None probes."""
        self.inputs, self._count = inputs, {}
        if inputs is None:
            self.calls = []

    def answer(self, path: str, collection: nn.Module, features: Any) -> Any:
        index = self._count.get(path, 0)
        self._count[path] = index + 1
        if self.inputs is None:
            out = collection(features)
            out = out.wait() if hasattr(out, "wait") else out
            keys, dims = tuple(out.keys()), tuple(out.length_per_key())
            self.calls.append(
                Call(path, index, collection, features, keys, dims, out.values().detach())
            )
            return out
        call = next(c for c in self.calls if (c.path, c.index) == (path, index))
        return KeyedTensor(list(call.keys), list(call.dims), self.inputs[call.name])


class StandIn(nn.Module):
    """Takes a collection's place in the shadow."""

    def __init__(self, path: str, collection: nn.Module, feed: Feed) -> None:
        super().__init__()
        # Past nn.Module's registration: the tables must not become part of the shadow.
        self.__dict__["_parts"] = (path, collection, feed)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self

    def forward(self, features: Any) -> Any:
        path, collection, feed = self.__dict__["_parts"]
        return feed.answer(path, collection, features)


class RequestIds(KeyedJaggedTensor):
    """The sparse argument while tracing. It may be split, permuted and looked up, nothing else.

    Ids that the dense part reads would have to be inputs of the program, and the schema has
    none of that kind. So whatever asks for them meets `__getattr__`, as they aren't here.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> RequestIds:
        return object.__new__(cls)

    def __init__(self, keys: list[str], stride: Any) -> None:
        self._keys = keys
        self._stride = stride

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BadInputError(
            f"features {', '.join(self.__dict__.get('_keys', ()))}: the model reads their ids or "
            f"lengths outside of an embedding collection, which a serving description can't say yet"
        )

    def stride(self) -> Any:
        return self._stride

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> RequestIds:
        return RequestIds([self._keys[i] for i in indices], self._stride)

    def split(self, segments: list[int]) -> list[RequestIds]:
        out, at = [], 0
        for n in segments:
            out.append(RequestIds(self._keys[at : at + n], self._stride))
            at += n
        return out


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside DistributedModelParallel and DistributedDataParallel."""
    while type(module).__name__ in _WRAPPERS:
        module = module.module  # type: ignore[assignment]
    return module


def shadow_of(model: nn.Module, feed: Feed) -> nn.Module:
    """The copy, in eval mode, on the model's own device.

    BadInputError naming a collection of a kind that can't be described, or the lack of any.
    """
    memo: dict[int, Any] = {}
    paths: list[str] = []
    for path, module in model.named_modules():
        if not any(path.startswith(f"{p}.") for p in paths) and _is_collection(path, module):
            paths.append(path)
            memo[id(module)] = StandIn(path, module, feed)
    if not paths:
        raise BadInputError(
            f"{type(model).__name__} has no EmbeddingBagCollection; there is nothing to look up"
        )
    for module in model.modules():
        for value in list(module.__dict__.values()):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses tensors with history
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied.eval()


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Every submodule in eval mode inside, and as it was afterwards."""
    was = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in was.items():
            module.training = training


def _is_collection(path: str, module: nn.Module) -> bool:
    """Is this a describable embedding collection? Raises for one of another kind."""
    kind = type(module).__name__
    other = None
    if "ManagedCollision" in kind and hasattr(module, "_embedding_module"):
        other = "managed collision, whose id map isn't exported"
    elif "FeatureProcessed" in kind:
        other = "per-position weights"
    elif hasattr(module, "_embedding_configs") and hasattr(module, "_need_indices"):
        other = "a sequence collection, whose output isn't pooled"
    elif hasattr(module, "_embedding_bag_configs"):
        if not getattr(module, "_is_weighted", False):
            return True
        other = "weighted ids"
    if other:
        raise BadInputError(
            f"{path or 'the model'} ({kind}): {other}; a serving description holds unweighted "
            f"EmbeddingBagCollections only"
        )
    return False
