"""Generators that nobody has seeded: each process has its own, forks included."""

from __future__ import annotations

import gc
import random
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any


class Unseeded:
    """Generators that take their seed from the system while imports are made.

    One that a library seeds itself, with a number, is none of them: a fresh process has the same.
    """

    def __init__(self) -> None:
        self._randoms: weakref.WeakSet[random.Random] = weakref.WeakSet()
        self._drawn: set[int] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note those that are made in this block."""
        seed, randbits = random.Random.seed, secrets.randbits

        def noting(generator: random.Random, a: Any = None, version: int = 2) -> None:
            seed(generator, a, version)
            (self._randoms.discard if a is not None else self._randoms.add)(generator)

        def drawing(k: int) -> int:
            number = randbits(k)
            self._drawn.add(number)
            return number

        random.Random.seed = noting  # type: ignore[assignment, method-assign]
        secrets.randbits = drawing
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
            secrets.randbits = randbits
            # NumPy's SeedSequence has taken hold of it at import.
            drawer = sys.modules.get("numpy.random.bit_generator")
            if isinstance(getattr(drawer, "randbits", None), FunctionType):
                drawer.randbits = randbits  # type: ignore[union-attr]

    def renewals(self) -> list[Callable[[], object]]:
        """What to call in a fork, so that each of them begins anew."""
        renew: list[Callable[[], object]] = [generator.seed for generator in self._randoms]
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is not None:
            renew += [
                partial(_renew, o)
                for o in gc.get_objects()
                if issubclass(type(o), numpy_random.BitGenerator)  # to ask a proxy would wake it up
                and getattr(o.seed_seq, "entropy", None) in self._drawn
            ]
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            # Those of devices come with the device, and begin with the same number in each process.
            renew.append(torch.default_generator.seed)
        return renew


def _renew(bits: Any) -> None:
    """A NumPy bit generator as if it were made now: also what is spawned of it later."""
    fresh = type(bits)()
    bits.__setstate__((fresh.state, fresh.seed_seq))
