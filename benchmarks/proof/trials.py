"""One writer beside training: how many saves go by until one of them finds it. In a process of its own."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.proof.writers import WRITERS, Place
from benchmarks.ranks import Seen, run_ranks, serve
from benchmarks.report import Row, median
from benchmarks.training.tables import best_kind
from benchmarks.training.workload import TABLES, Trainer, Workload
from ckpt import CheckpointConfig, Checkpointer
from ckpt.errors import UntrackedWriteError
from ckpt.events import ListSink

WARM_UP_STEPS = 20
DEADLINE_S = 3600.0
_ENDED_S = 300.0
_FEW = 4  # trials of what may take all saves of a trial


@dataclass(frozen=True)
class Job:
    """`trials` of one writer, each with a Checkpointer of its own and so many saves at most."""

    writer: str
    total_bytes: int
    trials: int
    saves: int
    steps: int


def fewer(writer: str, trials: int) -> int:
    kind = WRITERS[writer].kind
    return 1 if kind == "harmless" else min(trials, _FEW) if kind == "announced" else trials


def measure(job: Job, root: Path) -> Seen:
    """Raises RanksFailed."""
    return run_ranks(__name__, {"job": asdict(job), "threads": 1}, 1, root, DEADLINE_S)


def row(runs: list[Seen]) -> Row:
    answers = [r.answers[0] for r in runs]
    trials = [t for a in answers for t in a["trials"]]
    found = [t["found"] for t in trials if t["found"]]
    proof_ms = sorted(s * 1e3 for t in trials for s in t["proof_s"])
    return {
        "trials": len(trials),
        "saves": sum(len(t["proof_s"]) for t in trials),
        "found": len(found),
        "found_at_save": median(found),
        "latest": max(found, default=None),
        "left_in_place": median(t["left_in_place"] for t in trials),
        "proof_ms": median(proof_ms),
        "proof_ms_p99": proof_ms[int(0.99 * (len(proof_ms) - 1))],
        "others_cores": median(r.others_cores("start", "end") for r in runs),
        "samples": trials,
    }


class _Trial:
    """found: the number of the save that has found the writer, None if none has."""

    def __init__(self, trainer: Trainer, job: Job, seed: int) -> None:
        self._trainer = trainer
        self._job = job
        self._writer = WRITERS[job.writer]
        local = trainer.state.local
        self._place = Place(
            weights=[local[f"tables.{n}.weight"] for n in range(TABLES)],
            momenta=[local[f"tables.{n}.momentum"] for n in range(TABLES)],
            looked_up=list(trainer.ids),
            chance=random.Random(seed),
        )

    def play(self, folder: Path) -> dict[str, Any]:
        sink = ListSink()
        found = None
        config = CheckpointConfig(persist_target_s=0.0, keep_last=1)
        checkpointer = Checkpointer(folder, config, sink=sink)
        prepared = self._writer.prepare(self._place)
        try:
            checkpointer.guard(*self._trainer.guarded)
            for number in range(1, self._job.saves + 1):
                handle = checkpointer.save(number, {"tensors": self._trainer.state.trained})
                self._train(prepared)
                error = handle.committed.exception(_ENDED_S)
                if isinstance(error, UntrackedWriteError):
                    found = number
                    break
                if error is not None:
                    raise error
        finally:
            with contextlib.suppress(UntrackedWriteError):
                checkpointer.close()
        staged = sink.named("save_staged")
        return {
            "found": found,
            "proof_s": [e["proof_s"] for e in staged],
            "left_in_place": staged[0]["guarded_bytes"] / self._trainer.state.nbytes,
        }

    def _train(self, prepared: Any) -> None:
        for _ in range(self._job.steps):
            # Before the step: what it announces has been changed by then.
            self._writer.write(self._place, prepared)
            self._trainer.step(contextlib.nullcontext, ready=False)
            self._place.looked_up[:] = list(self._trainer.ids)


def _body(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    job = Job(**told["job"])
    trainer = Trainer(Workload(job.total_bytes, best_kind("cpu")))
    for _ in range(WARM_UP_STEPS):
        trainer.step(contextlib.nullcontext, ready=False)
    start, trials = monotonic(), []
    for number in range(job.trials):
        place = folder / str(number)
        trials.append(_Trial(trainer, job, seed=number).play(place))
        shutil.rmtree(place)
    return {"trials": trials, "moments": {"start": start, "end": monotonic()}}


if __name__ == "__main__":
    sys.exit(serve(_body))
