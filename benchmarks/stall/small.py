"""States of many small things: what a save takes of the training thread's processor time for each.

Processor time of the thread that calls save(), which others on the machine disturb less than wall time. The
structure stays as it is from save to save; every tensor and every number changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import run_ranks, serve
from benchmarks.report import Row, median
from ckpt import CheckpointConfig, Checkpointer

CASES = ("tensors", "module", "values")
SAVES = 5  # after the first
DEADLINE_S = 600.0
_PARAMETERS = 0.35  # of `count`: with Adam's state there are four tensors for each


def measure(case: str, count: int, world: int, root: Path) -> dict[str, Any]:
    """Figures of one run, of the rank that was slowest: see `_body`. Raises RanksFailed."""
    job = {"case": case, "count": count, "threads": 1}
    answers = run_ranks(__name__, job, world, root, DEADLINE_S).answers
    return max(answers, key=lambda a: median(a["later_s"]) or 0.0)


def row(runs: list[dict[str, Any]]) -> Row:
    def each_us(name: str) -> float:
        values = [s for r in runs for s in (r[name] if name == "later_s" else [r[name]])]
        return (median(values) or 0.0) / runs[0]["count"] * 1e6

    return {
        "count": runs[0]["count"],
        "first_us": each_us("first_s"),
        "us_each": each_us("later_s"),
        "state_dict_us": each_us("state_dict_s"),
        "second_vs_first": median((median(r["later_s"]) or 0.0) / r["first_s"] for r in runs),
        "samples": runs,
    }


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    state, change, count = {"tensors": _tensors, "module": _module, "values": _values}[job["case"]](
        job["count"]
    )
    saves_s = []
    with Checkpointer(folder, CheckpointConfig(persist_target_s=0.0, keep_last=1)) as checkpointer:
        for step in range(1, 2 + SAVES):
            began_s = time.thread_time()
            handle = checkpointer.save(step, state)
            saves_s.append(time.thread_time() - began_s)
            handle.committed.result(DEADLINE_S)
            change()
    began_s = time.thread_time()
    for part in state.values():
        if hasattr(part, "state_dict"):
            part.state_dict()
    state_dict_s = time.thread_time() - began_s
    return {
        "count": count,
        "first_s": saves_s[0],
        "later_s": saves_s[1:],
        "state_dict_s": state_dict_s,
    }


Made = tuple[dict[str, Any], Callable[[], None], int]


def _tensors(count: int) -> Made:
    """A dict of small tensors."""
    tensors = {f"table_{n}": torch.full((8, 4), float(n)) for n in range(count)}

    def change() -> None:
        for tensor in tensors.values():
            tensor.add_(1.0)

    return {"tensors": tensors}, change, count


def _module(count: int) -> Made:
    """A module of small parameters and its optimizer, Adam: three tensors more for each."""
    torch.manual_seed(7)  # the same on all ranks
    model = torch.nn.Module()
    model.parts = torch.nn.ModuleList(
        torch.nn.Linear(4, 4) for _ in range(max(1, int(count * _PARAMETERS) // 2))
    )
    optimizer = torch.optim.Adam(model.parameters())

    def change() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    change()
    return {"model": model, "optimizer": optimizer}, change, 4 * len(list(model.parameters()))


def _values(count: int) -> Made:
    """A dict of numbers."""
    numbers = {f"id_{n}": n for n in range(count)}

    def change() -> None:
        for key in numbers:
            numbers[key] += 1

    return {"numbers": numbers, "w": torch.zeros(3)}, change, count


if __name__ == "__main__":
    sys.exit(serve(_body))
