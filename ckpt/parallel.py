"""The same call on many things, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(fn: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """`fn` of each item, in order; the first error ends it.

    One at a time where the interpreter is ending: a pool takes nothing then, but the last save of
    a process that forgot close() must still be committed.
    """
    if len(items) < 2 or workers < 2:
        yield from map(fn, items)
        return
    with ThreadPoolExecutor(min(workers, len(items))) as pool:
        try:
            results = pool.map(fn, items)
        except RuntimeError:
            results = map(fn, items)
        yield from results
