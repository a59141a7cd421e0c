"""The form in which objects of a state are stored: by names, whatever made them and however they are cut."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt.canonical.cuts import Cuts, empty_among
from ckpt.canonical.kernels import Kernels
from ckpt.canonical.keyed import is_keyed, taken_keyed, trained_parameters
from ckpt.canonical.names import ParameterNames, modules_in, structure_of
from ckpt.canonical.optimizers import Name, is_numbered, is_optimizer, named, names_of, parameters
from ckpt.tree import FlatState, flatten, leaf_of


class Canonical:
    """Takes the state of objects in canonical form, save after save.

    `look` at a state before `taken` of what is in it: names come from its modules.

    rank: of this process: whose are the groups of a keyed optimizer, and the fused kernels.
    kernels: those of this process, shared by all who ask for them.
    """

    def __init__(self, rank: int = 0, kernels: Kernels | None = None) -> None:
        self.rank = rank
        self.kernels = kernels or Kernels()
        self.cuts = Cuts()
        self._modules: list[tuple[str, Any]] = []
        self._names: ParameterNames | None = None
        self._structure: list[Any] = []
        self._compared = False
        self._known: dict[int, _Known] = {}

    def look(self, state: Mapping[str, Any]) -> Canonical:
        self._modules, self._names, self._compared = list(modules_in(state)), None, False
        self.cuts.forget()
        return self

    def release(self) -> None:
        """Let go of the state. What is kept until the next `look` keeps nothing of it alive."""
        self._modules, self._names = [], None
        self.cuts.forget()

    @property
    def modules(self) -> list[tuple[str, Any]]:
        """(key in the state, module)."""
        return self._modules

    @property
    def names(self) -> ParameterNames:
        if self._names is None:
            self._names = ParameterNames(self._modules)
        return self._names

    def flat(self, state: Mapping[str, Any]) -> FlatState:
        """A state taken apart, see `flatten`; it is kept until `release`."""
        if isinstance(state, Mapping):
            self.look(state)
        flat = flatten(state, self.rank, self.taken)
        sources = [x.source for x in flat.leaves.values()]
        for name, part in self.cuts.parts(list(flat.leaves), sources).items():
            flat.leaves[name] = leaf_of(name, part, per_rank=False)
        return flat

    def taken(self, value: Any, path: str) -> Any:
        """The state of an object at `path` that saves itself. Its `state_dict()` is called once."""
        tree = value.state_dict()
        if is_keyed(value):
            return self._whole(taken_keyed(tree, value, self.rank), path, trained_parameters(value))
        if is_optimizer(value) and is_numbered(tree, value):
            names = self.by_number(value)
            of = dict(zip(reversed(names), reversed(parameters(value)), strict=True))
            return self._whole(named(tree, value, names), path, of)
        return tree

    def _whole(self, tree: Any, path: str, of: Mapping[Any, Any]) -> Any:
        """An optimizer's state without that of parameters of no element here. Notes what the rest is of."""
        if not isinstance(tree, Mapping) or not isinstance(state := tree.get("state"), Mapping):
            return tree
        if empty := empty_among(of):
            state = {k: v for k, v in state.items() if k not in empty}
            tree = {**tree, "state": state}
        self.cuts.note(path, state, of)
        return tree

    def by_number(self, optimizer: Any) -> list[Name]:
        """What each parameter of an optimizer is stored by; found anew where anything isn't as it was."""
        if not self._compared:
            self._compared = True
            if (structure := structure_of(self._modules)) != self._structure:
                self._structure, self._known = structure, {}
        now = list(map(id, parameters(optimizer)))
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer or known.parameters != now:
            names = names_of(optimizer, self.names)
            known = self._known[id(optimizer)] = _Known(weakref.ref(optimizer), now, names)
        return known.names


class _Known(NamedTuple):
    """The names of an optimizer's parameters, and what they were found for.

    Parameters by identity alone: a tensor with a weak reference can't be swapped any more. Another one
    in its place, in the optimizer as in the module, has its name too.
    """

    optimizer: weakref.ref[Any]
    parameters: list[int]
    names: list[Name]
