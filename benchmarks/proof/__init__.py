"""Does a save find a writer that goes past every hook, and what does looking cost?"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.proof import trials
from benchmarks.proof.writers import HARMLESS, WRITERS
from benchmarks.ranks import RanksFailed
from benchmarks.report import MIB, Report, Row, environment, median
from benchmarks.watch import wait_until_calm

COLUMNS = (
    *("name", "trials", "saves", "found", "found_at_save", "latest"),
    *("left_in_place", "proof_ms", "proof_ms_p99", "others_cores"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="tables with their optimizer state (1024)")
    parser.add_argument("--trials", type=int, help="of each writer; each begins anew (25)")
    parser.add_argument("--saves", type=int, help="that a writer may go unseen in a trial (100)")
    parser.add_argument("--steps", type=int, default=10, help="between two saves (10)")


def run(args: argparse.Namespace) -> Report:
    args.size_mib = args.size_mib or (64 if args.quick else 1024)
    wanted = args.trials or (3 if args.quick else 25)
    saves = args.saves or (4 if args.quick else 100)
    repeats = args.repeats or 1
    env = environment(size_mib=args.size_mib, repeats=repeats, saves=saves, steps=args.steps)
    taken: dict[str, list[Any]] = {w: [] for w in WRITERS}
    failed: dict[str, str] = {}
    for number in range(repeats):
        for writer in WRITERS if number % 2 == 0 else reversed(WRITERS):
            count = trials.fewer(writer, wanted)
            wait_until_calm(args.calm)
            print(f"round {number + 1} of {repeats}: {writer}", file=sys.stderr, flush=True)
            job = trials.Job(writer, args.size_mib * MIB, count, saves, args.steps)
            try:
                taken[writer].append(trials.measure(job, args.root))
            except RanksFailed as e:
                failed[writer] = str(e)
    rows: list[Row] = []
    for writer, runs in taken.items():
        if writer in failed:
            rows.append({"name": writer, "status": "failed", "reason": failed[writer]})
        else:
            rows.append({"name": writer, "status": "ok", **trials.row(runs)})
    return Report(env, rows, _ratios(rows), COLUMNS)


def _ratios(rows: list[Row]) -> dict[str, Any]:
    good = [r for r in rows if r["status"] == "ok"]
    hidden = [r for r in good if WRITERS[r["name"]].kind == "hidden"]
    tried = sum(r["trials"] for r in hidden)
    by_name = {r["name"]: r for r in good}
    return {
        "found_1_row_100_saves": sum(r["found"] for r in hidden) / tried if tried else None,
        "false_alarms": by_name.get(HARMLESS, {}).get("found"),
        "proof_ms_per_save": median(r["proof_ms"] for r in good),
        "proof_ms_p99": max((r["proof_ms_p99"] for r in good), default=None),
    }
