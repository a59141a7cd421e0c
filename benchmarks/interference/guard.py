"""What a guard costs a step of a sharded TorchRec model while no snapshot is open.

Steps with and without it in turn, in both orders; and the time spent inside its hooks, in
rounds of their own, so that taking it doesn't disturb the first two.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import RanksFailed, Seen, run_ranks, serve
from benchmarks.report import MIB, Row, median
from benchmarks.training.tables import row_bytes
from benchmarks.training.workload import DIM, LOOKUPS, SAMPLES, TABLES
from ckpt import Checkpointer
from ckpt.attach.fused import _Updates
from ckpt.storage import MemoryStorage

WARM_UP_STEPS = 30
IDS = TABLES * SAMPLES * LOOKUPS
DEADLINE_S = 600.0
_NO_GUARDS = "this version of ckpt has no Checkpointer.guard()"
_POOL = 64
_IN_A_STEP = ("_looked_up", "_before_update", "_after_update", "_after_backward")


class Unguarded(Exception):  # noqa: N818 - it reads as what happened
    """There is no guard to measure."""


def measure(size_mib: int, steps: int, rounds: int, root: Path) -> Seen:
    """`rounds` of so many steps each way. Raises Unguarded, RanksFailed."""
    job = {"size_mib": size_mib, "steps": steps, "rounds": rounds, "threads": 1}
    try:
        return run_ranks(__name__, job, 1, root, DEADLINE_S)
    except RanksFailed as e:
        if _NO_GUARDS in str(e):
            raise Unguarded(_NO_GUARDS) from None
        raise


def row(runs: list[Seen]) -> Row:
    rounds = [one for r in runs for one in r.answers[0]["rounds"]]
    without, guarded, in_hooks = (
        median(one[key] for one in rounds) or 0.0 for key in ("off_s", "on_s", "hooks_s")
    )
    # Each round against itself, before the median over all.
    cost = median(one["on_s"] / one["off_s"] - 1 for one in rounds)
    return {
        "ranks": 1,
        "quiet_step_ms": without * 1e3,
        "guarded_step_ms": guarded * 1e3,
        "guard_us": in_hooks * 1e6,
        "guard_cost": cost,
        "guard_cost_in_hooks": in_hooks / without,
        "ns_per_id": in_hooks * 1e9 / IDS,
        "ids": IDS,
        "samples": rounds,
    }


class _Timer:
    """Seconds spent in the functions that it wraps."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.total_s += time.perf_counter() - began

        return timed


class _Guarded:
    """The model of this rank, and the ways to train some steps of it."""

    def __init__(self, rows: int) -> None:
        from benchmarks.training.sharded import batches, lookup_modules, sharded_model

        self._ours = sharded_model(rows)
        self._batches = batches(rows, _POOL, seed=dist.get_rank())
        self._done = 0
        self._lookups = lookup_modules(self._ours.model)

    def steps(self, count: int) -> float:
        """Median seconds of a step."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            batch = self._batches[self._done % _POOL]
            self._done += 1
            self._ours.optimizer.zero_grad()
            self._ours.model(batch)[0].backward()
            self._ours.optimizer.step()
            times.append(time.perf_counter() - began)
        found = median(times)
        assert found is not None
        return found

    @contextmanager
    def guarded(self) -> Iterator[None]:
        checkpointer = Checkpointer(MemoryStorage())
        guard = getattr(checkpointer, "guard", None)
        if guard is None:
            raise Unguarded(_NO_GUARDS)
        before = self._hooks()
        guard(self._ours.model, self._ours.optimizer)
        if self._hooks() == before:
            raise RuntimeError("guard() has hooked none of the lookups")
        try:
            yield
        finally:
            checkpointer.close()
        if self._hooks() != before:
            raise RuntimeError("close() has left hooks on the lookups")

    @contextmanager
    def timing(self, timer: _Timer) -> Iterator[None]:
        """Take the time inside of everything that the guard does in a step."""
        kept = {name: getattr(_Updates, name) for name in _IN_A_STEP}
        for name, function in kept.items():
            setattr(_Updates, name, timer.around(function))
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(_Updates, name, function)

    def _hooks(self) -> int:
        return sum("forward" in vars(m) for m in self._lookups)


def _body(job: dict[str, Any], _: Path) -> dict[str, Any]:
    model = _Guarded(max(64, job["size_mib"] * MIB // (TABLES * row_bytes("torchrec", DIM))))
    count = job["steps"]
    model.steps(WARM_UP_STEPS)

    def off() -> float:
        return model.steps(count)

    def on() -> float:
        with model.guarded():
            model.steps(2)
            return model.steps(count)

    def hooks() -> float:
        timer = _Timer()
        with model.timing(timer), model.guarded():
            model.steps(2)
            timer.total_s = 0.0
            model.steps(count)
        return timer.total_s / count

    ways = {"off_s": off, "on_s": on, "hooks_s": hooks}
    rounds = []
    for number in range(job["rounds"]):
        order = list(ways.items())
        found = {n: way() for n, way in (order if number % 2 == 0 else reversed(order))}
        rounds.append(found)
    return {"rounds": rounds}


if __name__ == "__main__":
    sys.exit(serve(_body))
