"""Where the training thread is among the places at which it could stop, and how far it may go.

A place is the end of a step (`tick`), a poll in a phase that trains nothing (`tick`, too), or where a step
would begin (`begins`). The training thread comes to places; a watcher thread learns from here where it is,
and says where to stop (trainer.preemption).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any


class Places:
    """The places of one rank.

    Args:
        arrived: called when it waits for others where a step would begin.
        waiting: entered while it waits at a place.
    """

    def __init__(
        self, arrived: Callable[[], object], waiting: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._arrived = arrived
        self._waiting = waiting
        self._lock = threading.Lock()
        self._ticks = 0
        self._step = 0  # that was counted last
        self._free = False  # the next step begins only where `begins` is called
        self._held = False  # in there, with a batch
        self._stopped = False  # the training thread was told to stop
        self._proposal: int | None = None  # a tick
        self._stop: int | None = None  # a tick
        self._least: int | None = None  # the step that this rank could stop at, first of all
        self._stop_step: int | None = None  # in the place of a tick, where a loop has raised
        self._known = threading.Event()  # the stop is known, or will never be
        self._together = threading.Event()  # the last step may be begun

    # -- on the training thread -----------------------------------------------------------------

    def tick(self, step: int | None, *, free: bool) -> bool:
        """See `Preemption.tick`."""
        with self._lock:
            self._ticks += 1
            if step is not None:
                self._step, self._free = step, free
        return self._stops(begin=False)

    def begins(self) -> bool:
        """See `Preemption.begins`."""
        return self._stops(begin=True)

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stops_whole(self) -> bool:
        """All ranks stop at the step that was counted last, whose state this rank has."""
        with self._lock:
            self._stopped |= self._stop_step is not None and self._step == self._stop_step
            return self._stopped

    def _stops(self, *, begin: bool) -> bool:
        while True:
            with self._lock:
                event = self._awaited(begin=begin)
                if event is None:
                    here = self._stop is not None and self._ticks >= self._stop
                    here |= self._stop_step is not None and self._step >= self._stop_step
                    self._stopped |= here
                    self._free &= not begin
                    self._held = False
                    return here
                self._held = begin
            if begin:
                self._arrived()
            with self._waiting():
                event.wait()

    def _awaited(self, *, begin: bool) -> threading.Event | None:
        """What must be known before this rank passes a place; None: it may."""
        if self._proposal is None:
            return None
        if not self._known.is_set():
            if self._least is not None:
                waits = self._step >= self._least
            else:
                waits = self._ticks + begin >= self._proposal
            return self._known if waits else None
        last = self._stop is not None and self._ticks == self._stop - 1
        return self._together if begin and last and not self._together.is_set() else None

    # -- on the watcher thread ------------------------------------------------------------------

    def propose(self) -> int:
        """The tick that comes next. This rank doesn't pass it before the stop is known."""
        with self._lock:
            self._proposal = self._ticks + 1
            return self._proposal

    def stop_at(self, tick: int) -> None:
        """All ranks stop there; the step before it is begun together, see `begin_last`."""
        with self._lock:
            self._stop = tick
        self._known.set()

    def ready(self) -> bool:
        """Has this rank a batch for its last step, or doesn't it say?"""
        with self._lock:
            there = self._stop is None or self._ticks >= self._stop
            return there or not self._free or self._held

    def begin_last(self) -> None:
        """The last step may be begun."""
        self._together.set()

    def least(self, *, out: bool, whole: bool) -> dict[str, Any]:
        """The step that this rank could stop at, first of all. It passes no place beyond that for now.

        out: its loop has raised; whole: with the state of the step that it counted last.
        """
        with self._lock:
            self._known.clear()
            fixed = out or self._stopped
            self._least = self._step + (not fixed and not self._free)
            return {"step": self._least, "fixed": fixed, "whole": whole or not out}

    def settle(self, step: int | None) -> None:
        """All ranks stop at this step, in the place of the tick; None: they don't agree on any."""
        with self._lock:
            self._stop, self._stop_step = None, step
        self.release()

    def release(self) -> None:
        """Nothing more will be known."""
        self._known.set()
        self._together.set()

    def forget(self) -> None:
        """In a forked child: a lock may have been held, and nobody is asked."""
        self._lock, self._proposal = threading.Lock(), None
        self._known, self._together = threading.Event(), threading.Event()


def where_all_stop(told: Sequence[Mapping[str, Any]]) -> int | None:
    """What `least` says of all ranks: the step of those that can't go on, if all can stop there."""
    fixed = {p["step"] for p in told if p["fixed"]}
    if len(fixed) != 1 or not all(p["whole"] for p in told):
        return None
    (step,) = fixed
    return int(step) if all(p["step"] <= step for p in told) else None
