"""Matches a checkpoint against the state that it is restored into, before a byte is copied.

A target is a trainer's flattened state. Ranks may hold different tensors of it (a table-wise
table has its optimizer state on one rank only), so what is *missing* is judged by each rank,
and what is *extra* against the keys of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import BadInputError
from ckpt.index import TensorInfo
from ckpt.tree import FlatState, Leaf, PerRank, has_state_dict, torch_dtype
from ckpt.values import PerRankRef, TensorRef, iter_leaves

_SHOWN = 8


@dataclass
class Source:
    """A checkpoint as one rank sees it: tensors by key, the shared values, its own per-rank values.

    `same_world` is False where the saver had another number of ranks: per-rank parts then
    belong to nobody here.
    """

    tensors: Mapping[str, TensorInfo]
    values: Any
    per_rank: Mapping[str, Any]
    same_world: bool


@dataclass
class Mismatch:
    """What stands between a checkpoint and this rank's state. Each item names its key."""

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)  # per-rank parts of another world
    extra: list[str] = field(default_factory=list)  # values that only the checkpoint has


def check(flat: FlatState, source: Source, absorbing: Sequence[str]) -> Mismatch:
    """Compare this rank's tensors and values with the checkpoint's.

    Values below an `absorbing` prefix are judged by the object that they are given back to.
    """
    found = Mismatch()
    for fqn, leaf in flat.leaves.items():
        if leaf.kind == "per_rank" and not source.same_world:
            continue
        info = source.tensors.get(fqn)
        if info is None:
            found.missing.append(fqn)
        elif (info.dtype, info.shape) != (leaf.dtype, leaf.shape):
            found.wrong.append(
                f"{fqn}: the checkpoint has {info.dtype} {list(info.shape)}, the state {leaf.dtype} "
                f"{list(leaf.shape)}{_sharding_hint(info, leaf)}"
            )
        elif any(0 in s.tensor.stride() and s.tensor.numel() > 1 for s in leaf.shards):
            found.wrong.append(
                f"{fqn}: is an expanded view, whose elements share memory and can't be filled; "
                f"clone it"
            )
    found.wrong += _recut_optimizer_state(flat, source.tensors)
    _check_values(flat.values, source.values, "", found, tuple(absorbing))
    for path, tree in flat.per_rank.items():
        if not source.same_world:
            found.unclaimed.append(path)
        elif path not in source.per_rank:
            found.missing.append(path)
        else:
            _check_values(tree, source.per_rank[path], path, found, tuple(absorbing))
    return found


def extra_keys(source: Source, held: set[str]) -> list[str]:
    """Tensors of the checkpoint that are not in `held`, the keys of all ranks together."""
    return sorted(
        fqn
        for fqn, info in source.tensors.items()
        if fqn not in held and (info.kind != "per_rank" or source.same_world)
    )


def absorbing_prefixes(state: Any, path: str = "") -> list[str]:
    """Paths of objects that make their own state at load, such as an optimizer before its first step."""
    if has_state_dict(state):
        return _extra_state(state, path) if isinstance(state, torch.nn.Module) else [f"{path}."]
    if isinstance(state, PerRank):
        return absorbing_prefixes(state.value, path)
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(state, Mapping):
        parts = state.items()
    elif type(state) in (list, tuple):
        parts = enumerate(state)
    return [p for k, v in parts for p in absorbing_prefixes(v, f"{path}.{k}" if path else str(k))]


def _extra_state(module: torch.nn.Module, path: str) -> list[str]:
    """Paths of what the parts of a module save beside their parameters and buffers."""
    return [
        f"{path}.{name}{'.' if name else ''}_extra_state"
        for name, part in module.named_modules()
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state
    ]


def refuse(problems: Sequence[str], step: int, advice: str) -> BadInputError:
    """One error for all problems: the first few in full, the rest counted."""
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return BadInputError(f"step {step} doesn't fit this state: {shown}{more}. {advice}")


