"""The value trees of several ranks as one: dicts are united, and all else must be equal."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import BadInputError
from ckpt.values import Instance, PerRankRef, TensorRef, encode_value, map_leaves

_SHOWN_CHARS = 60
_NONE = object()
_BY_REPR = frozenset((type(None), bool, int, str, bytes, TensorRef, PerRankRef))
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHOWN_CHARS


class UnitedValues:
    """Takes in one rank's tree after the other. `tree`: what they have together."""

    def __init__(self) -> None:
        self.tree: Any = None
        self._seen: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def add(self, rank: int, tree: Any) -> None:
        """BadInputError names the key path of two values that differ, both of them, and their ranks."""
        self.tree = self._add(rank, (), tree, self.tree)

    def _add(self, rank: int, path: tuple[Any, ...], value: Any, known: Any) -> Any:
        """`known` is what earlier ranks have together at this path, if any of them has something."""
        mine = _united_by_keys(value) or value
        first, theirs = self._seen.setdefault(path, (rank, mine))
        if isinstance(mine, _ByKeys) and isinstance(theirs, _ByKeys) and mine == theirs:
            united = _items(known)
            for k, v in _items(value).items():
                united[k] = self._add(rank, (*path, k), v, united.get(k))
            return united if mine.like is None else replace(value, fields=tuple(united.items()))
        if isinstance(theirs, _ByKeys):
            raise _refusal(path, (first, rank), (known, value))
        if isinstance(mine, _ByKeys) or not _same(theirs, mine):
            raise _refusal(path, (first, rank), (theirs, value))
        return value


@dataclass(frozen=True)
class _ByKeys:
    """In the place of a mapping whose keys are looked at one by one: dicts, and those that ranks fill
    as dicts. Of anything else, such as a Counter, all ranks have the same.
    """

    like: tuple[str, str] | None


def _united_by_keys(value: Any) -> _ByKeys | None:
    if isinstance(value, dict):
        return _ByKeys(None)
    if type(value) is Instance and value.kind in ("OrderedDict", "defaultdict") and value.walks:
        return _ByKeys(value.like)
    return None


def _items(value: Any) -> dict[Any, Any]:
    if type(value) is Instance:
        return dict(value.fields)
    return dict(value) if isinstance(value, dict) else {}


def without_tensors(value: Any) -> Any:
    """A value tree with None in the place of what stands for tensors and for ranks' own parts."""
    return map_leaves(
        value, lambda _, leaf: None if isinstance(leaf, TensorRef | PerRankRef) else leaf
    )


def _refusal(
    path: tuple[Any, ...], ranks: tuple[int, int], values: tuple[Any, Any]
) -> BadInputError:
    a, b = values
    while (keys := _keys(a)) is not None and keys == _keys(b) and type(a) is type(b):
        inner = [dict(x.fields) if type(x) is Instance else x for x in (a, b)]
        k = next((k for k in keys if not _same(inner[0][k], inner[1][k])), _NONE)
        if k is _NONE:  # two types of one content
            break
        path, a, b = (*path, k), inner[0][k], inner[1][k]
    return BadInputError(
        f"{'.'.join(map(str, path)) or 'state'}: ranks {ranks[0]} and {ranks[1]} hold different values "
        f"({_shown(a)} and {_shown(b)}); wrap it in PerRank if each rank has its own, else make them equal"
    )


def _keys(value: Any) -> list[Any] | None:
    """Where the parts of a dict, list, tuple or Instance are; None for anything else."""
    if type(value) is Instance and value.walks:
        return [k for k, _ in value.fields]
    if isinstance(value, dict):
        return sorted(value, key=repr)
    return list(range(len(value))) if isinstance(value, list | tuple) else None


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple | dict) and len(value) > 4:
        return f"a {type(value).__name__} of {len(value)}: {_SHORT.repr(value)}"
    return _SHORT.repr(value)


def _same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down: 1, 1.0 and True differ, nan equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if (
        isinstance(a, Instance)
        and a.like == b.like
        and a.kind in ("Counter", "defaultdict", "dict")
    ):
        return _same(dict(a.fields), dict(b.fields))  # in any order
    if type(a) in _BY_REPR:
        return repr(a) == repr(b)
    # Such as arrays, of which repr shows the first and last.
    return json.dumps(encode_value(a), sort_keys=True) == json.dumps(
        encode_value(b), sort_keys=True
    )
