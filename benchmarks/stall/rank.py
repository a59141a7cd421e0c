"""One rank of one block: train, save in one mode, measure; then, untimed, save once more and compare.

Started by `benchmarks.stall.block`, which watches this process's memory from outside.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import serve
from benchmarks.report import median
from benchmarks.training.modes import MODES, Saver
from benchmarks.training.tables import Kind
from benchmarks.training.windows import Window, Windows
from benchmarks.training.workload import Trainer, Workload

WARM_UP_STEPS = 20
BASELINE_S = 0.3  # of quiet training, in which the watcher sees what the state alone takes


@dataclass(frozen=True)
class Block:
    """What to measure: some saves in one mode.

    min_steps: of each window.
    verify: save once more at the end, and compare what a restore gives with the state at save().
    """

    mode: str
    total_bytes: int
    saves: int
    min_steps: int
    threads: int
    tables: Kind
    device: str = "cpu"
    verify: bool = True


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
    fence_wait_s: float | None
    overlay_wait_s: float | None


@dataclass(frozen=True)
class RankResult:
    """What a rank saw. Times in `moments` are of the machine's monotonic clock."""

    state_bytes: int
    moments: dict[str, float]
    first_blocked_s: float
    saves: list[SaveFigures]
    differing: dict[str, int] | None
    copied_tables: int | None


class BlockRun:
    """One block on this rank. Collective throughout."""

    def __init__(self, block: Block, folder: Path) -> None:
        self._block = block
        workload = Workload(block.total_bytes, block.tables, block.device)
        self._windows = Windows(Trainer(workload), folder)

    def run(self) -> RankResult:
        windows, least = self._windows, self._block.min_steps
        windows.quiet(WARM_UP_STEPS)
        moments = {"baseline": time.monotonic()}
        windows.quiet_for(BASELINE_S)
        moments["open"] = time.monotonic()
        saver = MODES[self._block.mode].saver(windows.job)
        first = windows.saving(saver, least)
        windows.settle()
        figures = []
        before = windows.quiet(len(first.steps_s))
        for _ in range(self._block.saves):
            saving = windows.saving(saver, least)
            unsynced_s = windows.settle()
            after = windows.quiet(len(saving.steps_s))
            figures.append(_figures(before, saving, after, unsynced_s))
            before = after
        moments["saved"] = time.monotonic()
        differing = self._differing(saver) if self._block.verify else None
        saver.close()
        return RankResult(
            windows.trainer.state.nbytes,
            moments,
            first.blocked_s,
            figures,
            differing,
            saver.copied_tables(),
        )

    def _differing(self, saver: Saver) -> dict[str, int]:
        """Save beside training, and compare with a whole copy: how many elements differ in what."""
        state = self._windows.trainer.state
        kept = state.like()
        self._windows.saving(saver, self._block.min_steps, kept)
        loaded = state.like()
        saver.restore(self._windows.step, loaded)
        return kept.differing(loaded)


def _figures(before: Window, saving: Window, after: Window, unsynced_s: float) -> SaveFigures:
    """A save against the quiet windows on both sides of it, so that a slow drift cancels out."""
    quiet_s = (before.mean_step_s + after.mean_step_s) / 2
    quiet_step_s = median([*before.steps_s, *after.steps_s])
    assert quiet_step_s is not None
    return SaveFigures(
        blocked_s=saving.blocked_s,
        lost_s=saving.wall_s - quiet_s * len(saving.steps_s),
        persist_s=saving.persist_s,
        unsynced_s=unsynced_s,
        quiet_step_s=quiet_step_s,
        persist_step_s=median(saving.during_s),
        persist_step_p99_s=_p99(saving.during_s),
        fence_wait_s=saving.waited_s.get("fence_wait_s"),
        overlay_wait_s=saving.waited_s.get("overlay_wait_s"),
    )


def _p99(values: list[float]) -> float | None:
    return sorted(values)[int(0.99 * len(values))] if values else None


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    return asdict(BlockRun(Block(**job), folder).run())


if __name__ == "__main__":
    sys.exit(serve(_body))
