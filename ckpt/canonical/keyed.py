"""TorchRec's keyed optimizers: their groups, and the state that their state dicts don't have.

They save state by their parameters' keys, and leave out their groups, since each rank has other parameters.
So that no learning rate is lost, what is stored has the groups of each rank beside the state, and a restore
joins them by key:
{"state": {key: {...}}, "groups": {rank: [{"params": [key, ...], "class": ..., "lr": ...}]}}.
TorchRec is found in `sys.modules`: who has one of its optimizers has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt.canonical.cuts import empty_among
from ckpt.canonical.optimizers import CLASS, class_of

GROUPS = "groups"
WRAPPERS = "wrappers"
"""State that a wrapper keeps beside what it saves, as a WarmupOptimizer around a CombinedOptimizer does."""


def is_keyed(value: Any) -> bool:
    """Is it a `torchrec.optim.keyed.KeyedOptimizer`, whatever it wraps or combines?"""
    return _is_a(value, "KeyedOptimizer")


def taken_keyed(tree: Any, optimizer: Any, rank: int) -> Any:
    """What is stored of a keyed optimizer whose state dict is `tree`."""
    if not isinstance(tree, Mapping) or "state" not in tree or {GROUPS, WRAPPERS} & set(tree):
        return tree  # a class of its own, with a state dict of its own
    rest = {k: v for k, v in tree.items() if k != "param_groups"}
    beside = {place: held for place, one in nest(optimizer) if (held := _beside(one))}
    stored = {**rest, GROUPS: {rank: groups(optimizer)}}
    return {**stored, WRAPPERS: beside} if beside else stored


def groups(optimizer: Any) -> list[dict[str, Any]]:
    """Class and options of each group, with the keys of its parameters, in the order of `groups_of`."""
    keys = keys_of(optimizer)
    return [
        {
            **{k: v for k, v in group.items() if k not in ("params", "param_names")},
            CLASS: kind_of(leaf),
            "params": [keys[id(p)] for p in group["params"] if id(p) in keys],
        }
        for leaf, group in groups_of(optimizer)
    ]


def plain_of(stored: Mapping[Any, Any]) -> dict[Any, Any]:
    """The stored state of a keyed optimizer as that of one plain optimizer; of all ranks together."""
    listed = [g for of_rank in stored[GROUPS].values() for g in of_rank]
    seen: set[str] = set()
    merged = []
    for group in listed:
        new = [k for k in group["params"] if k not in seen]
        seen.update(new)
        if new:
            merged.append({k: v for k, v in group.items() if k != CLASS} | {"params": new})
    state = {k: v for k, v in stored["state"].items() if k in seen}
    kinds = dict.fromkeys(str(g[CLASS]) for g in listed)
    return {CLASS: " and ".join(kinds), "state": state, "param_groups": merged}


def groups_of(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(innermost keyed optimizer, one of its live groups)."""
    for _, one in nest(optimizer):
        if next(_inner(one), None) is None:
            for group in one.param_groups:
                yield one, group


def keyed_parameters(optimizer: Any) -> dict[str, Any]:
    """By the keys of the state dict, which is that of what wrappers are around."""
    while not _combines(optimizer) and (inner := next(_inner(optimizer), None)) is not None:
        optimizer = inner[1]
    found: dict[str, Any] = optimizer.params
    return found


def trained_parameters(optimizer: Any) -> dict[str, Any]:
    """Those in groups. One in no group stands for a wrapper's own state."""
    trained = {id(p) for _, group in groups_of(optimizer) for p in group["params"]}
    return {key: p for key, p in keyed_parameters(optimizer).items() if id(p) in trained}


def keys_of(optimizer: Any) -> dict[int, str]:
    """Keys by the ids of parameters."""
    return {id(p): key for key, p in keyed_parameters(optimizer).items()}


def kind_of(leaf: Any) -> str:
    """What computes the updates: the class of a torch optimizer, or the optimizer in a fused kernel."""
    kernel, inner = getattr(leaf, "_emb_module", None), getattr(leaf, "_optimizer", None)
    if kernel is not None and hasattr(kernel, "optimizer"):
        return f"fbgemm.{getattr(kernel.optimizer, 'name', kernel.optimizer)}"
    return class_of(inner if makes_state(leaf) else leaf)


