"""A copy of a model whose embedding collections are stand-ins: no table and no process group in it.

`copy.deepcopy` gets a memo in which each collection is already "copied" to its stand-in, so
every reference to it is caught, registered or not, and the live model stays untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ckpt.errors import BadInputError
from trainer.description.embeddings import Embeddings, embeddings_of

_WRAPPERS = ("DistributedModelParallel", "DMPCollection", "DistributedDataParallel")


@dataclass(frozen=True)
class Call:
    """One call of one collection, as the probe saw it.

    index: which call of that collection. features: the ids it was given.
    keys: its outputs in order, which under sharding is the plan's order.
    pooled: its output, float (batch, sum of `dims`), if it pools; else
    sequences: output -> JaggedTensor of (number of ids, dim).
    tupled: it returned a pair (managed collision does).
    """

    embeddings: Embeddings
    index: int
    features: Any
    keys: tuple[str, ...]
    dims: tuple[int, ...]
    pooled: Tensor | None
    sequences: Mapping[str, Any]
    tupled: bool

    @property
    def name(self) -> str:
        path = self.embeddings.path or "embeddings"
        return path if self.index == 0 else f"{path}#{self.index}"


Answers = Callable[[Call, Any], Any]
"""(A call of the first probe, the ids that it gets now) -> the collection's output."""


@dataclass
class Feed:
    """How the stand-ins answer: by the real collection, recording; or by `answers`."""

    calls: list[Call] = field(default_factory=list)
    answers: Answers | None = None
    _count: dict[str, int] = field(default_factory=dict)

    def begin(self, answers: Answers | None) -> None:
        """Start one run of the shadow. None probes the real collections."""
        self.answers, self._count = answers, {}
        if answers is None:
            self.calls = []

    def answer(self, embeddings: Embeddings, features: Any, *args: Any, **kwargs: Any) -> Any:
        index = self._count.get(embeddings.path, 0)
        self._count[embeddings.path] = index + 1
        if self.answers is None:
            out = embeddings.module(_own_copy(embeddings, features), *args, **kwargs)
            tupled = isinstance(out, tuple)
            out = out[0] if tupled else out
            out = out.wait() if hasattr(out, "wait") else out
            self.calls.append(_call(embeddings, index, features, out, tupled=tupled))
        else:
            call = self._call(embeddings.path, index)
            out, tupled = self.answers(call, features), call.tupled
        return (out, None) if tupled else out

    def _call(self, path: str, index: int) -> Call:
        for call in self.calls:
            if (call.embeddings.path, call.index) == (path, index):
                return call
        raise BadInputError(
            f"{path} is called {index + 1} times here, and was called {index} times on the golden "
            f"request: how often must not depend on data"
        )


def _call(embeddings: Embeddings, index: int, features: Any, out: Any, *, tupled: bool) -> Call:
    keys = tuple(out.keys())
    if embeddings.pooled:
        dims, pooled, sequences = tuple(out.length_per_key()), out.values().detach(), {}
    else:
        dims, pooled, sequences = tuple(j.values().shape[1] for j in out.values()), None, dict(out)
    return Call(embeddings, index, features, keys, dims, pooled, sequences, tupled)


def _own_copy(embeddings: Embeddings, features: Any) -> Any:
    """What a collection may change: sharded feature processors write positions into the weights."""
    if features.variable_stride_per_key():
        raise BadInputError(f"{embeddings.path}: its features have batch sizes of their own")
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=list(features.keys()),
        values=features.values(),
        lengths=features.lengths(),
        weights=None if weights is None else weights.clone(),
        stride=features.stride(),
    )


class StandIn(nn.Module):
    """Takes a collection's place in the shadow."""

    def __init__(self, embeddings: Embeddings, feed: Feed) -> None:
        super().__init__()
        # Past nn.Module's registration: the tables must not become part of the shadow.
        self.__dict__["_parts"] = (embeddings, feed)

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self

    def forward(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        embeddings, feed = self.__dict__["_parts"]
        return feed.answer(embeddings, features, *args, **kwargs)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside DistributedModelParallel and DistributedDataParallel."""
    while type(module).__name__ in _WRAPPERS:
        module = module.module  # type: ignore[assignment]
    return module


def shadow_of(model: nn.Module, feed: Feed) -> tuple[nn.Module, list[Embeddings]]:
    """The copy, in eval mode, on the model's own device; and the collections replaced in it.

    BadInputError naming a collection of a kind that can't be described, or the lack of any.
    """
    memo: dict[int, Any] = {}
    found: list[Embeddings] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{e.path}.") for e in found):
            continue
        embeddings = embeddings_of(path, module)
        if embeddings is not None:
            found.append(embeddings)
            memo[id(module)] = StandIn(embeddings, feed)
    if not found:
        raise BadInputError(
            f"{type(model).__name__} has no EmbeddingBagCollection and no EmbeddingCollection; there is "
            f"nothing to look up"
        )
    for module in model.modules():
        for value in list(module.__dict__.values()):
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses tensors with history
    copied: nn.Module = copy.deepcopy(model, memo)
    return copied.eval(), found


def to_host(shadow: nn.Module) -> nn.Module:
    """The shadow on the CPU, tensors that aren't registered in it included."""
    for module in shadow.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor):
                module.__dict__[name] = value.cpu()
    return shadow.cpu()


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
