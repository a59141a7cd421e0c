"""When to save and when to end: the same rule for every way, agreed once per attempt."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.ett.job import CALIBRATED, FIRST_SAVE, LifeJob
from trainer.interval import SaveCosts, best_interval_s


class Pace:
    """Steps of one attempt.

    The first life of a model decides how many steps its training has, by how long steps take; every
    attempt saves after `FIRST_SAVE` steps and then as often as loses least, by what that save took.
    """

    def __init__(self, job: LifeJob, rank: int, begin: int) -> None:
        self._job = job
        self._rank = rank
        self._begin = begin
        self._began_s = time.monotonic()
        self._plan = Path(job.plan)
        self.steps: int | None = None
        if self._plan.exists():
            self.steps = int(json.loads(self._plan.read_text())["steps"])
        self._every: int | None = None

    def due(self, step: int) -> bool:
        """Is a save due after this step?"""
        done = step - self._begin
        if self._every is None:
            return done == FIRST_SAVE
        return (done - FIRST_SAVE) % self._every == 0

    def learn(self, step: int, block_s: float, lag_s: float) -> None:
        """After a step on every rank: decide the interval after the first save, and the steps of the life."""
        done = step - self._begin
        if done == FIRST_SAVE:
            step_s = self._step_s(done, block_s)
            apart_s = self._job.training_s / max(1, self._job.failures)
            interval_s = best_interval_s(SaveCosts(block_s, lag_s, apart_s))
            self._every = self._agree(max(1, math.ceil(interval_s / step_s)))
        if self.steps is None and step == CALIBRATED:
            steps = math.ceil(self._job.training_s / self._step_s(done, block_s))
            self.steps = max(self._agree(steps), 2 * CALIBRATED)
            if self._rank == 0:
                made = self._plan.with_suffix(".new")
                made.write_text(json.dumps({"steps": self.steps}) + "\n")
                made.rename(self._plan)

    def over(self, step: int) -> bool:
        return self.steps is not None and step >= self.steps

    def _step_s(self, done: int, block_s: float) -> float:
        saves = 0 if self._every is None else 1 + (done - FIRST_SAVE) // self._every
        return max(1e-4, (time.monotonic() - self._began_s - saves * block_s) / done)

    def _agree(self, mine: int) -> int:
        said = [mine]
        dist.broadcast_object_list(said, 0)
        return said[0]
