"""What the ETT% would be with other settings, by a closed-form model of the run."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.ett.records import RunReport, WhatIf


def parse_changes(text: str) -> dict[str, float]:
    """Read "block=0.1s,interval=5m,failures=3/day" into seconds, and failures a day."""
    raise NotImplementedError


def what_if(report: RunReport, changes: Mapping[str, float]) -> WhatIf:
    """The run as it was and with `changes`, whose keys are those of `parse_changes`."""
    raise NotImplementedError
