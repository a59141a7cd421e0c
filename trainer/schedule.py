"""After which steps a session saves: every so many, or as often as loses least."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from ckpt import SaveHandle
from ckpt.checkpointer import SaveStats
from ckpt.coordinator import Coordinator
from ckpt.errors import BadInputError
from ckpt.types import Clock, CommitRef
from trainer.failures import Record
from trainer.interval import AutoInterval, lost_to_saves_s


class SaveSchedule:
    """When saves are due, the same on all ranks.

    Args:
        save_every: steps from one save to the next, or "auto": see trainer.interval.
    """

    def __init__(self, save_every: int | Literal["auto"], clock: Clock) -> None:
        if save_every != "auto" and save_every < 1:
            raise BadInputError(f'save_every = {save_every}: give at least 1, or "auto"')
        self._every = save_every
        self._clock = clock
        self._interval: AutoInterval | None = None
        self._lag_s: float | None = None
        self._newest: SaveHandle | None = None
        self._warm = False
        self._seconds = [0.0, 0.0]  # of steps, [without a save being written, with one]
        self._counts = [0, 0]

    def begin(self, step: int, coordinator: Coordinator, failures: Callable[[], Record]) -> None:
        """Training goes on from this step. `failures`: the run's record, asked on rank 0 where it matters."""
        if self._every != "auto":
            return
        record = failures() if coordinator.rank == 0 else Record(0, None)
        since_s = self._clock.time() if record.since_s is None else record.since_s
        self._interval = AutoInterval(
            coordinator, self._clock, failures=record.failures, since_s=since_s
        )
        self._interval.begin(step)

    def due(self, step: int, step_s: float, stats: SaveStats) -> bool:
        """Save after this step, which has just ended and took so long? Call after each, on every rank.

        step_s: without evaluation, saves and waits: see `Ledger.step_s`.
        """
        if self._every != "auto":
            return step % self._every == 0
        self._count(step_s)
        if self._interval is None or step < self._interval.next_look:
            return False
        block_s = None
        if saves := len(stats.blocked_s):
            waits_s = stats.fence_wait_s + stats.overlay_wait_s
            slower_s = lost_to_saves_s(self._seconds, self._counts)
            block_s = (sum(stats.blocked_s) + waits_s + slower_s) / saves
        return self._interval.due(step, block_s, self._lag_s)

    def _count(self, step_s: float) -> None:
        if self._warm:  # the first step of an attempt takes longer for reasons of its own
            writing = self._newest is not None and not self._newest.committed.done()
            self._seconds[writing] += step_s
            self._counts[writing] += 1
        self._warm = True

    def saved(self, handle: SaveHandle) -> None:
        """save() has just returned: time it until its commit."""
        if self._interval is None:
            return
        began_s = self._clock.monotonic()

        def done(committed: Future[CommitRef]) -> None:
            # One that was skipped or failed says nothing of how long a commit takes.
            if committed.exception() is None:
                self._lag_s = self._clock.monotonic() - began_s

        # Else it was skipped, and an older one may be being written.
        if not handle.committed.done():
            self._newest = handle
        handle.committed.add_done_callback(done)
