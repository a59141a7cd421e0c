"""All lives of one model with the same steps: what each way costs, and its ETT by one measure.

Steps get slower while a save is written in the background, and a ledger counts all of their time as
effective. So that no way gains by that, `ett_same` counts for each new step what one takes in the same
life while no save is written. `benchmarks.ett.beside` measures whether that is what a plain step takes;
`ett_by_sync` is stricter, and depends on how fast the machine was in each life.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.ett.job import Figures, Replayed, Technique, Way, replay
from benchmarks.ett.life import KILLS
from benchmarks.report import Row, median
from trainer.ett.records import AttemptTime, RunReport

Name = tuple[Way, Technique | None]
"""A way, and the technique that is switched off."""


@dataclass
class Lives:
    """source: how rows call them. level: the ETT% that `sync` was to have, None for the short lives.

    of: accounts of all lives of a way, in the order they were lived.
    """

    model: str
    source: str
    training_s: float
    level: int | None = None
    of: dict[Name, list[RunReport]] = field(default_factory=dict)

    def has(self, *ways: Way) -> bool:
        return all((w, None) in self.of for w in ways)

    @property
    def ways(self) -> list[Way]:
        return [way for way, without in self.of if without is None]

    @property
    def step_s(self) -> float:
        """A step of `sync`, or of the first way where that wasn't lived; median over its lives."""
        name: Name = ("sync", None) if self.has("sync") else next(iter(self.of))
        return statistics.median(calm_step_s(r) for r in self.of[name])

    def trained_s(self, way: Way) -> float:
        """Effective seconds; the median over a way's lives."""
        return statistics.median(effective_s(r) for r in self.of[way, None])

    def ett_same(self, name: Name) -> float:
        """Percent; the median over a way's lives."""
        return statistics.median(ett_same(r) for r in self.of[name])

    def ett_by_sync(self, way: Way) -> float:
        """Percent, with no more for a step than one of `sync` takes; the median over a way's lives."""
        return statistics.median(self._by_sync(r) for r in self.of[way, None])

    @property
    def calm_ratio(self) -> float:
        """A step of `ours` while no save is written over one of `sync`, by medians over the lives."""
        return statistics.median(calm_step_s(r) for r in self.of["ours", None]) / self.step_s

    def figures(self, way: Way) -> Figures:
        """Medians over a way's lives."""
        return middle([figures(r) for r in self.of[way, None]])

    def replayed(self, way: Way) -> Replayed:
        """The same lives out of their own figures."""
        return replay(self.figures(way), self.trained_s(way))

    def rows(self) -> list[Row]:
        """One for each life, and one of medians where there are several."""
        rows: list[Row] = []
        for name, reports in self.of.items():
            each = [self._row(name, r) for r in reports]
            rows += each
            if len(each) > 1:
                middles = {k: median(r[k] for r in each) for k in _NUMBERS}
                source = f"{self.source}, median of {len(each)}"
                rows.append({**self._named(name), "source": source, **middles})
        return rows

    def _named(self, name: Name) -> Row:
        return {
            "model": self.model,
            "name": called(name),
            "source": self.source,
            "status": "ok",
        }

    def _row(self, name: Name, report: RunReport) -> Row:
        found = figures(report)
        same = ett_same(report)
        row: Row = {
            **self._named(name),
            "ett": report.ett_percent,
            "ett_same": same,
            "ett_by_sync": self._by_sync(report) if self.has("sync") else None,
            "wall_s": report.wall_s,
            "training_s": report.areas["training_new"],
            "steps": new_steps(report),
            "step_ms": 1000 * step_s(report),
            "calm_ms": 1000 * calm_step_s(report),
            "inflation": step_s(report) / calm_step_s(report),
            "start_s": found.start_s,
            "recover_s": found.recover_s,
            "preempt_s": found.preempt_s,
            "block_ms": 1000 * found.block_s,
            "lag_s": found.lag_s,
            "interval_s": report.measured.interval_s,
            "repeated": report.batches_repeated,
            "unaccounted": report.areas["unaccounted"] / report.wall_s,
            "points": None,
            "lost": report.lost_batches,
            "ended": [a.ended for a in report.attempts],
            "areas": {k: v for k, v in report.areas.items() if v},
            "figures": asdict(found),
        }
        if name[1] is not None and self.has("ours"):
            row["points"] = self.ett_same(("ours", None)) - same
        return row

    def _by_sync(self, report: RunReport) -> float:
        counted_s = new_steps(report) * min(self.step_s, step_s(report))
        return 100 * counted_s / report.wall_s


