"""The `ckpt` command: list, show, verify and restore checkpoints. `ls` and `--help` import no torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.catalog import Catalog, CommitInfo
from ckpt.command import entry
from ckpt.errors import BadInputError, CorruptError
from ckpt.storage import Storage, open_storage

if TYPE_CHECKING:
    from ckpt.restore import CheckpointReader

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_STEP = click.option("--step", metavar="STEP", help="A step, or EPOCH/STEP. Default: the latest.")


@click.group(epilog="Every command takes --debug, which shows the trace of an error.")
@click.version_option(package_name="sidestage")
def cli() -> None:
    """Look at, verify and restore Sidestage checkpoints.

    Exit codes: 0 done, 1 defect, 2 bad input, 3 not found, 4 conflict, 5 corrupt,
    6 storage failed or too slow, 130 interrupted.
    """


@cli.command()
@click.argument("root")
@_JSON
def ls(root: str, *, as_json: bool) -> None:
    """List the checkpoints of ROOT, newest last, and which one is the latest."""
    catalog = Catalog(_existing(root))
    run = catalog.run()
    commits = catalog.commits()
    if as_json:
        _print_json({"run_id": run.run_id, "commits": [_summary(c) for c in commits]})
        return
    if not commits:
        click.echo(f"{root}: no checkpoints yet (run {run.run_id})")
        return
    _print_table(
        ["epoch", "step", "status", "saved", "ranks", "size"],
        [
            [
                str(c.ref.epoch),
                str(c.ref.step),
                c.status if c.problem is None else f"{c.status}: {c.problem}",
                _when(c.record.saved_at_s) if c.record else "",
                str(c.record.world_size) if c.record else "",
                _size(c.record.tensor_bytes) if c.record else "",
            ]
            for c in commits
        ],
    )


@cli.command()
@click.argument("root")
@_STEP
@_JSON
def show(root: str, step: str | None, *, as_json: bool) -> None:
    """Show one checkpoint: its tensors, with shapes and how they are cut, and its values."""
    found, reader = _open(root, step)
    keys = sorted(reader.tensors)
    if as_json:
        from ckpt.values import encode_value

        tensors = [
            {
                "key": t.fqn,
                "kind": t.kind,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "shards": [{"offsets": list(o), "sizes": list(s)} for o, s in t.boxes],
            }
            for t in (reader.tensors[k] for k in keys)
        ]
        values = encode_value(reader.values())
        _print_json({**_summary(found), "tensors": tensors, "values": values})
        return
    record = reader.record
    click.echo(
        f"step {record.step}, epoch {record.epoch}, {found.status}, {record.world_size} ranks, "
        f"saved {_when(record.saved_at_s)}, {_size(record.tensor_bytes)} in {len(keys)} tensors, "
        f"{_size(record.stored_bytes)} stored"
    )
    for name, value in sorted(record.annotations.items()):
        click.echo(f"  {name} = {value}")
    _print_table(
        ["key", "kind", "dtype", "shape", "shards"],
        [
            [t.fqn, t.kind, t.dtype, "x".join(map(str, t.shape)) or "scalar", str(len(t.boxes))]
            for t in (reader.tensors[k] for k in keys)
        ],
    )


@cli.command()
@click.argument("root")
@_STEP
@click.option("--all", "every", is_flag=True, help="Verify every checkpoint, not only one.")
@click.option("--quick", is_flag=True, help="Check sizes and small files only, not the data.")
@_JSON
def verify(root: str, step: str | None, *, every: bool, quick: bool, as_json: bool) -> None:
    """Check a checkpoint's files against the digests in its commit. Exit code 5 if any is damaged."""
    from ckpt.verify import verify_commit

    storage = _existing(root)
    catalog = Catalog(storage)
    catalog.run()
    if every and step is not None:
        raise BadInputError("give --step or --all, not both")
    targets = catalog.commits() if every else [_find(catalog, step)]
    results = []
    for found in targets:
        if found.record is None:
            results.append({**_summary(found), "ok": False, "problems": [found.problem]})
            continue
        with _progress(f"step {found.ref.step}", found.record.stored_bytes) as advance:
            report = verify_commit(
                storage, found.record, level="quick" if quick else "full", progress=advance
            )
        results.append(
            {**_summary(found), "ok": report.ok, "problems": report.problems, "bytes": report.bytes}
        )
    if as_json:
        _print_json({"level": "quick" if quick else "full", "commits": results})
    else:
        for r in results:
            state = "ok" if r["ok"] else "DAMAGED"
            click.echo(f"epoch {r['epoch']} step {r['step']}: {state}")
            for problem in r["problems"]:
                click.echo(f"  {problem}")
    bad = [r for r in results if not r["ok"]]
    if bad:
        raise CorruptError(
            f"{len(bad)} of {len(results)} checkpoints are damaged; restore uses the newest one that verifies"
        )


