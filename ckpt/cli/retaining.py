"""`ckpt prune`, `pins` and `branch`. No torch."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from ckpt.catalog import Catalog
from ckpt.cli.shared import (
    JSON_FLAG,
    find_commit,
    open_existing,
    print_json,
    print_table,
    progress_bar,
    size_text,
    split_step,
    when,
)
from ckpt.config import KeepBest, RetentionPolicy
from ckpt.errors import BadInputError, CorruptError, StorageError
from ckpt.pins import PinBoard, SeenPin, add_pin, remove_pin
from ckpt.prune import PrunePlan, Pruner, PruneResult
from ckpt.retention import Verdict
from ckpt.storage import open_storage
from ckpt.survey import SavedData
from ckpt.types import SystemClock

WATCH_OPTION = click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Watch the pins so long first: one whose heartbeat stands still for its time to live has expired.",
)


@click.command()
@click.argument("root")
@click.option("--keep-last", type=int, metavar="N", help="Keep the newest N.")
@click.option("--keep-every", type=int, metavar="K", help="Keep steps that are a multiple of K.")
@click.option(
    "--keep-best",
    metavar="N:METRIC[:max]",
    help="Keep the best N by an annotation; the smallest are best, with :max the largest.",
)
@click.option("--apply", is_flag=True, help="Delete; without it nothing is changed.")
@WATCH_OPTION
@JSON_FLAG
def prune(
    root: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    watch_s: float,
    apply: bool,
    as_json: bool,
) -> None:
    """Show what the rules would delete of ROOT, and data that no checkpoint lists; --apply deletes it.

    Without a rule, checkpoints all stay. The latest one, pinned ones and damaged ones always do.
    """
    policy = RetentionPolicy(keep_last, keep_every, _best(keep_best))
    storage = open_existing(root)
    Catalog(storage).run()
    pruner = Pruner(storage, policy, SystemClock())
    if watch_s:
        pruner.watch_pins(lambda: time.sleep(watch_s))
    plan = pruner.plan()
    result = pruner.apply(plan) if apply else None
    if as_json:
        print_json(_plan_json(plan, result))
    else:
        _print_plan(plan, result)
    if result and result.problems:
        raise StorageError(
            f"{len(result.problems)} deletions failed: {result.problems[0]}; run it again"
        )


@click.command()
@click.argument("root")
@click.argument("action", type=click.Choice(["list", "add", "remove"]), default="list")
@click.argument("what", required=False)
@click.option("--name", metavar="ID", help="With add: the pin's id; default is a random one.")
@click.option("--note", default="ckpt pins", help="With add: what the pin is for.")
@WATCH_OPTION
@JSON_FLAG
def pins(
    root: str,
    action: str,
    what: str | None,
    *,
    name: str | None,
    note: str,
    watch_s: float,
    as_json: bool,
) -> None:
    """List the pins of ROOT, `add` STEP (or EPOCH/STEP) a permanent one, or `remove` ID."""
    storage = open_existing(root)
    catalog = Catalog(storage)
    catalog.run()
    if action == "list":
        board = PinBoard(storage, SystemClock())
        found = board.look()
        if watch_s:
            time.sleep(watch_s)
            found = board.look()
        _print_pins(found, as_json=as_json)
        return
    if what is None:
        raise BadInputError(
            f"`ckpt pins ROOT {action}` needs {'STEP' if action == 'add' else 'ID'}"
        )
    if action == "add":
        record = add_pin(storage, find_commit(catalog, what).ref, note, pin_id=name)
        what = record.pin_id
        text = f"{what}: step {record.commit.step} is kept until `ckpt pins {root} remove {what}`"
    else:
        remove_pin(storage, what)
        text = f"{what}: removed"
    if as_json:
        print_json({"id": what, "action": action})
    else:
        click.echo(text)


@click.command()
@click.argument("source", metavar="ROOT@STEP")
@click.argument("target", metavar="NEWROOT")
@click.option(
    "--copy", is_flag=True, help="Copy the data; also makes an earlier branch independent."
)
@click.option(
    "--moved", is_flag=True, help="NEWROOT is a branch, and the root it came from lies at ROOT now."
)
@JSON_FLAG
def branch(source: str, target: str, *, copy: bool, moved: bool, as_json: bool) -> None:
    """Start a run at NEWROOT from a checkpoint of ROOT (default: its latest), without copying it.

    A pin in ROOT keeps the checkpoint there. Where ROOT can't be pinned, the data is copied.
    """
    from ckpt.branch import create_branch, move_source

    if moved:
        if copy:
            raise BadInputError("give --moved first, then --copy to make the branch independent")
        origin = move_source(open_existing(source), open_existing(target))
        if as_json:
            print_json(asdict(origin))
        else:
            click.echo(f"{target}: reads step {origin.commit.step} from {origin.source_url} now")
        return
    root, step = split_step(source)
    storage = open_existing(root)
    catalog = Catalog(storage)
    catalog.run()
    found = find_commit(catalog, step)
    if found.record is None:
        raise CorruptError(f"step {found.ref.step}: {found.problem}")
    with progress_bar(f"step {found.ref.step}", found.record.stored_bytes) as advance:
        made = create_branch(storage, found.ref, open_storage(target), copy=copy, progress=advance)
    if made.why_copied:
        click.echo(f"warning: copied, since {made.why_copied}", err=True)
    if as_json:
        print_json({**asdict(made.origin), "copied_bytes": made.copied_bytes})
        return
    pin = made.origin.pin_id
    how = f"pinned there as {pin}" if pin else f"{size_text(made.copied_bytes)} copied"
    click.echo(f"{target}: starts from {root}@{found.ref.step}, {how}")


def _best(text: str | None) -> KeepBest | None:
    if text is None:
        return None
    count, _, metric = text.partition(":")
    name, _, mode = metric.rpartition(":")
    if mode not in ("min", "max") or not name:
        name, mode = metric, "min"
    if not count.isdecimal() or not name:
        raise BadInputError(f"--keep-best {text}: give N:METRIC or N:METRIC:max, as in 3:loss")
    return KeepBest(name, int(count), "max" if mode == "max" else "min")


def _plan_json(plan: PrunePlan, result: PruneResult | None) -> dict[str, Any]:
    return {
        "applied": result is not None,
        "keep": [_verdict_json(v) for v in plan.keep],
        "delete": [_verdict_json(v) for v in plan.delete],
        "strays": [asdict(s) for s in plan.strays],
        "unsettled": [asdict(s) for s in plan.unsettled],
        "expired_pins": plan.expired_pins,
        **(
            {}
            if result is None
            else {
                "deleted": [asdict(ref) for ref in result.deleted],
                "swept": result.swept,
                "problems": result.problems,
            }
        ),
    }


def _verdict_json(v: Verdict) -> dict[str, Any]:
    c = v.commit
    return {
        **asdict(c.ref),
        "status": c.status,
        "stored_bytes": c.stored_bytes,
        "annotations": dict(c.annotations),
        "reason": v.reason,
    }


def _print_plan(plan: PrunePlan, result: PruneResult | None) -> None:
    gone = "deleted" if result else "delete"
    done = set(result.deleted) if result else set()
    rows = [(v, "keep") for v in plan.keep]
    rows += [(v, gone if not result or v.commit.ref in done else "left") for v in plan.delete]
    rows.sort(key=lambda row: row[0].commit.place)
    print_table(
        ["", "epoch", "step", "saved", "size", "why"],
        [
            [
                what,
                str(v.commit.ref.epoch),
                str(v.commit.ref.step),
                when(v.commit.saved_at_s) if v.commit.saved_at_s else "",
                size_text(v.commit.stored_bytes),
                v.reason,
            ]
            for v, what in rows
        ],
    )
    for s in plan.strays:
        state = gone if not result or s.prefix in result.swept else "left"
        click.echo(f"{state}  {s.prefix}: {_data_text(s)} that no checkpoint lists")
    for s in plan.unsettled:
        click.echo(f"keep  {s.prefix}: {_data_text(s)} of a save that may still be running")
    freed = sum(v.commit.stored_bytes for v in plan.delete) + sum(
        s.stored_bytes for s in plan.strays
    )
    if result is None:
        click.echo(f"{size_text(freed)} would be freed; nothing was changed, --apply deletes it")
    for problem in result.problems if result else []:
        click.echo(f"failed: {problem}")


def _data_text(s: SavedData) -> str:
    return f"{s.files} files, {size_text(s.stored_bytes)}"


def _print_pins(found: list[SeenPin], *, as_json: bool) -> None:
    if as_json:
        print_json([_pin_json(p) for p in found])
        return
    if not found:
        click.echo("no pins")
        return
    rows = []
    for p in found:
        r = p.record
        if r is None:
            rows.append([p.pin_id, "", "", "unreadable", "", p.problem or ""])
            continue
        kind = "permanent" if r.ttl_s is None else f"{r.ttl_s:g} s"
        state = f"{kind}, expired" if p.expired else kind
        place = [str(r.commit.epoch), str(r.commit.step)]
        rows.append([p.pin_id, *place, state, when(r.created_at_s), r.holder])
    print_table(["id", "epoch", "step", "lives", "since", "holder"], rows)


def _pin_json(p: SeenPin) -> dict[str, Any]:
    body = {"problem": p.problem} if p.record is None else asdict(p.record)
    return {"id": p.pin_id, "expired": p.expired, "still_s": round(p.still_s, 3), **body}
