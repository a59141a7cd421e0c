"""Walks through nested values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ckpt.values.records import Instance


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
