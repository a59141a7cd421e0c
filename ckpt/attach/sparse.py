"""Plain embeddings with sparse gradients: a torch optimizer's step changes the rows of the gradient.

The last hook before a step reads the sparse gradients: whatever other hooks do to them, or to the
rows, comes before. Whatever the step may change beyond them (a dense gradient, a closure that makes
new ones, settings that reach all rows) is announced as the whole table. The first hook after the
step tells that its writes are over. Both are put in their places at the beginning of each step, by a global
hook, since others may have been registered meanwhile.
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
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt.attach.finding import FoundEmbedding, memory_refusal, wrapped
from ckpt.rows import Group, RowGuards, Table
from ckpt.tree import foreign_memory

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
    """`barred`: why not to guard its weight, from the start or since something was found."""

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
    _hook: RemovableHandle | None = None
    _own_hooks: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, RemovableHandle]] = field(
        default_factory=WeakKeyDictionary
    )

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
        self._bar_found()
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
            if foreign := next(filter(None, map(foreign_memory, table.components)), None):
                self.refused[name] = foreign
                continue
            guarded[id(weight)] = self._guard(guards, table, weight, owned[0])
        for old in self._guarded.values():
            if old not in guarded.values():
                guards.drop(old.group)
        self._guarded = guarded
        self._held = WeakKeyDictionary()
        # Another library may have cleared all hooks.
        gone = self._hook is None or self._hook.id not in _global_optimizer_pre_hooks
        if guarded and gone:
            self._hook = register_optimizer_step_pre_hook(self._arrange)

    def unsure(self) -> Iterator[Group]:
        """Groups whose memory isn't their weight's and their optimizer's own any more."""
        for one in self._guarded.values():
            optimizer = one.optimizer()
            if optimizer is None:
                yield one.group
                continue
            parts = one.group.tables[0].components
            if _pointers(one.weight, optimizer) != one.pointers or any(map(foreign_memory, parts)):
                yield one.group

    def detach(self, guards: RowGuards) -> None:
        """Take the hooks off again."""
        for one in self._guarded.values():
            guards.drop(one.group)
        self._guarded, self._held = {}, WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """Take the hooks off, and nothing else: also in a forked child, where no lock is to be had."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for hooks in self._own_hooks.values():
            for hook in hooks:
                hook.remove()
        self._own_hooks = WeakKeyDictionary()

    def _bar_found(self) -> None:
        """What was found of a table stays with the modules that look it up."""
        found = {id(g.weight): g.group.barred for g in self._guarded.values() if g.group.barred}
        for e in self._embeddings if found else ():
            module = e.module()
            if module is not None and e.barred is None:
                e.barred = found.get(id(module._parameters.get("weight")))

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
        pointers = _pointers(weight, optimizer)
        old = self._guarded.get(id(weight))
        if old is not None and old.pointers == pointers:
            old.optimizer, old.group_number = weakref.ref(optimizer), number
            return old
        group = guards.group([table])
        return _Guarded(weight, weakref.ref(optimizer), number, pointers, group)

    def _arrange(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """A step begins, of whatever optimizer: have its rows read last, and its end seen first."""
        if not self._held_by(optimizer):
            return
        own: Any = optimizer  # the tables of hooks are private to torch
        first, last = own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks
        hooks = self._own_hooks.get(optimizer)
        if hooks is None or hooks[0].id not in first or hooks[1].id not in last:
            for hook in hooks or ():  # another library may have cleared one kind
                hook.remove()
            hooks = self._own_hooks[optimizer] = (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        before, after = hooks
        first.move_to_end(before.id)
        last.move_to_end(after.id, last=False)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for one, number in self._held_by(optimizer):
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is self
            grad = one.weight.grad
            known = type(optimizer) in _OPTIMIZERS and closure is None
            for group in self._groups_at(one, optimizer):
                group.versions.release()
                if not known or _reaches_all_rows(optimizer, number):
                    group.touch_all(0)
                elif grad is None:
                    continue
                elif grad.is_sparse:
                    group.touch_rows(0, grad._indices()[0])
                else:
                    group.touch_all(0)

    def _groups_at(self, one: _Guarded, optimizer: Optimizer) -> Iterable[Group]:
        """The groups whose memory a step on this weight changes: its own, if nothing was exchanged."""
        pointers = _pointers(one.weight, optimizer)
        if pointers == one.pointers:
            return (one.group,)
        there = set(pointers)
        others = (g.group for g in self._guarded.values() if there & set(g.pointers))
        return list(dict.fromkeys([one.group, *others]))

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
            for group in self._groups_at(one, optimizer):
                group.versions.settle()


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


def _pointers(weight: Tensor, optimizer: Optimizer) -> tuple[int, ...]:
    """Where a weight and its row-aligned state are now."""
    states = _row_states(weight, optimizer) if type(optimizer) in _OPTIMIZERS else ()
    return tuple(part.data_ptr() for part in (weight, *states))
