"""Gives restored values back to a state: the last step of a restore, in which nothing should fail."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ckpt.canonical.keyed import GROUPS, give_keyed, is_keyed
from ckpt.canonical.optimizers import is_optimizer, keep_dtypes
from ckpt.errors import BadInputError
from ckpt.tree import PerRank, has_state_dict
from ckpt.values import Instance, filled_in_place, given, put, resolve


class _Keep:
    """Stands in a loaded tree for what stays as it is."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP = _Keep()


class GivingError(Exception):
    """What an object of the state made of what it was given. `given` names those that have theirs."""

    def __init__(self, path: str, error: Exception, given: list[str]) -> None:
        super().__init__(f"{path}: {type(error).__name__}: {error}")
        self.path = path
        self.error = error
        self.given = given


def check_places(state: Any, loaded: Any, per_rank: Mapping[str, Any], path: str = "") -> None:
    """Ask a state, before anything is changed, whether it can take what it would get.

    Raises BadInputError for a mapping that can't be changed, and whatever an object raises in its
    `check_state_dict(stored)`, if it has one: that is given what `load_state_dict` would be given, but
    tensors, which aren't read yet: None stands for each.
    """
    if isinstance(state, PerRank):
        if path in per_rank:
            check_places(state.value, per_rank[path], {}, path)
    elif loaded is KEEP:
        return
    elif has_state_dict(state):
        if callable(check := getattr(state, "check_state_dict", None)):
            check(resolve(_without_tensors(loaded), path))
    elif isinstance(state, Mapping) and isinstance(loaded, Mapping):
        for k, v in loaded.items():
            sub = f"{path}.{k}" if path else str(k)
            inner = state.get(k)
            if not isinstance(state, MutableMapping) and not _in_place(inner, v):
                raise BadInputError(
                    f"{sub}: can't be put back into a {type(state).__name__}; give a dict"
                )
            check_places(inner, v, per_rank, sub)
    elif type(state) in (list, tuple) and type(loaded) is type(state):
        for i, (inner, v) in enumerate(zip(state, loaded, strict=False)):
            check_places(inner, v, per_rank, f"{path}.{i}")


def _without_tensors(loaded: Any) -> Any:
    if isinstance(loaded, torch.Tensor | ShardedTensor):
        return None
    if isinstance(loaded, PerRank):
        return PerRank(_without_tensors(loaded.value))
    if isinstance(loaded, dict):
        return {k: _without_tensors(v) for k, v in loaded.items()}
    if type(loaded) in (list, tuple):
        return type(loaded)(_without_tensors(v) for v in loaded)
    if isinstance(loaded, Instance) and loaded.walks:
        return loaded.having([_without_tensors(v) for _, v in loaded.fields])
    return loaded


def _in_place(state: Any, loaded: Any) -> bool:
    return (
        loaded is KEEP
        or has_state_dict(state)
        or isinstance(state, PerRank | torch.Tensor | ShardedTensor)
        or (isinstance(state, Mapping) and isinstance(loaded, Mapping))
        or (isinstance(loaded, Instance) and filled_in_place(state, loaded))
    )


class Giving:
    """One restore's giving back.

    Objects get `load_state_dict`, dicts get their values replaced, PerRank its value.

    Args:
        per_rank: what each rank's own parts get, by key.
    """

    def __init__(self, per_rank: Mapping[str, Any]) -> None:
        self._per_rank = per_rank
        self.given: list[str] = []
        """Keys of the objects that have taken theirs."""

    def give(self, state: Any, loaded: Any, path: str = "") -> Any:
        """What replaces `state`: mostly itself. Raises GivingError."""
        if isinstance(state, PerRank):
            if path in self._per_rank:
                state.value = self.give(state.value, self._per_rank[path], path)
            return state
        if loaded is KEEP or isinstance(state, torch.Tensor | ShardedTensor):
            return state  # tensors were filled in place
        if has_state_dict(state):
            self._load(state, loaded, path)
            return state
        if isinstance(state, Mapping) and isinstance(loaded, Mapping):
            return self._mapping(state, loaded, path)
        if isinstance(loaded, Instance):
            return put(state, loaded, self.give, path)
        if (
            type(state) in (list, tuple)
            and type(loaded) is type(state)
            and len(state) == len(loaded)
        ):
            items = [
                self.give(s, v, f"{path}.{i}")
                for i, (s, v) in enumerate(zip(state, loaded, strict=True))
            ]
            if isinstance(state, list):
                state[:] = items
                return state
            return tuple(items)
        return given(state, loaded, path)

    def _mapping(self, state: Mapping[Any, Any], loaded: Mapping[Any, Any], path: str) -> Any:
        for k, v in loaded.items():
            if v is KEEP and not isinstance(state.get(k), PerRank):
                continue
            new = (
                self.give(state[k], v, f"{path}.{k}" if path else str(k))
                if k in state
                else resolve(v)
            )
            if k in state and new is state[k]:
                continue  # filled in place, which a mapping that can't be changed permits too
            assert isinstance(state, MutableMapping), "check_places has seen to that"
            state[k] = new
        return state

    def _load(self, value: Any, loaded: Any, path: str) -> None:
        loaded = resolve(loaded, path)
        if isinstance(value, torch.nn.Module):
            # Modules' versions ride on the mapping; without them a newer module takes itself for old.
            loaded = OrderedDict(loaded)
            loaded._metadata = getattr(value.state_dict(), "_metadata", None)
        try:
            if is_keyed(value) and isinstance(loaded, Mapping) and GROUPS in loaded:
                give_keyed(value, loaded)
                self.given.append(path)
                return
            value.load_state_dict(loaded)
            if is_optimizer(value) and isinstance(loaded, Mapping) and "state" in loaded:
                keep_dtypes(value, loaded)
        except Exception as e:
            raise GivingError(path, e, self.given) from e
        self.given.append(path)
