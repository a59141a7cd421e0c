"""Canonical names of parameters: what optimizer state is stored by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt.tree import PerRank

# What wrappers call the module that they stand for: it has no part in a name.
_TRANSPARENT = frozenset(
    (
        "_orig_mod",  # torch.compile
        "_checkpoint_wrapped_module",  # activation checkpointing
        "_fsdp_wrapped_module",
        "_dmp_wrapped_module",  # TorchRec
    )
)
_PLAIN = frozenset((int, float, str, bool, bytes, type(None), torch.Tensor, nn.Parameter))
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)  # theirs is called `module`


class ParameterNames:
    """The parameters of the modules in a state by name, and their names.

    A parameter's name is its path in its module, without what wrappers add (DistributedDataParallel,
    torch.compile, activation checkpointing), as torch.distributed.checkpoint.state_dict has it. Where two
    modules of the state have the same name for different parameters, the module's key in the state goes
    before it. A shared parameter has the first of its names, and is found by all of them.

    Args:
        modules: (key in the state, module), in the order of the state.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._found: dict[str, torch.Tensor] = {}  # by the names that are unique
        self._names: dict[int, str] = {}
        self._keys: dict[int, tuple[str, ...]] = {}
        self._held = [m for _, m in modules]  # so that the ids stay theirs, as long as this lives
        within: dict[str, dict[int, torch.Tensor]] = {}
        named = [(key, name, p) for key, m in modules for name, p in _parameters(m, "", set())]
        for _, name, p in named:
            within.setdefault(name, {})[id(p)] = p
        for key, name, p in named:
            full = f"{key}.{name}" if key else name
            self._found.setdefault(full, p)
            self._keys[id(p)] = (*self._keys.get(id(p), ()), full)
            if len(within[name]) == 1:
                self._found.setdefault(name, p)
            self._names.setdefault(id(p), name if len(within[name]) == 1 else full)

    def name(self, parameter: torch.Tensor) -> str | None:
        """None if it is in none of the modules."""
        return self._names.get(id(parameter))

    def find(self, name: str) -> torch.Tensor | None:
        """The parameter that has this name, alone or behind its module's key."""
        return self._found.get(name)

    def keys(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Its names behind those of the modules in the state."""
        return self._keys.get(id(parameter), ())


def modules_in(state: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """(key, module) of the modules of a state that are there themselves, in their order."""
    return _modules_in(state, "", set())


def _modules_in(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
        return
    if not isinstance(value, Mapping | list | tuple):
        return
    values = value.values() if isinstance(value, Mapping) else value
    # Of large containers of plain values nothing but the types is looked at.
    if set(map(type, values)) <= _PLAIN or id(value) in above:
        return
    above = above | {id(value)}
    for k, v in value.items() if isinstance(value, Mapping) else enumerate(value):
        v = v.value if isinstance(v, PerRank) else v  # noqa: PLW2901
        if isinstance(v, nn.Module | Mapping | list | tuple):
            yield from _modules_in(v, f"{path}.{k}" if path else str(k), above)


def structure_of(modules: Sequence[tuple[str, nn.Module]]) -> list[Any]:
    """What the names of parameters follow from, to be compared: names and identities, nothing kept alive."""
    found: list[Any] = []
    seen: set[int] = set()
    for key, root in modules:
        found.append(key)
        left = [root]
        while left:
            module = left.pop()
            found.append(id(module))
            if id(module) in seen:
                continue
            seen.add(id(module))
            found += module._parameters
            found += map(id, module._parameters.values())
            found += module._modules
            left += [part for part in module._modules.values() if part is not None]
    return found


def _parameters(
    module: nn.Module, prefix: str, above: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter), those that are shared under each of their names."""
    if id(module) in above:
        return
    above = above | {id(module)}
    for name, p in module._parameters.items():
        if p is not None:
            yield f"{prefix}{name}", p
    for name, part in module._modules.items():
        if part is None:
            continue
        hidden = name in _TRANSPARENT or (name == "module" and isinstance(module, _WRAPPERS))
        yield from _parameters(part, prefix if hidden else f"{prefix}{name}.", above)
