"""Gives restored values back to where they belong: into the object that is there, if it can take them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from ckpt.errors import BadInputError
from ckpt.values.classes import instance_of, resolve
from ckpt.values.records import MAPPINGS, Instance

_NONE = object()


def given(state: Any, loaded: Any, path: str) -> Any:
    """What replaces a value: itself, filled, if it is an array, a set or a bytearray like the stored one."""
    if type(state) is type(loaded):
        np = sys.modules.get("numpy")
        if np is not None and type(state) is np.ndarray:
            if (
                state.dtype == loaded.dtype
                and state.shape == loaded.shape
                and state.flags.writeable
            ):
                state[...] = loaded
                return state
        elif type(state) is set:
            items = resolve(loaded, path)
            state.clear()
            state.update(items)
            return state
        elif type(state) is bytearray:
            state[:] = loaded
            return state
    return resolve(loaded, path)


def filled_in_place(state: Any, loaded: Instance) -> bool:
    """Does `put` keep the object that is there?"""
    live = _alike(state, loaded)
    return live is not None and (
        type(state) in _MUTABLE
        or (live.kind == "dataclass" and not type(state).__dataclass_params__.frozen)
    )


def put(state: Any, loaded: Instance, give: Callable[[Any, Any, str], Any], path: str) -> Any:
    """What replaces `state`: itself, filled, where it is of the same type and can be changed.

    give(state, loaded, path) does the same for what is in it.
    """
    live = _alike(state, loaded)
    if live is None:
        return resolve(loaded, path)
    if not loaded.walks:
        after = resolve(loaded, path)
        if type(state) in _MUTABLE:
            _fill(state, list(after.items()))
            return state
        return after
    before = dict(live.fields)
    made = loaded.having(
        [
            give(before[k], v, f"{path}.{k}") if k in before else resolve(v, f"{path}.{k}")
            for k, v in loaded.fields
        ]
    )
    if type(state) in _MUTABLE:
        _fill(state, list(made.fields))
        return state
    if all(v is before.get(k, _NONE) for k, v in made.fields):
        return state
    if filled_in_place(state, loaded):
        for k, v in made.fields:
            object.__setattr__(state, k, v)
        return state
    return resolve(made, path)


def _alike(state: Any, loaded: Instance) -> Instance | None:
    """What is there as an Instance, if it's of the type of the stored one."""
    try:
        live = instance_of(state, "")
    except BadInputError:
        return None
    if type(state) is dict and loaded.kind == "dict":
        return Instance("dict", "", tuple(state.items()))
    if live is None or live.like != loaded.like:
        return None
    names = [{k for k, _ in x.fields} for x in (live, loaded)]
    return live if type(state) in _MUTABLE or names[0] == names[1] else None


def _fill(state: Any, fields: list[tuple[Any, Any]]) -> None:
    state.clear()
    if type(state) is deque:
        state.extend(v for _, v in fields)
    else:
        for k, v in fields:
            state[k] = v


_MUTABLE = (dict, *MAPPINGS, deque)
