"""How often to save, from what saving costs and how often a run fails.

A save costs training `block_s`; a failure costs what was trained since the last commit: half an
interval on average, and the lag of a commit behind its save. Per second of training the two
cost block_s / interval + (interval / 2 + lag) / between_failures, which is least at
sqrt(2 * block * between_failures) (Young 1974; arXiv 2610.02057 uses the same). No interval is
shorter than a save takes to commit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY_S = 86400.0
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


def cost_share(interval_s: float, costs: SaveCosts) -> float:
    """The share of training time, 0 to 1, that saving at this interval and failing costs."""
    repeated_s = interval_s / 2 + costs.lag_s
    return min(1.0, costs.block_s / interval_s + repeated_s / costs.between_failures_s)


def between_failures_s(failures: int, wall_s: float) -> float:
    """Mean time between failures of a run that failed so often in `wall_s`.

    One failure a day is assumed beforehand, with the weight of a day: the run's own record
    outweighs it as the days go by.
    """
    return (_PRIOR_S + max(wall_s, 0.0)) / (1 + failures)
