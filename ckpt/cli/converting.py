"""`ckpt export` and `ckpt import`: checkpoints in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

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
from ckpt.storage import open_storage

if TYPE_CHECKING:
    from ckpt.foreign import Format

FORMATS = ("safetensors", "torch", "dcp")


@click.command("export")
@click.argument("root")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="What to write.")
@STEP_OPTION
@click.option(
    "--key", "keys", multiple=True, help="Only tensors whose key matches this pattern (repeatable)."
)
@click.option("--force", is_flag=True, help="Replace TARGET if it is a file. Folders never are.")
@JSON_FLAG
def export(
    root: str,
    target: Path,
    *,
    form: str,
    step: str | None,
    keys: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint of ROOT as TARGET, for other tools.

    safetensors: one file, with the values in its metadata. torch: one file for
    torch.load(weights_only=True); needs host memory for all of it. dcp: a folder for
    torch.distributed.checkpoint.

    Runs in one process, without a process group, whatever the number of ranks that saved it.
    """
    from ckpt import export as formats

    with open_checkpoint(root, step, holder="ckpt export") as (_, reader):
        chosen = formats.select(reader, keys)
        total = sum(reader.info(k).nbytes for k in chosen)
        with progress_bar(f"step {reader.record.step}", total) as advance:
            if form == "dcp":
                size = formats.export_dcp(reader, target, chosen, progress=advance)
            else:
                write = formats.export_torch if form == "torch" else formats.export_safetensors
                size = write(reader, target, chosen, replace=force, progress=advance)
    if as_json:
        print_json(
            {
                "target": str(target),
                "format": form,
                "bytes": size,
                "tensors": len(chosen),
                "step": reader.record.step,
            }
        )
    else:
        click.echo(
            f"{target}: {len(chosen)} tensors of step {reader.record.step}, {size_text(size)}"
        )


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("root")
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step it becomes.")
@click.option(
    "--format",
    "form",
    type=click.Choice(("auto", *FORMATS)),
    default="auto",
    show_default=True,
    help="What SOURCE is; auto looks at its content.",
)
@click.option(
    "--onto",
    type=click.IntRange(min=0),
    help="Continue this step of ROOT. Later ones become abandoned. Needed if ROOT has any.",
)
@click.option("--under", help="Put everything under this name, such as model.")
@JSON_FLAG
def import_(
    source: Path,
    root: str,
    step: int,
    *,
    form: str,
    onto: int | None,
    under: str | None,
    as_json: bool,
) -> None:
    """Make a checkpoint of ROOT from SOURCE: a safetensors or torch.save file, or a DCP folder.

    Nothing in SOURCE runs: whatever is neither a tensor nor a plain value is refused by name. ROOT
    is made if it doesn't exist; no running job may write to it.
    """
    from ckpt.foreign import open_foreign
    from ckpt.importing import Target, import_checkpoint

    if under == "":
        raise BadInputError("--under: give a name, such as model")
    target = Target(open_storage(root), step, onto)
    target.check()  # before a long look at the source
    wanted = None if form == "auto" else cast("Format", form)
    with (
        open_foreign(source, wanted, under=under) as foreign,
        progress_bar(f"step {step}", foreign.nbytes) as advance,
    ):
        ref = import_checkpoint(foreign, target, progress=advance)
    told = {
        "root": root,
        "epoch": ref.epoch,
        "step": ref.step,
        "format": foreign.format,
        "tensors": len(foreign.tensors),
        "bytes": foreign.nbytes,
    }
    if as_json:
        print_json(told)
    else:
        click.echo(
            f"{root}: step {ref.step} has {len(foreign.tensors)} tensors of {source} "
            f"({foreign.format}), {size_text(foreign.nbytes)}"
        )
