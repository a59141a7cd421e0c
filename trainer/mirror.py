"""Copies ledgers to roots that can't be appended to, such as an object store.

A ledger is written to a local folder, the spool, so that it survives SIGKILL line by line. Its
file is copied whole into the root after every commit, on the persist thread, and at the end. What
a killed attempt had not copied is copied by the next attempt on the same host.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from ckpt.errors import SidestageError
from ckpt.forks import forget_in_children
from ckpt.layout import EVENTS
from ckpt.storage import Storage

_TAIL_BYTES = 4096  # more than two lines of steps

_log = logging.getLogger("sidestage")


class Mirror:
    """Keeps a root's copy of the ledgers in a spool. Trouble is logged, and never stops training.

    Each run has a folder of its own in the spool, where its ledgers lie under their keys: a root may have
    been deleted and begun anew under the same name.

    Args:
        spool: the local folder of this root; see `trainer.spool`.
        storage: the root.
    """

    def __init__(self, spool: Path, storage: Storage) -> None:
        self._spool = spool
        self._folder = spool
        self._storage = storage
        self._key: str | None = None
        self._lock = threading.Lock()  # of two copies of one file the longer must be the last
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child: the ledger is the parent's to copy."""
        self._key = None
        self._lock = threading.Lock()

    def follow(self, run_id: str, key: str) -> Path:
        """Copy this ledger of a run from now on; returns the file to write it to."""
        self._folder = self._spool / run_id
        self._key = key
        return self._folder / key

    def copy_left_over(self, rank: int) -> None:
        """Copy this rank's ledgers of the run's earlier attempts where the root's is missing or older."""
        for path in sorted(self._folder.glob(f"{EVENTS}*/r{rank:05d}.jsonl")):
            key = path.relative_to(self._folder).as_posix()
            if key != self._key and self._is_older(key, path.stat().st_size):
                self._copy(key)

    def copy(self) -> None:
        """Copy the followed ledger as it is now."""
        if self._key is not None:
            self._copy(self._key)

    def emit(self, name: str, /, **fields: Any) -> None:
        """An event sink: a commit is the moment up to which nothing is trained again."""
        if name == "save_committed":
            self.copy()

    def _copy(self, key: str) -> None:
        with self._lock:
            try:
                self._storage.put(key, (self._folder / key).read_bytes())
            except (SidestageError, OSError) as e:
                _log.warning("the ledger was not copied to %s: %s", self._storage.url, e)

    def _is_older(self, key: str, size_bytes: int) -> bool:
        """A ledger grows, and its last line of steps is rewritten: look at the length and the tail."""
        try:
            stored_bytes = self._storage.stat(key).size_bytes
            if stored_bytes != size_bytes:
                return stored_bytes < size_bytes
            start = max(0, size_bytes - _TAIL_BYTES)
            with (self._folder / key).open("rb") as file:
                file.seek(start)
                return file.read() != self._storage.read(key, start)
        except (SidestageError, OSError):
            return True  # there is none; or copying will say what is wrong
