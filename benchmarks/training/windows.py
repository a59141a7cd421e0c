"""Windows of training on this rank, quiet ones and ones with a save. Collective throughout."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from benchmarks.training.modes import Job, Saver
from benchmarks.training.workload import State, Trainer

DEADLINE_S = 300.0  # of one save


@dataclass
class Window:
    """Steps in a row. `during_s` are those that ran while the save of this window was persisted.

    waited_s: what the saver counted itself, by name.
    """

    wall_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    blocked_s: float = 0.0
    persist_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict)

    @property
    def mean_step_s(self) -> float:
        return self.wall_s / len(self.steps_s)


class Windows:
    """Trains `trainer`, with and without saves. `step` is the number of the newest save."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer = trainer
        self.job = Job(dist.get_rank(), trainer.state, folder, trainer.guarded)
        self.step = 0
        self._lock_s = 0.0

    def quiet(self, steps: int) -> Window:
        """Train without a save."""
        dist.barrier()
        began = time.perf_counter()
        times = [self._timed_step(contextlib.nullcontext, ready=False)[0] for _ in range(steps)]
        return Window(time.perf_counter() - began, times)

    def quiet_for(self, seconds: float) -> None:
        """Train until every rank has seen `seconds` pass."""
        end = time.monotonic() + seconds
        while not self._timed_step(contextlib.nullcontext, ready=time.monotonic() > end)[1]:
            pass

    def saving(self, saver: Saver, min_steps: int, keep: State | None = None) -> Window:
        """Save, and train until it is over on every rank and for `min_steps` at least.

        keep: receives the state as it is at save(), outside of what is timed.
        """
        if keep is not None:
            keep.copy_from(self.trainer.state)
        self.step += 1
        window = Window()
        dist.barrier()
        before = saver.waited_s()
        began, self._lock_s = time.perf_counter(), 0.0
        saver.save(self.step)
        window.blocked_s = time.perf_counter() - began
        ready = over = False
        while not (over and len(window.steps_s) >= min_steps):
            if not ready and saver.done():
                ready = True
                window.persist_s = time.perf_counter() - began
            took_s, over = self._timed_step(saver.updating, ready=ready)
            window.steps_s.append(took_s)
            if not ready:
                window.during_s.append(took_s)
            if time.perf_counter() - began > DEADLINE_S:
                raise TimeoutError(f"save {self.step} isn't over after {DEADLINE_S:g} s")
        window.wall_s = time.perf_counter() - began
        window.blocked_s += self._lock_s
        window.waited_s = {n: s - before[n] for n, s in saver.waited_s().items()}
        return window

    def settle(self) -> float:
        """Sync what a saver left in the page cache, so that it doesn't disturb what comes next.

        The seconds that it took are the durability that a save called done didn't have yet.
        """
        dist.barrier()
        began = time.perf_counter()
        if self.job.rank == 0:
            for path in self.job.folder.rglob("*"):
                if path.is_file():
                    with path.open("rb") as f:
                        os.fsync(f.fileno())
        dist.barrier()
        return time.perf_counter() - began

    def _timed_step(
        self, updating: Callable[[], AbstractContextManager[object]], *, ready: bool
    ) -> tuple[float, bool]:
        began = time.perf_counter()
        all_ready = self.trainer.step(lambda: self._locked(updating), ready=ready)
        return time.perf_counter() - began, all_ready

    @contextlib.contextmanager
    def _locked(self, updating: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Count the time until a checkpointer lets the trainer update: it is blocked meanwhile."""
        began = time.perf_counter()
        with updating():
            self._lock_s += time.perf_counter() - began
            yield
