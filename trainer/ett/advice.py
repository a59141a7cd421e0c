"""What a run lost most by, what would mend it, and how often it should save."""

from __future__ import annotations

from trainer.ett.records import Advice, Loss, RunReport


def losses(report: RunReport, most: int = 3) -> tuple[Loss, ...]:
    """The areas that cost most points of ETT%, largest first, each with what would mend it."""
    raise NotImplementedError


def advise(report: RunReport) -> Advice | None:
    """How often to save. None where the run hasn't shown what a save costs, or no failure."""
    raise NotImplementedError
