"""`publisher export`: a version as a Triton model repository or an ONNX file. No torch before it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ckpt.config import trust_file
from ckpt.errors import NotFoundError
from ckpt.trust import TrustList
from publisher.registry import open_registry


@click.command("export")
@click.argument("root")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", "kind", type=click.Choice(["triton", "onnx"]), required=True, help="What to write."
)
@click.option("--version", type=int, help="The version to export. Default: the live one.")
@click.option(
    "--registry", metavar="URL", help="Where the versions are. Default: serving/ below ROOT."
)
@click.option("--force", is_flag=True, help="Replace an earlier view.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def export(  # noqa: PLR0913, PLR0917  (options of a command)
    root: str,
    out: Path,
    kind: str,
    version: int | None,
    registry: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a version for other serving hosts to OUT, after it answered the golden request.

    triton: OUT is a model repository; OUT/<model>/<version>/model.pt2 is added to it, and
    OUT/<model>/config.pbtxt with the first version. onnx: OUT is a new folder with model.onnx.
    Takes memory for about four times the version's tables.
    """
    opened = open_registry(root, registry, must_exist=True)
    if version is None:
        live = opened.live()
        if live is None:
            raise NotFoundError(f"{opened.url}: no version is live yet; publish one, or name it")
        version = live.to_version
    manifest = opened.version(version)
    from publisher.views.export import ViewSource, export_onnx, export_triton

    source = ViewSource(opened, manifest, TrustList(trust_file()))
    write = export_triton if kind == "triton" else export_onnx
    done = write(source, out, force=force)
    if as_json:
        click.echo(json.dumps(asdict(done)))
        return
    for name, size in done.files.items():
        click.echo(f"{done.path}/{name}  {size:,} bytes")
    click.echo(
        f"version {done.version}, golden request: not run, since onnxruntime isn't installed"
        if done.max_abs_err is None
        else f"version {done.version}, golden request: max abs error {done.max_abs_err:.3g}, "
        f"allowed below {done.allowed:g}"
    )
