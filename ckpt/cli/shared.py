"""What the subcommands share: finding a checkpoint, options, and how things are printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from ckpt.catalog import Catalog, CommitInfo
from ckpt.command import printable
from ckpt.errors import BadInputError, CorruptError, NotFoundError, StorageError
from ckpt.pins import pinned
from ckpt.storage import Storage, open_storage

if TYPE_CHECKING:
    from ckpt.restore import CheckpointReader

JSON_FLAG = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
STEP_OPTION = click.option(
    "--step", metavar="STEP", help="A step, or EPOCH/STEP. Default: the latest."
)

_PIN_TRIES = 5


def open_existing(root: str) -> Storage:
    return open_storage(root, must_exist=True)


def find_commit(catalog: Catalog, step: str | None) -> CommitInfo:
    if step is None:
        latest = catalog.latest()
        if latest is None:
            catalog.run()
            if damaged := len(catalog.lineage()):
                raise CorruptError(
                    f"no checkpoint of this run verifies ({damaged} damaged); see `ckpt ls`"
                )
            raise NotFoundError("this run has no checkpoint yet; see `ckpt ls`")
        return latest
    epoch, _, number = step.rpartition("/")
    if not number.isdecimal() or (epoch and not epoch.isdecimal()):
        raise BadInputError(f"--step {step}: give a number, or EPOCH/STEP")
    return catalog.find(int(number), epoch=int(epoch) if epoch else None)


@contextmanager
def open_checkpoint(
    root: str, step: str | None, *, holder: str | None = None
) -> Iterator[tuple[CommitInfo, CheckpointReader]]:
    """A checkpoint, pinned while the block reads it if `holder` says for whom."""
    storage = open_existing(root)
    catalog = Catalog(storage)
    catalog.run()
    with ExitStack() as stack:
        for _ in range(_PIN_TRIES):
            found = find_commit(catalog, step)
            if found.record is None:
                raise CorruptError(f"step {found.ref.step}: {found.problem}")
            if holder is None:
                break
            try:
                stack.enter_context(pinned(storage, found.ref, holder, refused=warn_unpinned))
                break
            except NotFoundError:
                if step is not None:
                    raise  # else there is a newer one by now
        else:
            raise StorageError(
                f"{root}: each latest checkpoint was deleted before it could be pinned, "
                f"{_PIN_TRIES} times; is keep_last large enough?"
            )
        from ckpt.restore import CheckpointReader

        yield found, CheckpointReader(storage, found.record)


def warn_unpinned(why: str) -> None:
    """For a root that this user can't write: it can be read all the same."""
    click.echo(f"warning: reading without a pin, retention may interfere: {why}", err=True)


def split_step(text: str) -> tuple[str, str | None]:
    """`ROOT@STEP` or `ROOT@EPOCH/STEP` as (root, step); `ROOT` alone means its latest."""
    root, at, step = text.rpartition("@")
    if at and step.replace("/", "", 1).isdecimal():
        return root, step
    return text, None


def summary_of(c: CommitInfo) -> dict[str, Any]:
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


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A plain table: rich would cost `ls` more time than the listing takes."""
    rows = [[printable(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    for r in [header, *rows]:
        click.echo("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip())


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size_text(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
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
