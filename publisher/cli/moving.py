"""`publisher rollback` and `publisher promote`: an operator moves the live pointer."""

from __future__ import annotations

from dataclasses import asdict

import click

from publisher.cli.shared import (
    as_json_flag,
    open_existing,
    reason,
    registry_option,
    say,
    who_option,
    why_option,
)
from publisher.records import Move


@click.command()
@click.argument("root")
@registry_option
@click.option("--to", type=int, help="The version to go back to. Default: what was live before.")
@who_option
@why_option
@as_json_flag
def rollback(  # noqa: PLR0917  (options of a command)
    root: str, registry: str | None, to: int | None, who: str | None, why: str, as_json: bool
) -> None:
    """Make an earlier version live, by one move of the pointer; again: one further back.

    The daemon leaves it at that until a newer commit is published. The canary stays.
    """
    opened = open_existing(root, registry)
    _say_live(as_json, opened.rollback(to, reason(who, why, "publisher rollback")))


@click.command()
@click.argument("root")
@registry_option
@click.option("--version", "number", type=int, help="Only if this is the canary still.")
@who_option
@why_option
@as_json_flag
def promote(  # noqa: PLR0917  (options of a command)
    root: str, registry: str | None, number: int | None, who: str | None, why: str, as_json: bool
) -> None:
    """Make the canary live; `publisher rollback` undoes it."""
    opened = open_existing(root, registry)
    _say_live(as_json, opened.promote(reason(who, why, "publisher promote"), number))


def _say_live(as_json: bool, move: Move) -> None:
    was = f"was {move.from_version}" if move.from_version is not None else "was unknown"
    say(
        as_json, asdict(move), f"version {move.to_version} (step {move.source.step}) is live; {was}"
    )
