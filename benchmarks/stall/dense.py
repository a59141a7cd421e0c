"""One rank with dense parameters only, which change at every step: what a save makes training wait.

The parameters are the whole state (SGD without momentum). A copy of them can't be avoided,
only hidden behind forward and backward: a warm memcpy with all cores is what it is measured by.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import run_ranks, serve
from benchmarks.report import MIB, Row, median
from benchmarks.training.modes import guard_all, seconds_of
from ckpt import CheckpointConfig, Checkpointer

WIDTH = 2048  # 16 MiB a layer
BATCH = 16
SAVES = 5
DEADLINE_S = 600.0


def measure(size_mib: int, device: str, threads: int, root: Path) -> dict[str, Any]:
    """Figures of one run: see `_body`."""
    job = {"size_mib": size_mib, "device": device, "threads": threads}
    return run_ranks(__name__, job, 1, root, DEADLINE_S).answers[0]


def row(runs: list[dict[str, Any]]) -> Row:
    def mid(name: str) -> float:
        return median(s[name] for r in runs for s in r["saves"]) or 0.0

    ratio = median((s["save_s"] + s["fence_s"]) / s["memcpy_s"] for r in runs for s in r["saves"])
    return {
        "blocked_ms": mid("save_s") * 1e3,
        "fence_wait_ms": mid("fence_s") * 1e3,
        "lost_ms": mid("lost_s") * 1e3,
        "memcpy_ms": mid("memcpy_s") * 1e3,
        "quiet_step_ms": mid("quiet_step_s") * 1e3,
        "persist_s": mid("persist_s"),
        "block_vs_memcpy": ratio,
        "exact": all(r["differing"] == 0 for r in runs),
        "samples": [s for r in runs for s in r["saves"]],
    }


class _Dense:
    """Layers of 16 MiB, trained on random data by SGD."""

    def __init__(self, size_mib: int, device: str) -> None:
        layers = max(1, size_mib * MIB // (4 * WIDTH * WIDTH))
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        ).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._x = torch.randn(BATCH, WIDTH, device=device)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]

    def step(self) -> None:
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # fresh pages at each step would be noise
        if self._x.is_cuda:
            torch.cuda.synchronize()

    def timed_step(self) -> float:
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    dense = _Dense(job["size_mib"], job["device"])
    copy = [torch.empty(w.shape).fill_(1) for w in dense.weights]  # touched
    source = [torch.empty(w.shape).fill_(2) for w in dense.weights]
    state = {"model": dense.model, "optimizer": dense.optimizer}
    config = CheckpointConfig(persist_target_s=0.0, keep_last=1)
    saves = []
    with Checkpointer(str(folder), config) as checkpointer:
        guard_all(checkpointer, (dense.model, dense.optimizer))
        for _ in range(3):
            dense.step()
        checkpointer.save(1, state).committed.result(DEADLINE_S)
        for number in range(2, 2 + SAVES):
            memcpy_s = median(_memcpy_s(source, copy) for _ in range(3))
            quiet = [dense.timed_step() for _ in range(3)]
            saves.append({"memcpy_s": memcpy_s, **_save(checkpointer, number, state, dense)})
            quiet += [dense.timed_step() for _ in range(3)]
            saves[-1]["quiet_step_s"] = median(quiet)
            saves[-1]["lost_s"] = saves[-1].pop("wall_s") - 2 * (median(quiet) or 0.0)
    return {"saves": saves, "differing": _differing(folder, config, dense, copy)}


def _save(
    checkpointer: Checkpointer, number: int, state: dict[str, Any], dense: _Dense
) -> dict[str, float]:
    """A save and the two steps after it; the first of them meets the fence."""

    def fenced_s() -> float:
        return seconds_of(getattr(checkpointer.stats, "fence_wait_s", 0.0))

    before = fenced_s()
    began = time.perf_counter()
    handle = checkpointer.save(number, state)
    save_s = time.perf_counter() - began
    dense.step()
    dense.step()
    wall_s = time.perf_counter() - began
    fence_s = fenced_s() - before
    handle.committed.result(DEADLINE_S)
    persist_s = time.perf_counter() - began
    return {"save_s": save_s, "fence_s": fence_s, "wall_s": wall_s, "persist_s": persist_s}


def _memcpy_s(source: list[torch.Tensor], into: list[torch.Tensor]) -> float:
    """A warm copy of as many bytes in host memory, with all cores."""
    began = time.perf_counter()
    for a, b in zip(source, into, strict=True):
        b.copy_(a)
    return time.perf_counter() - began


def _differing(
    folder: Path, config: CheckpointConfig, dense: _Dense, kept: list[torch.Tensor]
) -> int:
    """Elements of a save, taken while training went on, that weren't what they had been at save()."""
    state = {"model": dense.model, "optimizer": dense.optimizer}
    with Checkpointer(str(folder), config) as checkpointer:
        checkpointer.restore(state)
        guard_all(checkpointer, (dense.model, dense.optimizer))
        for a, b in zip(kept, dense.weights, strict=True):
            a.copy_(b)
        handle = checkpointer.save(100, state)
        dense.step()
        dense.step()
        handle.committed.result(DEADLINE_S)
    with contextlib.closing(Checkpointer(str(folder), config)) as reader:
        reader.restore(state)
    return sum(int((a != b.cpu()).sum()) for a, b in zip(kept, dense.weights, strict=True))


if __name__ == "__main__":
    sys.exit(serve(_body))
