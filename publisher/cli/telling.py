"""`publisher status` and `publisher history`: what is and what was. No torch."""

from __future__ import annotations

from dataclasses import asdict

import click

from publisher.cli.shared import as_json_flag, open_existing, open_root, registry_option, say, when
from publisher.records import Move, Pin
from publisher.registry import open_registry


@click.command()
@click.argument("root")
@registry_option
@as_json_flag
def status(root: str, registry: str | None, as_json: bool) -> None:
    """What is live, what is newest, and which commits were refused."""
    from publisher.status import describe_status, status_of

    # Nothing is published below a root at first; a registry's own address may be mistyped.
    opened = open_registry(root, registry, must_exist=registry is not None)
    found = status_of(open_root(root), opened)
    say(as_json, found, describe_status(found))


@click.command()
@click.argument("root")
@registry_option
@click.option("--limit", type=click.IntRange(min=1), help="Only the newest N moves.")
@as_json_flag
def history(root: str, registry: str | None, limit: int | None, as_json: bool) -> None:
    """Who made which version live, when and why, oldest first; and what is pinned."""
    opened = open_existing(root, registry)
    moves, pins = opened.history()[-(limit or 0) :], opened.pins()
    lines = [_move_line(m) for m in moves] or ["no version was live yet"]
    say(
        as_json,
        {"moves": [asdict(m) for m in moves], "pins": [asdict(p) for p in pins.values()]},
        "\n".join([*lines, *map(_pin_line, pins.values())]),
    )


def _move_line(move: Move) -> str:
    """`canary` moves change only the canary: their line names it."""
    before = "-" if move.from_version is None else move.from_version
    led = f"canary {move.canary}" if move.kind == "canary" else f"{before} -> {move.to_version}"
    step = move.source.step
    return f"{when(move.at_s)}  {move.kind:8}  {led}  step {step}  {move.who}: {move.why}"


def _pin_line(pin: Pin) -> str:
    return f"{when(pin.at_s)}  pinned    {pin.version}  {pin.who}: {pin.why}"
