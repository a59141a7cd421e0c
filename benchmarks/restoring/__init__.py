"""A restore against dcp.load of the same state and the machine's read limit; what it reads, what it takes."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ranks import RanksFailed, Seen, run_ranks
from benchmarks.report import MIB, Report, Row, cores, environment, median
from benchmarks.restoring import share
from benchmarks.restoring.rank import DCP, LIMIT, MOST_READERS, OURS, Case
from benchmarks.training.tables import best_kind, row_bytes
from benchmarks.training.workload import DIM, TABLES
from benchmarks.watch import wait_until_calm

COLUMNS = (
    *("name", "ranks", "size_mib", "restore_ms", "dcp_load_ms", "vs_dcp_load", "min", "max"),
    *(
        "cpu_vs_dcp_load",
        "limit_ms",
        "vs_read_limit",
        "extra_mib",
        "dcp_extra_mib",
        "read_vs_share",
    ),
    *("exact", "others_cores"),
)
MEMORY_FOLDER = Path("/dev/shm")
_RESTORERS = 8
_DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Part:
    """A row of the benchmark: what is restored, by how many ranks, from where."""

    name: str
    tensors: str
    ranks: int = 1
    in_memory: bool = False
    cold: bool = False


PARTS = (
    Part("warm", "plain"),
    Part("cold", "plain", cold=True),
    Part("tmpfs", "plain", ranks=2, in_memory=True),
    Part("tables", "tables", ranks=2, in_memory=True),
)
SHARE, RECUT = "share", "share recut"
SAVERS = {SHARE: 8, RECUT: 2}
"""Rows of what each of eight ranks reads, and how many had saved it."""
_ROWS = (*(p.name for p in PARTS), *SAVERS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="of the state (1024)")
    parser.add_argument("--parts", default=",".join(_ROWS), help=",".join(_ROWS))


def run(args: argparse.Namespace) -> Report:
    size_mib = args.size_mib or (64 if args.quick else 1024)
    repeats = args.repeats or (2 if args.quick else 7)
    names = args.parts.split(",")
    if unknown := [n for n in names if n not in _ROWS]:
        sys.exit(f"--parts {unknown[0]}: use some of {', '.join(_ROWS)}")
    env = environment(size_mib=size_mib, repeats=repeats, tables=best_kind("cpu"))
    rows: list[Row] = []
    for name in names:
        wait_until_calm(args.calm)
        print(name, file=sys.stderr, flush=True)
        rows.append({"name": name, "status": "ok"})
        part = next((p for p in PARTS if p.name == name), None)
        try:
            if part is None:
                rows[-1] |= _share(args.root, size_mib * MIB, SAVERS[name])
            else:
                rows[-1] |= _compare(part, size_mib * MIB, repeats, args.root)
        except RanksFailed as e:
            rows[-1] |= {"status": "failed", "reason": str(e)}
    return Report(env, rows, _ratios(rows), COLUMNS)


def _compare(part: Part, total_bytes: int, repeats: int, root: Path) -> Row:
    if part.in_memory and not os.access(MEMORY_FOLDER, os.W_OK):
        return {"status": "skipped", "reason": f"{MEMORY_FOLDER} can't be written"}
    case = Case(
        tensors=part.tensors,
        tables=best_kind("cpu"),
        total_bytes=total_bytes // (part.ranks if part.tensors == "plain" else 1),
        cold=part.cold,
        repeats=repeats,
        threads=max(1, cores() // part.ranks),
    )
    folder = MEMORY_FOLDER if part.in_memory else root
    seen = run_ranks("benchmarks.restoring.rank", asdict(case), part.ranks, folder, _DEADLINE_S)
    return {"ranks": part.ranks, **_row(seen)}


def _row(seen: Seen) -> Row:
    """Of each round the slowest rank's time and all ranks' processor time; medians of the rounds."""
    answers = seen.answers

    def rounds(way: str, key: str) -> Iterator[list[float]]:
        of_ranks = [[s[key] for s in a["samples"] if s["way"] == way] for a in answers]
        return map(list, zip(*of_ranks, strict=True))

    ours, theirs = ([max(r) for r in rounds(way, "wall_s")] for way in (OURS, DCP))
    cpu = {way: [sum(r) for r in rounds(way, "cpu_s")] for way in (OURS, DCP)}
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    limits = [
        median(s for (s,) in rounds(f"{LIMIT} {n}", "wall_s")) for n in range(1, MOST_READERS + 1)
    ]
    limit = min((s for s in limits if s is not None), default=None)
    extra = {way: [max(r) for r in rounds(way, "extra_bytes")] for way in (OURS, DCP)}
    return {
        "size_mib": sum(a["state_bytes"] for a in answers) / MIB,
        "restore_ms": (median(ours) or 0.0) * 1e3,
        "dcp_load_ms": (median(theirs) or 0.0) * 1e3,
        "vs_dcp_load": median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "cpu_vs_dcp_load": median(a / b for a, b in zip(cpu[OURS], cpu[DCP], strict=True)),
        "limit_ms": limit and limit * 1e3,
        "vs_read_limit": median(limit / s for s in ours) if limit else None,
        "extra_mib": (median(extra[OURS]) or 0.0) / MIB,
        "dcp_extra_mib": (median(extra[DCP]) or 0.0) / MIB,
        "exact": all(s["exact"] for a in answers for s in a["samples"]),
        "others_cores": seen.others_cores("began", "ended"),
        "samples": [a["samples"] for a in answers],
    }


def _share(root: Path, total_bytes: int, savers: int) -> Row:
    """What each of eight ranks reads of tables that others have saved; the most of them counts."""
    rows = total_bytes // (TABLES * row_bytes("torchrec", DIM)) // _RESTORERS * _RESTORERS
    folder = Path(tempfile.mkdtemp(prefix="share-", dir=root)).resolve()
    try:
        found = [
            run_ranks(
                "benchmarks.restoring.share",
                asdict(share.Case(rows, str(folder), restore, threads=1)),
                ranks,
                root,
                _DEADLINE_S,
            ).answers
            for ranks, restore in ((savers, False), (_RESTORERS, True))
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    restored = found[-1]
    return {
        "ranks": _RESTORERS,
        "size_mib": sum(a["share_bytes"] for a in restored) / MIB,
        "read_vs_share": max(a["read_bytes"] / a["share_bytes"] for a in restored),
        "exact": all(a["exact"] for a in restored),
        "samples": restored,
    }


def _ratios(rows: list[Row]) -> dict[str, Any]:
    by_name = {r["name"]: r for r in rows}

    def of(name: str, key: str) -> Any:
        return by_name.get(name, {}).get(key)

    extra = [r["extra_mib"] for r in rows if "extra_mib" in r]
    return {
        "restore_vs_dcp_load": of("warm", "vs_dcp_load"),
        "restore_vs_dcp_load_tmpfs": of("tmpfs", "vs_dcp_load"),
        "restore_vs_dcp_load_tables": of("tables", "vs_dcp_load"),
        "restore_vs_read_limit": of("cold", "vs_read_limit"),
        "bytes_read_vs_share": of(SHARE, "read_vs_share"),
        "bytes_read_vs_share_recut": of(RECUT, "read_vs_share"),
        "extra_rss_mib": max(extra, default=None),
        "exact": all(r.get("exact", True) for r in rows),
    }
