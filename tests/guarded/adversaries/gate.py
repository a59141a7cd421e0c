"""Where persist threads are held, so that what an adversary does falls into the gap after save()."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import ckpt
from tests.faults import DEADLINE_S
from tests.guarded.turnstile import Turnstile

_OURS = str(Path(ckpt.__file__).parent)
_LOOK_S = 0.02
_LOOKS = 3
_FRAMES = 4  # a wait of ours is in `threading`, called by `threading`, called by us


class Gate(Turnstile):
    """A turnstile that opens by itself when training waits for what it holds up.

    Some changes may only go on once the snapshot has the whole table, and training then waits for
    the persist thread: it is seen at the same instruction of ours again and again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = False

    def enter(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with self._changed:
            self._left = False
            if not self._permits and not self._open:
                self._standing = True
                self._changed.notify_all()
                looks: list[set[Any]] = []
                while not self._permits and not self._open:
                    assert time.monotonic() < deadline, "the stage never opened the gate"
                    self._changed.wait(_LOOK_S)
                    looks = [*looks[1 - _LOOKS :], _waiting()]
                    if len(looks) == _LOOKS and set.intersection(*looks):
                        self._open = True
                self._standing = False
            self._permits = max(0, self._permits - 1)

    def leave(self) -> None:
        with self._changed:
            self._left = True
            self._permits = 0
            self._changed.notify_all()

    def stand(self, done: Future[Any]) -> None:
        """Wait until a persist thread stands here, or its save is done without."""
        with self._changed:
            while not self._standing and not done.done():
                self._changed.wait(_LOOK_S)

    def go(self, blocks: int) -> None:
        """Let it do so many blocks, if it stands here; return when it stands here again or has left."""
        with self._changed:
            if self._open or not self._standing:
                return
            self._permits, self._standing, self._left = blocks, False, False
            self._changed.notify_all()
            moved = self._changed.wait_for(
                lambda: self._standing or self._left or self._open, DEADLINE_S
            )
            assert moved, "the persist thread hasn't come back to the gate"


class Chance(Turnstile):
    """Lets everything through, each block after a random while."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def enter(self) -> None:
        self.pause()

    def pause(self) -> None:
        """Mostly not at all, 3 ms at most. On any thread."""
        drawn = self._random.random()
        if drawn > 0.5:
            time.sleep((drawn - 0.5) ** 4 * 0.05)


def _waiting() -> set[tuple[int, int, int]]:
    """Threads that came from outside into our code, and where they are in it.

    Of each only the uppermost frames are looked at: further down, frames of compiled code may not be
    what they seem from another thread.
    """
    ours = {t.ident for t in threading.enumerate() if t.name.startswith("sidestage")}
    found = set()
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top
        for _ in range(_FRAMES if thread not in ours else 0):
            if not isinstance(frame, FrameType):
                break
            if frame.f_code.co_filename.startswith(_OURS):
                found.add((thread, id(frame), frame.f_lasti))
                break
            frame = frame.f_back
    return found
