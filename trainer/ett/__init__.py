"""Effective training time: a run's account, from its ledgers to advice."""

from trainer.ett.account import PARTS, AttemptTime, EttReport, read_report, report

__all__ = ["PARTS", "AttemptTime", "EttReport", "read_report", "report"]
