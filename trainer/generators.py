"""The random number generators that a loader's order of samples can come from, as plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_DEPTH = 3  # a loader's batch sampler's sampler


class Generators:
    """Torch's, Python's and NumPy's of this process, and those that a loader or its samplers hold.

    States are dicts of bytes and tuples, so that they can be looked at before a restore reads tensors.
    """

    def __init__(self, loader: Any) -> None:
        self._own = _held(loader)

    def state(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        return {
            "torch": _bytes(torch.get_rng_state()),
            "python": random.getstate(),
            "numpy": (str(kind), np.asarray(keys).tobytes(), *map(float, rest)),
            **self.own(),
        }

    def own(self) -> dict[str, Any]:
        """The state of those that the loader and its samplers hold."""
        return {"own": {name: _bytes(g.get_state()) for name, g in self._own.items()}}

    def set(self, state: Mapping[str, Any]) -> None:
        """What the state doesn't have stays as it is."""
        if "torch" in state:
            torch.set_rng_state(_tensor(state["torch"]))
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            kind, keys, position, has_gauss, gauss = state["numpy"]
            words = np.frombuffer(keys, dtype=np.uint32)
            np.random.set_state((kind, words, int(position), int(has_gauss), gauss))
        for name, stored in state.get("own", {}).items():
            if name in self._own:
                self._own[name].set_state(_tensor(stored))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What runs inside draws from them and leaves no trace."""
        before = self.state()
        try:
            yield
        finally:
            self.set(before)


def without_own(state: Mapping[str, Any]) -> dict[str, Any]:
    """The generators of the process alone."""
    return {name: value for name, value in state.items() if name != "own"}


def _held(thing: Any, name: str = "", depth: int = _DEPTH) -> dict[str, torch.Generator]:
    """Generators among the attributes of a loader and its samplers, by the path to each."""
    found: dict[str, torch.Generator] = {}
    for key, value in vars(thing).items() if hasattr(thing, "__dict__") else ():
        if isinstance(value, torch.Generator):
            found[f"{name}{key}"] = value
        elif key in ("sampler", "batch_sampler") and depth:
            found |= _held(value, f"{name}{key}.", depth - 1)
    return found


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.numpy().tobytes())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
