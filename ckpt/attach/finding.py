"""Looks through the objects of a state for embedding tables and for the optimizers that change them.

TorchRec and fbgemm are recognised by class names, so that neither has to be installed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ckpt.canonical.living import is_fused
from ckpt.rows import Table
from ckpt.tree import PerRank, has_state_dict

DATA_PARALLEL = "data-parallel: every rank's ids change it; copied like dense state"
DENSE_KERNEL = "dense kernel: its optimizer may change every row; copied like dense state"

# Modules that write rows of the tables in them behind any hook, by class name.
_EVICTION = "managed collisions: eviction resets rows outside of training"
_PRUNING = "in-training pruning resets rows outside of training"
_BARRED = {
    "ManagedCollisionEmbeddingBagCollection": _EVICTION,
    "ManagedCollisionEmbeddingCollection": _EVICTION,
    "BaseShardedManagedCollisionEmbeddingCollection": _EVICTION,
    "ITEPEmbeddingBagCollection": _PRUNING,
    "ITEPEmbeddingCollection": _PRUNING,
    "ShardedITEPEmbeddingBagCollection": _PRUNING,
    "ShardedITEPEmbeddingCollection": _PRUNING,
    "DMPCollection": "2D parallel: the replicas' weights are averaged outside of training",
}
_WRAPPERS = {"DistributedDataParallel", "DistributedModelParallel", "DataParallel"}
# Objects that aren't modules or optimizers may hold some: `AppState(model, optimizer)` of DCP's manual.
_MAX_NESTING = 8


@dataclass(frozen=True, eq=False)
class FoundLookup:
    """A lookup module of several tables with their names; `barred` says why not to guard them.

    dense: an optimizer's step changes them, as it does any parameter.
    """

    module: nn.Module
    names: tuple[str, ...]
    barred: str | None
    dense: bool


@dataclass(frozen=True, eq=False)
class FoundEmbedding:
    """A plain `nn.Embedding` or `nn.EmbeddingBag` with sparse gradients, or with a `max_norm`."""

    name: str
    module: nn.Embedding | nn.EmbeddingBag
    barred: str | None


@dataclass(frozen=True)
class _Place:
    """Where the search is: the name so far, and what the modules around it imply."""

    path: str = ""
    barred: str | None = None
    in_lookups: bool = False
    replicated: bool = False

    def below(self, name: str) -> _Place:
        return self.named(f"{self.path}.{name}" if self.path else name)

    def named(self, path: str) -> _Place:
        return _Place(path, self.barred, self.in_lookups, self.replicated)


@dataclass
class Finder:
    """Each object is looked through once; what was found is handed out by `take`."""

    _walked: weakref.WeakValueDictionary[int, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _known: weakref.WeakValueDictionary[int, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _lookups: list[FoundLookup] = field(default_factory=list)
    _embeddings: list[FoundEmbedding] = field(default_factory=list)
    _optimizers: list[Optimizer] = field(default_factory=list)

    def look(self, value: Any, path: str = "") -> None:
        """Search one object of a state: a module, an optimizer, or a nest of them, found at `path`."""
        self._look(value, _Place(path), 0)

    def look_again(self) -> None:
        """Walk what holds tables and optimizers once more when it is given; those known stay known."""
        self._walked.clear()

    def knows(self, module: nn.Module) -> bool:
        """Was this lookup or embedding found?"""
        return self._known.get(id(module)) is module

    def take(self) -> tuple[list[FoundLookup], list[FoundEmbedding], list[Optimizer]]:
        """What was found since the last call."""
        found = self._lookups, self._embeddings, self._optimizers
        self._lookups, self._embeddings, self._optimizers = [], [], []
        return found

    def _look(self, value: Any, place: _Place, depth: int) -> None:
        if isinstance(value, PerRank):
            value = value.value
        if isinstance(value, nn.Module):
            self._module(value, place)
        elif isinstance(value, Optimizer):
            self._optimizer(value)
        elif depth >= _MAX_NESTING:
            return
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                self._look(inner, place.below(str(name)), depth + 1)
        elif type(value) in (list, tuple):
            for n, inner in enumerate(value):
                self._look(inner, place.below(str(n)), depth + 1)
        elif has_state_dict(value) and _note(value, self._walked):
            for name, inner in getattr(value, "__dict__", {}).items():
                self._look(inner, place.below(name), depth + 1)

    def _optimizer(self, optimizer: Optimizer) -> None:
        """Wrappers share the parameters of the optimizers in them; only the innermost change anything."""
        inner = list(wrapped(optimizer))
        if not inner and _note(optimizer, self._known):
            self._optimizers.append(optimizer)
        if inner and _note(optimizer, self._walked):
            for one in inner:
                self._optimizer(one)

    def _module(self, module: nn.Module, place: _Place) -> None:
        kinds = _kinds(module)
        barred = next((why for kind, why in _BARRED.items() if kind in kinds), place.barred)
        replicated = place.replicated or (place.in_lookups and "DistributedDataParallel" in kinds)
        place = _Place(place.path, barred, place.in_lookups, replicated)
        if is_fused(module) or "_emb_module" in module._modules:
            self._lookup(module, place)
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if (module.sparse or module.max_norm is not None) and _note(module, self._known):
                name = place.path or type(module).__name__
                self._embeddings.append(FoundEmbedding(name, module, barred))
        elif _note(module, self._walked):
            self._children(module, kinds, place)

    def _children(self, module: nn.Module, kinds: set[str], place: _Place) -> None:
        for name, child in module._modules.items():
            if child is None:
                continue
            transparent = place.in_lookups or (
                kinds & _WRAPPERS and name in {"module", "_dmp_wrapped_module"}
            )
            self._module(child, place if transparent else place.below(name))
        # TorchRec's sharded modules keep their lookups in plain lists, which torch doesn't show.
        for name, value in vars(module).items():
            if type(value) in (list, tuple) and value and isinstance(value[0], nn.Module):
                folder = next(
                    (n for n in ("embedding_bags", "embeddings") if n in module._modules), ""
                )
                at = place.below(folder) if name == "_lookups" and folder else place
                at = _Place(at.path, at.barred, True, at.replicated)
                for child in value:
                    if isinstance(child, nn.Module):
                        self._module(child, at)

    def _lookup(self, module: nn.Module, place: _Place) -> None:
        """A kernel, or TorchRec's module around one, which knows the names of its tables."""
        kernel = module._modules.get("_emb_module") or module
        if not _note(kernel, self._known):
            return
        barred, dense = place.barred, False
        if not is_fused(kernel):
            dense = "DenseTableBatchedEmbeddingBagsCodegen" in _kinds(kernel)
            barred = _unguarded_kernel(kernel, dense=dense, replicated=place.replicated)
        elif _kinds(module) & {"ShardedBatchedFusedEmbedding", "ShardedBatchedFusedEmbeddingBag"}:
            barred = "2D parallel: weights are averaged and gathered outside of training"
        elif getattr(getattr(module, "_config", None), "enable_embedding_update", False):
            barred = "embedding updates write its rows outside of training"
        names = tuple(place.below(n).path for n in _table_names(module, kernel))
        self._lookups.append(FoundLookup(kernel, names, barred, dense))


