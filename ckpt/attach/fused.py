"""fbgemm's table-batched embeddings: their backward pass updates weights and optimizer state in place.

Whoever hears of a lookup hangs a hook on its backward node, which fires right before it updates the
looked-up rows: at each backward, in whatever order, and never for a lookup without one.

Not all lookups are heard of: those in compiled or scripted code aren't, nor those from before. So a
hook on a leaf of the graph counts the updates: it fires after each backward pass through the tables,
whoever made the graph. Where that tells of an update that nobody announced, the tables are copied
from then on, and a snapshot that is open fails.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from ckpt.attach.calls import Call, listen
from ckpt.attach.finding import FoundLookup, memory_refusal
from ckpt.rows import Group, RowGuards, Table
from ckpt.tree import foreign_memory

# Fused optimizers whose kernels visit the looked-up rows and no others (fbgemm's backward kernels
# run once for each distinct row of the batch). The ensemble and in-place EMA variants rewrite
# whole tables inside forward, and NONE leaves the update to somebody else.
_OPTIMIZERS = {
    "EXACT_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "LARS_SGD",
    "ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_ADAM",
    "PARTIAL_ROWWISE_LAMB",
}
# Each decays a row when it is looked up, also the global one, which makes up for missed steps then.
_DECAYS = {"NONE", "L2", "DECOUPLE", "COUNTER", "COWCLIP", "DECOUPLE_GLOBAL"}
# DEVICE, MANAGED and HOST hold the newest rows; a cached table has them in its cache.
_LOCATIONS = {"DEVICE", "MANAGED", "HOST"}
_STORAGES = tuple(
    f"{state}_{place}"
    for state in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for place in ("dev", "host", "uvm")
)


_ARGUMENTS = (  # of forward, in their order
    *("indices", "offsets", "per_sample_weights", "feature_requires_grad"),
    "batch_size_per_feature_per_rank",
)


class FusedTables:
    """The tables of one table-batched embedding, guarded as one group or not at all.

    early: training may have begun before; only what is seen to be announced is guarded.
    """

    def __init__(self, found: FoundLookup, *, early: bool) -> None:
        self.names = found.names
        self.quiet = found.dense  # dense state is copied anyway: nothing to tell
        self.refusal = found.barred or _refusal(found.module)
        self.group: Group | None = None
        self._module = weakref.ref(found.module)
        self._pointers: tuple[int, ...] = ()
        self._updates: _Updates | None = None
        if self.refusal is None:
            self._updates = _Updates(found.module, early=early)

    @property
    def gone(self) -> bool:
        return self._module() is None

    def refresh(self, guards: RowGuards) -> bool:
        """Follow weights and state to where they are now; False once the module is gone."""
        module = self._module()
        if module is None or self._updates is None:
            self._regroup(guards, None)
            return module is not None
        unknown = self._updates.unknown(module)
        if unknown is None and self.group is not None:
            unknown = self.group.barred
            if unknown is not None:
                self._updates.distrust(unknown)
        unknown = unknown or next(filter(None, map(foreign_memory, held(module))), None)
        if unknown is not None:
            self.refusal, self._pointers = unknown, ()
            self._regroup(guards, None)
            return True
        pointers = _pointers(module)
        if pointers != self._pointers:
            self._regroup(guards, self._tables(module, guards))
            self._pointers = pointers
        return True

    def tensors(self) -> Iterator[Tensor]:
        """All memory of the module, unless it is dense."""
        if not self.quiet and (module := self._module()) is not None:
            yield from module.parameters()
            yield from module.buffers()

    def sure(self) -> bool:
        """Is it known, now, what writes the tables of its group, and is their memory the module's own?"""
        module = self._module()
        if module is None or self._updates is None or self._updates.unknown(module) is not None:
            return False
        return _pointers(module) == self._pointers and not any(map(foreign_memory, held(module)))

    def detach(self, guards: RowGuards) -> None:
        """Take the hooks off again."""
        self._regroup(guards, None)
        self.forget()

    def forget(self) -> None:
        """Take the hooks off, and nothing else: also in a forked child, where no lock is to be had."""
        if self._updates is not None:
            self._updates.close()

    def _regroup(self, guards: RowGuards, tables: Sequence[Table] | None) -> None:
        if self.group is not None:
            guards.drop(self.group)
        self.group = guards.group(tables) if tables else None
        if self._updates is not None:
            self._updates.group = self.group
            module = self._module()
            self._updates.pointers = () if module is None else _pointers(module)

    def _tables(self, module: Any, guards: RowGuards) -> list[Table] | None:
        """The live tensors, or None with `refusal` set if their memory can't be guarded."""
        weights: list[Tensor] = module.split_embedding_weights()
        states: list[list[Tensor]] = module.split_optimizer_states() or [[] for _ in weights]
        tables = [
            Table(name, (weight, *(s for s in state if _row_aligned(s, weight))))
            for name, weight, state in zip(self.names, weights, states, strict=True)
        ]
        unfit = next((t for t in tables if not guards.takes(t)), None)
        self.refusal = None if unfit is None else memory_refusal(unfit)
        return tables if unfit is None else None


