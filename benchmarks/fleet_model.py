"""Lives of training jobs under random failures, many at a time: where their wall time goes.

An attempt starts (or recovers), then trains; a save comes after each `interval_s` of training. It
blocks for `block_s`, slows training down by `interference_s` in all, and is committed `lag_s`
after it began. A failure, at any moment, also in the start, takes the job back to the newest
committed save; what was trained since is trained again. The end of the work is saved too; then
the job publishes, and is over. Failures are a Poisson process over wall time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer import interval
from trainer.interval import DAY_S, SaveCosts

Seconds = NDArray[np.float64]

PARTS = (
    *("new", "repeated", "blocked", "interference", "start", "recover"),
    *("publishing", "shutdown"),
)
_MOST_ATTEMPTS = 2000  # a job that fails so often hardly advances


@dataclass(frozen=True)
class Times:
    """What one way of saving takes, in seconds.

    block_s: in save(). interference_s: what the rest of a save slows training down by.
    lag_s: from save() to its commit. start_s: of the first attempt. recover_s: from a failure to
    training again, repeated batches aside. publish_s: in the trainer, at the job's end.
    """

    block_s: float
    interference_s: float
    lag_s: float
    start_s: float
    recover_s: float
    publish_s: float = 0.0


@dataclass(frozen=True)
class Lives:
    """Jobs that are over. parts: seconds of each job, which add up to its wall time."""

    parts: Mapping[str, Seconds]

    @property
    def wall_s(self) -> Seconds:
        total: Seconds = np.sum(list(self.parts.values()), axis=0)
        return total

    @property
    def ett_percent(self) -> Seconds:
        shares: Seconds = 100 * self.parts["new"] / self.wall_s
        return shares


def best_interval_s(times: Times, failures_per_day: float) -> float:
    """Training time between saves that loses least (trainer.interval), never shorter than a save takes."""
    costs = SaveCosts(
        block_s=times.block_s + times.interference_s,
        lag_s=max(times.lag_s, times.block_s),
        between_failures_s=DAY_S / failures_per_day,
    )
    return max(interval.best_interval_s(costs), 1e-3)


def simulate(
    times: Times, work_s: Seconds, failures_per_day: float, interval_s: float, seed: int
) -> Lives:
    """Live through jobs of `work_s` (n,) seconds of training each."""
    rng = np.random.default_rng(seed)
    count = len(work_s)
    parts = {name: np.zeros(count) for name in PARTS}
    saved = np.zeros(count)  # training that a commit holds
    trained = np.zeros(count)  # all of it, repeated or not
    active = np.arange(count)
    save_s = times.block_s + times.interference_s
    period_s = interval_s + save_s
    commit_s = max(times.block_s, times.lag_s)
    for attempt in range(_MOST_ATTEMPTS):
        # Drawn for all, so that a job's failures don't depend on how the others fare.
        lives_s = rng.exponential(DAY_S / failures_per_day, count)[active]
        begin_s = times.recover_s if attempt else times.start_s
        parts["recover" if attempt else "start"][active] += np.minimum(lives_s, begin_s)
        left_s = work_s[active] - saved[active]
        saves = np.maximum(np.ceil(left_s / interval_s - 1e-9) - 1, 0)  # before the last one
        training_s = left_s + saves * save_s
        at_s = np.maximum(lives_s - begin_s, 0.0)  # when it fails, from the start of training
        # While it trains: whole periods, then a part of one.
        ends = at_s >= training_s
        whole = np.where(ends, saves, np.minimum(np.floor(at_s / period_s), saves))
        rest_s = np.where(ends, left_s - saves * interval_s, at_s - whole * period_s)
        step_s = np.where(ends, left_s, whole * interval_s + np.minimum(rest_s, interval_s))
        over_s = np.where(ends, 0.0, np.maximum(rest_s - interval_s, 0.0))
        blocked_s = np.minimum(over_s, times.block_s)
        parts["blocked"][active] += whole * times.block_s + blocked_s
        parts["interference"][active] += whole * times.interference_s + (over_s - blocked_s)
        trained[active] += step_s
        # After it: the last save, its commit, and publishing.
        end_s = np.where(left_s > 0, commit_s, 0.0)
        after_s = np.where(ends, at_s - training_s, 0.0)
        last_s = np.minimum(after_s, end_s)
        parts["blocked"][active] += np.minimum(last_s, times.block_s)
        parts["shutdown"][active] += np.maximum(last_s - times.block_s, 0.0)
        publish_s = np.clip(after_s - end_s, 0.0, times.publish_s)
        parts["publishing"][active] += publish_s
        # What is kept.
        committed = np.floor((at_s - interval_s - commit_s) / period_s) + 1
        kept_s = np.clip(committed, 0, saves) * interval_s
        whole_job = ends & (after_s >= end_s)
        saved[active] += np.where(whole_job, left_s, kept_s)
        active = active[~(whole_job & (after_s >= end_s + times.publish_s))]
        if not len(active):
            break
    parts["new"] = np.minimum(saved, work_s)
    parts["repeated"] = trained - parts["new"]
    return Lives(parts)
