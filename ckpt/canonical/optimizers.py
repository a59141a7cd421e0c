"""The state of torch's optimizers by the names of their parameters, to and fro.

torch.optim numbers parameters in the order in which a program happened to hand them over. What is stored
says names: {"class": ..., "state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}, the shape
that torch.distributed.checkpoint.state_dict has. A parameter of no module in the state has the name that
its group has for it (`param_names`), else it keeps its number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.canonical.names import ParameterNames

Name = str | int

CLASS = "class"


def is_optimizer(value: Any) -> bool:
    """Is it one of torch's kind, whose state dict numbers its parameters?"""
    groups = getattr(value, "param_groups", None)
    return isinstance(value, Optimizer) or (
        isinstance(groups, list)
        and isinstance(getattr(value, "state", None), Mapping)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    )


def class_of(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def parameters(optimizer: Any) -> list[torch.Tensor]:
    """By number, as in its state dict: one that is in it twice has the first of its numbers."""
    return [p for g in optimizer.param_groups for p in g["params"]]


def names_of(optimizer: Any, names: ParameterNames) -> list[Name]:
    """What each parameter is stored by, in the order of their numbers."""
    found: list[Name] = []
    number = 0
    taken: set[Name] = set()
    for group in optimizer.param_groups:
        given = group.get("param_names")
        for i, p in enumerate(group["params"]):
            name: Name | None = names.name(p)
            if name is None and given is not None and i < len(given):
                name = str(given[i])
            if name is None or (name in taken and names.name(p) is None):
                name = number
            taken.add(name)
            found.append(name)
            number += 1
    return found


def is_numbered(taken: Any, optimizer: Any) -> bool:
    """Is this state dict as torch makes it? Its class, or a hook, may have made another."""
    if not isinstance(taken, Mapping) or not {"state", "param_groups"} <= set(taken):
        return False
    groups, state = taken["param_groups"], taken["state"]
    live = optimizer.param_groups
    return (
        isinstance(state, Mapping)
        and isinstance(groups, list)
        and len(groups) == len(live)
        and all(
            isinstance(g, Mapping)
            and isinstance(n := g.get("params"), list)
            and len(n) == len(x["params"])
            and all(type(i) is int for i in n)
            for g, x in zip(groups, live, strict=True)
        )
    )


def named(taken: Mapping[str, Any], optimizer: Any, by_number: Sequence[Name]) -> dict[str, Any]:
    """A state dict with names in the place of numbers, and the optimizer's class."""
    groups = []
    for g in taken["param_groups"]:
        group = {k: v for k, v in g.items() if k != "param_names"}
        group["params"] = [by_number[n] for n in g["params"]]
        groups.append(group)
    count = len(by_number)
    state = {
        by_number[k] if type(k) is int and k < count else k: v for k, v in taken["state"].items()
    }
    rest = {k: v for k, v in taken.items() if k not in ("state", "param_groups")}
    return {CLASS: class_of(optimizer), **rest, "state": state, "param_groups": groups}


def numbered(tree: Mapping[str, Any], by_number: Sequence[Name]) -> dict[str, Any]:
    """What `load_state_dict` gets of a named state dict whose groups are in this optimizer's order."""
    numbers: dict[Name, int] = {}
    for n, name in enumerate(by_number):
        numbers.setdefault(name, n)
    rest = {k: v for k, v in tree.items() if k != CLASS}
    return {
        **rest,
        "state": {numbers.get(k, k): v for k, v in tree["state"].items()},
        "param_groups": [
            {**g, "params": [numbers[k] for k in g["params"]]} for g in tree["param_groups"]
        ],
    }


def keep_dtypes(optimizer: Any, given: Mapping[str, Any]) -> None:
    """After `load_state_dict`: torch has cast floating-point state to its parameter's dtype; undo that.

    See pytorch#43706. A tensor that the optimizer has made something else of is left as it is.
    """
    by_number = parameters(optimizer)
    for number, state in given["state"].items():
        if type(number) is int and number < len(by_number):
            parameter = by_number[number]
            _uncast(optimizer.state.get(parameter), state, parameter.dtype)


def _uncast(now: Any, given: Any, cast: torch.dtype) -> None:
    if not isinstance(now, dict) or not isinstance(given, Mapping):
        return
    for k, v in given.items():
        have = now.get(k)
        if isinstance(v, torch.Tensor) and isinstance(have, torch.Tensor):
            if have.dtype == cast != v.dtype and have.shape == v.shape:
                now[k] = v.to(have.device)
        else:
            _uncast(have, v, cast)