class _Updates:
    """Announces a module's updates before they come, and counts those that nobody announced.

    All of it runs on the thread that trains, or on autograd's for the module's device.
    """

    def __init__(self, module: nn.Module, *, early: bool) -> None:
        self.group: Group | None = None
        self.pointers: tuple[int, ...] = ()  # of the group's memory
        self._module = weakref.ref(module)
        self._features: list[int] = list(module.feature_table_map)  # type: ignore[arg-type]
        self._lookups = _lookup_count(module)
        self._heard = 0  # since `_lookups` was read
        self._announced = 0  # updates since the last backward pass ended
        self._trusted = not early
        self._distrusted: str | None = None
        self._leaf = _leaf(module)
        self._updater: str | None = None  # the kind of node that is an update itself
        self._token = object()
        self._pending = self._leaf is not None and _in_a_graph(self._leaf, self._token)
        self._calls = listen(module, self._looked_up)
        self._leaf_hook: RemovableHandle | None = None
        self._announce: Callable[..., None] = self._before_update
        self._update_ended: Callable[..., None] = self._after_update
        self._untraced = False
        self._watch_leaf(self._after_backward)

    def unknown(self, module: nn.Module) -> str | None:
        """Why it isn't known which rows of these tables change, or None if it is."""
        if self._leaf is None:
            return "this fbgemm has no parameter by which its updates are seen"
        self._count(module)
        if self._distrusted is not None:
            return self._distrusted
        if self._pending:
            self._pending = _in_a_graph(self._leaf, self._token, again=True)
        if self._pending:
            return (
                "a lookup from before this checkpointer knew of it may still be waiting for its "
                "backward; call restore() or guard() before training begins"
            )
        if not self._trusted:
            return (
                "first seen in save(), and guarded once an update has been announced; call restore() "
                "or guard() before training begins"
            )
        return None

    def distrust(self, why: str) -> str:
        """The updates of this module aren't known, now or ever."""
        if self._distrusted is None:
            self._distrusted = why
            if self.group is not None:
                self.group.bar(why)
        return self._distrusted

    def close(self) -> None:
        self._calls.stop(self._looked_up)
        if self._leaf_hook is not None:
            self._leaf_hook.remove()
        self.group = None

    def _watch_leaf(self, hook: Callable[[Any], None]) -> None:
        if self._leaf is not None:
            if self._leaf_hook is not None:
                self._leaf_hook.remove()
            self._leaf_hook = self._leaf.register_hook(_unserialised(hook))  # type: ignore[no-untyped-call]

    def _keep_untraced(self) -> None:
        """Compiled autograd traces hooks, too: ours must run as they are. Without dynamo nobody does."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            self._untraced = True
            self._announce = dynamo.disable(self._before_update)
            self._update_ended = dynamo.disable(self._after_update)
            self._watch_leaf(dynamo.disable(self._after_backward))

    def _looked_up(self, module: Any, call: Call) -> None:
        """The module's forward has just run."""
        if not self._untraced:
            self._keep_untraced()
        self._heard += 1
        known = self._count(module, call)
        node = getattr(call.output, "grad_fn", None)
        if node is None:
            return
        ids, edges = _ids(module, call, len(self._features)) if known else (None, None)
        node.register_prehook(functools.partial(self._announce, known, ids, edges))
        kind = node.name()
        if kind == self._updater or _leads_to(node, self._leaf):
            self._updater = kind
            node.register_hook(self._update_ended)

    def _before_update(
        self, known: bool, ids: Tensor | None, edges: Tensor | None, _gradients: Any
    ) -> None:
        if known:
            self._announced += 1
        if (group := self.group) is not None:
            group.versions.release()
            module = self._module()
            if module is not None and (now := _pointers(module)) != self.pointers:
                group.given_away(now)
            if ids is not None and edges is not None:
                # On a device the edges stay there: to fetch them would make the host wait.
                here = edges.device.type == "cpu"
                group.touch(ids, edges.tolist() if here else edges, self._features)

    def _after_update(self, *_gradients: Any) -> None:
        if (group := self.group) is not None:
            group.versions.settle()

    def _after_backward(self, _grad: Any) -> None:
        """A backward pass has gone through the tables: all its updates are made."""
        announced, self._announced = self._announced, 0
        if (module := self._module()) is not None:
            self._count(module)
        if announced:
            self._trusted = True
            self._after_update()
        elif not self._pending:
            self.distrust(
                "a backward pass has changed it for a lookup that wasn't heard of, as those of compiled "
                "or scripted code aren't; keep lookups out of it"
            )

    def _count(self, module: nn.Module, call: Call | None = None) -> bool:
        """Look for lookups that nobody heard of.

        call: the one just heard of. False if fbgemm hasn't counted it, since it ran compiled: then it
        has left no ids behind.
        """
        now = _lookup_count(module)
        if now is None or self._lookups is None:
            return True
        heard, made = self._heard, now - self._lookups
        if made > heard + self._calls.running - (call is not None):
            self.distrust("looked up by its class's forward(), unheard; call the module itself")
        if call is None or not call.alone:
            return True
        self._heard, self._lookups = 0, now
        return made >= heard


