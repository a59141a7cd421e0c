"""`publisher compile`: a package of native code for a program, ahead of need."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckpt.errors import NotFoundError
from publisher.cli.shared import as_json_flag, open_existing, registry_option, say


@click.command(name="compile")
@click.argument("root")
@registry_option
@click.option("--version", "number", type=int, help="Whose program. Default: the live version's.")
@as_json_flag
def compile_(root: str, registry: str | None, number: int | None, as_json: bool) -> None:
    """Compile a version's program for this CPU, once for all versions that share it.

    The package goes to the registry and its sha256 to this host's trust list; hosts with such a CPU
    that trust it use it from the next version that they load.
    """
    opened = open_existing(root, registry)
    if number is None:
        move = opened.live()
        number = move.to_version if move is not None else None
        if number is None:
            raise NotFoundError(f"{opened.url}: no version is live yet; publish one first")
    from ckpt.config import trust_file
    from ckpt.trust import TrustList
    from publisher.compiling import compile_version

    record, made = compile_version(opened, opened.version(number), TrustList(trust_file()))
    did = f"compiled in {record.compile_s:.0f} s" if made else "was compiled before"
    say(
        as_json,
        {**asdict(record), "made": made},
        f"program of version {number} {did}: {record.sha256}.pt2, {record.size_bytes} bytes, "
        f"for {record.instruction_set}",
    )
