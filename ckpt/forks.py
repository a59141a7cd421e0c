"""What a forked child must not take for its own.

Trainers fork: workers of loaders, pools, helpers. A child inherits the memory of a session and none of its
threads: hooks that would wait for one, signal handlers that would tell the trainer, files that only one
process may write, and locks that a thread held which isn't there any more. So whoever has such things
forgets them in the child, before anything else runs there.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something of the parent's that a child can do nothing with."""

    def forget(self) -> None:
        """Called in a child: be nothing but memory from here on. Must not wait, nor take an old lock."""


_log = logging.getLogger("sidestage")
_OURS: weakref.WeakSet[Inherited] = weakref.WeakSet()
_HELD = threading.local()


def forget_in_children(thing: Inherited) -> None:
    """Call `thing.forget()` in each child that os.fork makes from now on, as long as `thing` lives."""
    _OURS.add(thing)
    _register()


@functools.cache
def _register() -> None:
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


def _before() -> None:
    """A signal waits until the child has forgotten whose handlers it has: it may be sent one at once."""
    _HELD.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _OURS else None


def _in_parent() -> None:
    if _HELD.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _HELD.mask)


def _in_child() -> None:
    for thing in list(_OURS):
        try:
            thing.forget()
        except Exception:  # the others' signals and files aren't this process's either
            _log.exception("a forked child couldn't forget all that its parent has")
    _OURS.clear()
    _in_parent()
