"""After an error: are all ranks still there?

A rank that leaves by an error drains its saves first, for others may have their parts of them. If a rank
is dead, a save that it was part of never ends: waiting for it would only hold up the restart. No
error says which it is, so the ranks are called by name:

    failing  a rank that leaves says so in the job's store
    here     every rank's watcher thread answers, whatever its main thread waits for
    all      rank 0, which alone could commit, says whether all have answered
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckpt.coordinator import Coordinator
from ckpt.errors import DeadlineError, StorageError
from ckpt.types import Clock

T = TypeVar("T")

_HERE, _ALL = "roll-call", "roll-call-all"


@dataclass(frozen=True)
class Patience:
    """Waits in short pieces, so that who needs a wait no longer isn't held up by it."""

    piece_s: float
    clock: Clock

    def wait(self, once: Callable[[float], T], limit_s: float, over: Callable[[], bool]) -> T:
        """What `once(seconds)` returns. DeadlineError after `limit_s`, or when `over` says so."""
        until_s = self.clock.monotonic() + limit_s
        while True:
            left_s = until_s - self.clock.monotonic()
            try:
                return once(max(0.001, min(left_s, self.piece_s)))
            except DeadlineError:
                if left_s <= self.piece_s or over():
                    raise


@dataclass(frozen=True)
class RollCall:
    """This rank's part. answer_s: how long a living rank may take to answer."""

    talk: Coordinator
    patience: Patience
    answer_s: float

    def all_here(self, over: Callable[[], bool]) -> bool:
        """Answer, and learn whether every rank has. Call on every rank's watcher thread, once.

        False also when rank 0 says nothing, when the job's store is gone (nobody can commit then), and
        when `over` says that it's no longer of interest here.
        """
        try:
            if self.talk.rank != 0:
                self.talk.post(_HERE, {})
                # Rank 0 may hear of the call as late as it may answer, and waits as long again.
                heard = self.patience.wait(
                    lambda s: self.talk.hear(_ALL, s), 2 * self.answer_s, over
                )
                return bool(heard["here"])
            here = self._collected(over)
            self.talk.announce(_ALL, {"here": here})
        except StorageError:
            return False
        return here

    def _collected(self, over: Callable[[], bool]) -> bool:
        try:
            self.patience.wait(lambda s: self.talk.collect(_HERE, {}, s), self.answer_s, over)
        except StorageError:  # DeadlineError where a rank is silent
            return False
        return True
