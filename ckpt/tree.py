"""What a trainer's state is to a checkpoint: named tensors with their shards, and plain values.

The first layer with torch. `flatten` turns nested state (modules, optimizers, anything with
`state_dict`, tensors, ShardedTensor, DTensor, Python values) into `FlatState`: one `Leaf` a
tensor, under its path joined by dots, and a tree of values in which `TensorRef`s stand for
the tensors. It evaluates every `state_dict` anew: layouts may be cached, data never.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from ckpt.errors import BadInputError
from ckpt.index import TensorKind
from ckpt.types import ITEMSIZE
from ckpt.values import PerRankRef, TensorRef, instance_of


@dataclass
class PerRank:
    """Marks a part of the state that each rank has for itself, such as RNG state or a reader's position.

    Without it, values and plain tensors are taken to be the same on all ranks; saving finds
    values that aren't and names them.
    """

    value: Any


@dataclass(slots=True)
class Shard:
    """A box of a tensor that this rank holds: `tensor` is the live memory, of shape `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A plain tensor that is this rank's box, at `offsets`, of a tensor of shape `whole`."""

    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of the state. `source` is the object that the state has."""

    fqn: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    source: torch.Tensor | ShardedTensor


@dataclass
class FlatState:
    """State taken apart. `per_rank` holds the value trees of PerRank parts by their key."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    values: Any = None
    per_rank: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    """Those that saved themselves, by their path."""
    described: bool = False
    """It stands for the state of another process, which has the classes of the values."""


def flatten(
    state: Mapping[str, Any], rank: int, taken: Callable[[Any, str], Any] | None = None
) -> FlatState:
    """Take `state` apart without copying a tensor.

    taken: the state of an object that saves itself and its path, by default what its `state_dict()` gives.

    Raises BadInputError naming the key of whatever can't be stored: a meta tensor, a storage
    smaller than its shape, a sparse or quantised layout, an object that only pickle could save.
    """
    if not isinstance(state, Mapping):
        raise BadInputError(f"state is a {type(state).__name__}; give a dict of names to objects")
    check_names(state)
    flat = FlatState()
    try:
        flat.values = _Flattening(rank, taken or _state_dict_of, flat).tree(
            own_mapping(state), "", None
        )
    except RecursionError:
        raise BadInputError("state: is nested too deep, or holds itself") from None
    return flat


def _state_dict_of(value: Any, _path: str) -> Any:
    return value.state_dict()


class _Flattening:
    """Fills `flat` while it makes value trees of the parts of a state."""

    def __init__(self, rank: int, taken: Callable[[Any, str], Any], flat: FlatState) -> None:
        self._rank, self._taken, self._flat = rank, taken, flat

    def tree(self, value: Any, path: str, owner: int | None) -> Any:
        """The value tree of `value`; `owner` is the rank inside a PerRank part, else None."""
        flat = self._flat
        if isinstance(value, PerRank):
            if owner is not None:
                raise BadInputError(f"{path}: PerRank inside PerRank")
            if path in flat.per_rank:
                raise BadInputError(
                    f"{path}: two PerRank parts of the state have this key; rename one"
                )
            flat.per_rank[path] = self.tree(value.value, path, self._rank)
            return PerRankRef(path)
        if isinstance(value, torch.Tensor | ShardedTensor):
            leaf = leaf_of(
                path if owner is None else f"{path}@{owner}", value, per_rank=owner is not None
            )
            if leaf.fqn in flat.leaves:
                raise BadInputError(
                    f"{leaf.fqn}: two tensors of the state have this key; rename one"
                )
            flat.leaves[leaf.fqn] = leaf
            return TensorRef(leaf.fqn)
        if has_state_dict(value):
            flat.objects.setdefault(path, value)
            return self.tree(own_mapping(self._taken(value, path)), path, owner)
        if type(value) in (list, tuple):
            return type(value)(self.tree(v, f"{path}.{i}", owner) for i, v in enumerate(value))
        instance = instance_of(value, path)
        if instance is not None:
            fields = instance.fields if instance.walks else ()
            parts = [self.tree(v, f"{path}.{k}", owner) for k, v in fields]
            return instance.having(parts) if instance.walks else instance
        if type(value) is dict:
            return {
                k: self.tree(v, f"{path}.{k}" if path else str(k), owner) for k, v in value.items()
            }
        return self.tree(own_mapping(value), path, owner) if isinstance(value, Mapping) else value


def check_names(state: Mapping[Any, Any]) -> None:
    """BadInputError if the parts of a state aren't under strings or integers."""
    for k in state:
        if type(k) not in (str, int):
            raise BadInputError(
                f"state: key {k!r} is a {type(k).__name__}; name the parts of a state by strings or integers"
            )


def own_mapping(taken: Any) -> Any:
    """What an object's `state_dict()` returned: its own type has no meaning, as of modules' OrderedDicts."""
    return dict(taken.items()) if isinstance(taken, Mapping) else taken


def has_state_dict(value: Any) -> bool:
    """Is `value` an object that saves itself, such as a module or an optimizer?"""
    return (
        not isinstance(value, Mapping | type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def leaf_of(fqn: str, value: torch.Tensor | ShardedTensor | Part, *, per_rank: bool) -> Leaf:
    """Describe one tensor: its global shape and the boxes of it that this rank holds."""
    if isinstance(value, Part):
        plain = _plain(f"{fqn} (local shard)", value.tensor)
        shard = Shard(value.offsets, tuple(plain.shape), plain)
        return Leaf(fqn, "sharded", dtype_name(fqn, plain.dtype), value.whole, (shard,), plain)
    if isinstance(value, ShardedTensor):
        meta = value.metadata()
        shards = tuple(
            Shard(
                tuple(s.metadata.shard_offsets),
                tuple(s.metadata.shard_sizes),
                _plain(f"{fqn} (local shard)", s.tensor),
            )
            for s in value.local_shards()
        )
        dtype, shape = meta.tensor_properties.dtype, tuple(meta.size)
    elif isinstance(value, DTensor):
        shards, dtype, shape = _dtensor_shards(fqn, value), value.dtype, tuple(value.shape)
    else:
        plain = _plain(fqn, value)
        zeros = (0,) * plain.dim()
        shards = (Shard(zeros, tuple(plain.shape), plain),)
        dtype, shape = plain.dtype, tuple(plain.shape)
        kind: TensorKind = "per_rank" if per_rank else "replicated"
        return Leaf(fqn, kind, dtype_name(fqn, dtype), shape, shards, plain)
    if per_rank:
        raise BadInputError(f"{fqn}: a {type(value).__name__} spans ranks and can't be PerRank")
    return Leaf(fqn, "sharded", dtype_name(fqn, dtype), shape, shards, value)


def _dtensor_shards(fqn: str, value: DTensor) -> tuple[Shard, ...]:
    """A DTensor's boxes on this rank. TorchRec's wrap several local shards, or none, in one."""
    if value.device_mesh.get_coordinate() is None:
        return ()
    if any(p.is_partial() for p in value.placements):
        raise BadInputError(f"{fqn}: a DTensor with partial placements has no value yet; reduce it")
    shards = []
    for offsets, sizes in _boxes(value):
        local = value.__get_tensor_shard__(MetadataIndex(fqn, offsets))  # type: ignore[no-untyped-call]
        plain = _plain(f"{fqn} (local shard)", local)
        if not plain.numel():  # TorchRec's stand-in on a rank without a shard has another shape
            plain = plain.new_empty(sizes)
        shards.append(Shard(tuple(offsets), tuple(sizes), plain))
    return tuple(shards)


def _boxes(value: DTensor) -> list[tuple[torch.Size, torch.Size]]:
    """Offsets and sizes of what a DTensor holds here."""
    plain = all(type(p) is ShardPlacement or p.is_replicate() for p in value.placements)
    if hasattr(value._local_tensor, "__create_chunk_list__") or not plain:
        chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return [(c.offsets, c.sizes) for c in chunks]
    # Torch's own way makes a list of all row numbers of the shard: milliseconds for each table.
    offsets, sizes = [0] * value.dim(), list(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    for placement, parts, part in zip(
        value.placements, value.device_mesh.shape, coordinate, strict=True
    ):
        if isinstance(placement, ShardPlacement):
            dim, most = placement.dim, -(-sizes[placement.dim] // parts)
            start = min(sizes[dim], most * part)  # as torch.chunk cuts
            offsets[dim], sizes[dim] = offsets[dim] + start, min(most, sizes[dim] - start)
            if not sizes[dim]:
                offsets[dim] = value.shape[dim]
    return [(torch.Size(offsets), torch.Size(sizes))]


def _plain(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """A detached view of a dense tensor, or BadInputError saying why it can't be stored."""
    if torch.nn.parameter.is_lazy(tensor):
        raise BadInputError(f"{what}: has no shape yet; run its lazy module once before")
    if tensor.is_meta:
        raise BadInputError(f"{what}: is on the meta device and has no data; materialise it first")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise BadInputError(
            f"{what}: layout {tensor.layout} can't be stored; pass its dense parts as tensors"
        )
    tensor = tensor.detach()
    if tensor.numel():
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < needed:
            raise BadInputError(
                f"{what}: shape {tuple(tensor.shape)} needs {needed} bytes but its storage holds "
                f"{tensor.untyped_storage().nbytes()}; it was freed or offloaded, bring it back first"
            )
    return tensor


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Names a tensor's memory as it is used: two with one identity are the same values."""
    lazy = tensor.is_conj(), tensor.is_neg()
    return (
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        lazy,
    )


def foreign_memory(tensor: torch.Tensor) -> str | None:
    """Why it isn't known who may write a tensor's memory, as far as the memory itself tells, or None."""
    if tensor.untyped_storage().nbytes() < tensor.nbytes:
        return "its memory was freed"
    if tensor.device.type != "cpu":
        return None
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return "its memory is shared with other processes, which may write it"
    if not tensor.untyped_storage().resizable():
        return (
            "its memory was handed out to numpy, or is another library's or a file's, which may write "
            "it; clone it to have it guarded"
        )
    return None


def dtype_name(what: str, dtype: torch.dtype) -> str:
    """Torch's name of a dtype, or BadInputError if checkpoints can't hold it."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise BadInputError(
            f"{what}: dtype {name} can't be stored; known are {', '.join(ITEMSIZE)}"
        )
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a checked name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInputError(
            f"this torch ({torch.__version__}) has no dtype {name}; use a newer one"
        )
    return dtype


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as bytes, without a copy.

    For tensors of our own: torch marks the storage as one that can't be resized any more. Of the
    trainer's, see `native.memory_at`.
    """
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy()).cast("B")  # type: ignore[arg-type]
