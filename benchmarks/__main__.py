"""Runs one benchmark: prints a table and writes its figures as JSON."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    ett,
    fleet,
    freshness,
    interference,
    limits,
    memory,
    persist,
    proof,
    publish,
    report,
    restoring,
    scale,
    serve,
    stall,
)
from benchmarks.report import Report
from ckpt.errors import BadInputError

BENCHMARKS: dict[
    str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], Report]]
] = {
    "limits": (limits.add_options, limits.run),
    "stall": (stall.add_options, stall.run),
    "memory": (memory.add_options, memory.run),
    "interference": (interference.add_options, interference.run),
    "persist": (persist.add_options, persist.run),
    "proof": (proof.add_options, proof.run),
    "restore": (restoring.add_options, restoring.run),
    "scale": (scale.add_options, scale.run),
    "publish": (publish.add_options, publish.run),
    "fleet": (fleet.add_options, fleet.run),
    "freshness": (freshness.add_options, freshness.run),
    "serve": (serve.add_options, serve.run),
    "ett": (ett.add_options, ett.run),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (add_options, _) in BENCHMARKS.items():
        one = names.add_parser(name, help=f"see benchmarks/README.md, section {name}")
        one.add_argument("--json", type=Path, required=True, metavar="FILE", help="figures go here")
        one.add_argument("--quick", action="store_true", help="small sizes, for CI")
        one.add_argument(
            "--root",
            type=Path,
            default=Path("build/benchmarks"),
            help="folder on the storage to measure; a scratch folder is made in it and removed",
        )
        one.add_argument("--repeats", type=int, help="measure everything so often")
        one.add_argument(
            "--calm",
            type=float,
            default=0,
            metavar="S",
            help="before each part wait at most so long until others leave the machine idle (0)",
        )
        add_options(one)
    args = parser.parse_args(argv)
    # End like an error does, so that ranks are killed and scratch folders removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for option, folder in (("--root", args.root), ("--json", args.json.parent)):
        if (why := _unwritable(folder)) is not None:
            print(f"error: {option}: {folder}: {why}; name another folder", file=sys.stderr)
            return 2
    try:
        result = BENCHMARKS[args.name][1](args)
    except BadInputError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    report.write(args.json, result)
    report.show(args.name, result)
    print(f"the figures are in {args.json}")
    return 1 if result.ratios.get("exact") is False else 0


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be made in a folder, which is made if need be; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as e:
        return e.strerror or str(e)
    return None


if __name__ == "__main__":
    sys.exit(main())
