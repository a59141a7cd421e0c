"""DCP's flat keys and nested trees, each made from the other. No torch.

DCP flattens a state to keys joined by dots, and keeps the path of each key: strings for dict
keys, integers for places in a list. On the way integer keys of dicts become strings and
empty dicts get lost. A tuple, or a list of nothing but plain values, is one object to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ckpt.errors import BadInputError, CorruptError
from ckpt.values import Instance, PerRankRef, TensorRef, as_dict, iter_leaves, map_leaves

Path = tuple[str | int, ...]

_MOST_HOLES = 65536  # places of a list that a path may skip: a crafted one must not eat the memory


def state_tree(
    values: Any, per_rank: Sequence[Mapping[str, Any]], tensors: Collection[str]
) -> dict[Any, Any]:
    """A whole checkpoint as one nested dict with a TensorRef for each tensor, as other formats take it.

    A per-rank part becomes a dict from rank to that rank's part. A tensor that no tree places
    stands at the top, under its own key.

    Args:
        values: the tree that all ranks share.
        per_rank: for each rank, its own trees by key.
        tensors: the keys of all tensors.
    """

    def place(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, PerRankRef):
            return leaf
        return {rank: parts[leaf.fqn] for rank, parts in enumerate(per_rank) if leaf.fqn in parts}

    tree = map_leaves({} if values is None else values, place)
    if not isinstance(tree, dict):
        raise CorruptError(f"the checkpoint's values are a {type(tree).__name__}, not a dict")
    placed = {v.fqn for _, v in iter_leaves(tree) if isinstance(v, TensorRef)}
    if gone := sorted(placed.difference(tensors)):
        raise CorruptError(f"{gone[0]}: the values name this tensor, but no index has it")
    loose = {k: TensorRef(k) for k in sorted(set(tensors) - placed)}
    if taken := sorted(set(loose) & set(tree)):
        raise CorruptError(f"{taken[0]}: is a tensor and also a value")
    return {**tree, **loose}


def map_flat(tree: Mapping[Any, Any], fn: Callable[[str, Path, Any], Any]) -> dict[Any, Any]:
    """A copy of `tree` with fn(key, path, leaf) in the place of each of DCP's leaves.

    Raises BadInputError if two leaves have the same key in DCP, such as 1 and "1".
    """
    seen: set[str] = set()

    def visit(path: Path, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: visit((*path, str(k)), v) for k, v in value.items()}
        if isinstance(value, Instance) and isinstance(as_dict(value), dict):
            return value.having([visit((*path, str(k)), v) for k, v in value.fields])
        if type(value) is list and _has_parts(value):
            return [visit((*path, i), v) for i, v in enumerate(value)]
        key = ".".join(map(str, path))
        if key in seen:
            raise BadInputError(f"{key}: two parts of the state have this key in DCP; rename one")
        seen.add(key)
        return fn(key, path, value)

    return {k: visit((str(k),), v) for k, v in tree.items()}


def flattened(tree: Mapping[Any, Any]) -> dict[str, tuple[Path, Any]]:
    """DCP's key -> (path, leaf) of a tree of values and TensorRefs."""
    flat: dict[str, tuple[Path, Any]] = {}

    def take(key: str, path: Path, leaf: Any) -> None:
        flat[key] = (path, leaf)

    map_flat(tree, take)
    return flat


def nested(flat: Mapping[str, tuple[Path, Any]]) -> dict[Any, Any]:
    """The tree that DCP's paths describe. Raises BadInputError for paths that contradict each other."""
    root = _Node()
    for key, (path, leaf) in flat.items():
        if not path or not all(type(p) is str or (type(p) is int and p >= 0) for p in path):
            raise BadInputError(f"{key}: {path!r} is no path of keys and places")
        root.put(key, path, leaf)
    tree = root.tree("")
    if not isinstance(tree, dict):
        raise BadInputError("the state is a list; only a dict of names to objects can be stored")
    return tree


def number_optimizer_state(tree: Any) -> Any:
    """A copy of `tree` in which the state dicts of torch.optim have their integer keys again.

    Their `state` is keyed by the numbers in `param_groups[...]["params"]`, which DCP turned into
    strings: an optimizer would take no notice of entries under those.
    """
    if isinstance(tree, dict):
        out = {k: number_optimizer_state(v) for k, v in tree.items()}
        if isinstance(out.get("state"), dict):
            numbers = {str(n): n for n in _parameter_numbers(out.get("param_groups"))}
            out["state"] = {numbers.get(k, k): v for k, v in out["state"].items()}
        return out
    if type(tree) in (list, tuple):
        return type(tree)(number_optimizer_state(v) for v in tree)
    return tree


