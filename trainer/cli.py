"""The `trainer` command. `--help` and `ett` import no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt.command import entry

if TYPE_CHECKING:
    from trainer.ett import EttReport


@click.group(epilog="Every command takes --debug, which shows the trace of an error.")
@click.version_option(package_name="sidestage")
def cli() -> None:
    """Train the reference model, and account for a run's time.

    Exit codes: 0 done, 1 defect, 2 bad input, 3 not found, 4 conflict, 5 corrupt,
    6 storage failed or too slow, 7 the last save failed, 75 stopped on request and saved,
    76 stopped on request and not saved in time, 130 interrupted, 143 asked to end while
    another rank was gone.
    """


@cli.command()
@click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="A TOML file; trainer/configs/movielens.toml shows every setting.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one setting; may be repeated.",
)
def train(config_path: Path, overrides: tuple[str, ...]) -> None:
    """Train on MovieLens-100k, saving as it goes, and resume from the newest commit of the root.

    Start it by itself for a single process, or on every rank:

        torchrun --nproc-per-node 2 --max-restarts 3 -m trainer.cli train --config FILE
    """
    from trainer.config import load_config
    from trainer.quiet import quiet_libraries

    config = load_config(config_path, overrides)
    quiet_libraries()
    from trainer.train import train as run

    run(config, click.echo)


@cli.command()
@click.argument("root")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def ett(root: str, *, as_json: bool) -> None:
    """Show which share of a run's wall time was training on new data, and where the rest went.

    ROOT is the run's root, or the folder that its ledger was kept in.
    """
    from trainer.ett import read_report

    found = read_report(root)
    if as_json:
        totals = {"batches_repeated": found.batches_repeated, "lost_batches": found.lost_batches}
        click.echo(json.dumps({**totals, **asdict(found)}, indent=1))
    else:
        _print_report(found)


def _print_report(found: EttReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainer.ett import PARTS

    table = Table(title=f"ETT {found.ett_percent:.1f}% of {found.wall_s:.1f} s")
    table.add_column("")
    for attempt in found.attempts:
        table.add_column(f"attempt {attempt.epoch}", justify="right")
    table.add_column("all", justify="right")
    table.add_column("share", justify="right")
    for part in PARTS:
        seconds = [a.parts[part] for a in found.attempts]
        table.add_row(*_row(part.replace("_", " "), seconds, found.wall_s))
    between = ["" for _ in found.attempts]
    share = _share(found.between_attempts_s, found.wall_s)
    table.add_row("between attempts", *between, f"{found.between_attempts_s:.2f} s", share)
    table.add_section()
    table.add_row(
        *_row("wall time", [a.wall_s for a in found.attempts], found.wall_s)[:-2],
        f"{found.wall_s:.2f} s",
        "100.0%",
    )
    for label, counts in (
        ("new batches", [a.batches_new for a in found.attempts]),
        ("repeated batches", [a.batches_repeated for a in found.attempts]),
        ("lost batches", [a.lost_batches for a in found.attempts]),
        ("commits", [a.commits for a in found.attempts]),
        ("failed saves", [a.failed_saves for a in found.attempts]),
    ):
        table.add_row(label, *map(str, counts), str(sum(counts)), "")
    Console().print(table)


def _row(label: str, seconds: list[float], wall_s: float) -> list[str]:
    total = sum(seconds)
    return [label, *(f"{s:.2f} s" for s in seconds), f"{total:.2f} s", _share(total, wall_s)]


def _share(seconds: float, wall_s: float) -> str:
    return f"{100 * seconds / wall_s:.1f}%" if wall_s > 0 else ""


main = entry(cli)

if __name__ == "__main__":
    main()
