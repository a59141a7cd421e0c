"""Signals that ask a trainer to end: ours while a session is open, given back after, and never a child's."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_log = logging.getLogger("sidestage")


class EndSignals:
    """Handles some signals, on the main thread, and calls those that handled them before, too.

    The same signal often ends the workers of a loader, whose handler of SIGCHLD then raises on the training
    thread, wherever that is, maybe before this process is told. Such an error, and any of a worker once one
    of the signals has come, waits for a place between two steps: `worker_error` has it.

    Args:
        numbers: the signals.
        told: hears of each. Called as a signal handler is: it must take no lock.
        woken: a descriptor that gets a signal's number at once, also while the main thread is in a
            collective that never ends. Left alone where somebody else has one.
    """

    def __init__(
        self,
        numbers: Sequence[signal.Signals],
        told: Callable[[signal.Signals], object],
        woken: int,
    ) -> None:
        self.between_steps = False
        """Whether the training thread is where an error does no harm; said by that thread."""
        self.worker_error: Exception | None = None
        """What a handler of SIGCHLD raised in the middle of a step."""
        self.postponed: BaseException | None = None
        """What an earlier handler raised to end this process, which waits for a save."""
        self._told = told
        self._woken = woken
        self._asked = False
        self._closed = False
        self._before: dict[signal.Signals, Any] = {n: signal.getsignal(n) for n in numbers}
        self._of_workers: list[Any] = []  # handlers of SIGCHLD that ours has taken the place of
        self._running = (
            0  # calls of ours that haven't returned: a handler over ours may call it, too
        )
        old_fd = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        if old_fd != -1:
            signal.set_wakeup_fd(old_fd)
        self._wakes = old_fd == -1
        for number in numbers:
            signal.signal(number, self._handle)

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(int(n) for n in self._before)

    def close(self) -> None:
        """Give back what is still ours. Idempotent; in a forked child, too."""
        if self._closed:
            return
        self._closed = True
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                before = self._earlier(number)
                # None is a handler that C code installed: it can't be given back from Python.
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if self._of_workers and signal.getsignal(signal.SIGCHLD) == self._handle_worker:
            signal.signal(signal.SIGCHLD, self._of_workers.pop())
        if self._wakes and (found := signal.set_wakeup_fd(-1)) not in (-1, self._woken):
            signal.set_wakeup_fd(found)

    def _earlier(self, number: signal.Signals) -> Any:
        """Who had the signal before, sessions that are closed by now left out."""
        handler = self._before[number]
        while isinstance(owner := getattr(handler, "__self__", None), EndSignals):
            if not owner._closed:
                break
            handler = owner._before[number]
        return handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        which = signal.Signals(number)
        before = self._earlier(which)
        if self._closed:  # somebody has put a handler over ours, and still calls it
            if callable(before):
                before(number, frame)
            elif before == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._asked = True
        self._told(which)
        self.hold_worker_errors()
        if callable(before):
            try:
                before(number, frame)
            except BaseException as e:  # Ray's raises SystemExit; the save goes first
                _log.info(
                    "what an earlier handler of %s raised waits for the save: %r", which.name, e
                )
                self.postponed = e.with_traceback(None)  # its frames hold the training's tensors

    def hold_worker_errors(self) -> None:
        """Take the place of whoever handles SIGCHLD, and call them. On the main thread; cheap once done."""
        found = handler = signal.getsignal(signal.SIGCHLD)
        while isinstance(owner := getattr(handler, "__self__", None), EndSignals):
            if owner is self:
                return  # another session's calls ours
            handler = owner._of_workers[-1] if owner._of_workers else None
        if callable(found):
            self._of_workers.append(found)
            signal.signal(signal.SIGCHLD, self._handle_worker)

    def _handle_worker(self, number: int, frame: FrameType | None) -> None:
        if self._running >= len(self._of_workers):
            return
        before = self._of_workers[-1 - self._running]
        self._running += 1
        try:
            before(number, frame)
        except Exception as e:
            ours = self._asked or any(str(signal.strsignal(n)) in str(e) for n in self._before)
            if self._closed or self.between_steps or not ours:
                raise
            self.worker_error = e.with_traceback(None)
            _log.info("a worker of a loader has ended, which is told after this step: %s", e)
        finally:
            self._running -= 1
