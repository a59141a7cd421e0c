"""fbgemm's table-batched embeddings: their backward pass updates weights and optimizer state in place.

A forward hook hangs a hook on the output tensor, which fires right before the backward node that
updates the looked-up rows: at each backward, in whatever order, and never for a lookup without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ckpt.attach.finding import FoundLookup, memory_refusal
from ckpt.rows import Group, RowGuards, Table

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


class FusedTables:
    """The tables of one table-batched embedding, guarded as one group or not at all."""

    def __init__(self, found: FoundLookup) -> None:
        self.names = found.names
        self.quiet = found.dense  # dense state is copied anyway: nothing to tell
        self.refusal = found.barred or _refusal(found.module)
        self.group: Group | None = None
        self._module = weakref.ref(found.module)
        self._pointers: tuple[int, ...] = ()
        self._hook: _LookupHook | None = None
        self._handle: RemovableHandle | None = None
        if self.refusal is None:
            self._hook = _LookupHook(found.module)
            self._handle = found.module.register_forward_hook(self._hook)

    @property
    def gone(self) -> bool:
        return self._module() is None

    def refresh(self, guards: RowGuards) -> bool:
        """Follow weights and state to where they are now; False once the module is gone."""
        module = self._module()
        if module is None or self._hook is None:
            self._regroup(guards, None)
            return module is not None
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

    def detach(self, guards: RowGuards) -> None:
        """Take the hook off again."""
        self._regroup(guards, None)
        if self._handle is not None:
            self._handle.remove()

    def _regroup(self, guards: RowGuards, tables: Sequence[Table] | None) -> None:
        if self.group is not None:
            guards.drop(self.group)
        self.group = guards.group(tables) if tables else None
        if self._hook is not None:
            self._hook.group = self.group

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


class _LookupHook:
    """A forward hook that a copied or pickled module does without."""

    def __init__(self, module: nn.Module) -> None:
        self.group: Group | None = None
        self._features: list[int] = list(module.feature_table_map)  # type: ignore[arg-type]

    def __call__(self, module: Any, _args: Any, output: Tensor) -> None:
        if self.group is None or not output.requires_grad:
            return
        # What the kernel reads: after casts and after the bounds check has corrected it.
        ids, offsets, batches = module._indices, module._offsets, module._vbe_B_offsets
        features = self._features
        if batches is None:
            batch = (offsets.numel() - 1) // len(features)
            edges = offsets[::batch] if batch else offsets[:0]
        else:
            edges = offsets.index_select(0, batches)
        if not ids.numel() or edges.numel() <= len(features):
            return

        def before_update(_grad: Tensor) -> None:
            if (group := self.group) is not None:
                # On a device the edges stay there: to fetch them would make the host wait.
                group.touch(ids, edges.tolist() if edges.device.type == "cpu" else edges, features)

        output.register_hook(before_update)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_args: Any) -> None:
    """What stands for the hook in a copy of the module."""


def _row_aligned(state: Tensor, weight: Tensor) -> bool:
    return state.shape[:1] == weight.shape[:1] and state.is_contiguous()


def _pointers(module: nn.Module) -> tuple[int, ...]:
    """Where the storages of weights and state are now."""
    parameters, buffers = module._parameters, module._buffers
    tensors = (parameters.get(n) if n in parameters else buffers.get(n) for n in _STORAGES)
    return tuple(0 if t is None else t.data_ptr() for t in tensors)


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
