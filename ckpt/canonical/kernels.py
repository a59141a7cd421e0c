"""What fbgemm's fused kernels count and are set to beside their tables, and which no state dict has.

A table-batched embedding counts its lookups (Adam corrects its bias by that count), and has the learning rate
of its next backward pass. Both are stored for each rank, by the keys that its tables have in the state:
{rank: [{"tables": [key, ...], "iter": ..., "learning_rate": ..., ...}]}. Counts for each row (`prev_iter`,
`row_counter`) are optimizer state like momentum, which its optimizer, or the kernel as a module, saves. Where
the state doesn't have them, they are stored beside the others, for each shard with its first row:
{"rows": [{"table": key, "first": row, "prev_iter": ..., "row_counter": ...}]}.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckpt.canonical.living import LivingLookups
from ckpt.tree import leaf_of

KERNELS = "fused_kernels"
"""The key in a checkpoint, beside those of the state."""
TABLES, KIND, OPTIONS, ROWS = "tables", "optimizer", "options", "rows"
TABLE, FIRST = "table", "first"
COUNTS, RATE = ("iter", "iter_cpu"), "learning_rate"
_SCALARS = {
    "iter": "iter",
    "iter_cpu": "iter_cpu",  # the one that forward goes by
    RATE: "learning_rate_tensor",
    "max_counter": "max_counter",
}
# What `update_hyper_parameters` can change, besides the learning rate.
_ARGUMENTS = ("eps", "beta1", "beta2", "weight_decay")
_OF_ROWS = ("prev_iter", "row_counter")
_WEIGHTS = ("weights_dev", "weights_host", "weights_uvm")


class Kernels:
    """The fused kernels of this process whose tables are in a state, found by their memory."""

    def __init__(self) -> None:
        self.living = LivingLookups()
        self._known: _Known | None = None

    def taken(self, names: list[str], tensors: Sequence[Any]) -> list[dict[str, Any]]:
        """What is stored of them. Copies nothing and waits for no device.

        names, tensors: those of the state, as its objects gave them.
        """
        return [
            {TABLES: one.keys, **_read(one.kernel), **({ROWS: one.rows} if one.rows else {})}
            for one in self.find(names, tensors)
        ]

    def find(self, names: list[str], tensors: Sequence[Any]) -> list[Found]:
        """Those with a table among the tensors of a state."""
        kernels = list(self.living)
        if not kernels:
            return []
        places = {id(k): _places(k) for k in kernels}
        known = self._known
        if known is None or known.places != places or not known.holds(names, tensors):
            known = self._known = _Known(kernels, places, names, tensors)
        by_id = {id(k): k for k in kernels}
        return [
            Found(by_id[i], keys, _rows_of(by_id[i], known.shards[i])) for i, keys in known.found
        ]


class Found(NamedTuple):
    """A kernel, the keys that its tables have in the state, and its counts of rows that the state lacks."""

    kernel: Any
    keys: list[str]
    rows: list[dict[str, Any]]


class _Known:
    """Which tables are where, as long as nothing has moved. Holds neither kernels nor tensors."""

    def __init__(
        self,
        kernels: Sequence[nn.Module],
        places: dict[int, tuple[int, ...]],
        names: list[str],
        tensors: Sequence[Any],
    ) -> None:
        self.places = places
        self._names = list(names)
        # By number of the tensor: where its parts are, if they are tables.
        self._at: dict[int, list[int]] = {}
        self.shards: dict[int, list[_Shard]] = {id(k): [] for k in kernels}
        homes: dict[int, list[str]] = {}
        owners = {
            t.data_ptr(): (k, number)
            for k in kernels
            for number, t in enumerate(_weights_of(k))
            if t.numel()
        }
        held = {p.untyped_storage().data_ptr() for t in tensors for p in local_memory_of(t)}
        for n, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            at = [p.data_ptr() for p in local_memory_of(tensor)]
            if not any(a in owners for a in at):
                continue
            self._at[n] = at
            for shard in leaf_of(name, tensor, per_rank=False).shards:
                if (owner := owners.get(shard.tensor.data_ptr())) is not None:
                    kernel, number = owner
                    keys = homes.setdefault(id(kernel), [])
                    if name not in keys:
                        keys.append(name)
                    if not _counts_are_in(kernel, number, held):
                        first = shard.offsets[0] if shard.offsets else 0
                        self.shards[id(kernel)].append(_Shard(name, number, first))
        self.found = sorted(homes.items(), key=lambda home: home[1])

    def holds(self, names: list[str], tensors: Sequence[Any]) -> bool:
        return names == self._names and all(
            [p.data_ptr() for p in local_memory_of(tensors[n])] == at for n, at in self._at.items()
        )


class _Shard(NamedTuple):
    """A table in the state whose counts of rows aren't: its key, its number in the kernel, its first row."""

    key: str
    number: int
    first: int


