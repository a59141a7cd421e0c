"""After an error: are all ranks still there?

A rank that leaves by an error drains its saves first, for others may have their parts of them. If a rank
is dead, a save that it was part of never ends: waiting for it would only hold up the restart. No
error says which it is, so the ranks are called by name:

    failing  a rank that leaves says so in the job's store
    here     every rank's watcher thread answers, whatever its main thread waits for
    all      rank 0, which alone could commit, says whether all have answered
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.coordinator import Coordinator
from ckpt.errors import StorageError

_HERE, _ALL = "roll-call", "roll-call-all"


@dataclass(frozen=True)
class RollCall:
    """This rank's part. answer_s: how long a living rank may take to answer."""

    talk: Coordinator
    answer_s: float

    def all_here(self) -> bool:
        """Answer, and learn whether every rank has. Call on every rank's watcher thread, once.

        False also when rank 0 says nothing or the job's store is gone: then nobody can commit.
        """
        try:
            if self.talk.rank != 0:
                self.talk.post(_HERE, {})
                # Rank 0 may hear of the call as late as it may answer, and waits as long again.
                return bool(self.talk.hear(_ALL, 2 * self.answer_s)["here"])
            here = self._collected()
            self.talk.announce(_ALL, {"here": here})
        except StorageError:
            return False
        return here

    def _collected(self) -> bool:
        try:
            self.talk.collect(_HERE, {}, self.answer_s)
        except StorageError:  # DeadlineError where a rank is silent
            return False
        return True
