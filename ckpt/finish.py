"""Commits a save that all ranks have written, whoever finds it.

Rank 0 may die, or lose the job's store, between the last receipt and the commit. What it would
have checked and written can be told from the receipts alone; of several who try, create-only lets
one win, and the others find the commit and are as content with it. What rank 0 has refused is
refused again: a rank that failed or skipped has no receipt, and the same checks fail alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
)
from ckpt.manifest import OBJECTS_KIND, AttemptRecord, Receipt, unseal
from ckpt.receipts import Part, commit_parts
from ckpt.replicas import UNLIKE, differing
from ckpt.storage import Storage
from ckpt.types import Clock, CommitRef, EventSink
from ckpt.united import UnitedValues
from ckpt.values import decode_value
from ckpt.written import WrittenSave, find_receipts, uncommitted


def check_agreement(storage: Storage, receipts: Sequence[Receipt]) -> None:
    """All ranks wrote the same save of the same state; BadInputError names what differs.

    `receipts` are those of all ranks, in rank order.
    """
    first = receipts[0]
    for rank, r in enumerate(receipts):
        if (r.rank, r.step, r.plan_id) != (rank, first.step, first.plan_id):
            raise BadInputError(
                f"rank {rank} saved step {r.step} with plan {r.plan_id[-8:]}, rank 0 step {first.step} "
                f"with plan {first.plan_id[-8:]}; call save() in step, with the same state"
            )
        theirs = (r.epoch, r.attempt_token, r.save_id, r.world_size)
        if theirs != (first.epoch, first.attempt_token, first.save_id, len(receipts)):
            raise BadInputError(
                f"rank {rank} wrote save {r.save_id} of epoch {r.epoch} among {r.world_size} ranks, rank 0 "
                f"save {first.save_id} of epoch {first.epoch} among {len(receipts)}; is another job "
                f"using this root?"
            )
    if len({r.values_digest for r in receipts}) > 1:
        _merge_all(storage, receipts)


def finish(storage: Storage, attempt: AttemptRecord, save: WrittenSave, clock: Clock) -> CommitRef:
    """Commit a save as rank 0 would have, or find that it is committed.

    Raises what rank 0 would have refused it with (BadInputError, CorruptError), ConflictError if a
    newer attempt owns the root, and what the store raises.
    """
    parts = [Part(entry, receipt) for entry, receipt in find_receipts(storage, save)]
    receipts = [p.receipt for p in parts]
    if receipts[0].attempt_token != attempt.token or receipts[0].step != save.step:
        raise BadInputError(
            f"{save.prefix}: not written by attempt {attempt.epoch} of {storage.url}; is another "
            f"job using this root?"
        )
    check_agreement(storage, receipts)
    for f in (f for r in receipts for f in r.files):
        if save.sizes.get(f.key) != f.size_bytes:
            found = f"has {save.sizes[f.key]} bytes" if f.key in save.sizes else "is missing"
            raise CorruptError(f"{f.key}: {found}, its receipt says {f.size_bytes}")
    return commit_parts(storage, attempt, parts, clock)


def finish_newest(storage: Storage, clock: Clock, sink: EventSink) -> CommitRef | None:
    """Commit the newest save of the newest attempt that lacks only that, if there is one.

    For the start of a next attempt, before it claims its epoch: afterwards it is too late. A save
    that is refused is told in an event, and the one before it is tried. Raises what the store raises.
    """
    attempt, saves = uncommitted(storage, Catalog(storage).tree())
    for save in saves:
        assert attempt is not None
        try:
            ref = finish(storage, attempt, save, clock)
        except (BadInputError, ConflictError, CorruptError, NotFoundError) as e:
            sink.emit("save_not_finished", step=save.step, epoch=save.epoch, error=str(e))
            continue
        sink.emit("save_finished", step=save.step, epoch=save.epoch)
        return ref
    return None


def _merge_all(storage: Storage, receipts: Sequence[Receipt]) -> None:
    """Ranks may have different keys, but no two values for one key: name the one that has."""
    united = UnitedValues()
    replicas: list[dict[str, str]] = []
    for r in receipts:
        key = layout.rank_objects_key(layout.data_prefix(r.epoch, r.step, r.save_id), r.rank)
        body = unseal(OBJECTS_KIND, storage.read(key), key)
        united.add(r.rank, decode_value(body["values"], key))
        replicas.append(body.get("replicas", {}))
    if (found := differing(replicas)) is not None:
        tensor, rank = found
        raise BadInputError(
            f"{tensor}: ranks 0 and {rank} hold different values of this plain tensor; {UNLIKE}"
        )
