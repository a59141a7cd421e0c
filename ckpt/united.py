"""The value trees of several ranks as one: dicts are united, and all else must be equal."""

from __future__ import annotations

import reprlib
from typing import Any

from ckpt.errors import BadInputError
from ckpt.values import PerRankRef, TensorRef

_SHOWN_CHARS = 60
_DICT = object()  # in the place of a dict: its keys are looked at one by one
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
        mine = _DICT if isinstance(value, dict) else value
        first, theirs = self._seen.setdefault(path, (rank, mine))
        if mine is _DICT and theirs is _DICT:
            united = dict(known) if isinstance(known, dict) else {}
            for k, v in value.items():
                united[k] = self._add(rank, (*path, k), v, united.get(k))
            return united
        if theirs is _DICT:
            raise _refusal(path, (first, rank), (known, value))
        if not _same(theirs, mine):
            raise _refusal(path, (first, rank), (theirs, value))
        return value


def without_tensors(value: Any) -> Any:
    """A value tree with None in the place of what stands for tensors and for ranks' own parts."""
    if isinstance(value, dict):
        return {k: without_tensors(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_tensors(v) for v in value)
    return None if isinstance(value, TensorRef | PerRankRef) else value


def _refusal(
    path: tuple[Any, ...], ranks: tuple[int, int], values: tuple[Any, Any]
) -> BadInputError:
    a, b = values
    while (keys := _keys(a)) is not None and keys == _keys(b) and type(a) is type(b):
        k = next(k for k in keys if not _same(a[k], b[k]))
        path, a, b = (*path, k), a[k], b[k]
    return BadInputError(
        f"{'.'.join(map(str, path)) or 'state'}: ranks {ranks[0]} and {ranks[1]} hold different values "
        f"({_shown(a)} and {_shown(b)}); wrap it in PerRank if each rank has its own, else make them equal"
    )


def _keys(value: Any) -> list[Any] | None:
    """Where the parts of a dict, list or tuple are; None for anything else."""
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
    return repr(a) == repr(b)
