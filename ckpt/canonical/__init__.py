"""The form in which objects of a state are stored: by names, whatever made them and however they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt.canonical.kernels import Kernels
from ckpt.canonical.keyed import is_keyed, taken_keyed
from ckpt.canonical.names import ParameterNames, modules_in
from ckpt.canonical.optimizers import Name, is_numbered, is_optimizer, named, names_of, parameters


class Canonical:
    """Takes the state of objects in canonical form, save after save.

    `look` at a state before `taken` of what is in it: names come from its modules.

    rank: of this process: whose are the groups of a keyed optimizer, and the fused kernels.
    kernels: those of this process, shared by all who ask for them.
    """

    def __init__(self, rank: int = 0, kernels: Kernels | None = None) -> None:
        self.rank = rank
        self.kernels = kernels or Kernels()
        self._modules: list[tuple[str, Any]] = []
        self._names: ParameterNames | None = None
        self._known: dict[int, tuple[Any, list[torch.Tensor], list[Name]]] = {}

    def look(self, state: Mapping[str, Any]) -> Canonical:
        modules = list(modules_in(state))
        if [(k, id(m)) for k, m in modules] != [(k, id(m)) for k, m in self._modules]:
            self._modules, self._names, self._known = modules, None, {}
        return self

    @property
    def modules(self) -> list[tuple[str, Any]]:
        """(key in the state, module)."""
        return self._modules

    @property
    def names(self) -> ParameterNames:
        if self._names is None:
            self._names = ParameterNames(self._modules)
        return self._names

    def taken(self, value: Any) -> Any:
        """The state of an object that saves itself. Its `state_dict()` is called once."""
        tree = value.state_dict()
        if is_keyed(value):
            return taken_keyed(tree, value, self.rank)
        if is_optimizer(value) and is_numbered(tree, value):
            return named(tree, value, self.by_number(value))
        return tree

    def by_number(self, optimizer: Any) -> list[Name]:
        """What each parameter of an optimizer is stored by; found anew when they aren't the same."""
        now = parameters(optimizer)
        known = self._known.get(id(optimizer))
        if (
            known is not None
            and known[0] is optimizer
            and list(map(id, known[1])) == list(map(id, now))
        ):
            return known[2]
        self._names = None  # a layer may be new
        found = names_of(optimizer, self.names)
        self._known[id(optimizer)] = optimizer, now, found
        return found