_NUMBERS = (
    *(
        "ett",
        "ett_same",
        "ett_by_sync",
        "wall_s",
        "training_s",
        "steps",
        "step_ms",
        "calm_ms",
        "inflation",
    ),
    "start_s",
    *("recover_s", "preempt_s", "block_ms", "lag_s", "interval_s", "repeated", "unaccounted"),
    "points",
)


def called(name: Name) -> str:
    way, without = name
    return way if without is None else f"{way} without {without}"


def new_steps(report: RunReport) -> int:
    return sum(a.batches_new for a in report.attempts)


def step_s(report: RunReport) -> float:
    """A step on a new batch, as the ledger has it: with what a save in the background makes it lose."""
    return report.areas["training_new"] / max(1, new_steps(report))


def calm_step_s(report: RunReport) -> float:
    """A step while no save was written, or any step where too few of those show it."""
    return report.measured.step_s or step_s(report)


def effective_s(report: RunReport) -> float:
    """New steps, each as long as a calm one, and no more than they took."""
    return new_steps(report) * min(calm_step_s(report), step_s(report))


def ett_same(report: RunReport) -> float:
    """Percent."""
    return 100 * effective_s(report) / report.wall_s


def figures(report: RunReport) -> Figures:
    """What a life has measured, for its replay with other amounts of training."""
    first, *others = report.attempts
    last = report.attempts[-1]
    back = [_recovery_s(report, a) for a in others]
    kills, after_preemption = back[: len(KILLS)], back[len(KILLS) :]
    saves = sum(s.outcome != "skipped" for a in report.attempts for s in a.saves)
    blocked_s = report.areas["blocked_in_save"] / max(1, saves)
    return Figures(
        block_s=max(1e-4, report.measured.block_s or 0.0),
        lag_s=max(0.0, (report.measured.lag_s or 0.0) - blocked_s),
        start_s=first.time_to_start_s or 0.0,
        recover_s=sum(kills) / len(kills) if kills else 0.0,
        preempt_s=after_preemption[0] if after_preemption else 0.0,
        preempt_repeats=len(report.attempts) > len(KILLS)
        and report.attempts[len(KILLS)].ended != "preempted",
        shutdown_s=last.areas["shutdown"],
        publish_s=sum(a.areas["publishing"] for a in report.attempts),
        recoveries_s=tuple(back),
    )


def middle(of: Sequence[Figures]) -> Figures:
    """Field by field the median, of recoveries all."""
    numbers = {
        name: statistics.median(getattr(f, name) for f in of)
        for name in (
            *("block_s", "lag_s", "start_s", "recover_s", "preempt_s"),
            *("shutdown_s", "publish_s"),
        )
    }
    return Figures(
        **numbers,
        preempt_repeats=any(f.preempt_repeats for f in of),
        recoveries_s=tuple(s for f in of for s in f.recoveries_s),
    )


def _recovery_s(report: RunReport, attempt: AttemptTime) -> float:
    """From the last step before to this attempt's first one: survivors take their time to end, too."""
    before = [a for a in report.attempts if a.epoch < attempt.epoch][-1]
    gap_s = before.areas["shutdown"] + attempt.started_at_s - before.ended_at_s
    return gap_s + (attempt.time_to_start_s or 0.0)
