"""How much host memory saving takes beyond the state: usual, at worst, and after many saves."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from benchmarks.memory.rank import Case
from benchmarks.ranks import RanksFailed, Seen, run_ranks
from benchmarks.report import MIB, Report, Row, environment, median
from benchmarks.training.tables import KINDS, best_kind
from benchmarks.watch import wait_until_calm

CASES = ("usual", "worst", "growth")
COLUMNS = (
    *("name", "ranks", "state_mib", "budget_mib", "extra_mib", "extra_vs_state", "budget_kept"),
    *("growth_vs_state", "blocked_ms", "overlay_wait_s", "fence_wait_s", "persist_s"),
    *("quiet_step_ms", "persist_step_ms", "failed_saves", "others_cores"),
)
SLOW_MIB_PER_S = 30.0
# What isn't the ring, the overlay or an upload buffer: code, thread stacks, the allocator's slack.
_SLACK_MIB = 32
_DEADLINE_S = 3600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="tables of all ranks together (1024)")
    parser.add_argument("--ranks", default="1,2", help="for example 1,2, which is the default")
    parser.add_argument(
        "--tables", choices=KINDS, help="torchrec where it is installed, else plain"
    )
    parser.add_argument("--cases", default=",".join(CASES), help=", ".join(CASES))
    parser.add_argument("--saves", type=int, help="of `growth` (50)")


def run(args: argparse.Namespace) -> Report:
    size_mib = args.size_mib or (64 if args.quick else 1024)
    repeats = args.repeats or (1 if args.quick else 2)
    many = args.saves or (12 if args.quick else 50)
    tables = args.tables or best_kind("cpu")
    names = args.cases.split(",")
    if unknown := [n for n in names if n not in CASES]:
        sys.exit(f"--cases {unknown[0]}: use some of {', '.join(CASES)}")
    env = environment(
        size_mib=size_mib,
        repeats=repeats,
        tables=tables,
        slow_mib_per_s=SLOW_MIB_PER_S,
        slack_mib=_SLACK_MIB,
    )
    cases = [
        (name, world)
        for name in names
        for world in ([int(w) for w in args.ranks.split(",")] if name == "usual" else [1])
    ]
    seen: dict[tuple[str, int], list[Seen]] = defaultdict(list)
    failed: dict[tuple[str, int], str] = {}
    for number in range(repeats):
        for name, world in cases if number % 2 == 0 else reversed(cases):
            if (name, world) in failed:
                continue
            wait_until_calm(args.calm)
            print(
                f"round {number + 1} of {repeats}: {name}, ranks {world}",
                file=sys.stderr,
                flush=True,
            )
            case = Case(
                name=name,
                total_bytes=size_mib * MIB,
                tables=tables,
                saves=many if name == "growth" else 3,
                slow_bytes_per_s=SLOW_MIB_PER_S * MIB,
                threads=1,
            )
            try:
                seen[name, world].append(
                    run_ranks("benchmarks.memory.rank", asdict(case), world, args.root, _DEADLINE_S)
                )
            except RanksFailed as e:
                failed[name, world] = str(e)
    rows: list[Row] = []
    for key in cases:
        start = {"name": key[0], "ranks": key[1]}
        if key in failed:
            rows.append({**start, "status": "failed", "reason": failed[key]})
        else:
            rows.append({**start, "status": "ok", **_row(key[0], seen[key])})
    return Report(env, rows, _ratios(rows), COLUMNS)


def _row(name: str, runs: list[Seen]) -> Row:
    """Peaks: the largest of all runs; the rest: medians over their saves."""
    first = runs[0].answers
    state = sum(a["state_bytes"] for a in first)
    budget = sum(a["budget_bytes"] for a in first)
    extra = max(r.peak_bytes("open", "saved") - r.peak_bytes("baseline", "open") for r in runs)
    saves = [s for r in runs for a in r.answers for s in a["saves"]]

    def mid(key: str, unit: float = 1.0) -> float | None:
        value = median(s.get(key) for s in saves)
        return None if value is None else value * unit

    row: Row = {
        "state_mib": state / MIB,
        "budget_mib": budget / MIB,
        "extra_mib": extra / MIB,
        "extra_vs_state": extra / state,
        "budget_kept": extra <= budget + _SLACK_MIB * MIB * len(first),
        "mapped_files_mib": max(
            r.watch.peak_files_bytes(r.moment("open"), r.moment("saved"))
            - r.watch.peak_files_bytes(r.moment("baseline"), r.moment("open"))
            for r in runs
        )
        / MIB,
        "blocked_ms": mid("blocked_s", 1e3),
        "overlay_wait_s": mid("overlay_wait_s"),
        "fence_wait_s": mid("fence_wait_s"),
        "persist_s": mid("persist_s"),
        "quiet_step_ms": mid("quiet_step_s", 1e3),
        "persist_step_ms": mid("persist_step_s", 1e3),
        "copied_tables": first[0]["copied_tables"],
        "failed_saves": sum(a["failed"] for r in runs for a in r.answers),
        "others_cores": median(r.others_cores("open", "saved") for r in runs),
    }
    if name == "growth":
        row["growth_vs_state"] = (
            max(r.peak_bytes("late", "late_end") - r.peak_bytes("early", "early_end") for r in runs)
            / state
        )
    return row


def _ratios(rows: list[Row]) -> dict[str, Any]:
    def worst(name: str, key: str) -> Any:
        found = [r.get(key) for r in rows if r["name"] == name and r["status"] == "ok"]
        return max((v for v in found if v is not None), default=None)

    kept = [r["budget_kept"] for r in rows if r["status"] == "ok" and r["name"] == "worst"]
    return {
        "extra_rss_vs_state": worst("usual", "extra_vs_state"),
        "extra_rss_worst": worst("worst", "extra_vs_state"),
        "worst_budget_kept": all(kept) if kept else None,
        "worst_blocked_s": worst("worst", "overlay_wait_s"),
        "growth_over_50_saves": worst("growth", "growth_vs_state"),
    }
