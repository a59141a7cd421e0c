"""Walks through nested values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ckpt.values.records import MAPPINGS, Instance

_AS_DICTS = frozenset(MAPPINGS.values())


def as_dict(value: Any) -> Any:
    """The dict that an OrderedDict or the like is where types don't matter; anything else as it is."""
    if type(value) is Instance and value.kind in _AS_DICTS and value.walks:
        return dict(value.fields)
    return value


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """(key, part) of what tensors and objects may be in; None for a leaf."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return value.fields if type(value) is Instance and value.walks else None


def map_leaves(value: Any, fn: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of a nested value with fn(path, leaf) in the place of each leaf."""
    if isinstance(value, dict):
        return {k: map_leaves(v, fn, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(v, fn, f"{path}.{i}") for i, v in enumerate(value))
    if type(value) is Instance and value.walks:
        return value.having(map_leaves(v, fn, f"{path}.{k}") for k, v in value.fields)
    return fn(path, value)


def iter_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested value; an empty container is a leaf of its own."""
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from iter_leaves(v, f"{path}.{k}" if path else str(k))
    elif type(value) in (list, tuple) and value:
        for i, v in enumerate(value):
            yield from iter_leaves(v, f"{path}.{i}")
    elif type(value) is Instance and value.walks and value.fields:
        for k, v in value.fields:
            yield from iter_leaves(v, f"{path}.{k}")
    else:
        yield path, value


def common(value: Any) -> Any:
    """A copy of a value as programs that know none of its classes have it.

    Mappings, dataclasses and named tuples are dicts and tuples, deques are lists, enums the names of their
    members, numbers of numpy are Python's. What is of torch stays an Instance, for `resolve`.
    """
    if isinstance(value, dict):
        return {common(k): common(v) for k, v in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)([common(v) for v in value])
    if type(value) is Instance:
        if value.kind == "enum":
            names = value.fields[0][1]
            return names if isinstance(names, str) else "|".join(names)
        if value.kind == "torch":
            return value
        if value.kind in ("namedtuple", "deque"):
            items = [common(v) for _, v in value.fields]
            return items if value.kind == "deque" else tuple(items)
        return {common(k): common(v) for k, v in value.fields}
    np = sys.modules.get("numpy")
    if np is not None and isinstance(value, np.bool_ | np.number | np.str_ | np.bytes_):
        return value.item()
    return value
