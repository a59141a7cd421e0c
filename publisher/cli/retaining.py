"""`publisher pin`, `unpin`, `pins` and `prune`: which versions stay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from publisher.cli.shared import (
    as_json_flag,
    open_existing,
    reason,
    registry_option,
    say,
    when,
    who_option,
    why_option,
)


@click.command()
@click.argument("root")
@click.argument("version", type=click.IntRange(min=1))
@registry_option
@who_option
@why_option
@as_json_flag
def pin(  # noqa: PLR0917  (options of a command)
    root: str, version: int, registry: str | None, who: str | None, why: str, as_json: bool
) -> None:
    """Keep VERSION from being deleted, until `publisher unpin`."""
    opened = open_existing(root, registry)
    made = opened.pin(version, reason(who, why, "publisher pin"))
    say(as_json, asdict(made), f"version {version} is pinned")


@click.command()
@click.argument("root")
@click.argument("version", type=click.IntRange(min=1))
@registry_option
@as_json_flag
def unpin(root: str, version: int, registry: str | None, as_json: bool) -> None:
    """Remove the pin of VERSION."""
    open_existing(root, registry).unpin(version)
    say(as_json, {"version": version}, f"version {version} isn't pinned any more")


@click.command()
@click.argument("root")
@registry_option
@as_json_flag
def pins(root: str, registry: str | None, as_json: bool) -> None:
    """Which versions are pinned, by whom and why."""
    found = open_existing(root, registry).pins().values()
    lines = [f"version {p.version}  {when(p.at_s)}  {p.who}: {p.why}" for p in found]
    say(as_json, {"pins": [asdict(p) for p in found]}, "\n".join(lines) or "nothing is pinned")


@click.command()
@click.argument("root")
@registry_option
@click.option(
    "--policy",
    "policy_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Take `keep` of [retention] from there.",
)
@click.option(
    "--keep", type=click.IntRange(min=0), help="How many of the newest stay; 0: all. Default: 10."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be deleted.")
@as_json_flag
def prune(  # noqa: PLR0917  (options of a command)
    root: str,
    registry: str | None,
    policy_file: Path | None,
    keep: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete versions, except the newest, live, canary, previous and pinned ones."""
    from publisher.policy import RetentionPolicy, read_policy

    opened = open_existing(root, registry)
    if keep is None:
        keep = (read_policy(policy_file).retention if policy_file else RetentionPolicy()).keep
    deleted = opened.prune(keep, dry_run=dry_run)
    did = "would be deleted" if dry_run else "deleted"
    told = f"versions {', '.join(map(str, deleted))}" if deleted else "no version"
    say(
        as_json,
        {"versions": deleted, "keep": keep, "dry_run": dry_run},
        f"{told} {did}; {len(opened.numbers())} here",
    )
