"""Spreads the writing of one save over a time, so that training hardly notices it.

Written by the copying thread alone. Others only set flags: a trainer must never wait for a lock
that a thread of low priority holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from ckpt.types import Clock

HURRY_FROM = 0.8
"""The pressure from which on nothing waits any more."""
_TICK_S = 0.05  # how often a wait looks at the pressure again
_SLACK_S = 0.1
_SLACK = 0.1  # of the target
_LEAST_BYTES_PER_S = 256 << 20  # what an unpaced save is expected to reach before it's called late


class Pace:
    """When the next block of one save may be copied. The time starts when this is made.

    Args:
        target_s: how long the whole should take; 0 is as fast as possible.
        total_bytes: of the whole.
        pressure: how full the overlay is, 0 to 1: what is left to wait shrinks by it.
        limit_bytes_per_s: kept whatever the hurry.
        pause: waits for so many seconds, or less; a test's clock may jump instead.
    """

    def __init__(  # noqa: PLR0913 - the two last are keyword-only and have defaults
        self,
        target_s: float,
        total_bytes: int,
        pressure: Callable[[], float],
        clock: Clock,
        *,
        limit_bytes_per_s: int | None = None,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._total_bytes = max(1, total_bytes)
        self._pressure = pressure
        self._clock = clock
        self._limit = limit_bytes_per_s
        slowest_s = total_bytes / limit_bytes_per_s if limit_bytes_per_s else 0.0
        self._target_s = target_s
        self._expected_s = max(target_s, slowest_s, total_bytes / _LEAST_BYTES_PER_S)
        # Held from the start: to acquire it is to wait, to release it is to wake.
        wake = self._wake = threading.Lock()
        wake.acquire()
        # Not by `self`: a cycle would hold what `pressure` belongs to, the snapshot.
        self._pause = pause or (lambda seconds: wake.acquire(timeout=seconds))
        self._started_s = self._due_s = self._free_s = self._left_s = clock.monotonic()
        self._done_bytes = 0
        self._hurried = False
        self._closed = False

    def wait(self, done_bytes: int) -> None:
        """Wait until more than the `done_bytes` that were copied so far is due."""
        step, self._done_bytes = done_bytes - self._done_bytes, done_bytes
        share_s = self._target_s * step / self._total_bytes
        if self._limit:
            # Counted from the end of the last wait: time that was lost earns no burst.
            self._free_s = max(self._free_s, self._left_s) + step / self._limit
        while not self._closed:
            due_s = self._due_s
            if not self.hurried:
                due_s += share_s * (1.0 - self._pressure())
            left_s = max(due_s, self._free_s if self._limit else due_s) - self._clock.monotonic()
            if left_s <= 0:
                self._due_s = due_s
                break
            self._pause(min(left_s, _TICK_S))
        self._left_s = self._clock.monotonic()

    def hurry(self) -> None:
        """From any thread: wait no more than the limit asks for. Never blocks."""
        self._hurried = True
        self._release()

    def close(self) -> None:
        """From any thread: end the wait, whatever the limit says. Never blocks."""
        self._closed = True
        self._release()

    @property
    def hurried(self) -> bool:
        """Nothing is to wait any more, the limit aside."""
        return self._hurried or self._closed or self._pressure() >= HURRY_FROM

    @property
    def late_s(self) -> float:
        """Seconds behind the schedule; negative when ahead of it."""
        planned_s = self._expected_s * self._done_bytes / self._total_bytes
        return self._clock.monotonic() - self._started_s - planned_s

    @property
    def slack_s(self) -> float:
        """How late the writing may be before it needs help."""
        return _SLACK_S + _SLACK * self._expected_s

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # nobody waits, or is awake already
            self._wake.release()
