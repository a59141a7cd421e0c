"""Effective training time: a run's account, from its ledgers to advice."""

from trainer.ett.account import report
from trainer.ett.advice import advise, losses
from trainer.ett.reading import fleet, read_report
from trainer.ett.records import (
    AREAS,
    Advice,
    Area,
    AttemptTime,
    FleetReport,
    Loss,
    Measured,
    RunReport,
    WhatIf,
)
from trainer.ett.what_if import parse_changes, what_if

__all__ = [
    "AREAS",
    "Advice",
    "Area",
    "AttemptTime",
    "FleetReport",
    "Loss",
    "Measured",
    "RunReport",
    "WhatIf",
    "advise",
    "fleet",
    "losses",
    "parse_changes",
    "read_report",
    "report",
    "what_if",
]
