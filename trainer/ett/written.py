"""The account of runs as JSON: the records, with what is made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.ett.advice import advise, losses
from trainer.ett.reading import fleet
from trainer.ett.records import RunReport
from trainer.ett.what_if import what_if


def as_dict(reports: Sequence[RunReport], changes: Mapping[str, float] | None) -> dict[str, Any]:
    """One run as it is; several as `ett_percent` of the fleet, `notes` and `runs`."""
    if len(reports) == 1:
        return _run(reports[0], changes)
    found = fleet(reports)
    return {
        "ett_percent": found.ett_percent,
        "notes": found.notes,
        "runs": [_run(r, changes) for r in reports],
    }


def _run(report: RunReport, changes: Mapping[str, float] | None) -> dict[str, Any]:
    advice = advise(report)
    return {
        **asdict(report),
        "batches_repeated": report.batches_repeated,
        "lost_batches": report.lost_batches,
        "saves": report.saves,
        "losses": [asdict(loss) for loss in losses(report)],
        "advice": asdict(advice) if advice else None,
        "what_if": asdict(what_if(report, changes)) if changes is not None else None,
    }
