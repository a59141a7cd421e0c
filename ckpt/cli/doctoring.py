"""`ckpt doctor`. No torch."""

from __future__ import annotations

from dataclasses import asdict

import click

from ckpt.catalog import Catalog
from ckpt.cli.shared import JSON_FLAG, print_json, print_table
from ckpt.config import CheckpointConfig
from ckpt.doctor import examine_store, free_space, unfinished_save
from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.findings import Finding
from ckpt.machine import JobSize, copy_speed, host_memory, memory_lock, save_cost, scheduling
from ckpt.storage import Storage, open_storage
from ckpt.types import SystemClock


@click.command()
@click.argument("root")
@click.option(
    "--state-bytes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Bytes of state over all ranks. Default: those of the latest checkpoint.",
)
@click.option("--ranks", type=click.IntRange(min=1), help="Default: those of the latest, or 1.")
@click.option("--hosts", type=click.IntRange(min=1), default=1, help="Machines they run on.")
@click.option(
    "--failures-per-day",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the whole job: for the advised interval.",
)
@JSON_FLAG
def doctor(
    root: str,
    *,
    state_bytes: int | None,
    ranks: int | None,
    hosts: int,
    failures_per_day: float,
    as_json: bool,
) -> int:
    """Try out ROOT and this machine: is it safe, how fast, and how often to save?

    Writes at most 64 MiB for a few seconds, and removes it. Exit code 6 if something fails.
    """
    clock = SystemClock()
    storage = open_storage(root)
    job = _job(storage, state_bytes, ranks, hosts)
    findings, speeds = examine_store(storage, clock)
    findings.append(unfinished_save(storage))
    findings += [free_space(storage, job.state_bytes if job else None), memory_lock(job)]
    findings += scheduling()
    if job is not None:
        findings.append(host_memory(job, CheckpointConfig()))
        findings += save_cost(job, copy_speed(clock), speeds.write, failures_per_day)
    failed = any(f.level == "fail" for f in findings)
    if as_json:
        print_json({"root": storage.url, "usable": not failed, "findings": _plain(findings)})
    else:
        print_table(["", "check", "found"], [[f.level, f.name, f.text] for f in findings])
        if job is None:
            click.echo("no checkpoint here yet: --state-bytes N adds what a save will cost")
    return StorageError.exit_code if failed else 0


def _job(
    storage: Storage, state_bytes: int | None, ranks: int | None, hosts: int
) -> JobSize | None:
    """The job as asked for, with what the latest checkpoint says for the rest."""
    latest = None
    if state_bytes is None or ranks is None:
        try:
            latest = Catalog(storage).latest()
        except (NotFoundError, StorageError):
            latest = None  # a root to be; the store's checks say what is wrong with it
    record = latest.record if latest else None
    if state_bytes is None:
        state_bytes = record.tensor_bytes if record else 0
    ranks = ranks or (record.world_size if record else hosts)
    if hosts > ranks:
        raise BadInputError(f"--hosts {hosts}: more than the {ranks} ranks")
    return JobSize(state_bytes, ranks, hosts) if state_bytes else None


def _plain(findings: list[Finding]) -> list[dict[str, object]]:
    return [{**asdict(f), "values": dict(f.values)} for f in findings]
