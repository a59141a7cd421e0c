"""ETT of a fleet: measured block, start, recover, lag and publish times, over thousands of jobs.

A simulator (benchmarks/fleet_model.py) lives through jobs of days, on 8 to 4,096 ranks, at
published failure rates. Each way of saving runs at its own best interval. What is measured on a
few ranks is taken to hold on many: state, storage and network grow with the ranks.

Failures per node of 8 accelerators and day:

    rsc-jobs   0.0210   jobs of 8 GPUs failed every 47.7 days, of 1,024 every 7.9 h (0.0237 by that)
    rsc-1      0.0065   node failures of the same study's larger cluster, 16,384 GPUs: 1.8 h
    rsc-2      0.0023   and of its smaller one
    llama-3    0.0038   419 unexpected interruptions of a job of 16,384 H100s in 54 days

Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA
2025, arXiv 2410.21680; "The Llama 3 Herd of Models", 2024, arXiv 2407.21783. The default is what
jobs saw, not nodes: on 1,024 ranks that is 2.7 a day, near the 3 a day that the founding study of
ETT (arXiv 2610.02057) reckons with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet_model import PARTS, Lives, Seconds, Times, best_interval_s, simulate
from benchmarks.fleet_plots import line_plot
from benchmarks.report import Report, Row, environment, median
from trainer.interval import DAY_S

RATES: Mapping[str, float] = {
    "rsc-jobs": 1 / 47.7,
    "rsc-1": 6.50e-3,
    "llama-3": 419 / 54 / (16_384 / 8),
    "rsc-2": 2.34e-3,
}
NODE_RANKS = 8
BASELINE, ASYNC, OURS = "dcp.save", "dcp.async_save", "sidestage"
WAYS = (BASELINE, ASYNC, OURS)
_ALSO_CALLED = {"baseline": BASELINE, "async": ASYNC, "ours": OURS}

# Of 1 GiB over 2 ranks with no core free (docs/performance.md; dcp.save: `stall`, same machine).
# Starting and recovering are assumed to be equal, and nobody publishes, until they are measured.
BUILT_IN: Mapping[str, Times] = {
    BASELINE: Times(block_s=3.46, interference_s=0.0, lag_s=3.46, start_s=120, recover_s=120),
    ASYNC: Times(block_s=0.429, interference_s=2.365, lag_s=4.5, start_s=120, recover_s=120),
    OURS: Times(block_s=0.0057, interference_s=0.676, lag_s=4.6, start_s=120, recover_s=120),
}
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_TRIED = (0.5, 0.7, 1.0, 1.4, 2.0)  # of the closed form's interval


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measured",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="figures of `ett` or `stall`, may be repeated; what they lack is built in",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="SVG files go here")
    parser.add_argument("--jobs", type=int, help="jobs of each size (2000)")
    parser.add_argument(
        "--ranks", type=_sizes, default=(8, 64, 256, 1024, 4096), help="sizes of jobs, as 8,64,256"
    )
    parser.add_argument("--rate", choices=tuple(RATES), default="rsc-jobs", help="of failures")
    parser.add_argument(
        "--save-scale",
        type=float,
        default=1.0,
        help="multiply block, interference and lag, for a larger state a rank (1)",
    )
    parser.add_argument("--seed", type=int, default=7)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(n) for n in text.split(",")}))


def run(args: argparse.Namespace) -> Report:
    try:
        times = read_times(args.measured)
    except (OSError, ValueError, AttributeError, TypeError) as e:
        print(f"error: --measured: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    times = {way: _scaled(t, args.save_scale) for way, t in times.items()}
    jobs = args.jobs or (200 if args.quick else 2000)
    sizes = args.ranks
    work_s = work(jobs, args.seed)
    rate = RATES[args.rate]
    rows: list[Row] = []
    for ranks in sizes:
        for way in WAYS:
            named = {"part": "sizes", "way": way, "ranks": ranks}
            rows.append({**named, **_row(times[way], work_s, _of_job(ranks, rate), args.seed)})
    middle = 1024 if 1024 in sizes else sizes[-1]
    for name, each in RATES.items():
        for way in WAYS:
            named = {"part": "rates", "rate": name, "way": way, "ranks": middle}
            rows.append({**named, **_row(times[way], work_s, _of_job(middle, each), args.seed)})
    rows += _sensitivities(times, middle, work_s, rate, args.seed)
    if args.plots is not None:
        write_plots(rows, args.plots, middle)
    columns = ("part", "rate", "parameter", "factor", "way", "ranks", "failures_per_day")
    return Report(
        env=environment(
            jobs=jobs,
            rate=args.rate,
            failures_per_node_day=rate,
            save_scale=args.save_scale,
            seed=args.seed,
            measured=[p.name for p in args.measured],
            times={way: asdict(t) for way, t in times.items()},
        ),
        rows=rows,
        ratios=_ratios(rows),
        columns=(*columns, "interval_s", "ett_percent", "p5", "p95"),
    )


def work(jobs: int, seed: int) -> Seconds:
    """Training that each job needs, (jobs,) seconds: 1 to 14 days, 4 at the median."""
    days = np.random.default_rng(seed).lognormal(np.log(4), 0.6, jobs)
    return np.clip(days, 1, 14) * DAY_S


def read_times(files: Sequence[Path]) -> dict[str, Times]:
    """The built-in times, with what was measured in their place; later files win.

    Rows of a report are taken by `way` (or `mode`), medians over rows of the same: seconds under
    the names of Times, as `ett` reports them, or `blocked_ms`, `lost_ms` and `persist_s` of
    `stall`, those with the most ranks.
    """
    found = dict(BUILT_IN)
    for path in files:
        rows = json.loads(path.read_text()).get("rows", ())
        used = False
        for way in WAYS:
            of_way = [r for r in rows if _way_of(r) == way and r.get("status", "ok") == "ok"]
            most = max((r.get("ranks") or 0 for r in of_way), default=0)
            said = [_times_in(r) for r in of_way if (r.get("ranks") or 0) == most]
            names = {name for s in said for name in s}
            middle = {n: median(s.get(n) for s in said) for n in names}
            found[way] = replace(found[way], **{n: v for n, v in middle.items() if v is not None})
            used = used or bool(names)
        if not used:
            said_ways = ", ".join(WAYS)
            raise ValueError(
                f"{path}: no times of {said_ways}; give the --json of `stall`, or what `ett --measured` wrote"
            )
    return found


def _way_of(row: Row) -> str | None:
    name = row.get("way", row.get("mode"))
    return _ALSO_CALLED.get(name, name)


def _times_in(row: Row) -> dict[str, float]:
    said = {name: row[name] for name in Times.__annotations__ if row.get(name) is not None}
    if row.get("blocked_ms") is not None and row.get("lost_ms") is not None:
        said["block_s"] = row["blocked_ms"] / 1000
        said["interference_s"] = max(0.0, row["lost_ms"] - row["blocked_ms"]) / 1000
        said["lag_s"] = max(row.get("persist_s") or 0.0, said["block_s"])
    return said


def _scaled(times: Times, factor: float) -> Times:
    names = ("block_s", "interference_s", "lag_s")
    return replace(times, **{n: getattr(times, n) * factor for n in names})


# -- rows -----------------------------------------------------------------------------------


def at_best_interval(
    times: Times, work_s: Seconds, failures_per_day: float, seed: int
) -> tuple[float, Lives]:
    """Simulated at the closed form's interval and around it; the one with the best mean ETT."""
    shortest_s = max(times.lag_s, times.block_s)
    about_s = best_interval_s(times, failures_per_day)
    tried = sorted({max(shortest_s, about_s * f) for f in _TRIED})
    lived = [(i, simulate(times, work_s, failures_per_day, i, seed)) for i in tried]
    return max(lived, key=lambda each: float(each[1].ett_percent.mean()))


