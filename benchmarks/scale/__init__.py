"""The work of rank 0, and of a reader, for a job of thousands of ranks: the real code, without tensors.

Plan, receipts, commit and open of one save, for three sizes of job: is each linear in it?
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from typing import Any

from benchmarks.report import Report, Row, environment, median
from benchmarks.scale.job import Job, Simulated
from benchmarks.watch import wait_until_calm

COLUMNS = (
    *("ranks", "tensors", "chunks", "index_mb", "commit_mb", "plan_s", "hear_s"),
    *("receipt_ms", "commit_s", "latest_s", "open_s", "gc_s"),
)
_TIMED = ("plan_s", "hear_s", "receipt_ms", "commit_s", "latest_s", "open_s", "gc_s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="of the largest job (4096)")
    parser.add_argument("--tables", type=int, default=100, help="row-wise over all ranks (100)")
    parser.add_argument("--gib", type=float, default=20.0, help="of tables on each rank (20)")
    parser.add_argument(
        "--latency-ms", type=float, default=0.0, help="of each call of the simulated store (0)"
    )


def run(args: argparse.Namespace) -> Report:
    most = args.ranks or (64 if args.quick else 4096)
    repeats = args.repeats or 1
    worlds = [max(2, most // 4), max(2, most // 2), most]
    env = environment(
        ranks=most,
        tables=args.tables,
        gib_per_rank=args.gib,
        latency_ms=args.latency_ms,
        repeats=repeats,
    )
    taken: dict[int, list[dict[str, Any]]] = {w: [] for w in worlds}
    for number in range(repeats):
        for world in worlds if number % 2 == 0 else reversed(worlds):
            wait_until_calm(args.calm)
            print(f"round {number + 1} of {repeats}: {world} ranks", file=sys.stderr, flush=True)
            job = Job(world, args.tables, int(args.gib * (1 << 30)), args.latency_ms / 1e3)
            taken[world].append(_measure(job))
    rows = [_row(world, found) for world, found in taken.items()]
    return Report(env, rows, _ratios(rows), COLUMNS)


def _measure(job: Job) -> dict[str, Any]:
    """Seconds of each part, for one job."""
    simulated = Simulated(job)
    found: dict[str, Any] = {"tensors": job.tables, "chunks": job.chunks}
    pauses = _Pauses()
    with pauses:
        for name, part in (
            ("plan_s", simulated.plan),
            ("hear_s", simulated.hear),
            ("receipts_s", simulated.write_receipts),
            ("commit_s", simulated.commit),
            ("latest_s", simulated.latest),
            ("open_s", simulated.open),
        ):
            began = time.perf_counter()
            part()
            found[name] = time.perf_counter() - began
    found["gc_s"] = pauses.total_s
    found["receipt_ms"] = found.pop("receipts_s") / job.world * 1e3
    found["open_s"] += found["latest_s"]  # nobody opens without finding it first
    found["index_mb"] = simulated.index_bytes / 1e6
    found["commit_mb"] = simulated.commit_bytes / 1e6
    return found


class _Pauses:
    """Seconds that Python's garbage collector took in a block."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began = 0.0

    def __enter__(self) -> _Pauses:
        gc.collect()
        gc.callbacks.append(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.total_s += time.perf_counter() - self._began


def _row(world: int, found: list[dict[str, Any]]) -> Row:
    mid = {name: median(f[name] for f in found) for name in _TIMED}
    return {"name": f"{world} ranks", "ranks": world, "status": "ok", **found[0], **mid}


def _ratios(rows: list[Row]) -> dict[str, Any]:
    """Of the largest job; and seconds a rank there over those at half of it: 1 is linear."""
    half, largest = rows[-2], rows[-1]
    ratios = {n: largest[n] for n in ("plan_s", "commit_s", "open_s", "index_mb")}
    for name in ("plan_s", "commit_s", "open_s"):
        per_rank = [r[name] / r["ranks"] for r in (largest, half)]
        ratios[f"{name.removesuffix('_s')}_linearity"] = per_rank[0] / per_rank[1]
    return ratios
