"""One rank of `memory`: trains and saves, and notes when; what it takes is read from outside."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import serve
from benchmarks.report import median
from benchmarks.training.modes import Sidestage
from benchmarks.training.stores import SlowStorage
from benchmarks.training.tables import Kind
from benchmarks.training.windows import Window, Windows
from benchmarks.training.workload import Trainer, Workload
from ckpt import CheckpointConfig
from ckpt.budget import share_out
from ckpt.storage import open_storage

WARM_UP_STEPS = 20
BASELINE_S = 0.5
EARLY = 5  # the save after which the memory of `growth` is taken first


@dataclass(frozen=True)
class Case:
    """usual: Zipf ids and default settings. worst: uniform ids and a store of `slow_bytes_per_s`.

    growth: `saves` saves, as fast as they go.
    """

    name: str
    total_bytes: int
    tables: Kind
    saves: int
    slow_bytes_per_s: float
    threads: int


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """What this rank saw; times in `moments` are of the machine's monotonic clock."""
    ids = "uniform" if case.name == "worst" else "zipf"
    trainer = Trainer(Workload(case.total_bytes, case.tables, ids=ids))
    windows = Windows(trainer, folder)
    windows.quiet(WARM_UP_STEPS)
    moments = {"baseline": time.monotonic()}
    windows.quiet_for(BASELINE_S)
    moments["open"] = time.monotonic()
    ours = _saver(case, windows, folder)
    quiet = windows.quiet(WARM_UP_STEPS)
    saves = []
    for number in range(1, case.saves + 1):
        saves.append(_figures(windows.saving(ours, 1), quiet))
        if case.name == "growth" and number in (min(EARLY, case.saves), case.saves):
            moment = "late" if number == case.saves else "early"
            moments[moment] = time.monotonic()
            windows.quiet_for(BASELINE_S)
            moments[f"{moment}_end"] = time.monotonic()
    moments["saved"] = time.monotonic()
    failed, copied = ours.checkpointer.stats.failed, ours.copied_tables()
    ours.close()
    tables_bytes = sum(t.nbytes for n, t in trainer.state.local.items() if n.startswith("tables."))
    return {
        "state_bytes": trainer.state.nbytes,
        "budget_bytes": share_out(CheckpointConfig(), tables_bytes, 0, 0).staging_bytes,
        "moments": moments,
        "saves": saves,
        "failed": failed,
        "copied_tables": copied,
    }


def _saver(case: Case, windows: Windows, folder: Path) -> Sidestage:
    if case.name == "growth":
        config = CheckpointConfig(persist_target_s=0.0, keep_last=1)
        return Sidestage(windows.job, config)
    if case.name == "worst":
        slow = SlowStorage(open_storage(folder), case.slow_bytes_per_s / dist.get_world_size())
        return Sidestage(windows.job, storage=slow)
    return Sidestage(windows.job)


def _figures(window: Window, quiet: Window) -> dict[str, float | None]:
    return {
        "blocked_s": window.blocked_s,
        "persist_s": window.persist_s,
        "quiet_step_s": median(quiet.steps_s),
        "persist_step_s": median(window.during_s),
        **window.waited_s,
    }


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    return measure(Case(**job), folder)


if __name__ == "__main__":
    sys.exit(serve(_body))
