"""Hears of each call of a module's forward, however it is called, and leaves the module what it was.

A forward hook of torch's would do for `module(...)` only, would see what earlier hooks have made of the
output, and would keep the module from being scripted. So the module gets a `forward` of its own.
"""

from __future__ import annotations

import copy
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Call:
    """A forward that has just run, or raised: then without `output`.

    alone: no other thread was in one of the same module meanwhile.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    alone: bool


Heard = Callable[[Any, Call], None]


def listen(module: nn.Module, heard: Heard) -> Calls:
    """Have `heard(module, call)` called after each forward that runs as Python, until `stop`.

    Code that is being compiled passes over it: traced, it would break the user's graph.
    """
    forward = module.__dict__.get("forward")
    calls = getattr(forward, "__self__", None)
    if not isinstance(calls, Calls):
        calls = Calls(module, forward)
        module.__dict__["forward"] = calls.forward()
    calls.heard.append(heard)
    return calls


class Calls:
    """The `self` of a module's own forward. It holds no reference to the module, to make no cycle.

    before: a `forward` that the module itself had already.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any] | None) -> None:
        self._module = weakref.ref(module)
        self._before = before
        self._begun = 0
        self.running = 0
        """Calls under way, on whatever thread, the one that is being heard of among them."""
        self.heard: list[Heard] = []

    def forward(self) -> types.MethodType:
        """A method that TorchScript takes for the one of the module's class: same source, same names."""
        plain = type(self._lives()).forward
        function = types.FunctionType(_forward.__code__, plain.__globals__, "forward")
        function.__wrapped__ = plain  # type: ignore[attr-defined]
        return types.MethodType(function, self)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._lives()
        if torch.compiler.is_compiling():
            return self._plain(module, args, kwargs)
        self._begun += 1
        begun, alone = self._begun, not self.running
        self.running += 1
        output = None
        try:
            output = self._plain(module, args, kwargs)
        finally:
            try:
                call = Call(args, kwargs, output, alone and begun == self._begun)
                for heard in self.heard:
                    heard(module, call)
            finally:
                self.running -= 1
        return output

    def _plain(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def stop(self, heard: Heard) -> None:
        """Tell `heard` no more.

        The module gets its own forward back with the last, unless somebody has put another around this.
        """
        self.heard.remove(heard)
        module = self._module()
        if module is None or self.heard:
            return
        if getattr(module.__dict__.get("forward"), "__self__", None) is self:
            del module.__dict__["forward"]
            if self._before is not None:
                module.__dict__["forward"] = self._before

    def _lives(self) -> nn.Module:
        module = self._module()
        assert module is not None  # who calls its forward has it
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        """A copy of the module has no listeners."""
        return Calls(copy.deepcopy(self._lives(), memo), copy.deepcopy(self._before, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it's the module: its method is then that of the class, and nothing names us."""
        return operator.getitem, ((self._module(),), 0)


def _forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
    return self.call(args, kwargs)