def _note(value: Any, known: weakref.WeakValueDictionary[int, Any]) -> bool:
    """Keep `value` in mind as long as it lives; False if it was already."""
    if known.get(id(value)) is value:
        return False
    with contextlib.suppress(TypeError):  # no weak references: looking again does no harm
        known[id(value)] = value
    return True


def memory_refusal(table: Table) -> str:
    """Why `RowGuards` doesn't take a table, as far as that can be seen on it."""
    weight = table.components[0]
    if weight.is_meta:
        return "on the meta device: it has no rows yet"
    if not weight.is_contiguous():
        return "its rows aren't contiguous memory"
    return f"rows on {weight.device.type} with {len(table.components) - 1} states can't be guarded"


def _kinds(module: nn.Module) -> set[str]:
    return {c.__name__ for c in type(module).__mro__}


def _unguarded_kernel(kernel: nn.Module, *, dense: bool, replicated: bool) -> str:
    if replicated:
        return DATA_PARALLEL
    if dense:
        return DENSE_KERNEL
    kind = type(kernel).__name__
    if "SSD" in kind or "KeyValue" in kind:
        return f"{kind}: rows live outside of memory; save this table by its own means"
    return f"{kind}: which rows it changes isn't known"


def wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Optimizers inside a wrapper such as TorchRec's KeyedOptimizerWrapper or CombinedOptimizer."""
    for name in ("_optimizer", "optimizer", "_optims", "_optimizers", "optimizers"):
        held = vars(optimizer).get(name)
        for one in held if isinstance(held, list | tuple) else [held]:
            parts = one if isinstance(one, tuple) else (one,)
            yield from (p for p in parts if isinstance(p, Optimizer))


def _table_names(module: nn.Module, kernel: nn.Module) -> Iterator[str]:
    """Names of the tables in their order; a shard that isn't the whole table adds its box."""
    config = getattr(module, "_config", None)
    if config is None:
        names = getattr(kernel, "table_names", None)
        count = len(getattr(kernel, "embedding_specs", ()))
        yield from names if names and len(names) == count else map(str, range(count))
        return
    for t in config.embedding_tables:
        rows, columns = t.local_rows, t.local_cols
        if (rows, columns) == (t.num_embeddings, t.embedding_dim):
            yield t.name
            continue
        row, column = t.local_metadata.shard_offsets if t.local_metadata else (0, 0)
        yield f"{t.name}[{row}:{row + rows}, {column}:{column + columns}]"
