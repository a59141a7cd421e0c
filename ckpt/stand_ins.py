"""A described state as a restore's plan takes one: tensors of no memory, and stand-ins for its objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

from ckpt.canonical import Canonical
from ckpt.canonical.kernels import KERNELS
from ckpt.canonical.keyed import GROUPS
from ckpt.canonical.optimizers import CLASS
from ckpt.conversions import is_fused_class
from ckpt.description import StateDescription
from ckpt.keyed_plan import KeyedOptimizer
from ckpt.restore_plan import nested_like
from ckpt.tree import FlatState, Leaf, Shard, torch_dtype
from ckpt.values import PerRankRef, TensorRef, iter_leaves


def state_of_shapes(state: StateDescription, rank: int, stored: Any) -> tuple[FlatState, Canonical]:
    """What a rank would have that has all that ranks share, and beside it what rank `rank` has for itself.

    stored: the values of the checkpoint that is to be restored.
    """
    own = dict(state.per_rank[rank])
    values = _without_others(_values_of(state, stored), own)
    flat = FlatState({}, values, own, described=True)
    for name, info in state.tensors.items():
        shards = tuple(Shard(o, n, _shape_only(n, info.dtype)) for o, n in info.boxes)
        whole = shards[0].tensor if len(shards) == 1 else _shape_only(info.shape, info.dtype)
        flat.leaves[name] = Leaf(name, info.kind, info.dtype, info.shape, shards, whole)
    optimizers = list(_optimizers(values, ""))
    tables = _Parameters(flat, {n for _, tree in optimizers for n in _names_of(tree)})
    for path, tree in optimizers:
        if isinstance(tree.get(GROUPS), dict):
            groups = _one_list(tree[GROUPS])
            flat.values = _with(flat.values, path, {**tree, GROUPS: {0: groups}})
            flat.objects[path] = _keyed(tree, groups, tables)
        else:
            flat.objects[path] = _plain(tree, tables, _shapes(state, path, tree))
    for path, one in (state.objects or {}).items():
        flat.objects.setdefault(path, nn.Module() if one.kind == "module" else _Other())
    if state.objects is None:
        for key, node in values.items() if isinstance(values, dict) else ():
            if str(key) not in flat.objects and _is_module(node):
                flat.objects[str(key)] = nn.Module()
    canonical = Canonical(rank)
    canonical.look(tables.modules())
    return flat, canonical


class _Other:
    """In the place of an object that saves itself, and of which no more is known."""


def _values_of(state: StateDescription, stored: Any) -> Any:
    """Its values. Tensors without a place in them, as of other tools' files, have the checkpoint's."""
    values = {} if state.values is None else state.values
    if not isinstance(values, dict):
        return values
    values = {k: v for k, v in values.items() if k != KERNELS}
    trees = (state.values, *(tree for part in state.per_rank for tree in part.values()))
    placed = {x.fqn for tree in trees for _, x in iter_leaves(tree) if isinstance(x, TensorRef)}
    loose = {k: TensorRef(k) for k in state.tensors if k not in placed}
    return {**nested_like(stored, loose), **values} if loose else values


def _without_others(values: Any, own: dict[str, Any]) -> Any:
    """The values without the parts that only other ranks have. In a list, such a part is an empty one."""
    if isinstance(values, dict):
        return {
            k: _without_others(v, own)
            for k, v in values.items()
            if not isinstance(v, PerRankRef) or v.fqn in own
        }
    for _, leaf in iter_leaves(values):
        if isinstance(leaf, PerRankRef):
            own.setdefault(leaf.fqn, {})
    return values


def _shapes(
    state: StateDescription, path: str, tree: Mapping[Any, Any]
) -> dict[str | int, tuple[int, ...]]:
    """The shapes of an optimizer's parameters as described, else as its state has them."""
    names = [n for g in tree["param_groups"] for n in g["params"]]
    known = (state.objects or {}).get(path)
    if known is not None and len(known.shapes) == len(names):
        return dict(zip(names, known.shapes, strict=True))
    found: dict[str | int, tuple[int, ...]] = {}
    for name, entry in tree["state"].items():
        for part in entry.values() if isinstance(entry, dict) else ():
            if isinstance(part, TensorRef) and state.tensors[part.fqn].shape:
                found.setdefault(name, state.tensors[part.fqn].shape)
    return found


