"""The threads that write, and their priority: they give way to training until they fall behind.

A thread at SCHED_IDLE that gets no core can't raise itself, so a watchdog at normal priority
does. No thread of normal priority ever waits here for one of low priority: flags, no locks.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch

from ckpt.config import Priority
from ckpt.pace import Pace
from ckpt.types import EventSink

TICK_S = 0.05
Work = Callable[[], None]
SetPolicy = Callable[[int, int], None]


class WriteThreads:
    """Some writer threads for one save at a time, and the watchdog. Threads start when first needed.

    Args:
        writers: how many threads `start` may keep busy at a time.
        priority: "idle" lowers the threads of a save while it is on schedule; "normal" never does.
        sink: hears once if this process may not use idle priority.
        set_policy: sets a thread's scheduling policy by its native id.
    """

    def __init__(
        self,
        writers: int,
        priority: Priority,
        sink: EventSink,
        *,
        set_policy: SetPolicy | None = None,
    ) -> None:
        self.writers = writers
        self._priority = priority
        self._sink = sink
        self._set_policy = set_policy or set_thread_policy
        self._low: int | None = None  # the policy of a lowered thread, once probed
        self._work: SimpleQueue[tuple[Work, Future[None]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._watchdog: threading.Thread | None = None
        self._active, self._closed = threading.Event(), threading.Event()
        self._pace: Pace | None = None
        self._members: tuple[int, ...] = ()
        self._lowered = False
        self._hurriers = 0
        self._waiting = threading.Lock()  # of those who wait, never taken by a writing thread

    def start(self, work: Work) -> Future[None]:
        """Begin `work` on a writer thread; the future has its end or its error.

        It runs in the caller's context, with the limits of its calls to the store (ckpt.storage.limits).
        """
        self._grow()
        done: Future[None] = Future()
        self._work.put((partial(contextvars.copy_context().run, work), done))
        return done

    @contextlib.contextmanager
    def paced(self, pace: Pace) -> Iterator[None]:
        """Lower the calling thread and the writers in this block, as long as they keep the pace.

        Call at normal priority, one block at a time, and start no threads in it: they would be low.
        """
        self._grow()
        self._watch()
        ids = [t.native_id for t in self._threads] + [threading.get_native_id()]
        self._members = tuple(n for n in ids if n is not None)
        self._pace = pace
        if self._hurriers:
            pace.hurry()
        self._active.set()
        try:
            if self._priority == "idle" and not pace.hurried:
                self._lower()
            yield
        finally:
            pace.close()
            self._raise()  # while the watchdog still looks: it would help a thread that starves here
            self._pace = None
            self._active.clear()
            self._raise()  # it may have lowered them in between

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Somebody waits: no pacing and normal priority, for this save and those that begin in here."""
        with self._waiting:
            self._hurriers += 1
        self.hurry()
        try:
            yield
        finally:
            with self._waiting:
                self._hurriers -= 1

    def prepare(self) -> None:
        """Start all threads, if they don't run yet. An interpreter that is ending starts none."""
        self._grow()
        self._watch()
        if self._priority == "idle":
            self._probe()

    def lift(self) -> None:
        """From any thread: normal priority for a moment, until the watchdog looks again."""
        if self._pace is not None:
            self._raise()

    def hurry(self) -> None:
        """From any thread: no pacing and normal priority for the save that is being written."""
        pace = self._pace
        if pace is not None:
            pace.hurry()
            self._raise()

    def check(self) -> None:
        """Raise the threads if the save is late or in a hurry, lower them once it is ahead again.

        The watchdog calls it every TICK_S.
        """
        pace = self._pace
        if pace is None or self._priority != "idle":
            return
        if pace.hurried or pace.late_s > (pace.slack_s if self._lowered else 0.0):
            self._raise()
        elif not self._lowered:
            self._lower()

    def close(self) -> None:
        """End the threads once what they do is done. Idempotent."""
        self._closed.set()
        self._active.set()
        for _ in self._threads:
            self._work.put(None)

    def _lower(self) -> None:
        low = self._probe()
        self._lowered = True
        for member in self._members:
            self._set_policy(member, low)
        if self._pace is None:  # it has ended, and its raising may have come before this
            self._raise()

    def _probe(self) -> int:
        """The policy of a lowered thread, found out once."""
        if self._low is None:
            self._low = os.SCHED_IDLE if _may_come_back() else os.SCHED_BATCH
            if self._low != os.SCHED_IDLE:
                self._sink.emit(
                    "idle_priority_refused",
                    detail="this process may not raise a thread from SCHED_IDLE: needs "
                    "CAP_SYS_NICE, or a hard limit on nice (ulimit -e) of 20; SCHED_BATCH is used",
                )
        return self._low

    def _raise(self) -> None:
        if self._low is None:
            return
        self._lowered = False
        for member in self._members:
            self._set_policy(member, os.SCHED_OTHER)

    def _grow(self) -> None:
        while len(self._threads) < self.writers:
            name = f"sidestage-write-{len(self._threads)}"
            thread = threading.Thread(target=self._loop, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                work()
            except BaseException as e:  # whoever waits for the future raises it
                done.set_exception(e)
            else:
                done.set_result(None)
            del item, work, done

    def _watch(self) -> None:
        if self._watchdog is None and self._priority == "idle":
            self._watchdog = threading.Thread(
                target=self._keep_watch, name="sidestage-watchdog", daemon=True
            )
            self._watchdog.start()

    def _keep_watch(self) -> None:
        while True:
            self._active.wait()
            if self._closed.wait(TICK_S):
                return
            try:
                self.check()
            except Exception as e:  # without it nobody would raise a thread that starves
                self._sink.emit("watchdog_failed", error=repr(e))


def set_thread_policy(native_id: int, policy: int) -> None:
    """Set the scheduling policy of a thread of this process, if it still runs and the system allows it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.sched_setscheduler(native_id, policy, os.sched_param(0))


def use_one_core() -> None:
    """Keep torch's operations of the calling thread on it.

    The threads that OpenMP starts for a lowered thread are lowered, and nobody would raise them.
    `torch.set_num_threads` would change the whole process.
    """
    torch.get_num_threads()  # sets this thread's number at its first use, over what is set below
    with contextlib.suppress(AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


def _may_come_back() -> bool:
    """Can a thread of this process be raised from SCHED_IDLE again? Tried on a scratch thread."""
    tried = threading.Event()
    thread = threading.Thread(target=tried.wait, name="sidestage-probe", daemon=True)
    thread.start()
    assert thread.native_id is not None
    policies = []
    for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
        set_thread_policy(thread.native_id, policy)
        policies.append(os.sched_getscheduler(thread.native_id))
    tried.set()  # and it isn't waited for: left at idle priority, it may take long to end
    return policies == [os.SCHED_IDLE, os.SCHED_OTHER]
