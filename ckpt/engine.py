"""The one owner of threads: a bounded queue of staged saves and the threads that persist them.

Order is the order of save(); one persist at a time, and whoever waits for it hurries it. An arena
belongs to the trainer while it stages, then to the queue, and comes back when its save has ended,
well or not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckpt.config import Priority, WhenBusy
from ckpt.events import LogSink
from ckpt.threads import WriteThreads, use_one_core
from ckpt.types import EventSink

Slot = TypeVar("Slot")
_END_S = 10.0
_WRITERS = 2  # one doesn't reach a disk's speed while it digests, and more bring nothing


@dataclass
class Job(Generic[Slot]):
    """Work for the persist thread. None of the three raises.

    `run` does it; `drop` ends it without running; `after` comes when the slot is free again.
    """

    run: Callable[[], None]
    drop: Callable[[str], None]
    slot: Slot
    after: Callable[[], None] = lambda: None


class Engine(Generic[Slot]):
    """Runs jobs in order on one background thread.

    Args:
        slots: the staging memory; as many jobs may be pending.
        when_busy: what `acquire` does when no slot is free.
        priority: of the threads while they write, see CheckpointConfig.persist_priority.
        sink: hears if the system refuses that priority.
        idle: called on the thread when it has had nothing to do for `idle_s`, again and again. Must not
            raise.
    """

    def __init__(  # noqa: PLR0913 - all but the first two have defaults
        self,
        slots: list[Slot],
        when_busy: WhenBusy,
        priority: Priority = "idle",
        sink: EventSink | None = None,
        *,
        idle: Callable[[], None] | None = None,
        idle_s: float = 60.0,
    ) -> None:
        self.threads = WriteThreads(_WRITERS, priority, sink or LogSink())
        self._free = deque(slots)
        self._when_busy = when_busy
        self._queue: deque[Job[Slot]] = deque()
        self._running = False
        self._after = False  # the slot of a job is free, and what comes after it goes on
        self._closed = False
        self._idle = idle
        self._idle_s = idle_s if idle is not None else None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="sidestage-persist", daemon=True)
        self._thread.start()

    def acquire(self, timeout_s: float) -> Slot | None:
        """A free slot by policy: wait for one, take the newest waiting job's, or None.

        None also when waiting took longer than `timeout_s`.
        """
        job = None
        with self._changed:
            if self._free:
                return self._free.popleft()
            if self._when_busy == "skip":
                return None
            if self._when_busy == "coalesce" and self._queue:
                job = self._queue.pop()
        if job is not None:
            # Without the lock: it tells other ranks and whoever listens, which may take long.
            job.drop("a newer save took its place")
            return job.slot
        with self.threads.hurried(), self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout_s):
                return None
            return self._free.popleft()

    def release(self, slot: Slot) -> None:
        """Give back a slot that no job was made of."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def submit(self, job: Job[Slot]) -> None:
        self.threads.prepare()
        with self._changed:
            self._queue.append(job)
            self._changed.notify_all()

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._queue) + self._running

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False if the deadline passes first. Hurries what is."""
        with self.threads.hurried(), self._changed:
            return self._changed.wait_for(
                lambda: not (self._queue or self._running or self._after), timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Drain, then end the thread. What is still waiting at the deadline is dropped."""
        drained = self.drain(timeout_s)
        with self._changed:
            self._closed = True
            left, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        for job in left:
            job.drop(f"close() gave up after {timeout_s:g} s")
        if drained:
            self._thread.join(min(timeout_s, _END_S))  # `idle` may be with a store that hangs
        return drained

    def _loop(self) -> None:
        use_one_core()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed, self._idle_s)
                job = self._queue.popleft() if self._queue else None
                if job is not None:
                    self._running = True
                elif self._closed:
                    break
            if job is None:
                if self._idle is not None:
                    self._idle()
                continue
            job.run()
            with self._changed:
                self._running, self._after = False, True
                self._free.append(job.slot)
                self._changed.notify_all()
            job.after()
            with self._changed:
                self._after = False
                self._changed.notify_all()
        self.threads.close()
