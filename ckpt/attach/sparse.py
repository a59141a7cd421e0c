"""Plain embeddings with sparse gradients: a torch optimizer's step changes the rows of the gradient.

One global step pre-hook reads the sparse gradients right before the step. Whatever the step may
change beyond them (a dense gradient, a closure that makes new ones, settings that reach all
rows) is announced as the whole table. A post-hook tells that the step's writes are over.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ckpt.attach.finding import FoundEmbedding, memory_refusal, wrapped
from ckpt.rows import Group, RowGuards, Table

# With sparse gradients these change the gradient's rows and no others, given that the settings
# named here are zero. Values: those settings, and the state tensors that have one row per row.
_OPTIMIZERS: dict[type[Optimizer], tuple[tuple[str, ...], tuple[str, ...]]] = {
    SGD: (("momentum", "weight_decay"), ()),
    Adagrad: (("weight_decay",), ("sum",)),
    SparseAdam: ((), ("exp_avg", "exp_avg_sq")),
}


@dataclass(eq=False)
class _Guarded:
    """A guarded weight; `group_number` finds its settings in the optimizer's `param_groups`."""

    weight: Tensor
    optimizer: weakref.ref[Optimizer]
    group_number: int
    pointers: tuple[int, ...]
    group: Group


# The sizes of an optimizer's groups when it was looked through, and what was found: weights with
# the numbers of their groups.
_Held = tuple[list[int], list[tuple[_Guarded, int]]]


@dataclass(eq=False)
class _Embedding:
    name: str
    module: weakref.ref[nn.Embedding | nn.EmbeddingBag]
    barred: str | None


