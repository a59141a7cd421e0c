"""`ckpt restore`: a checkpoint as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

from ckpt.cli.shared import (
    JSON_FLAG,
    STEP_OPTION,
    open_checkpoint,
    print_json,
    progress_bar,
    size_text,
)
from ckpt.errors import BadInputError


@click.command()
@click.argument("root")
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@STEP_OPTION
@click.option(
    "--key", "keys", multiple=True, help="Only keys that match this pattern (repeatable)."
)
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
@JSON_FLAG
def restore(
    root: str, output: Path, step: str | None, keys: tuple[str, ...], *, force: bool, as_json: bool
) -> None:
    """Write a checkpoint of ROOT as the safetensors file OUTPUT, whole or selected keys.

    Runs in one process, without a process group, whatever the number of ranks that saved it.
    """
    from ckpt.export import export_safetensors, select

    if not output.parent.is_dir():
        raise BadInputError(f"{output.parent}: no such folder for the output; make it first")
    with open_checkpoint(root, step, holder="ckpt restore") as (_, reader):
        chosen = select(reader, keys)
        total = sum(reader.info(k).nbytes for k in chosen)
        with progress_bar(f"step {reader.record.step}", total) as advance:
            size = export_safetensors(reader, output, chosen, replace=force, progress=advance)
    if as_json:
        print_json(
            {
                "output": str(output),
                "bytes": size,
                "tensors": len(chosen),
                "step": reader.record.step,
            }
        )
    else:
        click.echo(
            f"{output}: {len(chosen)} tensors of step {reader.record.step}, {size_text(size)}"
        )
