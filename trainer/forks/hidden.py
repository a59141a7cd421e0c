"""Modules that a fork has and its program hasn't imported yet: hidden until it does.

What an import leaves behind in a process (filters of warnings, handlers of logging's root, environment
variables) is kept with them and comes with the import, too: a program that sets logging up before it imports
torchrec finds nothing set up.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from trainer.forks.late import read_at_import


@dataclass
class Traces:
    """What is set for the whole process, now or as what has changed."""

    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    handlers: list[logging.Handler] = field(default_factory=lambda: list(logging.root.handlers))
    level: int = field(default_factory=lambda: logging.root.level)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    loggers: set[str] = field(default_factory=lambda: set(logging.root.manager.loggerDict))

    def since(self, before: Traces) -> Traces:
        """What is new or different here."""
        return Traces(
            [f for f in self.filters if f not in before.filters],
            [h for h in self.handlers if h not in before.handlers],
            self.level if self.level != before.level else logging.NOTSET,
            {k: v for k, v in self.environment.items() if before.environment.get(k) != v},
            self.loggers - before.loggers,
        )

    def leave(self) -> None:
        """Leave them in this process, as the import would."""
        for action, message, category, module, line in reversed(self.filters):
            texts = [getattr(text, "pattern", text) or "" for text in (message, module)]
            warnings.filterwarnings(action, texts[0], category, texts[1], line)
        if not logging.root.handlers:  # logging.basicConfig does nothing where there are some
            for handler in self.handlers:
                logging.root.addHandler(handler)
            if self.level:
                logging.root.setLevel(self.level)
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        for name in self.loggers:  # logging.config disables those that it doesn't know and finds
            logging.getLogger(name).disabled = False


class Hidden:
    """Modules that are there and not in sys.modules; a finder on sys.meta_path that gives them out.

    Args:
        modules: by full name, in the order of their import. A package comes with all that is inside it,
            and with the packages that it uses.
        traces: what imports have left, by the top-level name of what was imported.
    """

    def __init__(
        self, modules: Mapping[str, ModuleType], traces: Mapping[str, list[Traces]]
    ) -> None:
        self._packages: dict[str, dict[str, ModuleType]] = {}
        for name, module in modules.items():
            self._packages.setdefault(name.split(".")[0], {})[name] = module
        self._uses = {
            top: set(_used(inside.values())) & set(self._packages)
            for top, inside in self._packages.items()
        }
        self._traces = dict(traces)
        self._environment: dict[str, str] = {}

    def hide(self) -> None:
        """Hide them from here on."""
        for inside in self._packages.values():
            for name in inside:
                del sys.modules[name]
        finders: list[Any] = sys.meta_path
        finders.insert(0, self)

    def begin(self) -> None:
        """In a worker, right before its program."""
        self._environment = dict(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The hidden module of that name, where the program's own path leads to the same one."""
        module = self._packages.get(name, {}).get(name)
        if module is None:
            return None
        others = [f for f in sys.meta_path if f is not self]
        found = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        spec = module.__spec__
        if found is None or spec is None or _place(found) != _place(spec):
            return None
        found = copy.copy(found)
        found.loader = _Revealing(self, module, spec)  # type: ignore[assignment]
        return found

    def reveal(self, top: str) -> None:
        """The program imports it: its modules, those that it uses, and what their import leaves behind."""
        late = sorted(
            name
            for name in {*self._environment, *os.environ}
            if read_at_import(name) and self._environment.get(name) != os.environ.get(name)
        )
        self._environment = dict(os.environ)
        if late and os.environ.get("LOCAL_RANK") == "0":
            print(
                f"note: {', '.join(late)} changed by the program has no effect on {top}, which this worker "
                "is a fork with; set it for the launcher instead",
                file=sys.stderr,
            )
        shown: set[str] = set()
        todo = [top]
        while todo:
            one = todo.pop()
            if one not in shown:
                shown.add(one)
                todo += self._uses.get(one, ())
        for one in [p for p in self._packages if p in shown]:
            for name, module in self._packages.pop(one, {}).items():
                sys.modules.setdefault(name, module)
        for one in [t for t in self._traces if t in shown]:
            for traces in self._traces.pop(one, []):
                traces.leave()
        finders: list[Any] = sys.meta_path
        if not self._packages and self in finders:
            finders.remove(self)


class _Revealing:
    """Loads a module by showing it."""

    def __init__(self, hidden: Hidden, module: ModuleType, spec: ModuleSpec) -> None:
        self._hidden = hidden
        self._module = module
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the one that led here
        self._hidden.reveal(self._spec.name)


def _place(spec: ModuleSpec) -> object:
    """Where a module comes from; a namespace package comes from its folders."""
    return spec.origin or list(spec.submodule_search_locations or ())


def _used(modules: Iterable[ModuleType]) -> Iterator[str]:
    """Top-level names of what these modules hold: modules, functions and classes of others.

    Kinds are looked at by `type`, and modules in their dictionaries: to ask a lazy object would wake it up.
    """
    for module in modules:
        for value in list(vars(module).values()):
            kind = type(value)
            name: object = None
            if issubclass(kind, ModuleType):
                name = vars(value).get("__name__")
            elif kind in {FunctionType, BuiltinFunctionType}:
                name = value.__module__
            elif issubclass(kind, type):
                name = vars(value).get("__module__")
            if isinstance(name, str):
                yield name.split(".")[0]