def _unserialised(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook of a tensor that may be pickled: without it, and without a warning."""

    def call(grad: Tensor) -> None:
        hook(grad)

    marked: Callable[[Tensor], None] = unserializable_hook(call)  # type: ignore[no-untyped-call]
    return marked


def _lookup_count(module: nn.Module) -> int | None:
    """How often forward() has run as Python, as fbgemm itself counts it."""
    count = getattr(module, "step", None)
    return count if isinstance(count, int) else None


def _leaf(module: nn.Module) -> Tensor | None:
    """A parameter that each lookup of the module has in its graph."""
    found = module._parameters.get("placeholder_autograd_tensor")
    return found if found is not None and found.requires_grad else None


def _in_a_graph(leaf: Tensor, token: object, *, again: bool = False) -> bool:
    """Has some graph held on to the leaf since the last call? At first: does one hold it now?

    A leaf's node lives as long as a graph that has it; what is put on it stays there as long.
    """
    if not again:
        _node_of(leaf).metadata["sidestage"] = token
    return _node_of(leaf).metadata.get("sidestage") is token


def _node_of(leaf: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _leads_to(node: Any, leaf: Tensor | None) -> bool:
    """Is it the node of the update itself? That one has the leaf right after it."""
    return any(getattr(n, "variable", None) is leaf for n, _ in node.next_functions)


def _ids(module: Any, call: Call, features: int) -> tuple[Tensor | None, Tensor | None]:
    """The ids of a lookup, and where those of each feature begin; None: there are none."""
    if call.alone:
        # What the kernel reads, after casts and after the bounds check has corrected it.
        ids, offsets, batches = module._indices, module._offsets, module._vbe_B_offsets
    else:  # those may be another thread's: what it was called with, then
        ids, offsets, batches = _given(call)
    if batches is None:
        batch = (offsets.numel() - 1) // features
        edges = offsets[::batch] if batch else offsets[:0]
    else:
        edges = offsets.index_select(0, batches)
    if not ids.numel() or edges.numel() <= features:
        return None, None
    return ids, edges


def _row_aligned(state: Tensor, weight: Tensor) -> bool:
    return state.shape[:1] == weight.shape[:1] and state.is_contiguous()


def _given(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices, offsets and, where batches vary, the place in the offsets at which each feature begins."""
    given = dict(zip(_ARGUMENTS, call.args, strict=False)) | call.kwargs
    ids, offsets = (given[name].detach().clone() for name in _ARGUMENTS[:2])
    batches = given.get(_ARGUMENTS[4])
    if batches is None:
        return ids, offsets, None
    begins = [0, *itertools.accumulate(sum(ranks) for ranks in batches)]
    return ids, offsets, torch.tensor(begins, dtype=torch.int64, device=offsets.device)


def held(module: nn.Module) -> Iterator[Tensor]:
    """The storages of a table-batched embedding's weights and state, as flat tensors."""
    for name in _STORAGES:
        tensor: Tensor | None = module._parameters.get(name)
        if tensor is None:
            tensor = module._buffers.get(name)
        if tensor is not None and tensor.numel():
            yield tensor


def _pointers(module: nn.Module) -> tuple[int, ...]:
    """Where these are now."""
    return tuple(t.data_ptr() for t in held(module))


def _refusal(module: Any) -> str | None:
    """Why the tables of a table-batched embedding can't be guarded, or None."""
    kind = module.optimizer.name
    if kind not in _OPTIMIZERS:
        return f"fused optimizer {kind} may change rows that no batch looked up"
    decay = getattr(module.weight_decay_mode, "name", str(module.weight_decay_mode))
    if decay not in _DECAYS:
        return f"weight decay mode {decay} may change rows that no batch looked up"
    places = {getattr(p, "name", str(p)) for p in module.weights_physical_placements}
    if not places <= _LOCATIONS:
        return (
            f"placed in {', '.join(sorted(places - _LOCATIONS))}: newer rows may be in its cache; "
            "place it without a cache to have it guarded"
        )
    missing = [a for a in ("_indices", "_offsets", "_vbe_B_offsets") if not hasattr(module, a)]
    if missing:
        return f"this fbgemm doesn't keep {', '.join(missing)} of a lookup"
    return None
