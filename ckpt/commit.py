"""The commit protocol: claim an epoch, and make a checkpoint exist with one create-only object.

See docs/design/0001-commit-protocol.md. Every create may have its reply lost by the
network; the object is then read back, and a token in it says whose it is.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import TypeVar

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.events import LogSink
from ckpt.identity import TOOL, identify
from ckpt.manifest import (
    AttemptRecord,
    CommitRecord,
    RunRecord,
    commit_ref,
    decode,
    encode,
)
from ckpt.storage import Storage, check_place, owned
from ckpt.types import Clock, CommitRef, EventSink

T = TypeVar("T")


def check_run(storage: Storage) -> None:
    """Raise what `open_run` would for this root, without writing anything."""
    if identify(storage) is None:
        check_place(storage)


def open_run(storage: Storage, clock: Clock, sink: EventSink | None = None) -> RunRecord:
    """The root's run record, made now if this is the first trainer of the root.

    Where it was lost, it's written anew from what the run has left, said in an event.

    Raises BadInputError where no run may begin, see `check_place`; ConflictError or CorruptError
    where it can't be told which run this is, see `identify`.
    """
    found = identify(storage)
    if found is not None and found.lost is None:
        return found.record
    if found is None:
        check_place(storage)
        record = RunRecord(secrets.token_hex(8), clock.time(), TOOL)
    else:
        record = found.record
        (sink or LogSink()).emit("record_lost", key=layout.RUN, why=found.lost)
    if found is not None and found.damaged:
        storage.put(layout.RUN, encode(record))  # whoever else does it writes the same
    else:
        with contextlib.suppress(ConflictError):  # another job was first: its record counts
            storage.create(layout.RUN, encode(record))
    return decode(RunRecord, storage.read(layout.RUN), layout.RUN)


def how_it_starts(
    storage: Storage, parent: CommitRef | None, world_size: int | None, *, fresh: bool
) -> str:
    """What an attempt begins from, in one line for people; `world_size` is that of the save."""
    where = storage.url
    if parent is not None:
        return (
            f"resumed at step {parent.step} of {where} (epoch {parent.epoch}, saved by {world_size} "
            f"rank{'' if world_size == 1 else 's'})"
        )
    newest = None
    if fresh:
        with contextlib.suppress(SidestageError):  # they are left aside, sound or not
            newest = Catalog(storage).tree().newest()
    has = (
        "it has no checkpoints"
        if newest is None
        else f"beside checkpoints up to step {newest.step}"
    )
    if fresh:
        return f"starts from scratch in {where} as asked (fresh=True){':' if newest is None else ','} {has}"
    return f"starts from scratch in {where}: {has}"


def next_epoch(storage: Storage) -> int:
    """One above all epochs that an attempt or a commit shows: those whose record was lost count."""
    epochs = {layout.parse_attempt_key(o.key) or 0 for o in storage.list(layout.ATTEMPTS)}
    places = (layout.parse_commit_key(o.key) for o in storage.list(layout.COMMITS))
    return 1 + max(epochs | {place[0] for place in places if place}, default=0)


def claim_epoch(  # noqa: PLR0913 - keyword-only, for imports
    storage: Storage,
    run: RunRecord,
    world_size: int,
    parent: CommitRef | None,
    clock: Clock,
    *,
    epoch: int | None = None,
) -> AttemptRecord:
    """Claim the next epoch for this attempt. Of several racers each gets its own number.

    epoch: the number that data was written for already; else none is taken that has data or a
    ledger, as of an attempt that has lost its record.
    """
    token = secrets.token_hex(16)
    mine, epoch = epoch, max(epoch or 0, next_epoch(storage))
    while True:
        if epoch == mine or not _has_traces(owned(storage), epoch):
            record = AttemptRecord(epoch, run.run_id, token, world_size, clock.time(), parent)
            if create_mine(storage, layout.attempt_key(epoch), encode(record)):
                return record
        epoch += 1


def _has_traces(storage: Storage, epoch: int) -> bool:
    prefixes = (layout.epoch_data_prefix(epoch), layout.epoch_ledger_prefix(epoch))
    return any(next(iter(storage.list(prefix)), None) is not None for prefix in prefixes)


def check_not_superseded(storage: Storage, attempt: AttemptRecord) -> None:
    """Raise ConflictError if another attempt has claimed the root, or this one's epoch.

    Lineage alone keeps an old attempt's commits from becoming latest; this tells its owner. On a
    store that can't exclude writers, two may have claimed one epoch: the later record counts.
    """
    for info in storage.list(layout.ATTEMPTS):
        newer = layout.parse_attempt_key(info.key)
        if newer is not None and newer > attempt.epoch:
            raise ConflictError(
                f"{info.key}: a newer attempt owns {storage.url}, this one is {attempt.epoch}; "
                f"end this job"
            )
    key = layout.attempt_key(attempt.epoch)
    if decode(AttemptRecord, storage.read(key), key).token != attempt.token:
        raise ConflictError(
            f"{key}: another job has claimed this epoch of {storage.url}, whose store can't keep "
            f"writers apart (conditional create isn't honoured); end one of the two"
        )


def write_commit(storage: Storage, record: CommitRecord) -> CommitRef:
    """Make the checkpoint exist, or find that somebody has committed this very save.

    Raises ConflictError if this epoch already has another commit of that step.
    """
    key, data = layout.commit_key(record.epoch, record.step), encode(record)
    if create_mine(storage, key, data):
        return commit_ref(record, data)
    found = committed(storage, record.epoch, record.step, record.attempt_token, record.save_id)
    if found is None:
        raise ConflictError(
            f"{key}: step {record.step} is committed already in epoch {record.epoch}"
        )
    return found


def committed(
    storage: Storage, epoch: int, step: int, attempt_token: str, save_id: str
) -> CommitRef | None:
    """The commit of one save of one attempt, whoever wrote it; None if there is none."""
    key = layout.commit_key(epoch, step)
    try:
        data = storage.read(key)
        record = decode(CommitRecord, data, key)
    except (CorruptError, NotFoundError):
        return None
    if (record.attempt_token, record.save_id) != (attempt_token, save_id):
        return None
    return commit_ref(record, data)


def create_mine(storage: Storage, key: str, data: bytes) -> bool:
    """Create an object; True if it is there with our bytes, whatever the reply said.

    Our bytes hold a random token, or the key is ours alone: equality means that we wrote it.
    """
    try:
        storage.create(key, data)
    except (ConflictError, StorageError):
        stored = _or_none(lambda: storage.read(key))
        if stored == data:
            return True
        if stored is None:
            raise
        return False
    return True


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (NotFoundError, StorageError):
        return None
