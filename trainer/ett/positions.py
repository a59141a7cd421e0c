"""Which global batches a run has trained on, whatever order its attempts took them in."""

from __future__ import annotations

import bisect


class Trained:
    """A set of batch positions, kept as disjoint stretches (first, last]."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> int:
        """Add the batches (first, last] and return how many of them are new."""
        if last <= first:
            return 0
        a = bisect.bisect_left(self._lasts, first)
        b = bisect.bisect_right(self._firsts, last)
        known = sum(min(last, self._lasts[i]) - max(first, self._firsts[i]) for i in range(a, b))
        new = (
            (min(first, self._firsts[a]), max(last, self._lasts[b - 1])) if a < b else (first, last)
        )
        self._firsts[a:b], self._lasts[a:b] = [new[0]], [new[1]]
        return last - first - known
