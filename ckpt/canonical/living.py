"""The table-batched embeddings of this process, whoever holds them.

A state may hold their tensors only, `model.state_dict()`, and an optimizer over `model.parameters()`
lists their memory as its own though their backward changes it. So they are found by what they are.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle


def is_fused(module: nn.Module) -> bool:
    """Is it fbgemm's table-batched embedding, whose backward pass updates the tables?"""
    return _is_fused_kind(type(module))


def _is_fused_kind(kind: type) -> bool:
    return any(c.__name__ == "SplitTableBatchedEmbeddingBagsCodegen" for c in kind.__mro__)


def _kinds(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """All classes derived from this one."""
    for derived in kind.__subclasses__():
        yield derived
        yield from _kinds(derived)


class LivingLookups:
    """Finds those that exist when it begins, and each that is made after."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None
        self._looked = False

    def __iter__(self) -> Iterator[nn.Module]:
        self._look()
        return iter(tuple(self._modules))

    def forget(self) -> None:
        """Find no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _look(self) -> None:
        """Go through all objects, once: some ten milliseconds for each million of them."""
        if self._hook is None:
            self._hook = register_module_parameter_registration_hook(self._registered)
        if not self._looked and "fbgemm_gpu" in sys.modules:
            self._looked = True
            # A list: whoever looks at this moment in another thread would break a tuple in the making.
            fused = [kind for kind in _kinds(nn.Module) if _is_fused_kind(kind)]
            if fused:  # nearly all that refers to a class is of it
                found = [m for m in gc.get_referrers(*fused) if isinstance(m, nn.Module)]
                self._modules.update(filter(is_fused, found))

    def _registered(self, module: nn.Module, _name: str, _parameter: Any) -> None:
        if is_fused(module):
            self._modules.add(module)