@cli.command()
@click.argument("root")
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@_STEP
@click.option(
    "--key", "keys", multiple=True, help="Only keys that match this pattern (repeatable)."
)
@click.option("--force", is_flag=True, help="Replace OUTPUT if it exists.")
@_JSON
def restore(
    root: str, output: Path, step: str | None, keys: tuple[str, ...], *, force: bool, as_json: bool
) -> None:
    """Write a checkpoint of ROOT as the safetensors file OUTPUT, whole or selected keys.

    Runs in one process, without a process group, whatever the number of ranks that saved it.
    """
    from ckpt.export import export_safetensors, select

    if not output.parent.is_dir():
        raise BadInputError(f"{output.parent}: no such folder for the output; make it first")
    _, reader = _open(root, step)
    chosen = select(reader, keys)
    total = sum(reader.info(k).nbytes for k in chosen)
    with _progress(f"step {reader.record.step}", total) as advance:
        size = export_safetensors(reader, output, chosen, replace=force, progress=advance)
    if as_json:
        _print_json(
            {
                "output": str(output),
                "bytes": size,
                "tensors": len(chosen),
                "step": reader.record.step,
            }
        )
    else:
        click.echo(f"{output}: {len(chosen)} tensors of step {reader.record.step}, {_size(size)}")


def _existing(root: str) -> Storage:
    return open_storage(root, must_exist=True)


def _find(catalog: Catalog, step: str | None) -> CommitInfo:
    if step is None:
        latest = catalog.latest()
        if latest is None:
            catalog.run()
            raise BadInputError("no checkpoint of this root verifies or exists yet; see `ckpt ls`")
        return latest
    epoch, _, number = step.rpartition("/")
    if not number.isdecimal() or (epoch and not epoch.isdecimal()):
        raise BadInputError(f"--step {step}: give a number, or EPOCH/STEP")
    return catalog.find(int(number), epoch=int(epoch) if epoch else None)


def _open(root: str, step: str | None) -> tuple[CommitInfo, CheckpointReader]:
    storage = _existing(root)
    catalog = Catalog(storage)
    catalog.run()
    found = _find(catalog, step)
    if found.record is None:
        raise CorruptError(f"step {found.ref.step}: {found.problem}")
    from ckpt.restore import CheckpointReader

    return found, CheckpointReader(storage, found.record)


def _summary(c: CommitInfo) -> dict[str, Any]:
    out: dict[str, Any] = {"epoch": c.ref.epoch, "step": c.ref.step, "status": c.status}
    if c.problem is not None:
        out["problem"] = c.problem
    if c.record is not None:
        out |= {
            "world_size": c.record.world_size,
            "saved_at_s": c.record.saved_at_s,
            "committed_at_s": c.record.committed_at_s,
            "tensor_bytes": c.record.tensor_bytes,
            "stored_bytes": c.record.stored_bytes,
            "annotations": c.record.annotations,
        }
    return out


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    """A plain table: rich would cost `ls` more time than the listing takes."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    for r in [header, *rows]:
        click.echo("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip())


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr where a person is watching."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    with Progress(
        TextColumn(label),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)


main = entry(cli)

if __name__ == "__main__":
    main()
