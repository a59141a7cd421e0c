"""The tensors of a state at one save: their layout, kept from save to save, and their memory, which never is.

A state that looks as it did at the last save is told by a look at each tensor: its class, dtype, shape and
the bytes behind it. All else that a plan or an index needs follows from these, and is made once for a layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import BadInputError
from ckpt.index import TensorKind
from ckpt.tree import FlatState, Leaf, Shard, identity, leaf_of
from ckpt.types import ITEMSIZE
from ckpt.walk import Parts

SMALL_BYTES = 64 << 10
"""Up to here a tensor is copied in save(): to leave it in place for a while costs more than the copy."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True, eq=False)
class _Spec:
    """What a tensor was at the last save.

    dtype, sizes: of a tensor that is one plain piece of memory; None of others, which are described anew.
    schema: all that a plan depends on.
    """

    dtype: torch.dtype | None
    sizes: tuple[int, ...]
    itemsize: int
    nbytes: int
    schema: tuple[Any, ...]


@dataclass(eq=False)
class Layout:
    """What states have in common that differ in nothing but their tensors' memory. It holds no tensor."""

    names: list[str]
    owned: list[bool]
    specs: list[_Spec]
    kinds: Mapping[str, TensorKind]
    places: list[Shard]
    """Of all shards. Their `tensor` is there only while a `LiveState` is."""
    led: frozenset[str] = frozenset()
    """Keys of replicated tensors that may differ between ranks; see `led_by_rank_0`."""
    _order: tuple[SavePlan, list[int]] | None = field(default=None, repr=False)
    _numbers: dict[str, int] = field(default_factory=dict, repr=False)

    def replicated(self) -> dict[str, int]:
        """Bytes of each tensor that all ranks are to have alike, by its key."""
        sizes, count = {}, 0
        for name, spec in zip(self.names, self.specs, strict=True):
            if self.kinds[name] == "replicated" and name not in self.led:
                sizes[name], self._numbers[name] = spec.nbytes, count
            count += len(spec.schema[-1])
        return sizes

    def order(self, plan: SavePlan) -> list[int]:
        """For each item of a plan the number of its shard among those of a `LiveState`."""
        if self._order is None or self._order[0] is not plan:
            numbers: dict[tuple[str, tuple[int, ...], bool], int] = {}
            count = 0
            for name, spec in zip(self.names, self.specs, strict=True):
                for offsets, sizes in spec.schema[-1]:
                    numbers[name, offsets, bool(math.prod(sizes))] = count
                    count += 1
            self._order = plan, [_number(item, numbers) for item in plan.items]
        return self._order[1]


@dataclass(slots=True, eq=False)
class LiveState:
    """This rank's tensors at one save. `release` it before there is another.

    values, per_rank: canonical JSON of the state's values. wholes: the DTensors, by their keys.
    leaves: where the layout is new, all that is known of each tensor; else None.
    """

    layout: Layout
    values: bytes
    per_rank: Mapping[str, bytes]
    wholes: Mapping[str, DTensor]
    leaves: dict[str, Leaf] | None = None

    def in_order(self, plan: SavePlan) -> list[Shard]:
        """The live shards of a plan's items; theirs until `release`."""
        shards = self.layout.places
        return [shards[n] for n in self.layout.order(plan)]

    def replica(self, name: str) -> torch.Tensor:
        """One of `layout.replicated()`."""
        return self.layout.places[self.layout._numbers[name]].tensor

    def release(self) -> None:
        """Let go of the tensors. What is still needed of their memory has been taken by now."""
        for shard in self.layout.places:
            del shard.tensor
        self.wholes, self.leaves = {}, None

    @property
    def flat(self) -> FlatState:
        """As `flatten` gives it, without values. Only where the layout is new."""
        assert self.leaves is not None
        return FlatState(self.leaves)