def _row(times: Times, work_s: Seconds, failures_per_day: float, seed: int) -> dict[str, Any]:
    interval_s, lives = at_best_interval(times, work_s, failures_per_day, seed)
    return _figures(failures_per_day, interval_s, lives)


def _of_job(ranks: int, rate: float) -> float:
    """Failures a day of a job. Ranks below a node's share its failures."""
    return rate * max(1.0, ranks / NODE_RANKS)


def _figures(failures_per_day: float, interval_s: float, lives: Lives) -> dict[str, Any]:
    shares = lives.ett_percent
    wall_s = float(lives.wall_s.sum())
    return {
        "failures_per_day": failures_per_day,
        "interval_s": interval_s,
        "ett_percent": float(shares.mean()),
        "p5": float(np.percentile(shares, 5)),
        "p95": float(np.percentile(shares, 95)),
        **{f"{name}%": 100 * float(s.sum()) / wall_s for name, s in lives.parts.items()},
    }


def _sensitivities(
    times: Mapping[str, Times], ranks: int, work_s: Seconds, rate: float, seed: int
) -> list[Row]:
    """One figure at a time, times a factor. All but the interval itself: at the best interval."""
    usual = _of_job(ranks, rate)
    rows: list[Row] = []
    for parameter in ("block", "interference", "lag", "start", "recover", "failures", "interval"):
        for way in WAYS:
            for factor in _FACTORS:
                name, failures, changed = f"{parameter}_s", usual, times[way]
                if parameter == "failures":
                    failures *= factor
                elif parameter != "interval":
                    changed = replace(changed, **{name: getattr(changed, name) * factor})
                interval_s = best_interval_s(changed, failures)
                if parameter == "interval":
                    interval_s *= factor
                lives = simulate(changed, work_s, failures, interval_s, seed)
                figures = _figures(failures, interval_s, lives)
                named = {"part": "sensitivity", "parameter": parameter, "factor": factor}
                rows.append({**named, "way": way, "ranks": ranks, **figures})
    return rows