def _shape_only(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of one element that is seen as many."""
    return torch.empty((), dtype=torch_dtype(dtype), device="cpu").expand(shape)


class _Parameters:
    """The tensors of a state that its optimizers' parameters are, by the names that these have."""

    def __init__(self, flat: FlatState, names: Set[str]) -> None:
        self._flat = flat
        self._ends: dict[str, str] = {}
        for key in flat.leaves if names else ():
            end = key
            while end:
                if end in names:
                    self._ends.setdefault(end, key)
                _, _, end = end.partition(".")
        self._modules: dict[str, nn.Module] = {}

    def of(self, name: str | int, shape: tuple[int, ...] = (0,)) -> nn.Parameter:
        """shape: of one that isn't among them."""
        key = self._ends.get(name) if isinstance(name, str) else None
        if key is None:
            return nn.Parameter(_shape_only(shape, "float32"), requires_grad=False)
        top = key.removesuffix(f".{name}") if key != name else ""
        module = self._modules.setdefault(top, nn.Module())
        if str(name) not in module._parameters:
            source = self._flat.leaves[key].source
            module._parameters[str(name)] = nn.Parameter(source, requires_grad=False)
        found = module._parameters[str(name)]
        assert found is not None
        return found

    def modules(self) -> dict[str, nn.Module]:
        return self._modules


def _optimizers(node: Any, path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(path, tree) of the optimizers in a value tree."""
    if not isinstance(node, dict):
        return
    by_rank, plain = node.get(GROUPS), node.get("param_groups")
    keyed = isinstance(by_rank, dict) and all(map(_are_groups, by_rank.values()))
    if isinstance(node.get("state"), dict) and (
        keyed or (isinstance(node.get(CLASS), str) and _are_groups(plain))
    ):
        yield path, node
        return
    for k, v in node.items():
        yield from _optimizers(v, f"{path}.{k}" if path else str(k))


def _names_of(tree: Mapping[Any, Any]) -> Iterator[str]:
    """What an optimizer calls its parameters."""
    by_rank = (
        tree[GROUPS].values() if isinstance(tree.get(GROUPS), dict) else [tree["param_groups"]]
    )
    yield from (n for listed in by_rank for g in listed for n in g["params"] if type(n) is str)
    yield from (n for n in tree["state"] if type(n) is str)


def _are_groups(listed: Any) -> bool:
    """Parameter groups, as they are stored?"""
    return isinstance(listed, list) and all(
        isinstance(g, dict)
        and isinstance(names := g.get("params"), list)
        and all(type(n) in (str, int) for n in names)
        for g in listed
    )


def _one_list(by_rank: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """The groups of all ranks, each parameter once."""
    seen: set[Any] = set()
    groups = []
    for listed in by_rank.values():
        for group in listed:
            new = [k for k in group["params"] if k not in seen]
            seen.update(new)
            if new:
                groups.append({**group, "params": new})
    return groups


def _keyed(
    tree: Mapping[str, Any], groups: list[dict[str, Any]], tables: _Parameters
) -> KeyedOptimizer:
    kinds = {k: str(g.get(CLASS)) for g in groups for k in g["params"]}
    keys = dict.fromkeys([*kinds, *tree["state"]])
    own = {k for k, kind in kinds.items() if not is_fused_class(kind)}
    places = set(tree.get("wrappers", {})) | {"optimizer"}
    return KeyedOptimizer({k: tables.of(k) for k in keys}, kinds, own, set(), places)


def _plain(
    tree: Mapping[str, Any], tables: _Parameters, shapes: Mapping[str | int, tuple[int, ...]]
) -> torch.optim.Optimizer:
    """An optimizer of the same class by name, with the same groups, that can do nothing."""
    module, _, name = tree[CLASS].rpartition(".")
    names = {"__module__": module, "__qualname__": name}
    kind: Any = type("Optimizer", (torch.optim.Optimizer,), names)
    optimizer = kind.__new__(kind)
    optimizer.param_groups = [
        {
            **g,
            "params": [tables.of(n, shapes.get(n, (0,))) for n in g["params"]],
            # Those in no module have names here, or numbers.
            **({"param_names": g["params"]} if all(type(n) is str for n in g["params"]) else {}),
        }
        for g in tree["param_groups"]
    ]
    optimizer.state = {}
    found: torch.optim.Optimizer = optimizer
    return found


def _is_module(node: Any) -> bool:
    """Nothing but tensors, by keys: as modules save themselves."""
    leaves = [leaf for _, leaf in iter_leaves(node)]
    return isinstance(node, dict) and bool(leaves) and all(isinstance(x, TensorRef) for x in leaves)


def _with(tree: Any, path: str, node: Any) -> Any:
    """The tree with another node at a path."""
    if not path:
        return node
    for k, v in tree.items():
        if path == str(k):
            return {**tree, k: node}
        if path.startswith(f"{k}.") and isinstance(v, dict):
            return {**tree, k: _with(v, path[len(str(k)) + 1 :], node)}
    return tree
