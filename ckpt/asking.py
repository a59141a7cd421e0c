"""Asks the objects of a state, before anything is changed, whether they can take what they would be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.tree import PerRank, has_state_dict, substitute
from ckpt.values import PerRankRef, TensorRef


def ask(state: Any, stored: Any, per_rank: Mapping[str, Any]) -> None:
    """Call `check_state_dict(stored)` of each object of the state that has one.

    Such an object raises to refuse, most likely BadInputError, and then nothing is changed on any rank. It is
    given what `load_state_dict` would be given, but tensors: they aren't read yet, and None stands for each.
    The value of a PerRank part is None where the checkpoint has none for this rank.
    """
    if isinstance(state, PerRank):
        if isinstance(stored, PerRankRef):
            ask(state.value, per_rank.get(stored.fqn), {})
    elif has_state_dict(state):
        if callable(check := getattr(state, "check_state_dict", None)) and stored is not None:
            check(substitute(stored, lambda leaf: _plain(leaf, per_rank)))
    elif isinstance(state, Mapping) and isinstance(stored, Mapping):
        for key, value in state.items():
            ask(value, stored.get(key), per_rank)
    elif type(state) in (list, tuple) and type(stored) is type(state):
        for value, its in zip(state, stored, strict=False):
            ask(value, its, per_rank)


def _plain(leaf: Any, per_rank: Mapping[str, Any]) -> Any:
    if isinstance(leaf, TensorRef):
        return None
    if isinstance(leaf, PerRankRef):
        own = per_rank.get(leaf.fqn)
        return PerRank(None if own is None else substitute(own, lambda x: _plain(x, {})))
    return leaf
