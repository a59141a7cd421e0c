"""Runs the demo and prints its table. Exit code 1 if one of its promises isn't kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.demo.script import Demo, Summary, broken_promises
from ckpt.errors import SidestageError

BUILD = Path("build/demo")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument(
        "--root", default=str(BUILD / "run"), help="an empty or new folder for the run"
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="folder for logs and the summary")
    parser.add_argument("--short", action="store_true", help="two epochs instead of four")
    args = parser.parse_args()
    console = Console()
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(
            f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True
        )

    try:
        summary = Demo(args.root, args.build, short=args.short, say=say).run()
    except SidestageError as e:
        console.print(f"error: {e}", style="red", markup=False, highlight=False)
        return e.exit_code
    path = args.build / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    _print(console, summary)
    console.print(f"{time.monotonic() - began:.0f} s in all; the figures are in {path}")
    broken = broken_promises(summary)
    for promise in broken:
        console.print(f"not kept: {promise}", style="red", markup=False)
    return 1 if broken else 0


def _print(console: Console, summary: Summary) -> None:
    table = Table(title="Sidestage demo", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in summary.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