def live_state(parts: Parts, known: Layout | None) -> LiveState:
    """Describe the tensors of a state, by the layout of the last one if it's still theirs.

    Raises BadInputError naming the key of what can't be stored; see `leaf_of`.
    """
    wholes = {n: t for n, t in zip(parts.names, parts.tensors, strict=True) if _is_whole(t)}
    if known is not None and parts.names == known.names and parts.owned == known.owned:
        tensors = _tensors(parts, known.specs)
        if tensors is not None and (
            not known.led or known.led == led_by_rank_0(parts, known.kinds)
        ):
            # The same objects at each save: to make and to collect so many costs more than all the rest.
            for shard, tensor in zip(known.places, tensors, strict=True):
                shard.tensor = tensor
            return LiveState(known, parts.values, parts.per_rank, wholes)
    leaves: dict[str, Leaf] = {}
    for name, tensor, owned in zip(parts.names, parts.tensors, parts.owned, strict=True):
        if name in leaves:
            raise BadInputError(f"{name}: two tensors of the state have this key; rename one")
        leaves[name] = leaf_of(name, tensor, per_rank=owned)
    specs = [_spec(t, leaves[n]) for n, t in zip(parts.names, parts.tensors, strict=True)]
    places = [Shard(s.offsets, s.sizes, s.tensor) for x in leaves.values() for s in x.shards]
    kinds = {n: x.kind for n, x in leaves.items()}
    layout = Layout(parts.names, parts.owned, specs, kinds, places, led_by_rank_0(parts, kinds))
    return LiveState(layout, parts.values, parts.per_rank, wholes, leaves)


def led_by_rank_0(parts: Parts, kinds: Mapping[str, TensorKind]) -> frozenset[str]:
    """Keys of the buffers that DistributedDataParallel broadcasts from rank 0 before each forward.

    Between two forwards each rank has its own, such as the statistics of a BatchNorm, and rank 0's count.
    Not where a hook of the trainer's makes something else of them.
    """
    led = {
        identity(buffer)
        for module in parts.objects
        if isinstance(module, torch.nn.Module)
        for part in module.modules()
        if isinstance(part, DistributedDataParallel)
        if dist.is_initialized()
        and part.will_sync_module_buffers()  # type: ignore[no-untyped-call]
        and not hasattr(part, "buffer_hook")
        and part.process_group.size() == dist.get_world_size()
        for buffer in part.named_module_buffers.values()
    }
    return frozenset(
        name
        for name, tensor in zip(parts.names, parts.tensors, strict=True)
        if led
        and kinds[name] == "replicated"
        and type(tensor) in _PLAIN
        and identity(tensor) in led
    )


def _tensors(parts: Parts, specs: Sequence[_Spec]) -> list[torch.Tensor] | None:
    """The live memory of all shards, or None if a tensor isn't what it was."""
    tensors: list[torch.Tensor] = []
    for n, (tensor, spec) in enumerate(zip(parts.tensors, specs, strict=True)):
        if spec.dtype is None or not _is_plain(tensor, spec):
            leaf = leaf_of(parts.names[n], tensor, per_rank=parts.owned[n])
            if _schema(leaf) != spec.schema:
                return None
            tensors += [s.tensor for s in leaf.shards]
        else:
            # Small ones are copied before the trainer goes on: what they are of can't change before.
            tensors.append(tensor if spec.nbytes <= SMALL_BYTES else tensor.detach())
    return tensors


def _is_plain(tensor: Any, spec: _Spec) -> bool:
    """Is it as it was, one piece of memory that is all there? If not sure: no."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype is spec.dtype
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.shape == spec.sizes
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes()
        >= tensor.storage_offset() * spec.itemsize + spec.nbytes
    )


def _spec(tensor: Any, leaf: Leaf) -> _Spec:
    plain, sizes, itemsize = type(tensor) in _PLAIN, leaf.shape, ITEMSIZE[leaf.dtype]
    dtype = tensor.dtype if plain else None
    nbytes = math.prod(sizes) * itemsize
    return _Spec(dtype, sizes, itemsize, nbytes, _schema(leaf))


def _schema(leaf: Leaf) -> tuple[Any, ...]:
    boxes = tuple((s.offsets, s.sizes) for s in leaf.shards)
    return leaf.kind, leaf.dtype, leaf.shape, boxes


def _is_whole(tensor: Any) -> bool:
    return type(tensor) not in _PLAIN and isinstance(tensor, DTensor)


def _number(item: WriteItem, numbers: Mapping[tuple[str, tuple[int, ...], bool], int]) -> int:
    assert item.tensor_data is not None
    offsets = tuple(item.index.offset or ())
    filled = bool(math.prod(item.tensor_data.chunk.sizes))
    number = numbers.get((item.index.fqn, offsets, filled))
    if number is None:
        raise BadInputError(
            f"{item.index.fqn}: no local shard at {offsets}; did its layout change?"
        )
    return number
