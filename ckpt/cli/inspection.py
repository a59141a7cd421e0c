"""`ckpt ls`, `show` and `verify`. `ls` and `verify` import no torch."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import click

from ckpt.catalog import Catalog
from ckpt.cli.shared import (
    JSON_FLAG,
    STEP_OPTION,
    find_commit,
    open_checkpoint,
    open_existing,
    print_json,
    print_table,
    progress_bar,
    size_text,
    summary_of,
    warn_unpinned,
    when,
)
from ckpt.command import printable
from ckpt.errors import BadInputError, CorruptError, NotFoundError
from ckpt.manifest import CommitRecord, Receipt
from ckpt.pins import pinned
from ckpt.storage import Storage
from ckpt.verify import VerifyReport, verify_commit
from ckpt.written import read_receipts


@click.command()
@click.argument("root")
@JSON_FLAG
def ls(root: str, *, as_json: bool) -> None:
    """List the checkpoints of ROOT, newest last, and which one is the latest."""
    catalog = Catalog(open_existing(root))
    run = catalog.run()
    commits = catalog.commits()
    origin = catalog.tree().origin
    if as_json:
        branched = {} if origin is None else {"origin": asdict(origin)}
        found = [summary_of(c) for c in commits]
        print_json({"run_id": run.run_id, **branched, "commits": found})
        return
    if origin is not None:
        where = "copied" if origin.pin_id is None else "its data is read there"
        click.echo(f"branched from {origin.source_url}@{origin.commit.step} ({where})")
    if not commits:
        click.echo(f"{root}: no checkpoints yet (run {run.run_id})")
        return
    print_table(
        ["epoch", "step", "status", "saved", "ranks", "size"],
        [
            [
                str(c.ref.epoch),
                str(c.ref.step),
                c.status if c.problem is None else f"{c.status}: {c.problem}",
                when(c.record.saved_at_s) if c.record else "",
                str(c.record.world_size) if c.record else "",
                size_text(c.record.tensor_bytes) if c.record else "",
            ]
            for c in commits
        ],
    )


@click.command()
@click.argument("root")
@STEP_OPTION
@JSON_FLAG
def show(root: str, step: str | None, *, as_json: bool) -> None:
    """Show one checkpoint: its tensors, with shapes and how they are cut, and its values."""
    with open_checkpoint(root, step) as (found, reader):
        # All else that is shown here was read at opening.
        receipts = read_receipts(open_existing(root), reader.record.receipts)
    taken = _taken(receipts)
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
        print_json({**summary_of(found), **taken, "tensors": tensors, "values": values})
        return
    record = reader.record
    click.echo(
        f"step {record.step}, epoch {record.epoch}, {found.status}, {record.world_size} ranks, "
        f"saved {when(record.saved_at_s)}, {size_text(record.tensor_bytes)} in {len(keys)} tensors, "
        f"{size_text(record.stored_bytes)} stored"
    )
    if taken["guarded_bytes"] or taken["copied_bytes"]:
        click.echo(
            f"  snapshot: {size_text(taken['guarded_bytes'])} stayed in place, "
            f"{size_text(taken['copied_bytes'])} were copied in save()"
        )
    for name, value in sorted(record.annotations.items()):
        click.echo(printable(f"  {name} = {value}"))
    print_table(
        ["key", "kind", "dtype", "shape", "shards"],
        [
            [t.fqn, t.kind, t.dtype, "x".join(map(str, t.shape)) or "scalar", str(len(t.boxes))]
            for t in (reader.tensors[k] for k in keys)
        ],
    )
    if taken["copied_tables"]:
        click.echo()
        print_table(["copied table", "why"], [list(t) for t in taken["copied_tables"].items()])


def _taken(receipts: list[Receipt]) -> dict[str, Any]:
    """How all ranks took the snapshot, together."""
    tables = {name: why for r in receipts for name, why in r.copied_tables.items()}
    return {
        "guarded_bytes": sum(r.guarded_bytes for r in receipts),
        "copied_bytes": sum(r.copied_bytes for r in receipts),
        "copied_tables": dict(sorted(tables.items())),
    }


@click.command()
@click.argument("root")
@STEP_OPTION
@click.option("--all", "every", is_flag=True, help="Verify every checkpoint, not only one.")
@click.option("--quick", is_flag=True, help="Check sizes and small files only, not the data.")
@JSON_FLAG
def verify(root: str, step: str | None, *, every: bool, quick: bool, as_json: bool) -> None:
    """Check a checkpoint's files against the digests in its commit. Exit code 5 if any is damaged."""
    storage = open_existing(root)
    catalog = Catalog(storage)
    catalog.run()
    if every and step is not None:
        raise BadInputError("give --step or --all, not both")
    targets = catalog.commits() if every else [find_commit(catalog, step)]
    results = []
    warn = lru_cache(warn_unpinned)  # the same refusal for every checkpoint is told once
    for found in targets:
        if found.record is None:
            results.append({**summary_of(found), "ok": False, "problems": [found.problem]})
            continue
        try:
            with pinned(storage, found.ref, "ckpt verify", refused=warn):
                report = _verified(storage, found.record, quick=quick)
        except NotFoundError:
            if not every:
                raise
            continue  # pruned since it was listed
        results.append(
            {
                **summary_of(found),
                "ok": report.ok,
                "problems": report.problems,
                "bytes": report.bytes,
            }
        )
    if as_json:
        print_json({"level": "quick" if quick else "full", "commits": results})
    else:
        for r in results:
            state = "ok" if r["ok"] else "DAMAGED"
            click.echo(f"epoch {r['epoch']} step {r['step']}: {state}")
            for problem in r["problems"]:
                click.echo(printable(f"  {problem}"))
    bad = [r for r in results if not r["ok"]]
    if bad:
        raise CorruptError(
            f"{len(bad)} of {len(results)} checkpoints are damaged; restore uses the newest one that verifies"
        )


def _verified(storage: Storage, record: CommitRecord, *, quick: bool) -> VerifyReport:
    with progress_bar(f"step {record.step}", record.stored_bytes) as advance:
        return verify_commit(storage, record, level="quick" if quick else "full", progress=advance)
