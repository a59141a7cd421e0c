"""Does a persist keep its target duration while others take all cores?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import Seen, run_ranks, serve
from benchmarks.report import Row, median
from benchmarks.training.modes import Sidestage
from benchmarks.training.tables import Kind
from benchmarks.training.windows import Windows
from benchmarks.training.workload import Trainer, Workload
from ckpt import CheckpointConfig

SAVES = 3
WARM_UP_STEPS = 20
DEADLINE_S = 1200.0


@dataclass(frozen=True)
class Case:
    """One rank that trains and saves, beside so many processes that only burn CPU time."""

    total_bytes: int
    tables: Kind
    target_s: float
    hogs: int


def measure(case: Case, root: Path) -> Seen:
    job = {"case": asdict(case), "threads": 1}
    return run_ranks(__name__, job, 1, root, DEADLINE_S)


def row(runs: list[Seen]) -> Row:
    answers = [r.answers[0] for r in runs]
    saves = [s for a in answers for s in a["saves"]]
    target_s = answers[0]["target_s"]
    return {
        "ranks": 1,
        "persist_s": median(s["persist_s"] for s in saves),
        "target_s": target_s,
        "vs_target": (median(s["persist_s"] for s in saves) or 0.0) / target_s,
        "blocked_ms": (median(s["blocked_s"] for s in saves) or 0.0) * 1e3,
        "quiet_step_ms": (median(a["quiet_step_s"] for a in answers) or 0.0) * 1e3,
        "persist_step_ms": (median(s["step_s"] for s in saves) or 0.0) * 1e3,
        "samples": saves,
    }


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    case = Case(**job["case"])
    windows = Windows(Trainer(Workload(case.total_bytes, case.tables)), folder)
    windows.quiet(WARM_UP_STEPS)
    ours = Sidestage(windows.job, CheckpointConfig(persist_target_s=case.target_s))
    windows.saving(ours, 1)  # the first one allocates
    saves = []
    with _hogs(case.hogs):
        quiet = windows.quiet(WARM_UP_STEPS)
        for _ in range(SAVES):
            window = windows.saving(ours, 1)
            saves.append(
                {
                    "persist_s": window.persist_s,
                    "blocked_s": window.blocked_s,
                    "step_s": median(window.during_s),
                }
            )
    ours.close()
    return {"saves": saves, "quiet_step_s": median(quiet.steps_s), "target_s": case.target_s}


@contextmanager
def _hogs(count: int) -> Iterator[None]:
    """Processes at normal priority that never sleep."""
    command = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


if __name__ == "__main__":
    sys.exit(serve(_body))