def loaded_tree(want: Any, stored: Any, tensor: Callable[[str], Any | None]) -> Any:
    """The stored values in the shape of this rank's tree, with live tensors for TensorRefs.

    `tensor(fqn)` gives the tensor for a key, or None if this rank holds no part of it: such
    keys are left out. Keys that only the checkpoint has are added.
    """
    if isinstance(want, dict) and isinstance(stored, dict):
        out = {}
        for k, v in want.items():
            out[k] = loaded_tree(v, stored[k], tensor) if k in stored else _live(v, tensor)
        for k, v in stored.items():
            if k not in want and (live := _live(v, tensor)) is not _ABSENT:
                out[k] = live
        return out
    if type(want) is type(stored) and isinstance(want, list | tuple) and len(want) == len(stored):
        return type(want)(loaded_tree(w, s, tensor) for w, s in zip(want, stored, strict=True))
    return _live(stored, tensor)


_ABSENT = object()


def _live(value: Any, tensor: Callable[[str], Any | None]) -> Any:
    """A stored tree with tensors in it; _ABSENT for what this rank holds no part of."""
    if isinstance(value, TensorRef):
        found = tensor(value.fqn)
        return _ABSENT if found is None else found
    if isinstance(value, dict):
        items = {k: _live(v, tensor) for k, v in value.items()}
        kept = {k: v for k, v in items.items() if v is not _ABSENT}
        return _ABSENT if items and not kept else kept
    if isinstance(value, list | tuple):
        return type(value)(v for x in value if (v := _live(x, tensor)) is not _ABSENT)
    return value


def allocate(info: TensorInfo) -> torch.Tensor:
    """Host memory for a tensor that only the checkpoint has."""
    return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="cpu")


def _check_values(
    want: Any, stored: Any, path: str, found: Mismatch, absorbing: tuple[str, ...]
) -> None:
    """Every tensor and value of the target has its like in the checkpoint."""
    if isinstance(want, dict) and isinstance(stored, dict):
        for k, v in want.items():
            sub = f"{path}.{k}" if path else str(k)
            if k in stored:
                _check_values(v, stored[k], sub, found, absorbing)
            else:
                found.missing += [
                    p for p, leaf in iter_leaves(v, sub) if not isinstance(leaf, TensorRef)
                ]
        if want and not f"{path}.".startswith(absorbing):  # an empty dict takes whatever comes
            found.extra += [
                p
                for k, v in stored.items()
                if k not in want
                for p, leaf in iter_leaves(v, f"{path}.{k}" if path else str(k))
                if not isinstance(leaf, TensorRef | PerRankRef) and not p.startswith(absorbing)
            ]
        return
    if path.startswith(absorbing):
        return
    if any(isinstance(want, kind) != isinstance(stored, kind) for kind in _STRUCTURE):
        found.wrong.append(
            f"{path}: the checkpoint has a {_kind(stored)}, the state a {_kind(want)}"
        )


_STRUCTURE = (TensorRef, PerRankRef, dict)


def _kind(value: Any) -> str:
    names = {TensorRef: "tensor", PerRankRef: "PerRank part"}
    return names.get(type(value), type(value).__name__)


def _sharding_hint(info: TensorInfo, leaf: Leaf) -> str:
    if info.kind == "sharded" and leaf.kind == "sharded" and len(info.shape) == 1:
        return (
            " (optimizer state of a table whose sharding kind changed: restore at the sharding it "
            "was saved with, or leave the optimizer out)"
        )
    return ""


def _recut_optimizer_state(flat: FlatState, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Rowwise state of a table whose columns are cut elsewhere: the same shape, another meaning."""
    problems = []
    for fqn, leaf in flat.leaves.items():
        info = tensors.get(fqn)
        if info is None or leaf.kind != "sharded" or not leaf.shards:
            continue
        if len(leaf.shape) != 2 or info.shape != leaf.shape:
            continue
        stored = {(o[1], s[1]) for o, s in info.boxes if 0 not in s}
        here = {(s.offsets[1], s.sizes[1]) for s in leaf.shards if 0 not in s.sizes}
        if here <= stored:
            continue
        inner = f".{fqn.partition('.')[2]}."
        problems += [
            f"{name}: rowwise state of {fqn}, whose column shards were {sorted(stored)} and are "
            f"{sorted(here)} here; restore at the sharding it was saved with, or leave the optimizer out"
            for name, x in flat.leaves.items()
            if inner in f".{name}." and len(x.shape) == 1 and name in tensors
        ]
    return problems
