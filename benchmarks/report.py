"""What every benchmark hands back, and how it is written and shown."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ckpt import native

Row = dict[str, Any]
GIB = 1 << 30
MIB = 1 << 20
_FILE_WIDTH = 170  # without a terminal to fit in, keep each row on one line


@dataclass
class Report:
    """env: where and how it was measured; rows: what was measured; ratios: what to look at.

    columns: the keys of rows that the printed table shows.
    """

    env: dict[str, Any]
    rows: list[Row]
    ratios: dict[str, Any]
    columns: Sequence[str] = ()


def environment(**settings: Any) -> dict[str, Any]:
    """The machine, without its name, and the settings of the run."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "cores": cores(),
        "memory_gib": round(memory / GIB, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.cuda.is_available(),
        "native": native.load() is not None,
        "load_before": os.getloadavg()[0],
        **settings,
    }


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured, or None if nothing was."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def write(path: Path, report: Report) -> None:
    figures = asdict(report)
    del figures["columns"]
    path.write_text(json.dumps(figures, indent=2) + "\n")


def show(name: str, report: Report) -> None:
    """Print rows and ratios to the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    table = Table(title=name)
    columns = [k for k in report.columns if any(r.get(k) is not None for r in report.rows)]
    for key in columns:
        named = key in ("name", "mode")
        table.add_column(key, justify="left" if named else "right", no_wrap=named)
    for row in report.rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    console.print(table)
    for row in report.rows:
        if row.get("status", "ok") != "ok":
            title = row.get("mode", row.get("name"))
            console.print(f"{title}: {row['status']}, {row['reason']}", markup=False)
    for key, value in report.ratios.items():
        console.print(f"{key} = {_cell(value)}", markup=False, highlight=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
