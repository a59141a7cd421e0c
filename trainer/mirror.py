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

from ckpt.digest import digest_of
from ckpt.errors import SidestageError
from ckpt.layout import EVENTS
from ckpt.storage import Storage

_TAIL_BYTES = 4096  # more than two lines of steps

_log = logging.getLogger("sidestage")


def spool_of(folder: Path, url: str) -> Path:
    """The spool of one root below the host's spool folder."""
    return folder / digest_of(url.encode()).rpartition(":")[2]


class Mirror:
    """Keeps a root's copy of the ledgers in a spool. Trouble is logged, and never stops training.

    Args:
        spool: the local folder that the ledgers are written to, under their keys.
        storage: the root.
    """

    def __init__(self, spool: Path, storage: Storage) -> None:
        self._spool = spool
        self._storage = storage
        self._key: str | None = None
        self._lock = threading.Lock()  # of two copies of one file the longer must be the last

    def follow(self, key: str) -> None:
        """Copy this ledger from now on."""
        self._key = key

    def copy_left_over(self, rank: int) -> None:
        """Copy this rank's ledgers of earlier attempts where the root's copy is missing or older."""
        for path in sorted(self._spool.glob(f"{EVENTS}*/r{rank:05d}.jsonl")):
            key = path.relative_to(self._spool).as_posix()
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
                self._storage.put(key, (self._spool / key).read_bytes())
            except (SidestageError, OSError) as e:
                _log.warning("the ledger was not copied to %s: %s", self._storage.url, e)

    def _is_older(self, key: str, size_bytes: int) -> bool:
        """A ledger grows, and its last line of steps is rewritten: look at the length and the tail."""
        try:
            stored_bytes = self._storage.stat(key).size_bytes
            if stored_bytes != size_bytes:
                return stored_bytes < size_bytes
            start = max(0, size_bytes - _TAIL_BYTES)
            with (self._spool / key).open("rb") as file:
                file.seek(start)
                return file.read() != self._storage.read(key, start)
        except (SidestageError, OSError):
            return True  # there is none; or copying will say what is wrong
