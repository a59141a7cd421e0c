"""One rank of one block: train, save in one mode, measure, restore and compare.

Started by `benchmarks.stall.block`, which watches this process's memory from outside. Leaves a
JSON file: what it saw, or the error that ended it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.report import median
from benchmarks.stall.modes import MODES, Job, Saver
from benchmarks.stall.workload import State, Trainer

WARM_UP_STEPS = 20
BASELINE_S = 0.3  # of quiet training, in which the watcher sees what the state alone takes
DEADLINE_S = 180.0  # of one save


@dataclass(frozen=True)
class Block:
    """What to measure: some saves in one mode.

    number: the order of the windows with and without a save alternates with it.
    min_steps: of each window.
    """

    mode: str
    number: int
    total_bytes: int
    saves: int
    min_steps: int
    threads: int


@dataclass
class Window:
    """Steps in a row. `during` are those that ran while the save of this window was persisted."""

    wall_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    blocked_s: float = 0.0
    persist_s: float = 0.0


@dataclass(frozen=True)
class SaveFigures:
    """One save. `lost_s` is the window's time beyond that of as many quiet steps."""

    blocked_s: float
    lost_s: float
    persist_s: float
    unsynced_s: float
    quiet_step_s: float
    persist_step_s: float | None
    persist_step_p99_s: float | None


@dataclass(frozen=True)
class RankResult:
    """What a rank saw. Times in `moments` are of the machine's monotonic clock."""

    state_bytes: int
    moments: dict[str, float]
    first_blocked_s: float
    saves: list[SaveFigures]
    differing: dict[str, int]


class BlockRun:
    """One block on this rank. Collective throughout."""

    def __init__(self, block: Block, folder: Path) -> None:
        torch.set_num_threads(block.threads)
        self._block = block
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._trainer = Trainer(block.total_bytes, mesh)
        self._job = Job(dist.get_rank(), self._trainer.state, folder)
        self._step = 0  # of the newest save
        self._waited_s = 0.0

    def run(self) -> RankResult:
        kept = self._trainer.state.like()  # the benchmark's own copy, so before the baseline
        kept.copy_from(self._trainer.state)
        self._quiet(WARM_UP_STEPS)
        moments = {"baseline": time.monotonic()}
        self._quiet_for(BASELINE_S)
        moments["open"] = time.monotonic()
        saver = MODES[self._block.mode].saver(self._job)
        first = self._saving(saver, self._block.min_steps)
        self._settle()
        figures, steps = [], len(first.steps_s)
        for n in range(self._block.saves):
            keep = kept if n == self._block.saves - 1 else None
            quiet_first = (n + self._block.number) % 2 == 0
            one, steps = self._pair(saver, steps, keep, quiet_first=quiet_first)
            figures.append(one)
        moments["saved"] = time.monotonic()
        loaded = self._trainer.state.like()
        saver.restore(self._step, loaded)
        saver.close()
        return RankResult(
            self._trainer.state.nbytes, moments, first.blocked_s, figures, kept.differing(loaded)
        )

    def _pair(
        self, saver: Saver, steps: int, keep: State | None, *, quiet_first: bool
    ) -> tuple[SaveFigures, int]:
        """A window with a save beside a quiet one; also how many steps the save's took."""
        if quiet_first:
            quiet = self._quiet(steps)
            saving = self._saving(saver, steps, keep)
            unsynced_s = self._settle()
        else:
            saving = self._saving(saver, self._block.min_steps, keep)
            unsynced_s = self._settle()
            quiet = self._quiet(len(saving.steps_s))
        count = len(saving.steps_s)
        # A save may take more steps than the quiet window before it: compare as many.
        lost_s = saving.wall_s - quiet.wall_s * count / len(quiet.steps_s)
        quiet_step_s = median(quiet.steps_s)
        assert quiet_step_s is not None
        figures = SaveFigures(
            blocked_s=saving.blocked_s,
            lost_s=lost_s,
            persist_s=saving.persist_s,
            unsynced_s=unsynced_s,
            quiet_step_s=quiet_step_s,
            persist_step_s=median(saving.during_s),
            persist_step_p99_s=_p99(saving.during_s),
        )
        return figures, count

    def _saving(self, saver: Saver, min_steps: int, keep: State | None = None) -> Window:
        """Save, and train until it is over on every rank and for `min_steps` at least.

        keep: receives the state as it is at save(), outside of what is timed.
        """
        if keep is not None:
            keep.copy_from(self._trainer.state)
        self._step += 1
        window = Window()
        dist.barrier()
        began, self._waited_s = time.perf_counter(), 0.0
        saver.save(self._step)
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
                raise TimeoutError(f"save {self._step} isn't over after {DEADLINE_S:g} s")
        window.wall_s = time.perf_counter() - began
        window.blocked_s += self._waited_s
        return window

    def _quiet(self, steps: int) -> Window:
        dist.barrier()
        began = time.perf_counter()
        times = [self._timed_step(contextlib.nullcontext, ready=False)[0] for _ in range(steps)]
        return Window(time.perf_counter() - began, times)

    def _quiet_for(self, seconds: float) -> None:
        """Train until every rank has seen `seconds` pass."""
        end = time.monotonic() + seconds
        while not self._timed_step(contextlib.nullcontext, ready=time.monotonic() > end)[1]:
            pass

    def _timed_step(
        self, updating: Callable[[], AbstractContextManager[object]], *, ready: bool
    ) -> tuple[float, bool]:
        began = time.perf_counter()
        all_ready = self._trainer.step(lambda: self._waiting_for(updating), ready=ready)
        return time.perf_counter() - began, all_ready

    @contextlib.contextmanager
    def _waiting_for(
        self, updating: Callable[[], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Count the time until a checkpointer lets the trainer update: it is blocked meanwhile."""
        began = time.perf_counter()
        with updating():
            self._waited_s += time.perf_counter() - began
            yield

    def _settle(self) -> float:
        """Sync what the saver left in the page cache, so that it doesn't disturb what comes next.

        The seconds that it took are the durability that a save called done didn't have yet.
        """
        dist.barrier()
        began = time.perf_counter()
        if self._job.rank == 0:
            for path in self._job.folder.rglob("*"):
                if path.is_file():
                    with path.open("rb") as f:
                        os.fsync(f.fileno())
        dist.barrier()
        return time.perf_counter() - began


def main() -> int:
    block = Block(**json.loads(os.environ["BENCHMARK_BLOCK"]))
    folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        dist.init_process_group("gloo")
        result = asdict(BlockRun(block, folder).run())
    except BaseException as e:  # DCP's CheckpointException is no Exception
        lines = str(e).strip().splitlines() or ["no message"]
        answer.write_text(json.dumps({"error": f"{type(e).__name__}: {lines[-1]}"}))
        raise
    answer.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _p99(values: list[float]) -> float | None:
    return sorted(values)[int(0.99 * len(values))] if values else None


if __name__ == "__main__":
    sys.exit(main())
