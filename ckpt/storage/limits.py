"""How long calls to a store may go on, and who hears of it when a client repeats them.

Both belong to the caller, not to the store: a save has a deadline, which a client that repeats what failed
would outlast unseen. They go with the context of a thread, into the coroutines that it begins, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Retried = Callable[[str, str, str, float], object]
"""retried(key, kind, error, pause_s): a call has failed and comes again after a pause.

kind: "throttled", "outage" or "credentials". Called on any thread; must not raise, and return quickly.
"""


@dataclass(frozen=True)
class _Limits:
    until_s: float | None = None
    retried: Retried | None = None


_NONE = _Limits()
_LIMITS: ContextVar[_Limits] = ContextVar("limits", default=_NONE)


@contextmanager
def limited(seconds: float | None, retried: Retried | None = None) -> Iterator[None]:
    """Calls of this thread in this block end after `seconds`, with a DeadlineError if need be.

    None: only the store's own patience counts. Stores that can't interrupt a call may take longer.

    retried: hears of repeated calls; None: who heard of them around this block.
    """
    until_s = None if seconds is None else time.monotonic() + seconds
    token = _LIMITS.set(_Limits(until_s, retried or _LIMITS.get().retried))
    try:
        yield
    finally:
        _LIMITS.reset(token)


def left_s() -> float | None:
    """Seconds that are left to a call that begins now, 0 if none are; None: there is no limit."""
    until_s = _LIMITS.get().until_s
    return None if until_s is None else max(0.0, until_s - time.monotonic())


def tell_retried(key: str, kind: str, error: str, pause_s: float) -> None:
    """For stores: a call is about to be repeated."""
    if (retried := _LIMITS.get().retried) is not None:
        retried(key, kind, error, pause_s)
