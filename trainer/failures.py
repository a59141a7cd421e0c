"""How often a run has failed so far, from the ends of its ledgers.

Rank 0's ledgers are enough: leaving a session is collective, so once rank 0 has closed without an
error, or was preempted, everything trained is committed, or was given up at the end of a grace. Each
attempt costs three small reads, and only the newest attempts are looked at, so that an old run on an
object store starts as fast as a young one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ckpt.catalog import Catalog
from ckpt.errors import CorruptError, NotFoundError, StorageError
from ckpt.layout import ledger_key
from ckpt.parallel import each
from ckpt.storage import Storage
from trainer.ett.timeline import how_it_ended
from trainer.ledger import parse_ledger

_log = logging.getLogger("sidestage")

_MOST_ATTEMPTS = 64
_TAIL_BYTES = 16 << 10  # an attempt's last save and its end take a few hundred
_WORKERS = 8  # small reads in flight: an object store takes tens of milliseconds for each


@dataclass(frozen=True)
class Record:
    """So many failures since a moment, Unix seconds; None: there was no attempt before."""

    failures: int
    since_s: float | None


def failures_before(epoch: int, storage: Storage, ledgers: Storage) -> Record:
    """The failures among the attempts before this one, the newest 64 of them.

    An attempt without a ledger of rank 0 counts: it was killed before it had one, or on another host
    that has not copied it. `ledgers` is the store that has them: `storage`, or a folder of this host.
    A store that fails costs the record, not the start.
    """
    try:
        return _record(epoch, storage, ledgers)
    except StorageError as e:
        _log.warning("how often the run has failed isn't known, it counts as new: %s", e)
        return Record(0, None)


def _record(epoch: int, storage: Storage, ledgers: Storage) -> Record:
    tree = Catalog(storage).tree()
    epochs = sorted(e for e in tree.epochs if e < epoch)[-_MOST_ATTEMPTS:]
    ends = list(each(lambda e: (tree.attempt(e).record, _failed(ledgers, e)), epochs, _WORKERS))
    return Record(
        sum(failed for _, failed in ends),
        min((record.started_at_s for record, _ in ends if record), default=None),
    )


def _failed(ledgers: Storage, epoch: int) -> bool:
    key = ledger_key(epoch, 0)
    try:
        start = max(0, ledgers.stat(key).size_bytes - _TAIL_BYTES)
        events = parse_ledger(ledgers.read(key, start), key, tail=start > 0)
    except (CorruptError, NotFoundError):
        return True
    return how_it_ended({0: events}, newest=False) == "failed"