def local_memory_of(value: Any) -> Iterable[Tensor]:
    """The local memory of a tensor of a state."""
    if isinstance(value, ShardedTensor):
        return [s.tensor for s in value.local_shards()]
    if isinstance(value, DTensor):
        value = value._local_tensor
        shards = getattr(value, "local_shards", None)
        if callable(shards):  # TorchRec's wrapper of several, or none
            return list(shards())
    return [value]


def give_kernel(kernel: Any, values: Mapping[str, Any]) -> None:
    """Set a kernel to what a restore has planned, in place. Tensors in `values` are on the host."""
    with torch.no_grad():
        for name, attribute in _SCALARS.items():
            if name in values and isinstance(target := getattr(kernel, attribute, None), Tensor):
                value = values[name]
                if isinstance(value, Tensor):
                    target.copy_(value.reshape(target.shape))
                else:
                    target.fill_(value)
    changed = {k: v for k, v in values.get(OPTIONS, {}).items() if _options(kernel).get(k) != v}
    if changed:
        kernel.update_hyper_parameters(changed)


def kind_of_kernel(kernel: Any) -> str:
    return str(getattr(kernel.optimizer, "name", kernel.optimizer))


def _read(kernel: Any) -> dict[str, Any]:
    """On a device, values stay tensors, stored with the others: to fetch them would make save() wait."""
    found: dict[str, Any] = {KIND: kind_of_kernel(kernel)}
    for name, attribute in _SCALARS.items():
        value = getattr(kernel, attribute, None)
        if isinstance(value, Tensor):
            found[name] = value.item() if value.is_cpu and value.numel() == 1 else value.detach()
    return {**found, OPTIONS: _options(kernel)}


def _options(kernel: Any) -> dict[str, float]:
    arguments = getattr(kernel, "optimizer_args", None)
    found = {name: getattr(arguments, name, None) for name in _ARGUMENTS}
    found["lower_bound"] = getattr(kernel, "gwd_lower_bound", None)
    return {k: v for k, v in found.items() if isinstance(v, int | float)}


def _rows_of(kernel: Any, shards: Sequence[_Shard]) -> list[dict[str, Any]]:
    if not shards:
        return []
    state = kernel.get_optimizer_state()
    return [
        {TABLE: key, FIRST: first, **{n: state[number][n] for n in _OF_ROWS if n in state[number]}}
        for key, number, first in shards
    ]


def _counts_are_in(kernel: Any, number: int, held: set[int]) -> bool:
    """Has the state the counts of the rows of a table, or are there none?"""
    places = [getattr(kernel, f"{n}_{p}", None) for n in _OF_ROWS for p in ("dev", "host", "uvm")]
    if not any(isinstance(t, Tensor) and t.numel() for t in places):
        return True
    state = kernel.get_optimizer_state()
    counts = [state[number][n] for n in _OF_ROWS if number < len(state) and n in state[number]]
    return all(t.untyped_storage().data_ptr() in held for t in counts)


def _weights_of(kernel: Any) -> Iterator[Tensor]:
    """Its tables, each as a tensor of its own."""
    weights = [getattr(kernel, name, None) for name in _WEIGHTS]
    if any(isinstance(w, Tensor) and not w.is_meta and w.numel() for w in weights):
        yield from kernel.split_embedding_weights()


def _places(kernel: nn.Module) -> tuple[int, ...]:
    weights = (getattr(kernel, name, None) for name in _WEIGHTS)
    return tuple(w.data_ptr() for w in weights if isinstance(w, Tensor) and not w.is_meta)
