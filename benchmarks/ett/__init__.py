"""Effective training time of five models, each through the same life in three ways.

Measured: a life is launched, killed twice, preempted once and trained to its end, with real processes.
Replayed: the same losses around as much training as brings the way of today to 60, 80 and 90%.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ett.job import (
    TECHNIQUES,
    WAYS,
    Figures,
    LifeJob,
    Replayed,
    Technique,
    Way,
    replay,
    training_for,
)
from benchmarks.ett.life import FAILURES, figures, live
from benchmarks.report import Report, Row, environment
from benchmarks.watch import wait_until_calm
from ckpt.errors import BadInputError, SidestageError
from trainer.ett.records import RunReport

COLUMNS = (
    "model",
    "name",
    "source",
    "ett",
    "ett_lost",
    "wall_s",
    "training_s",
    "interval_s",
    "start_s",
    "recover_s",
    "preempt_s",
    "block_ms",
    "lag_s",
    "repeated",
    "unaccounted",
)
LEVELS = (60, 80, 90)
NAMES = ("tables", "dense", "many", "sequence", "multitask")
COMPILED = ("dense", "multitask")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(NAMES), help=" ".join(NAMES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=" ".join(WAYS))
    parser.add_argument(
        "--training", type=float, default=40.0, metavar="S", help="training in a measured life (40)"
    )
    parser.add_argument(
        "--compiled",
        nargs="*",
        default=list(COMPILED),
        help=f"models whose dense part is compiled ({' '.join(COMPILED)})",
    )
    parser.add_argument(
        "--ablate", metavar="MODEL", help="switch each technique of ours off alone, on this model"
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="write what benchmarks fleet reads"
    )


def run(args: argparse.Namespace) -> Report:
    models = args.models[:1] if args.quick else args.models
    training_s = 5.0 if args.quick else args.training
    if unknown := sorted({*models, *([args.ablate] if args.ablate else [])} - set(NAMES)):
        raise BadInputError(f"--models {unknown[0]}: there are {', '.join(NAMES)}")
    env = environment(training_s=training_s, compiled=args.compiled, ranks=2)
    folder = Path(tempfile.mkdtemp(prefix="ett-", dir=args.root)).resolve()
    rows: list[Row] = []
    seen: dict[str, dict[Way, tuple[RunReport, Figures]]] = {}
    try:
        for model in models:
            compiled = model in args.compiled and not args.quick
            for way in args.ways:
                job = _job(folder, model, way, training_s, compiled=compiled)
                if (life := _life(job, args.calm, rows)) is not None:
                    seen.setdefault(model, {})[way] = life
            rows += _replayed(model, {w: f for w, (_, f) in seen.get(model, {}).items()})
        if args.ablate:
            compiled = args.ablate in args.compiled
            for technique in TECHNIQUES:
                if technique == "compile_cache" and not compiled:
                    continue
                job = _job(folder, args.ablate, "ours", training_s, technique, compiled=compiled)
                _life(job, args.calm, rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.measured is not None:
        args.measured.write_text(json.dumps(_for_fleet(seen), indent=1) + "\n")
    return Report(env, rows, _ratios(seen), COLUMNS)


def _job(
    folder: Path,
    model: str,
    way: Way,
    training_s: float,
    without: Technique | None = None,
    *,
    compiled: bool,
) -> LifeJob:
    return LifeJob(
        model=model,
        way=way,
        folder=str(folder / model / (f"without-{without}" if without else way)),
        plan=str(folder / model / "plan.json"),
        training_s=training_s,
        failures=FAILURES,
        compiled=compiled,
        without=(without,) if without else (),
    )


def _life(job: LifeJob, calm_s: float, rows: list[Row]) -> tuple[RunReport, Figures] | None:
    """Run a life; its row, and what it measured. None, with a row that says why, if it failed."""
    wait_until_calm(calm_s)
    Path(job.plan).parent.mkdir(parents=True, exist_ok=True)
    name = f"{job.way} without {job.without[0]}" if job.without else job.way
    print(f"{job.model}: {name}", flush=True)
    row: Row = {"model": job.model, "name": name, "source": "measured", "compiled": job.compiled}
    try:
        report = live(job)
        found = figures(report)
    except SidestageError as e:
        rows.append({**row, "status": "failed", "reason": str(e)})
        return None
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)
    ended = [a.ended for a in report.attempts]
    rows.append(
        {
            **row,
            "status": "ok",
            "ett": report.ett_percent,
            "wall_s": report.wall_s,
            "training_s": report.areas["training_new"],
            "start_s": found.start_s,
            "recover_s": found.recover_s,
            "preempt_s": found.preempt_s,
            "block_ms": 1000 * found.block_s,
            "lag_s": found.lag_s,
            "interval_s": report.measured.interval_s,
            "repeated": report.batches_repeated,
            "lost": report.lost_batches,
            "unaccounted": report.areas["unaccounted"] / report.wall_s,
            "ended": ended,
            "areas": {k: v for k, v in report.areas.items() if v},
            "figures": asdict(found),
        }
    )
    again = replay(found, report.areas["training_new"])
    rows.append({**row, "source": "replayed as measured", "status": "ok", **_shown(again)})
    return report, found


def _replayed(model: str, ways: dict[Way, Figures]) -> list[Row]:
    if "sync" not in ways:
        return []
    rows = []
    for level in LEVELS:
        training_s = training_for(ways["sync"], level)
        for way, found in ways.items():
            shown = _shown(replay(found, training_s))
            row = {"model": model, "name": way, "source": f"replayed, sync at {level}%"}
            rows.append({**row, "status": "ok", **shown})
    return rows


def _shown(again: Replayed) -> dict[str, Any]:
    return {
        "ett": again.ett_percent,
        "ett_lost": 100 - again.ett_percent,
        "wall_s": again.wall_s,
        "training_s": again.training_s,
        "interval_s": again.interval_s,
    }


def _ratios(seen: dict[str, dict[Way, tuple[RunReport, Figures]]]) -> dict[str, Any]:
    both = {m: w for m, w in seen.items() if {"sync", "ours"} <= set(w)}
    ratios: dict[str, Any] = {"models": len(both)}
    if both:
        gains = [_ett(w, "ours", 60) - _ett(w, "sync", 60) for w in both.values()]
        ratios["gain_min_60"] = min(gains)
        ratios["gain_mean_60"] = statistics.mean(gains)
        for level in (80, 90):
            ratios[f"loss_removed_{level}"] = min(
                1 - (100 - _ett(w, "ours", level)) / (100 - _ett(w, "sync", level))
                for w in both.values()
            )
        ratios["recover_ratio"] = statistics.median(
            w["ours"][1].recover_s / w["sync"][1].recover_s for w in both.values()
        )
        ratios["start_warm_vs_cold"] = statistics.median(_warm_vs_cold(w) for w in both.values())
        ratios["repeated_ratio"] = statistics.median(_repeated_ratio(w) for w in both.values())
    reports = [r for w in seen.values() for r, _ in w.values()]
    if reports:
        ratios["unaccounted"] = max(r.areas["unaccounted"] / r.wall_s for r in reports)
    return ratios


def _ett(ways: dict[Way, tuple[RunReport, Figures]], way: Way, level: int) -> float:
    training_s = training_for(ways["sync"][1], level)
    return replay(ways[way][1], training_s).ett_percent


def _warm_vs_cold(ways: dict[Way, tuple[RunReport, Figures]]) -> float:
    """Time to the first step of ours after a failure, over that of the first start."""
    report = ways["ours"][0]
    warm = [a.time_to_start_s or 0.0 for a in report.attempts[1:]]
    return statistics.median(warm) / (report.attempts[0].time_to_start_s or 1.0)


def _repeated_ratio(ways: dict[Way, tuple[RunReport, Figures]]) -> float:
    """Training done again where sync is at 90%: at long runs intervals differ most."""
    training_s = training_for(ways["sync"][1], 90)
    ours, sync = (replay(ways[w][1], training_s).repeated_s for w in ("ours", "sync"))
    return ours / sync if sync else 0.0


def _for_fleet(seen: dict[str, dict[Way, tuple[RunReport, Figures]]]) -> dict[str, Any]:
    """Rows of costs, by way and model."""
    names = ("block_s", "lag_s", "start_s", "recover_s", "shutdown_s", "publish_s")
    called = {"sync": "baseline", "async": "async", "ours": "ours"}
    return {
        "rows": [
            {
                "way": called[way],
                "model": model,
                "ranks": 2,
                "status": "ok",
                **{name: getattr(found, name) for name in names},
            }
            for model, ways in seen.items()
            for way, (_, found) in ways.items()
        ]
    }
