"""What a save costs the trainer: ours beside its peers, in one run.

Fresh ranks for each block of saves in one mode; blocks interleaved in both orders; medians.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.ranks import RanksFailed
from benchmarks.report import MIB, Report, Row, cores, environment
from benchmarks.stall import dense, figures, link, pipelines, small
from benchmarks.stall.block import BlockResult, run_block
from benchmarks.stall.rank import Block
from benchmarks.training.modes import MODES, OURS
from benchmarks.training.tables import KINDS, best_kind, has_torchrec
from benchmarks.watch import wait_until_calm

PARTS = ("modes", "sizes", "dense", "small", "pipelines", "link")
_DEADLINE_S = 1800.0  # of one block
_CALM_CORES = 0.4  # kernel threads that write for the block itself count, too: up to 0.3


@dataclass(frozen=True)
class Case:
    """One measurement that every round takes: `once` does it, the others name its row."""

    part: str
    mode: str
    ranks: int
    size_mib: int
    once: Callable[[], Any]
    skipped: str | None = None

    @property
    def name(self) -> Row:
        return {
            "part": self.part,
            "mode": self.mode,
            "ranks": self.ranks,
            "size_mib": self.size_mib,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="tables of all ranks together (1024)")
    parser.add_argument("--ranks", type=_numbers, help="for example 1,2, which is the default")
    parser.add_argument("--modes", type=_names(MODES, "mode"), default=list(MODES))
    parser.add_argument("--parts", type=_names(PARTS, "part"), default=list(PARTS))
    parser.add_argument(
        "--tables", choices=KINDS, help="torchrec where it is installed, else plain"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--saves", type=int, default=2, help="measured in each block (2)")
    parser.add_argument("--min-steps", type=int, help="of each window (100)")
    parser.add_argument(
        "--retries", type=int, default=0, help="measure a block again that others disturbed (0)"
    )
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a rank (1)")


def run(args: argparse.Namespace) -> Report:
    args.size_mib = args.size_mib or (64 if args.quick else 1024)
    args.min_steps = args.min_steps or (20 if args.quick else 100)
    args.ranks = args.ranks or ([1, 2] if args.device == "cpu" else [1])
    args.tables = args.tables or best_kind(args.device)
    repeats = args.repeats or (1 if args.quick else 3)
    env = environment(
        size_mib=args.size_mib,
        repeats=repeats,
        saves=args.saves,
        min_steps=args.min_steps,
        threads=args.threads,
        tables=args.tables,
        device=args.device,
    )
    cases = list(_cases(args))
    failed: dict[Case, str] = {c: c.skipped for c in cases if c.skipped is not None}
    results: dict[Case, list[Any]] = defaultdict(list)
    for number in range(repeats):
        for case in cases if number % 2 == 0 else reversed(cases):
            if case in failed:
                continue
            print(f"round {number + 1} of {repeats}: {case.name}", file=sys.stderr, flush=True)
            try:
                results[case].append(case.once())
            except RanksFailed as e:
                failed[case] = str(e)
    rows = []
    for case in cases:
        if case in failed:
            word = "skipped" if case.skipped is not None else "failed"
            rows.append({**case.name, "status": word, "reason": failed[case]})
        else:
            make = {
                "dense": dense.row,
                "small": small.row,
                "pipelines": pipelines.row,
                "link": link.row,
            }.get(case.part, partial(figures.row, case.mode))
            rows.append({**case.name, "status": "ok", **make(results[case])})
    return Report(env, rows, figures.ratios(rows), figures.COLUMNS)


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    """All measurements of this run, in the order of odd rounds."""
    if "modes" in args.parts:
        for mode in args.modes:
            for world in args.ranks:
                once = partial(_block, args, mode, world, args.size_mib)
                why = MODES[mode].unavailable()
                yield Case("modes", mode, world, args.size_mib, once, why)
    if "sizes" in args.parts:
        for world in args.ranks:
            for size in (args.size_mib // 4, args.size_mib * 4):
                once = partial(_block, args, OURS, world, size, verify=False)
                yield Case("sizes", OURS, world, size, once)
    if "dense" in args.parts:
        once = partial(dense.measure, args.size_mib, args.device, cores(), args.root)
        yield Case("dense", OURS, 1, args.size_mib, once)
    if "small" in args.parts:
        for name in small.CASES:
            count = (100_000 if name == "values" else 20_000) // (10 if args.quick else 1)
            for world in args.ranks:
                once = partial(small.measure, name, count, world, args.root)
                why = None if args.device == "cpu" else "what it takes doesn't depend on the device"
                yield Case("small", name, world, 0, once, why)
    if "pipelines" in args.parts:
        size = max(1, args.size_mib // 16)
        why = None if has_torchrec() else "torchrec is not installed"
        if args.device != "cpu":
            why = "exactness of TorchRec's pipelines is shown on the CPU"
        for name in pipelines.PIPELINES:
            for world in args.ranks:
                once = partial(pipelines.check, name, size, world, args.root)
                yield Case("pipelines", name, world, size, once, why)
    if "link" in args.parts:
        why = "there is no link to a device" if args.device == "cpu" else None
        once = partial(link.measure, args.size_mib, args.root)
        yield Case("link", OURS, 1, args.size_mib, once, why)


def _block(
    args: argparse.Namespace, mode: str, world: int, size_mib: int, *, verify: bool = True
) -> BlockResult:
    """Measure; again, so often as allowed, while others disturb. Of all tries the calmest counts."""
    block = Block(
        mode,
        size_mib * MIB,
        args.saves,
        args.min_steps,
        args.threads,
        args.tables,
        args.device,
        verify,
    )
    best = None
    for _ in range(1 + args.retries):
        wait_until_calm(args.calm)
        result = run_block(block, world, args.root, _DEADLINE_S)
        if best is None or result.others_cores < best.others_cores:
            best = result
        if best.others_cores < _CALM_CORES:
            break
    assert best is not None
    return best


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def _names(known: Any, what: str) -> Callable[[str], list[str]]:
    """A comma list of names, each of `known`."""

    def parse(text: str) -> list[str]:
        names = [n.strip() for n in text.split(",")]
        unknown = [n for n in names if n not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}"
            )
        return names

    return parse
