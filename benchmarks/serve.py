"""A served model under swaps, and its latency against the live model's.

swaps: versions whose every weight is one number are made live in turn, 200 times, while clients ask over
HTTP. An answer that isn't wholly of the version that it names is counted as mixed.
latency: a Predictor on int8 tables against the eager TorchRec model in fp32, in one process, in turn.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo.client import is_ready
from benchmarks.demo.jobs import run as run_command
from benchmarks.demo.jobs import wait_for
from benchmarks.report import Report, Row, environment
from benchmarks.serving.models import DENSE
from benchmarks.serving.process import committing, daemon, environment_of
from benchmarks.watch import wait_until_calm
from ckpt.errors import SidestageError
from publisher.pointer import Reason
from publisher.registry import open_registry

COLUMNS = ("name", "engine", "batch", "p50_ms", "p99_ms", "answers", "mixed", "errors", "swaps")
STAMPS = 5
CLIENTS = 2
ROWS = 8
TIMEOUT_S = 180.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--swaps", type=int, help="how often another version goes live (200)")
    parser.add_argument("--rows", type=int, help="rows of each of the 8 tables, latency (100000)")


def run(args: argparse.Namespace) -> Report:
    swaps = args.swaps or (6 if args.quick else 200)
    rows = args.rows or (1000 if args.quick else 100_000)
    env = environment(swaps=swaps, rows=rows, clients=CLIENTS)
    folder = Path(tempfile.mkdtemp(prefix="serve-", dir=args.root)).resolve()
    try:
        swapped = _swap(folder, swaps)
        wait_until_calm(args.calm)
        latency = _latency(folder, rows, args.repeats or (20 if args.quick else 400))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    at_64 = {r["name"]: r["p50_ms"] for r in latency if r["batch"] == 64}
    ratios: dict[str, Any] = {
        "mixed_answers": swapped["mixed"],
        "failed_answers": swapped["errors"],
        "p50_vs_eager": at_64["published"] / at_64["eager fp32"],
    }
    return Report(env, [swapped, *latency], ratios, COLUMNS)


def _swap(folder: Path, swaps: int) -> Row:
    root = folder / "stamped"
    with committing(folder, root, "stamped") as commits:
        for step in range(1, STAMPS + 1):
            commits.commit(step)
            _publish(folder, root)
    registry = open_registry(str(root))
    stamp_of = {n: registry.version(n).source.step for n in registry.numbers()}
    with daemon(
        folder, "server", "serve", str(root), "--port", "0", "--interval", "0.02"
    ) as server:
        port = int(server.event("listening", TIMEOUT_S)["port"])
        wait_for(lambda: is_ready(port) or None, TIMEOUT_S, "the server", [server])
        clients = [_Client(port, stamp_of, seed) for seed in range(CLIENTS)]
        try:
            for n in range(swaps):
                live = registry.live()
                assert live is not None
                others = [v for v in stamp_of if v != live.to_version]
                to = others[n % len(others)]
                registry.rollback(to, Reason("benchmark", "swap"))
                wait_for(
                    lambda to=to: True if any(c.version == to for c in clients) else None,
                    TIMEOUT_S,
                    f"version {to} to answer",
                    [server],
                )
        finally:
            for c in clients:
                c.stop()
    return {
        "name": "swaps under load",
        "status": "ok",
        "swaps": swaps,
        "answers": sum(c.answers for c in clients),
        "mixed": sum(c.mixed for c in clients),
        "errors": sum(c.errors for c in clients),
        "versions_seen": sorted(set().union(*(c.seen for c in clients))),
    }


def _publish(folder: Path, root: Path) -> dict[str, Any]:
    return run_command(["-m", "publisher.cli", "once", str(root)], environment_of(folder))


class _Client:
    """Asks on one connection all the time, and checks that each answer is of one version."""

    def __init__(self, port: int, stamp_of: dict[int, int], seed: int) -> None:
        self._port, self._stamp_of = port, stamp_of
        self._body = json.dumps({"inputs": _inputs(seed)}).encode()
        self._stop = threading.Event()
        self.version: int | None = None
        self.seen: set[int] = set()
        self.answers = self.mixed = self.errors = 0
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        while not self._stop.is_set():
            try:
                connection.request("POST", "/v2/models/benchmark/infer", self._body)
                response = connection.getresponse()
                doc = json.loads(response.read())
                self._check(doc)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                self.errors += 1
                connection.close()
        connection.close()

    def _check(self, doc: dict[str, Any]) -> None:
        version = int(doc["model_version"])
        data = {o["name"]: o["data"] for o in doc["outputs"]}
        want = float(self._stamp_of[version])
        whole = all(v == want for name in ("table", "dense") for v in data[name])
        whole = whole and all(v == 2 * want for v in data["both"])
        self.answers += 1
        self.mixed += not whole
        self.seen.add(version)
        self.version = version


def _inputs(seed: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 1000, (ROWS,), generator=g).tolist()
    return [
        {"name": "dense", "datatype": "FP32", "shape": [ROWS, DENSE], "data": [0.5] * ROWS * DENSE},
        {"name": "f0.values", "datatype": "INT64", "shape": [ROWS], "data": ids},
        {"name": "f0.lengths", "datatype": "INT64", "shape": [ROWS], "data": [1] * ROWS},
    ]


def _latency(folder: Path, rows: int, requests: int) -> list[Row]:
    """In a process of its own: the clients' threads must not be in it."""
    root = folder / "ranker"
    with committing(folder, root, "ranker", str(rows)) as commits:
        commits.commit(1)
    _publish(folder, root)
    with suppress(
        SidestageError
    ):  # without a compiler the program runs eagerly, which the row says
        run_command(["-m", "publisher.cli", "compile", str(root)], environment_of(folder))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.latency", str(root), str(rows), str(requests)],
        env={**os.environ, **environment_of(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the latency part failed: {done.stderr[-2000:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))
