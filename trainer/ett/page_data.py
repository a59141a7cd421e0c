"""What the page of a run shows, as plain JSON values: areas in groups, and long lists made short.

A run of weeks has more segments and saves than a screen has pixels. Segments too short to be seen
become columns that keep each area's seconds; saves become the longest of each stretch. Totals are
never merged, and the page says what was.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.ett.records import (
    AREAS,
    START_UP,
    Advice,
    Area,
    AttemptTime,
    Loss,
    RunReport,
    SaveTime,
    Segment,
)

Json = dict[str, Any]

MOST_MARKS = 12_000  # segments of all timelines of a page, give or take a factor of two
MOST_SAVES_LISTED = 150  # a page, in the tables
MOST_SAVES_PLOTTED = 400  # a run
MOST_ATTEMPTS_DRAWN = 100  # timelines of a run; all are in the table and in the overview

GROUPS: Mapping[str, tuple[str, tuple[Area, ...]]] = {
    "new": ("New data", ("training_new",)),
    "machines": ("Waiting for machines", ("scheduling", "hardware_setup", "launcher_init")),
    "start": (
        "Starting",
        tuple(a for a in START_UP[3:] if a not in ("restore", "pt2_compilation")),
    ),
    "restore": ("Restoring", ("restore",)),
    "compile": ("Compiling", ("pt2_compilation",)),
    "again": ("Trained again", ("training_repeated",)),
    "saves": ("Held up by saves", ("blocked_in_save", "overlay_pressure")),
    "data": ("Waiting for data", ("data_wait",)),
    "evaluation": ("Evaluating", ("evaluation",)),
    "publishing": ("Publishing", ("publishing",)),
    "end": ("Shutting down", ("shutdown",)),
    "between": ("Between attempts", ("between_attempts",)),
    "unknown": ("Unaccounted", ("unaccounted",)),
}
"""Areas that are told as one: key -> label, areas. Every area is in exactly one group."""

_GROUP_OF: Mapping[Area, str] = {a: key for key, (_, areas) in GROUPS.items() for a in areas}
_NAMES: Mapping[str, str] = {
    "training_new": "training on new data",
    "training_repeated": "training repeated",
    "pt2_compilation": "PT2 compilation",
}


def page_data(
    reports: Sequence[RunReport],
    losses: Sequence[tuple[Loss, ...]],
    advice: Sequence[Advice | None],
    fleet_percent: float | None = None,
) -> Json:
    """All that a page shows. `losses` and `advice`: one for each report, in its order."""
    if not len(reports) == len(losses) == len(advice):
        raise ValueError(
            f"{len(reports)} reports, {len(losses)} lists of losses and {len(advice)} pieces of "
            f"advice: give one of each for every run"
        )
    drawn = sum(min(len(r.attempts), MOST_ATTEMPTS_DRAWN) for r in reports)
    marks = max(60, MOST_MARKS // max(1, drawn))
    listed = max(20, MOST_SAVES_LISTED // max(1, len(reports)))
    return {
        "areas": [
            {"name": _NAMES.get(a, a.replace("_", " ")), "group": _GROUP_OF[a]} for a in AREAS
        ],
        "groups": {key: label for key, (label, _) in GROUPS.items()},
        "fleet_percent": _number(_fleet(reports) if fleet_percent is None else fleet_percent),
        "runs": [
            _run(*each, marks=marks, listed=listed)
            for each in zip(reports, losses, advice, strict=True)
        ],
    }


@dataclass(frozen=True)
class Column:
    """A stretch of a timeline: one segment, or neighbours too short to be told apart.

    seconds: what each area took of it, in the order of their first appearance.
    """

    begin_s: float
    end_s: float
    seconds: Mapping[Area, float]
    segments: int


def merge_segments(segments: Sequence[Segment], most: int) -> list[Column]:
    """At most about two times `most` columns, which tile the same time and keep all seconds.

    Up to `most` segments stay as they are. Empty ones are left out.
    """
    segments = [s for s in segments if s.end_s > s.begin_s]
    if not segments:
        return []
    wall_s = segments[-1].end_s - segments[0].begin_s
    finest_s = wall_s / most if len(segments) > most else 0.0
    done: list[Column] = []
    held: list[Segment] = []
    for segment in segments:
        if held and segment.end_s - held[0].begin_s > finest_s:
            done.append(_column(held))
            held = []
        held.append(segment)
    done.append(_column(held))
    return done


def _column(held: Sequence[Segment]) -> Column:
    seconds: dict[Area, float] = {}
    for s in held:
        seconds[s.area] = seconds.get(s.area, 0.0) + s.end_s - s.begin_s
    return Column(held[0].begin_s, held[-1].end_s, seconds, len(held))


def _fleet(reports: Sequence[RunReport]) -> float:
    """ETT% of all runs, weighted by wall time times ranks."""
    weights = [r.wall_s * max((a.world_size for a in r.attempts), default=1) for r in reports]
    if not (total := sum(weights)):
        return 0.0
    return sum(w * r.ett_percent for w, r in zip(weights, reports, strict=True)) / total


def _run(
    report: RunReport,
    losses: tuple[Loss, ...],
    advice: Advice | None,
    *,
    marks: int,
    listed: int,
) -> Json:
    attempts = report.attempts
    hidden = max(0, len(attempts) - MOST_ATTEMPTS_DRAWN)
    measured = report.measured
    return {
        "root": report.root,
        "ett_percent": _number(report.ett_percent),
        "wall_s": _number(report.wall_s),
        "began_s": _number(attempts[0].started_at_s) if attempts else None,
        "failures": report.failures,
        "preemptions": report.preemptions,
        "time_to_start_s": _number(report.time_to_start_s),
        "time_to_recover_s": _number(report.time_to_recover_s),
        "batches_new": sum(a.batches_new for a in attempts),
        "batches_repeated": report.batches_repeated,
        "samples_repeated": sum(a.samples_repeated for a in attempts),
        "areas": _seconds(report.areas),
        "interval_s": _number(measured.interval_s),
        "failures_per_day": _number(measured.failures_per_day),
        "notes": list(report.notes),
        "losses": [
            {
                "area": AREAS.index(loss.area),
                "seconds": _number(loss.seconds),
                "points": _number(loss.points),
                "mend": loss.mend,
            }
            for loss in losses
        ],
        "advice": None
        if advice is None
        else {
            "interval_s": _number(advice.interval_s),
            "interval_steps": advice.interval_steps,
            "points_now": _number(advice.points_now),
            "points_then": _number(advice.points_then),
            "why": advice.why,
        },
        "attempts": [_attempt(a, marks, drawn=n >= hidden) for n, a in enumerate(attempts)],
        "saves": _saves(attempts, listed),
    }


def _attempt(attempt: AttemptTime, marks: int, *, drawn: bool) -> Json:
    start_s = attempt.started_at_s
    columns = merge_segments(attempt.segments, marks) if drawn else []
    return {
        "epoch": attempt.epoch,
        "began_s": _number(start_s),
        "wall_s": _number(attempt.wall_s),
        "ended": attempt.ended,
        "ranks": attempt.ranks,
        "world_size": attempt.world_size,
        "areas": _seconds(attempt.areas),
        "resumed_step": attempt.resumed_step,
        "last_step": attempt.last_step,
        "batches_new": attempt.batches_new,
        "batches_repeated": attempt.batches_repeated,
        "lost_batches": attempt.lost_batches,
        "samples_repeated": attempt.samples_repeated,
        "time_to_start_s": _number(attempt.time_to_start_s),
        "time_to_recover_s": _number(attempt.time_to_recover_s),
        "segments": sum(c.segments for c in columns),
        "columns": [
            [
                _number(c.begin_s - start_s),
                _number(c.end_s - start_s),
                _seconds(c.seconds),
                c.segments,
            ]
            for c in columns
        ],
        "stages": [
            [s.name, _number(s.begin_s - start_s), _number(s.end_s - start_s)]
            for s in attempt.stages
        ],
        "saves": {
            outcome: sum(s.outcome == outcome for s in attempt.saves)
            for outcome in ("committed", "failed", "skipped", "lost")
        },
    }


def _seconds(areas: Mapping[Area, float]) -> list[list[float | None]]:
    """[index of the area, seconds], only areas that took any."""
    return [[AREAS.index(a), _number(s)] for a, s in areas.items() if s > 0]


def _saves(attempts: Sequence[AttemptTime], listed: int) -> Json:
    """Totals of all saves, those that the table lists, and points to plot."""
    every = [(a, s) for a in attempts for s in a.saves]
    blocked = sorted(s.blocked_s for _, s in every)
    lags = sorted(lag for _, s in every if (lag := _lag(s)) is not None)
    return {
        "count": len(every),
        "outcomes": {
            o: sum(s.outcome == o for _, s in every)
            for o in ("committed", "failed", "skipped", "lost")
        },
        "blocked_s": _number(math.fsum(blocked)),
        "blocked_median_s": _number(statistics.median(blocked)) if blocked else None,
        "blocked_max_s": _number(blocked[-1]) if blocked else None,
        "lag_median_s": _number(statistics.median(lags)) if lags else None,
        "lag_max_s": _number(lags[-1]) if lags else None,
        "listed": [_save(a, s) for a, s in _telling(every, listed)],
        "plotted": [_save(a, s) for a, s in _longest(every, MOST_SAVES_PLOTTED)],
    }


def _lag(save: SaveTime) -> float | None:
    return None if save.committed_at_s is None else save.committed_at_s - save.at_s


def _save(attempt: AttemptTime, save: SaveTime) -> Json:
    return {
        "epoch": attempt.epoch,
        "step": save.step,
        "at_s": _number(save.at_s),
        "blocked_s": _number(save.blocked_s),
        "lag_s": _number(_lag(save)),
        "outcome": save.outcome,
        "error": save.error,
    }


_Saves = list[tuple[AttemptTime, SaveTime]]


def _telling(every: _Saves, most: int) -> _Saves:
    """The saves to list where there are too many: the newest that went wrong, were long, or are last."""
    if len(every) <= most:
        return every
    numbers = range(len(every))
    wrong = [n for n in numbers if every[n][1].outcome != "committed"][-most // 3 :]
    longest = sorted(numbers, key=lambda n: every[n][1].blocked_s)[-most // 3 :]
    chosen = {*wrong, *longest}
    for n in reversed(numbers):
        if len(chosen) >= most:
            break
        chosen.add(n)
    return [every[n] for n in sorted(chosen)]


def _longest(every: _Saves, most: int) -> _Saves:
    """Of each stretch of saves the one that blocked longest."""
    size = math.ceil(len(every) / most)
    return [
        max(every[n : n + size], key=lambda each: each[1].blocked_s)
        for n in range(0, len(every), max(1, size))
    ]


def _number(value: float | None) -> float | None:
    """Rounded to microseconds; None for what JSON can't say."""
    return None if value is None or not math.isfinite(value) else round(value, 6)
