"""What a rank of one life is told, and the few figures that a life is replayed from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from trainer.interval import SaveCosts, best_interval_s

Way = Literal["sync", "async", "ours"]
WAYS: tuple[Way, ...] = ("sync", "async", "ours")
Technique = Literal[
    "compile_cache", "description_reuse", "overlap", "warm_workers", "async_save", "preemption"
]
TECHNIQUES: tuple[Technique, ...] = (
    "compile_cache",
    "description_reuse",
    "overlap",
    "warm_workers",
    "async_save",
    "preemption",
)

FIRST_SAVE = 20
"""The step of each attempt after which it saves, and learns what that costs."""
CALIBRATED = 120
"""The step at which the first attempt knows how many steps the training is to have."""
BESIDE = "beside.json"
"""What `benchmarks.ett.beside` writes into its job's folder."""


@dataclass(frozen=True)
class LifeJob:
    """One life of one model in one way.

    folder: the run's root. training_s: about how long training alone takes; the steps that come of it
    are decided once, by the first life of a model, and written to `plan`. without: techniques of
    ours that are switched off.
    """

    model: str
    way: Way
    folder: str
    plan: str
    training_s: float
    failures: int
    compiled: bool = True
    without: tuple[Technique, ...] = ()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> LifeJob:
        told = json.loads(path.read_text())
        return cls(**{**told, "without": tuple(told["without"])})


@dataclass(frozen=True)
class Figures:
    """What one way costs; seconds. The input of the replay and of `benchmarks fleet`.

    block_s: what a save costs training: the time in it, waits for its snapshot, and what steps lose
    while it is written. lag_s: from save()'s return to its commit; what is trained meanwhile a
    failure loses too.
    start_s: from the launcher's start to the first step. recover_s: from a failure to the first
    batch, trained before or not. preempt_s: the same for a preemption, with what it took to stop;
    preempt_repeats: is anything trained again after it? shutdown_s, publish_s: at the end.
    recoveries_s: after each kill and the preemption.
    """

    block_s: float
    lag_s: float
    start_s: float
    recover_s: float
    preempt_s: float
    preempt_repeats: bool
    shutdown_s: float
    publish_s: float
    recoveries_s: tuple[float, ...] = field(default=())


@dataclass(frozen=True)
class Replayed:
    """A life with so much training, at this way's best interval.

    training_s: what its new steps take while no save is written, which is what counts as effective.
    """

    training_s: float
    wall_s: float
    interval_s: float
    repeated_s: float

    @property
    def ett_same(self) -> float:
        """Percent."""
        return 100 * self.training_s / self.wall_s


def replay(way: Figures, training_s: float, kills: int = 2, preemptions: int = 1) -> Replayed:
    """The measured losses around another amount of training, in steps while no save is written.

    A failure costs half an interval and the lag, as long as training lasts; the interval is the one
    that loses least when so many failures come in this life.
    """
    repeats = kills + (preemptions if way.preempt_repeats else 0)
    apart_s = training_s / max(1, kills + preemptions)
    interval_s = max(best_interval_s(SaveCosts(way.block_s, way.lag_s, apart_s)), 1e-3)
    interval_s = min(interval_s, training_s)
    repeated_s = repeats * min(interval_s / 2 + way.lag_s, apart_s)
    wall_s = (
        way.start_s
        + training_s
        + training_s / interval_s * way.block_s
        + kills * way.recover_s
        + preemptions * way.preempt_s
        + repeated_s
        + way.publish_s
        + way.shutdown_s
    )
    return Replayed(training_s, wall_s, interval_s, repeated_s)


def training_for(way: Figures, ett_percent: float) -> float:
    """The amount of training at which this way reaches a share of effective time."""
    low, high = 1e-3, 1e7
    for _ in range(100):
        middle = math.sqrt(low * high)
        if replay(way, middle).ett_same < ett_percent:
            low = middle
        else:
            high = middle
    return high
