"""Finds in-place writes to guarded tables that nobody announced, by torch's version counters.

Each in-place operation counts its tensor's `_version` up, through whatever view of it; what goes
through `.data` or another library's pointers doesn't, and only prints and stretches can find it (see
ckpt/proof.py). So between one announced change and the next the counters must stand still. An
optimizer's step or a fused update may count or not: it's between `release` and `settle`, of which
one comes right before it and one right after. Views of one tensor share a counter: a write to
one table of a fused lookup shows on all of them. But what a DTensor holds counts by itself, so the
state's own tensors are watched as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ckpt.rows.pool import Table

Component = tuple[Table, int]
"""A table and the number of one of its components."""
Watched = tuple[Table, int, torch.Tensor]
"""A component and a tensor of its memory."""


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
        self._own = _counted((t, k, c) for t in tables for k, c in enumerate(t.components))
        self._watched = self._own
        # None: they may be anything, since an update or an announced edit is going on. Each one is
        # a new object, by which `differing` sees that training has gone on.
        self._expected: _Expected | None = None

    def settle(self) -> None:
        """From now on the counters stand still: a snapshot opens, or an update has ended."""
        if self._look():
            self._expected = _Expected(self._watched)

    def watch(self, aliases: Iterable[Watched]) -> None:
        """`settle`, and watch these tensors beside the components until the next call."""
        self._look()
        self._watched = [*self._own, *_counted(aliases)]
        self._expected = _Expected(self._watched)

    def release(self) -> None:
        """An update begins, which may write until `settle`; one that raises leaves it at that."""
        self._look()
        self._expected = None

    def forgive(self) -> None:
        """An edit was announced: nothing is checked until the next step's end or snapshot."""
        self._look()  # an earlier one that wasn't announced stays found
        self._expected = None

    def differing(self) -> list[Component]:
        """The components written to since the last announced change. Runs on a persist thread."""
        while (expected := self._expected) is not None:
            found = expected.differing()
            if self._expected is expected:
                return found
        return []

    def _look(self) -> bool:
        """Report what has changed since `settle`. False if nothing has, and it's known what is expected."""
        if self._expected is None:
            return True
        found = self._expected.differing()
        if found:
            self._report(found)
        return bool(found)


class _Expected:
    """Tensors and their counters at one moment."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self.counts = _read(watched)

    def differing(self) -> list[Component]:
        """The components whose counters are others by now, each once."""
        now = _read(self._watched)
        if now == self.counts:
            return []
        pairs = zip(self._watched, self.counts, now, strict=True)
        return list(dict.fromkeys((table, k) for (table, k, _), was, n in pairs if was != n))


def _read(watched: Sequence[Watched]) -> tuple[int, ...]:
    return tuple([tensor._version for _, _, tensor in watched])


def _counted(watched: Iterable[Watched]) -> list[Watched]:
    """Without inference tensors, which have no counter."""
    return [w for w in watched if not w[2].is_inference()]
