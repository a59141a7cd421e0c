"""How often to save, from what saving costs and how often a run fails.

A save costs training `block_s`; a failure costs what was trained since the last commit: half an
interval on average, and the lag of a commit behind its save. Per second of training the two
cost block_s / interval + (interval / 2 + lag) / between_failures, which is least at
sqrt(2 * block * between_failures) (Young 1974; arXiv 2610.02057 uses the same). No interval is
shorter than a save takes to commit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.types import Clock

if TYPE_CHECKING:  # it imports torch, and the account of a run needs the formula only
    from ckpt.coordinator import Coordinator

DAY_S = 86400.0
_log = logging.getLogger("sidestage")

_LOOK_STEPS = (
    16  # after which rank 0 knows how long a step takes; the first save comes after as many more
)
_HEAR_S = 60.0
_KEPT = 4  # announcements that stay for slow ranks
_UNKNOWN_BLOCK_S = 1.0  # before the first save
_UNKNOWN_LAG_S = 60.0
FEWEST_STEPS = 10
"""With and without a save being written, to tell what that costs."""
_PRIOR_S = DAY_S  # a run that has not failed yet is taken to fail once a day


@dataclass(frozen=True)
class SaveCosts:
    """What a run has measured: seconds of training that one save costs, and from save() to commit."""

    block_s: float
    lag_s: float
    between_failures_s: float


def best_interval_s(costs: SaveCosts) -> float:
    """The interval that loses least, and never less than a save takes."""
    best_s = math.sqrt(2 * max(costs.block_s, 0.0) * costs.between_failures_s)
    return max(best_s, costs.lag_s)


def lost_to_saves_s(seconds: Sequence[float], steps: Sequence[int]) -> float:
    """What steps lost while saves were written; 0 where too few steps show it.

    Both arguments are of [without a save being written, with one]: the time of steps, and their number.
    """
    if min(steps) < FEWEST_STEPS or min(seconds) <= 0:
        return 0.0
    calm_s, busy_s = (s / n for s, n in zip(seconds, steps, strict=True))
    return max(0.0, busy_s - calm_s) * steps[1]


def cost_share(interval_s: float, costs: SaveCosts) -> float:
    """The share of training time, 0 to 1, that saving at this interval and failing costs."""
    blocked = costs.block_s / interval_s if interval_s > 0 else math.inf
    return min(1.0, blocked + (interval_s / 2 + costs.lag_s) / costs.between_failures_s)


def between_failures_s(failures: int, wall_s: float) -> float:
    """Mean time between failures of a run that failed so often in `wall_s`.

    One failure a day is assumed beforehand, with the weight of a day: the run's own record
    outweighs it as the days go by.
    """
    return (_PRIOR_S + max(wall_s, 0.0)) / (1 + failures)


class AutoInterval:
    """Chooses the steps to save at, the same on all ranks, without waiting for any.

    Rank 0 decides at each save and announces it through the job's store; all ranks read it at the
    next save, when it has long been there, and count their way to the one after by it. So a
    decision takes effect one save late. The first is made after a few steps, and the first save
    comes soon: it shows what one costs.

    Args:
        coordinator: this rank's end of the job's store, for the training thread.
        failures: how often the run has failed since `since_s`, Unix seconds; on rank 0.
    """

    def __init__(
        self, coordinator: Coordinator, clock: Clock, *, failures: int, since_s: float
    ) -> None:
        self._talk = coordinator
        self._clock = clock
        self._failures = failures
        self._since_s = since_s
        self._points = 0
        self._next = 0
        self._at = (0, 0.0)  # step and monotonic time of the last point
        self._step_s = 0.0
        self._decided: dict[int, int] = {}  # on rank 0
        self._told_s = 0.0

    def begin(self, step: int) -> None:
        """Training goes on from this step."""
        self._next = step + _LOOK_STEPS
        self._at = (step, self._clock.monotonic())

    @property
    def next_look(self) -> int:
        """The step after which `due` has something to decide."""
        return self._next

    def due(self, step: int, block_s: float | None, lag_s: float | None) -> bool:
        """Is a save due after this step? Call after each step, on every rank.

        Args:
            step: the one that has ended.
            block_s: what one save has cost training so far; None before the first. Rank 0's counts.
            lag_s: from save() to its commit; None before the first. Rank 0's counts.
        """
        if step < self._next:
            return False
        point, self._points = self._points, self._points + 1
        if self._talk.rank == 0:
            self._decide(point, step, block_s, lag_s)
        if point == 0:
            self._next = step + _LOOK_STEPS
            return False
        self._next = step + self._heard(point - 1)
        return True

    def _decide(self, point: int, step: int, block_s: float | None, lag_s: float | None) -> None:
        before, then_s = self._at
        now_s = self._clock.monotonic()
        self._at = (step, now_s)
        self._step_s = max(1e-6, (now_s - then_s) / max(1, step - before))
        costs = SaveCosts(
            _UNKNOWN_BLOCK_S if block_s is None else block_s,
            _UNKNOWN_LAG_S if lag_s is None else lag_s,
            between_failures_s(self._failures, self._clock.time() - self._since_s),
        )
        interval_s = best_interval_s(costs)
        steps = max(1, math.ceil(interval_s / self._step_s))
        self._decided[point] = steps
        self._talk.announce(f"interval/{point}", {"steps": steps})
        self._talk.forget(f"interval/{point - _KEPT}", posts=False)
        self._decided.pop(point - _KEPT, None)
        if not self._told_s or not 0.8 < interval_s / self._told_s < 1.25:
            self._told_s = interval_s
            _log.info("%s", explain(interval_s, steps, costs))

    def _heard(self, point: int) -> int:
        if self._talk.rank == 0:
            return self._decided[point]
        return int(self._talk.hear(f"interval/{point}", _HEAR_S)["steps"])


def explain(interval_s: float, steps: int, costs: SaveCosts) -> str:
    """One line: what was chosen, and why."""
    bound = "what loses least"
    if interval_s <= costs.lag_s:
        bound = "no less than a save takes to commit"
    return (
        f"saving every {steps} steps, {interval_s:.3g} s: {bound}, at {costs.block_s:.3g} s for a save, "
        f"{costs.lag_s:.3g} s until its commit and a failure every "
        f"{costs.between_failures_s / 3600:.3g} h; saving and failing cost "
        f"{100 * cost_share(interval_s, costs):.2f} points of ETT%"
    )
