"""Finds and reads the ledgers of runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt.errors import NotFoundError
from ckpt.layout import EVENTS as EVENTS_PREFIX
from ckpt.layout import ledger_key
from ckpt.storage import Root, Storage, storage_of
from trainer.ett.account import report
from trainer.ett.records import FleetReport, RunReport
from trainer.ett.timeline import Events
from trainer.ledger import parse_ledger

_KEY = re.compile(re.escape(EVENTS_PREFIX) + r"(\d{6,})/r(\d{5,})\.jsonl")


def read_report(root: Root) -> RunReport:
    """Account for the run under a root, or under the folder that its ledger was kept in.

    NotFoundError without any ledger, CorruptError naming the file that is broken.
    """
    storage = storage_of(root)
    attempts = read_attempts(storage)
    where = storage.url if isinstance(root, Storage) else str(root)
    if not attempts:
        raise NotFoundError(
            f"{where}: no ledger under {EVENTS_PREFIX}; name the root, or the ledger folder, of a run "
            f"that a trainer.Session has kept"
        )
    return report(attempts, where)


def read_attempts(storage: Storage) -> dict[int, dict[int, Events]]:
    """All ledgers of a root: epoch -> rank -> events."""
    attempts: dict[int, dict[int, Events]] = {}
    for info in storage.list(EVENTS_PREFIX):
        m = _KEY.fullmatch(info.key)
        if m is None or ledger_key(int(m[1]), int(m[2])) != info.key:
            continue
        if events := parse_ledger(storage.read(info.key), f"{storage.url}/{info.key}"):
            attempts.setdefault(int(m[1]), {})[int(m[2])] = events
    return attempts


def fleet(runs: Sequence[RunReport]) -> FleetReport:
    """Several runs as one: each counts by its wall time times its ranks."""
    weights = [r.wall_s * max(a.world_size for a in r.attempts) for r in runs]
    total = sum(weights)
    percent = (
        sum(w * r.ett_percent for w, r in zip(weights, runs, strict=True)) / total if total else 0.0
    )
    notes = tuple(f"{r.root}: {note}" for r in runs for note in r.notes)
    return FleetReport(tuple(runs), percent, notes)
