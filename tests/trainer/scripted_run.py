"""Acts out attempts of a run on a fake clock, each with a ledger of its own."""

from pathlib import Path
from typing import Any

from ckpt.layout import ledger_key
from tests.trainer.fake_clock import FakeClock
from trainer.ett import RunReport
from trainer.ledger import Ledger


class Script:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock(wall_offset_s=1.8e9)  # as coarse as real ones

    def attempt(self, epoch: int, rank: int = 0, **process: Any) -> Ledger:
        """The ledger of a process that has been created right now."""
        ledger = Ledger(self.clock, age_s=0.0)
        ledger.open(self.root / ledger_key(epoch, rank))
        ledger.record("process", created_at_s=ledger.created_at_s, **process)
        return ledger

    def begin(
        self, epoch: int, at: int = 0, of: int | None = None, rank: int = 0, **process: Any
    ) -> Ledger:
        """An attempt that continues at a batch, from a commit of attempt `of`, without delay."""
        ledger = self.attempt(epoch, rank, **process)
        ledger.record("restored", step=at, position=at, epoch=of)
        return ledger

    def spend(self, ledger: Ledger, name: str, seconds: float) -> None:
        with ledger.span(name):
            self.clock.advance(seconds)

    def steps(self, ledger: Ledger, first: int, last: int, seconds: float = 1.0) -> None:
        for n in range(first, last + 1):
            self.clock.advance(seconds)
            ledger.stepped(n, n)

    def save(self, ledger: Ledger, step: int, seconds: float) -> None:
        self.spend(ledger, "blocked_in_save", seconds)
        ledger.record("saved", step=step, blocked_s=seconds)

    def close(self, ledger: Ledger, seconds: float = 0.0) -> None:
        ledger.record("closing", error=None)
        self.clock.advance(seconds)
        ledger.record("closed")


def check_sums(found: RunReport) -> None:
    """Every moment of the run has exactly one area."""
    at_s = found.attempts[0].started_at_s
    between_s = 0.0
    for attempt in found.attempts:
        assert attempt.started_at_s >= at_s
        between_s += attempt.started_at_s - at_s
        at_s = attempt.started_at_s
        for s in attempt.segments:
            assert s.begin_s == at_s < s.end_s
            at_s = s.end_s
        assert at_s == attempt.ended_at_s
        assert abs(sum(attempt.areas.values()) - attempt.wall_s) < 1e-6
    assert abs(sum(found.areas.values()) - found.wall_s) < 1e-6
    assert abs(found.areas["between_attempts"] - between_s) < 1e-6
    assert 0 <= found.ett_percent <= 100


def spent(areas: Any) -> dict[str, float]:
    """The areas that have any time, rounded."""
    return {a: round(s, 4) for a, s in areas.items() if s > 1e-4}
