"""What a run shows about its own saves and failures: the numbers that advice is made from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from trainer.ett.records import AttemptTime, Measured
from trainer.ett.timeline import Steps, Timeline
from trainer.interval import FEWEST_STEPS, lost_to_saves_s

_DAY_S = 86400.0


def measure(
    done: Sequence[AttemptTime], lines: Sequence[Timeline], wall_s: float, failures: int
) -> Measured:
    saves = [s for a in done for s in a.saves if s.outcome != "skipped"]
    lags_s = [s.committed_at_s - s.at_s for s in saves if s.committed_at_s is not None]
    seconds, counts = _trained(lines)
    calm_s = seconds[0] / counts[0] if counts[0] >= FEWEST_STEPS else 0.0
    trained_s = sum(a.areas["training_new"] + a.areas["training_repeated"] for a in done)
    waited_s = sum(a.areas["overlay_pressure"] + a.areas["blocked_in_save"] for a in done)
    steps = sum(s.count for line in lines for s in line.steps)
    recovers_s = [
        a.time_to_recover_s - _repeated_before_new_s(a)
        for before, a in itertools.pairwise(done)
        if a.time_to_recover_s is not None and before.ended in ("failed", "preempted")
    ]
    return Measured(
        block_s=(waited_s + lost_to_saves_s(seconds, counts)) / len(saves) if saves else None,
        lag_s=sum(lags_s) / len(lags_s) if lags_s else None,
        interval_s=_interval_s(done, lines),
        step_s=calm_s or (trained_s / steps if steps and trained_s > 0 else None),
        failures_per_day=failures * _DAY_S / wall_s if failures and wall_s > 0 else None,
        recover_s=max(0.0, sum(recovers_s) / len(recovers_s)) if recovers_s else None,
    )


def _interval_s(done: Sequence[AttemptTime], lines: Sequence[Timeline]) -> float | None:
    """Training time before the last of an attempt's saves that training went on after, by their count."""
    seconds, count = 0.0, 0
    for attempt, line in zip(done, lines, strict=True):
        regular = [s for s in line.saves if line.steps and s.at_s < line.steps[-1].end_s]
        if regular:
            count += len(regular)
            until_s = regular[-1].at_s
            seconds += sum(
                min(s.end_s, until_s) - s.begin_s
                for s in attempt.segments
                if s.area in ("training_new", "training_repeated") and s.begin_s < until_s
            )
    return seconds / count if seconds > 0 else None


def _trained(lines: Sequence[Timeline]) -> tuple[list[float], list[int]]:
    """Seconds of steps and their number, each [without a save being written, with one].

    Lines of steps end where saves begin, and the step in which one is over has a line of its own: beside
    the save, for the most part. A save that was lost was being written until the attempt ended.
    """
    seconds, counts = [0.0, 0.0], [0, 0]
    for line in lines:
        saves = [s for s in line.saves if s.outcome != "skipped"]
        for steps in line.steps[1:]:  # the first one warms up
            while saves and (saves[0].over_at_s or math.inf) <= steps.begin_s:
                saves.pop(0)
            busy = bool(saves) and saves[0].at_s < steps.end_s
            seconds[busy] += _net_s(line, steps)
            counts[busy] += steps.count
    return seconds, counts


def _net_s(line: Timeline, steps: Steps) -> float:
    """Time of these steps without spans and waits in them."""
    # Spans of one thread nest: adding those that aren't inside another one counts none twice.
    spans_s, at_s = 0.0, steps.begin_s
    for s in line.main_spans_in(steps.begin_s, steps.end_s):
        if s.end_s > at_s:
            spans_s += min(s.end_s, steps.end_s) - max(s.begin_s, at_s)
            at_s = s.end_s
    waits_s = steps.data_s + steps.pressure_s
    return max(0.0, steps.end_s - steps.begin_s - spans_s - waits_s)


def _repeated_before_new_s(attempt: AttemptTime) -> float:
    total_s = 0.0
    for s in attempt.segments:
        if s.area == "training_new":
            break
        if s.area == "training_repeated":
            total_s += s.end_s - s.begin_s
    return total_s
