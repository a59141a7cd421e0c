"""How fast a snapshot reaches storage while the trainer is idle, against what the storage takes.

Each save stands between two measurements of the limit, in the same second.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.persist.folder import Folder
from benchmarks.persist.store import Bucket, unavailable
from benchmarks.persist.target import Sample, Target
from benchmarks.report import MIB, Report, Row, environment, median
from benchmarks.watch import wait_until_calm

COLUMNS = ("name", "gb_per_s", "limit_gb_per_s", "vs_limit", "min", "max", "blocked_ms")
TARGETS = ("local", "s3")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="tables with their optimizer state (1024)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="local,s3")


def run(args: argparse.Namespace) -> Report:
    size_mib = args.size_mib or (32 if args.quick else 1024)
    repeats = args.repeats or (2 if args.quick else 7)
    names = args.targets.split(",")
    if unknown := [n for n in names if n not in TARGETS]:
        sys.exit(f"--targets {unknown[0]}: use {' or '.join(TARGETS)}")
    env = environment(size_mib=size_mib, repeats=repeats)
    skipped = {"s3": unavailable()} if "s3" in names else {}
    samples: dict[str, list[Sample]] = defaultdict(list)
    folder = Path(tempfile.mkdtemp(prefix="persist-", dir=args.root)).resolve()
    try:
        with ExitStack() as stack:
            targets = {
                name: stack.enter_context(make())
                for name, make in _makers(folder, size_mib * MIB)
                if name in names and skipped.get(name) is None
            }
            for number in range(repeats):
                order = list(targets.items())
                for name, target in order if number % 2 == 0 else reversed(order):
                    wait_until_calm(args.calm)
                    print(f"round {number + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
                    samples[name].append(target.measure())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [_row(name, samples[name], skipped.get(name)) for name in names]
    by_name = {r["name"]: r for r in rows}
    ratios: dict[str, Any] = {
        "persist_vs_write_limit": by_name.get("local", {}).get("vs_limit"),
        "persist_s3_vs_one_stream": by_name.get("s3", {}).get("vs_limit"),
    }
    return Report(env, rows, ratios, COLUMNS)


def _makers(folder: Path, size_bytes: int) -> Iterator[tuple[str, Callable[[], Target]]]:
    yield "local", lambda: Folder(folder / "local", size_bytes)
    yield "s3", lambda: Bucket(folder / "s3", size_bytes)


def _row(name: str, samples: list[Sample], skipped: str | None) -> Row:
    if skipped is not None:
        return {"name": name, "status": "skipped", "reason": skipped}
    shares = [s.bytes_per_s / s.limit_bytes_per_s for s in samples]
    return {
        "name": name,
        "status": "ok",
        "gb_per_s": (median(s.bytes_per_s for s in samples) or 0.0) / 1e9,
        "limit_gb_per_s": (median(s.limit_bytes_per_s for s in samples) or 0.0) / 1e9,
        "vs_limit": median(shares),
        "min": min(shares),
        "max": max(shares),
        "blocked_ms": (median(s.blocked_s for s in samples) or 0.0) * 1e3,
        "samples": [vars(s) for s in samples],
    }