@dataclass(eq=False)
class SparseTables:
    """All plain embeddings that were found, each weight a group of its own."""

    refused: dict[str, str] = field(default_factory=dict)
    _embeddings: list[_Embedding] = field(default_factory=list)
    _optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    _guarded: dict[int, _Guarded] = field(default_factory=dict)
    _held: WeakKeyDictionary[Optimizer, _Held] = field(default_factory=WeakKeyDictionary)
    _hooks: tuple[RemovableHandle, ...] = ()

    def add(self, embeddings: Iterable[FoundEmbedding], optimizers: Iterable[Optimizer]) -> None:
        """Know more modules and optimizers; the next `refresh` judges them."""
        self._embeddings += [
            _Embedding(e.name, weakref.ref(e.module), e.barred) for e in embeddings
        ]
        self._optimizers += [weakref.ref(o) for o in optimizers]

    @property
    def any_gone(self) -> bool:
        return any(e.module() is None for e in self._embeddings)

    @property
    def groups(self) -> list[Group]:
        return [g.group for g in self._guarded.values()]

    @property
    def optimizers(self) -> list[Optimizer]:
        return [o for ref in self._optimizers if (o := ref()) is not None]

    def renormed(self) -> Iterator[Tensor]:
        """The weights that lookups scale down to a `max_norm`."""
        for e in self._embeddings:
            if (module := e.module()) is not None and module.max_norm is not None:
                yield module.weight

    def refresh(self, guards: RowGuards) -> None:
        """Judge every weight anew and guard what changed: its memory, its state, its optimizer."""
        if not self._embeddings:
            return
        weights = list(self._weights())
        owners = self._owners([w for _, w, _ in weights])
        guarded: dict[int, _Guarded] = {}
        self.refused = {}
        sharers = self._sharers()
        for name, weight, barred in weights:
            owned = owners[id(weight)]
            refusal = barred or _refusal(weight, owned)
            if not refusal and sharers[weight.untyped_storage().data_ptr()] > 1:
                refusal = "another parameter shares its memory, and may change it"
            if refusal:
                self.refused[name] = refusal
                continue
            table = Table(name, (weight.detach(), *_row_states(weight, owned[0][0])))
            if not guards.takes(table):
                self.refused[name] = memory_refusal(table)
                continue
            guarded[id(weight)] = self._guard(guards, table, weight, owned[0])
        for old in self._guarded.values():
            if old not in guarded.values():
                guards.drop(old.group)
        self._guarded = guarded
        self._held = WeakKeyDictionary()
        if guarded and not self._hooks:
            self._hooks = (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            )

    def detach(self, guards: RowGuards) -> None:
        """Take the hooks off again."""
        for one in self._guarded.values():
            guards.drop(one.group)
        self._guarded, self._held = {}, WeakKeyDictionary()
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def _weights(self) -> Iterator[tuple[str, Tensor, str | None]]:
        """Name, weight and bar of each weight: tied ones are one table, under its first name."""
        self._embeddings = [e for e in self._embeddings if e.module() is not None]
        found: dict[int, tuple[str, Tensor, str | None]] = {}
        for e in self._embeddings:
            module = e.module()
            weight = module._parameters.get("weight") if module is not None else None
            if module is None or weight is None:
                continue
            why = e.barred
            if module.max_norm is not None:
                why = "max_norm rewrites rows during lookups"
            name, _, earlier = found.get(id(weight), (e.name, weight, None))
            found[id(weight)] = (name, weight, earlier or why)
        yield from found.values()

    def _owners(self, weights: Sequence[Tensor]) -> dict[int, list[tuple[Optimizer, int]]]:
        """The optimizers of each weight, by its id, with the number of its parameter group."""
        owners: dict[int, list[tuple[Optimizer, int]]] = {id(w): [] for w in weights}
        self._optimizers = [o for o in self._optimizers if o() is not None]
        known = [o for ref in self._optimizers if (o := ref()) is not None]
        for w in weights:  # made by torch's apply_optimizer_in_backward, and in no list
            known += [o for o in getattr(w, "_in_backward_optimizers", ()) if o not in known]
        for optimizer in known:
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) in owners:
                        owners[id(parameter)].append((optimizer, number))
        return owners

    def _sharers(self) -> Counter[int]:
        """How many parameters, trained or looked up, lie in each storage."""
        held = {id(w): w for _, w, _ in self._weights()}
        for optimizer in self.optimizers:
            held |= {id(p): p for g in optimizer.param_groups for p in g["params"]}
        plain = (p for p in held.values() if type(p) in (Tensor, nn.Parameter) and not p.is_meta)
        return Counter(p.untyped_storage().data_ptr() for p in plain)

    def _guard(
        self, guards: RowGuards, table: Table, weight: Tensor, owner: tuple[Optimizer, int]
    ) -> _Guarded:
        optimizer, number = owner
        pointers = tuple(c.data_ptr() for c in table.components)
        old = self._guarded.get(id(weight))
        if old is not None and old.pointers == pointers:
            old.optimizer, old.group_number = weakref.ref(optimizer), number
            return old
        group = guards.group([table])
        return _Guarded(weight, weakref.ref(optimizer), number, pointers, group)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for one, number in self._held_by(optimizer):
            one.group.versions.release()
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is self
            grad = one.weight.grad
            known = type(optimizer) in _OPTIMIZERS and closure is None
            if not known or _reaches_all_rows(optimizer, number):
                one.group.touch_all(0)
            elif grad is None:
                continue
            elif grad.is_sparse:
                one.group.touch_rows(0, grad._indices()[0])
            else:
                one.group.touch_all(0)

    def _held_by(self, optimizer: Optimizer) -> list[tuple[_Guarded, int]]:
        """The guarded weights of any optimizer, also of one that no state has shown yet."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._held.get(optimizer)
        if known is None or known[0] != sizes:
            held = [
                (one, number)
                for number, group in enumerate(optimizer.param_groups)
                for parameter in group["params"]
                if (one := self._guarded.get(id(parameter))) is not None
                and not any(wrapped(optimizer))  # the optimizer in it has its own step
            ]
            known = self._held[optimizer] = sizes, held
        return known[1]

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for one, _ in self._held_by(optimizer):
            one.group.versions.settle()


def _reaches_all_rows(optimizer: Optimizer, number: int) -> str | None:
    """The setting by which a step changes rows without a gradient, as `name=value`."""
    group = optimizer.param_groups[number]
    for setting in _OPTIMIZERS[type(optimizer)][0]:
        if value := group.get(setting):
            return f"{setting}={value}"
    return None


def _refusal(weight: Tensor, owners: Sequence[tuple[Optimizer, int]]) -> str | None:
    """Why a weight can't be guarded, or None."""
    if not owners:
        return "no optimizer of the state holds it; add the one that trains it to the state"
    if len(owners) > 1:
        return f"{len(owners)} optimizers or parameter groups change it"
    optimizer, number = owners[0]
    if type(optimizer) not in _OPTIMIZERS:
        return f"{type(optimizer).__name__} may change rows without a gradient"
    if setting := _reaches_all_rows(optimizer, number):
        return f"{type(optimizer).__name__} with {setting} changes rows without a gradient"
    return "it's a DTensor" if isinstance(weight, DTensor) else None


def _row_states(weight: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
    """The state tensors with one row per row of `weight`, as far as they exist yet."""
    states = optimizer.state.get(weight, {})
    for name in _OPTIMIZERS[type(optimizer)][1]:
        state = states.get(name)
        if state is not None and state.shape == weight.shape and state.is_contiguous():
            yield state