def _ratios(rows: Sequence[Row]) -> dict[str, Any]:
    """Ours beside the others, for each size: points of ETT, and the share of the loss removed."""
    sizes = {(r["ranks"], r["way"]): r["ett_percent"] for r in rows if r["part"] == "sizes"}
    found: dict[str, Any] = {}
    for ranks in sorted({ranks for ranks, _ in sizes}):
        ours, theirs = sizes[ranks, OURS], sizes[ranks, BASELINE]
        found[f"gain_{ranks}_ranks"] = ours - theirs
        found[f"gain_over_async_{ranks}_ranks"] = ours - sizes[ranks, ASYNC]
        found[f"loss_removed_{ranks}_ranks"] = (ours - theirs) / (100 - theirs)
    sums = [sum(r[f"{p}%"] for p in PARTS) for r in rows]
    found["parts_add_up"] = all(abs(s - 100) < 1e-6 for s in sums)
    return found


def write_plots(rows: Sequence[Row], folder: Path, ranks: int) -> list[Path]:
    """fleet-ranks.svg, and fleet-PARAMETER.svg for each sensitivity."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [r for r in rows if r["part"] == "sizes"]
    plots = {
        "ranks": line_plot(
            "ETT by size of the job", "ranks", "ETT%", _lines(sizes, "ranks", "ett_percent")
        )
    }
    turns = [r for r in rows if r["part"] == "sensitivity"]
    for parameter in dict.fromkeys(r["parameter"] for r in turns):
        of = [r for r in turns if r["parameter"] == parameter]
        plots[parameter] = line_plot(
            f"ETT on {ranks} ranks by {parameter}",
            f"{parameter}, times what was measured",
            "ETT%",
            _lines(of, "factor", "ett_percent"),
        )
    paths = []
    for name, svg in plots.items():
        paths.append(folder / f"fleet-{name}.svg")
        paths[-1].write_text(svg)
    return paths


def _lines(rows: Sequence[Row], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    return {way: [(float(r[x]), r[y]) for r in rows if r["way"] == way] for way in WAYS}