def makes_state(leaf: Any) -> bool:
    """Is it around an optimizer that makes the state of a parameter at its first step?"""
    inner = getattr(leaf, "_optimizer", None)
    return isinstance(inner, torch.optim.Optimizer) and not is_keyed(inner)


def nest(optimizer: Any, place: str = "optimizer") -> Iterator[tuple[str, Any]]:
    """(place, keyed optimizer) of it and of all that it wraps or combines, from the outside in."""
    yield place, optimizer
    for name, inner in _inner(optimizer):
        yield from nest(inner, f"{place}.{name}")


def homes_of(optimizer: Any) -> dict[str, Any]:
    """By key: the innermost keyed optimizer that keeps the state of a parameter itself."""
    keys, homes = keys_of(optimizer), {}
    for _, one in nest(optimizer):
        if not _combines(one):
            homes.update({keys[id(p)]: one for p in one.params.values() if id(p) in keys})
    return homes


def give_keyed(optimizer: Any, loaded: Mapping[str, Any]) -> None:
    """Load what a restore has planned, in the form that is stored, with one list of groups: those here.

    `state` has an entry for each parameter that shall have one. State that isn't made yet is put where the
    first step would have put it, so that nobody has to take that step before.
    """
    parameters = keyed_parameters(optimizer)
    # Those of other ranks' parts keep what they have.
    empty = empty_among(trained_parameters(optimizer))
    for key, home in homes_of(optimizer).items():
        if key not in empty:
            _make_alike(home, parameters[key], loaded["state"].get(key))
    now = optimizer.state_dict()
    rest = {k: v for k, v in loaded.items() if k not in (GROUPS, WRAPPERS)}
    if empty:
        kept = {k: v for k, v in now["state"].items() if k in empty}
        rest["state"] = {**rest["state"], **kept}
    if "param_groups" in now:  # they get their options below: in each group that there is
        rest["param_groups"] = now["param_groups"]
    optimizer.load_state_dict(rest)
    for place, one in nest(optimizer):
        for key, entry in loaded.get(WRAPPERS, {}).get(place, {}).items():
            one.state[one.params[key]] = entry
    for (_, group), options in zip(groups_of(optimizer), loaded.get(GROUPS, ()), strict=False):
        for name, value in options.items():
            if name not in (CLASS, "params") and not _is_filled(group.get(name), value):
                group[name] = value


def _is_filled(live: Any, given: Any) -> bool:
    """Has a tensor, such as a learning rate, its value already? Then it stays the object that it is."""
    tensors = isinstance(live, torch.Tensor) and isinstance(given, torch.Tensor)
    return tensors and live.data_ptr() == given.data_ptr()


def _make_alike(home: Any, parameter: Any, entry: Mapping[str, Any] | None) -> None:
    """Have the state of a parameter there, or not, before it is filled: `load_state_dict` asks for that."""
    state = home.state
    if entry is None:
        if parameter in state:
            del state[parameter]
    elif parameter not in state or set(state[parameter]) != set(entry):
        state[parameter] = dict(entry)


def _beside(wrapper: Any) -> dict[str, Any]:
    """State of a wrapper's own parameters that what it wraps doesn't know of."""
    inner = next(_inner(wrapper), None)
    if inner is None or _combines(wrapper):
        return {}
    known = {id(p) for p in inner[1].params.values()}
    return {
        key: wrapper.state[p]
        for key, p in wrapper.params.items()
        if id(p) not in known and p in wrapper.state
    }


def _inner(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """The keyed optimizers that one wraps or combines, and where it has them."""
    if _combines(optimizer):
        yield from ((str(i), one) for i, (_, one) in enumerate(optimizer._optims))
    elif _is_a(optimizer, "OptimizerWrapper"):
        yield "_optimizer", optimizer._optimizer


def _combines(optimizer: Any) -> bool:
    return _is_a(optimizer, "CombinedOptimizer")


def _is_a(value: Any, name: str) -> bool:
    kind = getattr(sys.modules.get("torchrec.optim.keyed"), name, None)
    return kind is not None and isinstance(value, kind)
