"""Finds in-place writes to guarded tables that nobody announced, by torch's version counters.

Each in-place operation counts its tensor's `_version` up, through whatever view of it; what goes
through `.data` or another library's pointers doesn't, and only the sampled proof can find it. So
between one announced change and the next the counters must stand still. A torch optimizer's
step counts, so the counters are read anew after it. fbgemm's fused updates don't, which is
seen on a group's first two updates before it's relied on. Views of one tensor share a counter:
a write to one table of a fused lookup shows on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt.rows.pool import Table

Component = tuple[Table, int]
"""A table and the number of one of its components."""


class Versions:
    """The counters of one group's components, and what they should be.

    All calls are the training side's, except for `differing`.

    Args:
        tables: of the group.
        report: told the components that were found written to, on the training thread.
    """

    def __init__(
        self, tables: Sequence[Table], report: Callable[[Sequence[Component]], None]
    ) -> None:
        self._report = report
        self._tensors = [
            (t, k, c)
            for t in tables
            for k, c in enumerate(t.components)
            if not c.is_inference()  # torch counts nothing there
        ]
        # None: they may be anything, since a step or an announced edit is going on. Each tuple is
        # a new one, by which `differing` sees that training has gone on.
        self._expected: tuple[int, ...] | None = None
        self._at_update: tuple[int, ...] | None = None
        self._silent = False

    def settle(self) -> None:
        """From now on the counters stand still: a snapshot opens, or a step has ended."""
        now = self._read()
        self._look(now)
        self._expected = now

    def release(self) -> None:
        """A step begins, which may write until `settle`; one that raises leaves it at that."""
        self._look(self._read())
        self._expected = None

    def forgive(self) -> None:
        """An edit was announced: nothing is checked until the next step's end or snapshot."""
        self._expected = None

    def ignore(self) -> None:
        """Check nothing from now on: whether these tensors' updates count isn't known."""
        self._tensors = []
        self._expected = None

    def before_update(self) -> None:
        """A fused update follows. Until one is known not to count, it's taken as an edit."""
        if self._silent and self._expected is not None:
            return
        now = self._read()
        self._look(now)
        self._silent = self._silent or now == self._at_update
        self._at_update = now
        self._expected = now if self._silent else None

    def differing(self) -> list[Component]:
        """The components written to since the last announced change. Runs on a persist thread."""
        while (expected := self._expected) is not None:
            found = self._compare(expected, self._read())
            if self._expected is expected:
                return found
        return []

    def _look(self, now: tuple[int, ...]) -> None:
        if self._expected is not None and self._expected != now:
            self._report(self._compare(self._expected, now))

    def _compare(self, expected: tuple[int, ...], now: tuple[int, ...]) -> list[Component]:
        return [
            (table, k)
            for (table, k, _), e, n in zip(self._tensors, expected, now, strict=True)
            if e != n
        ]

    def _read(self) -> tuple[int, ...]:
        return tuple([c._version for _, _, c in self._tensors])