def named_optimizers(tree: Any, path: Path = ()) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """(path, part) of the parts of a tree that are a plain optimizer's, whose parameters have names."""
    if not isinstance(tree, dict):
        return
    if {"class", "state", "param_groups"} <= set(tree) and isinstance(tree["state"], dict):
        yield path, tree
    else:
        for k, v in tree.items():
            yield from named_optimizers(v, (*path, k))


def parameter_names(optimizer: Mapping[Any, Any]) -> list[Any]:
    """What a plain optimizer's part of a tree calls its parameters, in the order of their numbers."""
    groups = optimizer["param_groups"]
    if not isinstance(groups, list):
        return []
    return [p for g in groups if isinstance(g, dict) for p in g.get("params") or ()]


def numbered_optimizers(tree: Any) -> Any:
    """A copy of `tree` in which plain optimizers are as torch's own state dicts are, by number."""
    if not isinstance(tree, dict):
        return tree
    if not any(True for _ in named_optimizers({"": tree} if "class" in tree else tree)):
        return tree
    if "class" not in tree or not isinstance(tree.get("state"), dict):
        return {k: numbered_optimizers(v) for k, v in tree.items()}
    numbers: dict[Any, int] = {}
    for n, name in enumerate(parameter_names(tree)):
        numbers.setdefault(name, n)
    groups = [{**g, "params": [numbers[p] for p in g["params"]]} for g in tree["param_groups"]]
    state = {numbers.get(k, k): v for k, v in tree["state"].items()}
    rest = {k: v for k, v in tree.items() if k != "class"}
    return {**rest, "state": state, "param_groups": groups}


def pruned(tree: Any, keep: set[str]) -> Any:
    """A copy of `tree` without the tensors that aren't in `keep`: None in their place in a list."""
    if isinstance(tree, dict):
        return {k: pruned(v, keep) for k, v in tree.items() if not _dropped(v, keep)}
    if type(tree) in (list, tuple):
        return type(tree)(None if _dropped(v, keep) else pruned(v, keep) for v in tree)
    if isinstance(tree, Instance) and tree.walks:
        if isinstance(as_dict(tree), dict):
            kept = [(k, pruned(v, keep)) for k, v in tree.fields if not _dropped(v, keep)]
            return Instance(*tree.like, tuple(kept))
        return tree.having([None if _dropped(v, keep) else pruned(v, keep) for _, v in tree.fields])
    return tree


def _dropped(value: Any, keep: set[str]) -> bool:
    """Is `value` a tensor not to be kept, or a dict of only such ones?"""
    if isinstance(value, TensorRef):
        return value.fqn not in keep
    value = as_dict(value)
    return (
        isinstance(value, dict) and bool(value) and all(_dropped(v, keep) for v in value.values())
    )


def _has_parts(values: list[Any]) -> bool:
    """Does DCP look into this list? It does if it finds a tensor or a dict in it, at any depth."""
    return any(
        isinstance(as_dict(v), dict | TensorRef) or (type(v) is list and _has_parts(v))
        for v in values
    )


def _parameter_numbers(groups: Any) -> list[int]:
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        return []
    params = [p for g in groups if isinstance(g.get("params"), list) for p in g["params"]]
    return params if all(type(p) is int for p in params) else []


class _Node:
    """A place in a tree that is being built: a leaf, or parts under keys or numbers."""

    def __init__(self) -> None:
        self.parts: dict[str | int, _Node] = {}
        self.leaf: tuple[Any] | None = None

    def put(self, key: str, path: Path, leaf: Any) -> None:
        node = self
        for part in path:
            if node.leaf is not None:
                break
            node = node.parts.setdefault(part, _Node())
        if node.leaf is not None or node.parts:
            raise BadInputError(f"{key}: its path {path!r} runs into that of another key")
        node.leaf = (leaf,)

    def tree(self, where: str) -> Any:
        if self.leaf is not None:
            return self.leaf[0]
        numbers = [p for p in self.parts if isinstance(p, int)]
        if not numbers:
            return {k: n.tree(f"{where}.{k}") for k, n in self.parts.items()}
        if len(numbers) < len(self.parts) or max(numbers) > len(numbers) + _MOST_HOLES:
            raise BadInputError(f"{where.strip('.')}: its parts are neither a dict's nor a list's")
        items: list[Any] = [None] * (max(numbers) + 1)
        for n in numbers:
            items[n] = self.parts[n].tree(f"{where}.{n}")
        return items
