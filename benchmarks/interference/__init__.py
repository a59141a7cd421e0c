"""How much saving and guarding disturb training, and a busy machine the saving."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.interference import deadline, guard
from benchmarks.ranks import RanksFailed
from benchmarks.report import MIB, Report, Row, environment
from benchmarks.stall import figures
from benchmarks.stall.block import run_block
from benchmarks.stall.rank import Block
from benchmarks.training.modes import DCP_ASYNC, OURS, UNPACED
from benchmarks.training.tables import KINDS, best_kind, has_torchrec
from benchmarks.watch import wait_until_calm

PARTS = ("steps", "deadline", "guard")
COLUMNS = (
    *("name", "ranks", "quiet_step_ms", "persist_step_ms", "persist_step_p99_ms", "step_inflation"),
    *("persist_s", "target_s", "vs_target", "guard_us", "guard_cost", "ns_per_id", "others_cores"),
)
_STEP_RATIOS = {
    OURS: "step_inflation",
    UNPACED: "step_inflation_unpaced",
    DCP_ASYNC: "step_inflation_dcp_async",
}
_DEADLINE_S = 1800.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="tables of all ranks together (1024)")
    parser.add_argument("--parts", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument(
        "--tables", choices=KINDS, help="torchrec where it is installed, else plain"
    )
    parser.add_argument("--ranks", type=int, default=2, help="that saturate the machine (2)")
    parser.add_argument("--target-s", type=float, help="of a persist beside CPU hogs (4)")


def run(args: argparse.Namespace) -> Report:
    args.size_mib = args.size_mib or (64 if args.quick else 1024)
    args.target_s = args.target_s or (0.5 if args.quick else 4.0)
    args.tables = args.tables or best_kind("cpu")
    repeats = args.repeats or (1 if args.quick else 3)
    names = args.parts.split(",")
    if unknown := [n for n in names if n not in PARTS]:
        sys.exit(f"--parts {unknown[0]}: use some of {', '.join(PARTS)}")
    env = environment(size_mib=args.size_mib, repeats=repeats, tables=args.tables)
    cases = [c for c in _cases(args) if c[0] in names]
    taken: dict[str, list[Any]] = defaultdict(list)
    failed: dict[str, tuple[str, str]] = {}
    for number in range(repeats):
        for _, name, once, _ in cases if number % 2 == 0 else reversed(cases):
            if name in failed:
                continue
            wait_until_calm(args.calm)
            print(f"round {number + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            try:
                taken[name].append(once())
            except guard.Unguarded as e:
                failed[name] = "skipped", str(e)
            except RanksFailed as e:
                failed[name] = "failed", str(e)
    rows: list[Row] = []
    for _, name, _, row in cases:
        if name in failed:
            status, reason = failed[name]
            rows.append({"name": name, "status": status, "reason": reason})
        else:
            rows.append({"name": name, "status": "ok", **row(taken[name])})
    return Report(env, rows, _ratios(rows), COLUMNS)


def _cases(
    args: argparse.Namespace,
) -> Iterator[tuple[str, str, Callable[[], Any], Callable[[list[Any]], Row]]]:
    """(part, name, how to measure it once, how to make a row of it)."""
    steps = 20 if args.quick else 100
    for mode in _STEP_RATIOS:
        block = Block(mode, args.size_mib * MIB, 2, steps, 1, args.tables, verify=False)
        once = partial(run_block, block, args.ranks, args.root, _DEADLINE_S)

        def row(blocks: list[Any], mode: str = mode) -> Row:
            return {"ranks": args.ranks, **figures.row(mode, blocks)}

        yield "steps", mode, once, row
    for hogs in (0, 2):
        case = deadline.Case(args.size_mib * MIB, args.tables, args.target_s, hogs)
        once = partial(deadline.measure, case, args.root)
        yield "deadline", f"persist beside {hogs} CPU hogs", once, deadline.row
    if has_torchrec():
        steps, rounds = (20, 2) if args.quick else (60, 8)
        once = partial(guard.measure, args.size_mib, steps, rounds, args.root)
        yield "guard", "guard, no snapshot open", once, guard.row


def _ratios(rows: list[Row]) -> dict[str, Any]:
    by_name = {r["name"]: r for r in rows if r["status"] == "ok"}
    ratios: dict[str, Any] = {}
    for mode, key in _STEP_RATIOS.items():
        ratios[key] = by_name.get(mode, {}).get("step_inflation")
    ratios["deadline_vs_target"] = by_name.get("persist beside 2 CPU hogs", {}).get("vs_target")
    guarded = by_name.get("guard, no snapshot open", {})
    ratios["guard_cost"] = guarded.get("guard_cost")
    ratios["guard_cost_in_hooks"] = guarded.get("guard_cost_in_hooks")
    ratios["guard_ns_per_id"] = guarded.get("ns_per_id")
    return ratios
