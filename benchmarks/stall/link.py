"""How fast a snapshot leaves a GPU, against what the link to it takes from pinned memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import run_ranks, serve
from benchmarks.report import MIB, Row, median
from benchmarks.training.modes import Job, Sidestage
from benchmarks.training.stores import DiscardingStorage
from benchmarks.training.workload import Trainer, Workload
from ckpt import CheckpointConfig

SAVES = 5
DEADLINE_S = 600.0
_PIECE_BYTES = 16 * MIB


def measure(size_mib: int, root: Path) -> dict[str, Any]:
    """Figures of one run on the first GPU: see `_body`."""
    job = {"size_mib": size_mib, "device": "cuda", "threads": 1}
    return run_ranks(__name__, job, 1, root, DEADLINE_S).answers[0]


def row(runs: list[dict[str, Any]]) -> Row:
    saves = [s for r in runs for s in r["saves"]]
    return {
        "d2h_gb_per_s": median(s["gb_per_s"] for s in saves),
        "link_gb_per_s": median(s["link_gb_per_s"] for s in saves),
        "d2h_vs_link": median(s["gb_per_s"] / s["link_gb_per_s"] for s in saves),
        "blocked_ms": (median(s["blocked_s"] for s in saves) or 0.0) * 1e3,
        "samples": saves,
    }


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Saves of an idle trainer into a store without a limit, the link measured around each."""
    trainer = Trainer(Workload(job["size_mib"] * MIB, "plain", "cuda"))
    config = CheckpointConfig(persist_target_s=0.0, compression="off")
    ours = Sidestage(
        Job(0, trainer.state, folder, trainer.guarded), config, DiscardingStorage("link")
    )
    pinned = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    source = torch.ones(_PIECE_BYTES, dtype=torch.uint8, device="cuda")
    saves = []
    for step in range(SAVES + 1):
        before = _link_bytes_per_s(source, pinned, trainer.state.nbytes)
        torch.cuda.synchronize()
        began = time.perf_counter()
        ours.save(step)
        blocked_s = time.perf_counter() - began
        while not ours.done():
            time.sleep(0.001)
        took_s = time.perf_counter() - began
        after = _link_bytes_per_s(source, pinned, trainer.state.nbytes)
        if step:  # the first one allocates
            saves.append(
                {
                    "blocked_s": blocked_s,
                    "gb_per_s": trainer.state.nbytes / took_s / 1e9,
                    "link_gb_per_s": (before + after) / 2 / 1e9,
                }
            )
    ours.close()
    return {"saves": saves}


def _link_bytes_per_s(source: torch.Tensor, pinned: torch.Tensor, total_bytes: int) -> float:
    """Copies of 16 MiB into one pinned buffer, until as many bytes as a snapshot has have gone."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    pieces = -(-total_bytes // len(pinned))
    for _ in range(pieces):
        pinned.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return pieces * len(pinned) / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(serve(_body))
