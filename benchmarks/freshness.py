"""From a commit to the first answer of its version over HTTP, and from a rollback to the first older one.

The demo's model, with the daemons as one runs them: `publisher run`, `publisher serve`, a client that asks
all the time. Nothing else is in the way, so this is what the parts take one after another.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.demo.client import MODEL, Load, is_ready
from benchmarks.demo.jobs import Job, wait_for
from benchmarks.demo.script import _held_out_request
from benchmarks.report import Report, Row, environment, median
from benchmarks.serving.process import committing, daemon
from benchmarks.watch import wait_until_calm
from publisher.pointer import Reason
from publisher.registry import Registry, open_registry

COLUMNS = ("name", "seconds", "min", "max", "count")
TIMEOUT_S = 180.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=float, default=0.2, help="of both daemons, in seconds")
    parser.add_argument(
        "--pause",
        type=float,
        default=10.0,
        help="seconds between an answer and the next commit: the publisher's spare process warms up",
    )


def run(args: argparse.Namespace) -> Report:
    repeats = args.repeats or (2 if args.quick else 9)
    pause_s = 0.0 if args.quick else args.pause
    env = environment(repeats=repeats, model=MODEL, interval_s=args.interval, pause_s=pause_s)
    folder = Path(tempfile.mkdtemp(prefix="freshness-", dir=args.root)).resolve()
    try:
        wait_until_calm(args.calm)
        fresh, backward = _measure(folder, repeats, args.interval, pause_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [_row("commit to first answer", fresh), _row("rollback to first answer", backward)]
    ratios = {
        "freshness_s": median(fresh),
        "rollback_ms": None if not backward else 1000 * (median(backward) or 0.0),
    }
    return Report(env, rows, ratios, COLUMNS)


def _measure(
    folder: Path, repeats: int, interval_s: float, pause_s: float
) -> tuple[list[float], list[float]]:
    root = folder / "run"
    each = ("--interval", str(interval_s))
    with (
        committing(folder, root, "movielens") as commits,
        daemon(folder, "publisher", "run", str(root), *each) as publisher,
    ):
        commits.commit(1)
        registry = open_registry(str(root))
        _until_live(registry, 1, publisher)
        with daemon(folder, "server", "serve", str(root), "--port", "0", *each) as server:
            port = int(server.event("listening", TIMEOUT_S)["port"])
            wait_for(lambda: is_ready(port) or None, TIMEOUT_S, "the server", [server, publisher])
            load = Load(port, _held_out_request(16))
            try:
                jobs = [server, publisher]
                fresh = []
                for step in range(2, 2 + repeats):
                    time.sleep(pause_s)
                    committed_at_s = commits.commit(step)
                    fresh.append(_first_answer(registry, load, step, committed_at_s, jobs))
                backward = [_roll_back(registry, load, jobs) for _ in range(min(repeats, 5))]
            finally:
                load.stop()
            if load.errors:
                raise RuntimeError(f"a request failed: {load.errors[0]}")
    return fresh, backward


def _until_live(registry: Registry, step: int, *jobs: Job) -> int:
    def look() -> int | None:
        live = registry.live()
        return live.to_version if live is not None and live.source.step == step else None

    return wait_for(look, TIMEOUT_S, f"step {step} to be live", jobs)


def _first_answer(
    registry: Registry, load: Load, step: int, committed_at_s: float, jobs: list[Job]
) -> float:
    """Seconds from the commit to the first answer of its version."""
    version = _until_live(registry, step, *jobs)
    answer = wait_for(
        lambda: load.first_from(version, committed_at_s), TIMEOUT_S, f"version {version}", jobs
    )
    return answer.at_s - committed_at_s


def _roll_back(registry: Registry, load: Load, jobs: list[Job]) -> float:
    """Seconds from the pointer's move to the first answer of the version before; then forward again."""
    live = registry.live()
    assert live is not None
    moves = []
    for to in (None, live.to_version):
        move = registry.rollback(to, Reason("benchmark", "rollback"))

        def answered(version: int = move.to_version, since_s: float = move.at_s) -> float | None:
            found = load.first_from(version, since_s)
            return None if found is None else found.at_s - since_s

        moves.append(wait_for(answered, TIMEOUT_S, f"version {move.to_version}", jobs))
    return moves[0]


def _row(name: str, seconds: list[float]) -> Row:
    return {
        "name": name,
        "status": "ok",
        "seconds": median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "count": len(seconds),
        "samples": seconds,
    }
