"""When to save and when to end: the same rule for every way, agreed after each save."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.ett.job import CALIBRATED, FIRST_SAVE, LifeJob
from trainer.interval import SaveCosts, best_interval_s, lost_to_saves_s

_WARM_UP = 5  # steps of an attempt that take longer than those to come


class Pace:
    """Steps of one attempt.

    The first life of a model decides how many steps its training has, by how long steps take; every
    attempt saves after `FIRST_SAVE` steps and then as often as loses least, by what its saves cost:
    the time that they block, what steps lose while they are written, and how long that takes.

    Args:
        begin: the step that this attempt begins after.
        lag_s: expected from save() to commit, until one has been seen.
        now_s: the clock, and agree: rank 0's number on every rank; for tests.
    """

    def __init__(
        self,
        job: LifeJob,
        rank: int,
        begin: int,
        lag_s: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self._job = job
        self._rank = rank
        self._plan = Path(job.plan)
        self.steps: int | None = None
        if self._plan.exists():
            self.steps = int(json.loads(self._plan.read_text())["steps"])
        self._warm = begin + _WARM_UP
        self._next = begin + FIRST_SAVE
        self._lag_s = lag_s
        self._now_s = now_s
        self._agree = agree or _of_rank_0
        self._at_s = self._now_s()  # of the last step's or save's end
        self._writing_since_s: float | None = None
        self._seconds = [0.0, 0.0]  # of steps, without a save being written and with one
        self._counts = [0, 0]
        self._blocks_s: list[float] = []

    def due(self, step: int) -> bool:
        """Is a save due after this step?"""
        return step == self._next

    def stepped(self, step: int, *, writing: bool) -> None:
        """After a step on every rank, before its save. At CALIBRATED they agree on the life's steps."""
        now_s = self._now_s()
        if step > self._warm:
            self._seconds[writing] += now_s - self._at_s
            self._counts[writing] += 1
        self._at_s = now_s
        if self._writing_since_s is not None and not writing:
            self._lag_s = now_s - self._writing_since_s
            self._writing_since_s = None
        if self.steps is None and step == CALIBRATED:
            steps = self._agree(math.ceil(self._job.training_s / self._step_s()))
            self.steps = max(steps, 4 * CALIBRATED)  # the first end comes later
            if self._rank == 0:
                write_steps(self._plan, self.steps)

    def saved(self, step: int, block_s: float, *, writing: bool) -> None:
        """After a save on every rank: agree on when the next one is due."""
        self._blocks_s.append(block_s)
        apart_s = self._job.training_s / max(1, self._job.failures)
        interval_s = best_interval_s(SaveCosts(self._save_s(), self._lag_s, apart_s))
        self._next = step + self._agree(max(1, math.ceil(interval_s / self._step_s())))
        self._at_s = self._now_s()
        self._writing_since_s = self._at_s - block_s if writing else None

    def over(self, step: int) -> bool:
        return self.steps is not None and step >= self.steps

    def _step_s(self) -> float:
        return max(1e-4, sum(self._seconds) / max(1, sum(self._counts)))

    def _save_s(self) -> float:
        """What a save costs training, with what steps lose while it is written where that is known."""
        slower_s = lost_to_saves_s(self._seconds, self._counts)
        return (sum(self._blocks_s) + slower_s) / len(self._blocks_s)


def _of_rank_0(mine: int) -> int:
    said = [mine]
    dist.broadcast_object_list(said, 0)
    return said[0]


def write_steps(plan: Path, steps: int) -> None:
    """How many steps the lives of a model have; a reader sees all of it or nothing."""
    made = plan.with_suffix(".new")
    made.write_text(json.dumps({"steps": steps}) + "\n")
    made.rename(plan)
