"""What publishing costs: time against reading, quantising and writing alone; memory; a trainer's steps.

Each publish stands between two measurements of the limit, with the same files dropped from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.limits import forget
from benchmarks.report import MIB, Report, Row, environment, median
from benchmarks.serving.memory import PeakAbove, imports_bytes
from benchmarks.serving.process import committing, environment_of
from benchmarks.watch import wait_until_calm
from publisher.registry import Registry, open_registry

TABLES, DIM = 8, 64
PARTS = ("full", "sizes", "beside")
COLUMNS = (
    *("name", "size_mib", "publish_s", "limit_s", "vs_limit", "peak_mib", "int8_vs_fp32"),
    *("max_abs_err", "step_ms", "step_beside_ms"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="fp32 tables of the full publish (1024)")
    parser.add_argument("--parts", default=",".join(PARTS), help="full,sizes,beside")


@dataclass(frozen=True)
class _Publish:
    """One publish; `began` and `ended` by the wall clock."""

    seconds: float
    peak_bytes: int
    stored_bytes: int
    max_abs_err: float
    began: float
    ended: float


def run(args: argparse.Namespace) -> Report:
    size_mib = args.size_mib or (16 if args.quick else 1024)
    repeats = args.repeats or (1 if args.quick else 5)
    parts = args.parts.split(",")
    if unknown := [p for p in parts if p not in PARTS]:
        sys.exit(f"--parts {unknown[0]}: use {', '.join(PARTS)}")
    sizes = [size_mib, *([size_mib // 4, size_mib * 4] if "sizes" in parts else [])]
    env = environment(size_mib=size_mib, repeats=repeats)
    base = imports_bytes()
    rows: list[Row] = []
    folder = Path(tempfile.mkdtemp(prefix="publish-", dir=args.root)).resolve()
    try:
        for size in sizes:
            wait_until_calm(args.calm)
            of_size = repeats if size == size_mib else 1
            rows.append(_size(folder / str(size), size, of_size, base))
            if size == size_mib and "beside" in parts:
                rows.append(_beside(folder / str(size), repeats, base))
            shutil.rmtree(folder / str(size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    full = rows[0]
    ratios: dict[str, Any] = {
        "publish_vs_limit": full["vs_limit"],
        "peak_mib": full["peak_mib"],
        "int8_vs_fp32": full["int8_vs_fp32"],
        "max_abs_err": full["max_abs_err"],
    }
    if "sizes" in parts:
        ratios["peak_4g_vs_quarter_g"] = rows[-1]["peak_mib"] / rows[-2]["peak_mib"]
    if "beside" in parts:
        ratios["trainer_step_vs_alone"] = rows[1]["step_vs_alone"]
    return Report(env, rows, ratios, COLUMNS)


def _size(folder: Path, size_mib: int, repeats: int, base: int) -> Row:
    folder.mkdir()
    root, rows = folder / "run", size_mib * MIB // (TABLES * DIM * 4)
    with committing(folder, root, "ranker", str(rows)) as commits:
        commits.commit(1)
    limits, found = [], []
    for _ in range(repeats):
        limits.append(_limit(folder, root))
        found.append(_publish(folder, root, base))
        limits.append(_limit(folder, root))
    shares = [
        f.seconds / (a + b) * 2 for f, a, b in zip(found, limits[::2], limits[1::2], strict=True)
    ]
    return {
        "name": f"full publish, {size_mib} MiB",
        "status": "ok",
        "size_mib": size_mib,
        "publish_s": median(f.seconds for f in found),
        "limit_s": median(limits),
        "vs_limit": median(shares),
        "peak_mib": (median(f.peak_bytes for f in found) or 0.0) / MIB,
        "int8_vs_fp32": found[0].stored_bytes / (rows * TABLES * DIM * 4),
        "max_abs_err": max(f.max_abs_err for f in found),
        "samples": [vars(f) for f in found],
        "limits": limits,
    }


def _publish(folder: Path, root: Path, base: int) -> _Publish:
    """`publisher once` into a new registry. The seconds are the manifest's: imports are before them."""
    target = folder / "registry"
    shutil.rmtree(target, ignore_errors=True)
    forget(root / "data")
    process = subprocess.Popen(
        [sys.executable, "-m", "publisher.cli", "once", str(root), "--registry", str(target)],
        env={**os.environ, **environment_of(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with PeakAbove(process.pid, base) as peak:
        _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"publisher once failed: {said.decode(errors='replace')[-2000:]}")
    registry: Registry = open_registry(str(root), str(target))
    manifest = registry.version(registry.numbers()[-1])
    parity = next(g for g in manifest.gates if g.name == "golden_parity")
    tables = sum(f.size_bytes for f in manifest.files if f.key.startswith("tables"))
    return _Publish(
        manifest.published_at_s - manifest.started_at_s,
        peak.bytes,
        tables,
        parity.value or 0.0,
        manifest.started_at_s,
        manifest.published_at_s,
    )


def _limit(folder: Path, root: Path) -> float:
    out = folder / "limit"
    forget(root / "data")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.limit", str(root), str(out)],
        env={**os.environ, **environment_of(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    out.unlink()
    return float(done.stdout.split()[-1])


def _beside(folder: Path, repeats: int, base: int) -> Row:
    """Steps of a trainer on one thread while a version is made, and while none is. A daemon imports once
    in its life, so the seconds in which `once` imports are neither.
    """
    with _trainer() as steps:
        time.sleep(3)
        windows = []
        for _ in range(max(2, repeats)):
            started = time.time()
            done = _publish(folder, folder / "run", base)
            windows.append((started, done.began, done.ended))
            time.sleep(min(10.0, done.seconds))
    while_publishing, alone = [], []
    for line in steps:
        at, took = map(float, line.split())
        inside = any(a <= at and at + took <= b for _, a, b in windows)
        outside = all(at > b + 1 or at + took < a for a, _, b in windows)
        outside = outside and at > windows[0][0] - 2
        (while_publishing if inside else alone if outside else []).append(took)
    quiet, busy = median(alone) or 0.0, median(while_publishing) or 0.0
    return {
        "name": "trainer beside it",
        "status": "ok",
        "step_ms": 1000 * quiet,
        "step_beside_ms": 1000 * busy,
        "step_vs_alone": busy / quiet,
        "steps": len(while_publishing),
    }


@contextmanager
def _trainer() -> Iterator[list[str]]:
    """A training process; the list has its lines once the block has ended."""
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving.trainer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    out = process.stdout
    reader = threading.Thread(target=lambda: lines.extend(out), daemon=True)
    try:
        lines.append(out.readline().strip())
        reader.start()
        yield lines
    finally:
        process.stdin.close()
        process.wait(60)
        reader.join(60)
