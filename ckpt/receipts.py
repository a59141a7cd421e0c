"""What a save leaves on storage: each rank's files and receipt, and one create-only commit over them.

A Checkpointer, stock DCP and an import differ in how ranks agree; this is what they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.commit import check_not_superseded, write_commit
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, CorruptError
from ckpt.manifest import AttemptRecord, CommitRecord, Receipt, canonical, encode, seal
from ckpt.restore import OBJECTS_KIND
from ckpt.storage import Storage
from ckpt.types import Clock, CommitRef, DigestName, FileEntry, Json


@dataclass(frozen=True)
class SaveTerms:
    """What a rank must know of a save: the same on all ranks but for `rank`. Plain, so it can travel."""

    epoch: int
    step: int
    save_id: str
    rank: int
    world_size: int
    plan_id: str

    @property
    def prefix(self) -> str:
        return layout.data_prefix(self.epoch, self.step, self.save_id)


@dataclass(frozen=True)
class Written:
    """The data files of one rank, and the bytes of the tensors in them."""

    files: tuple[FileEntry, ...]
    tensor_bytes: int


@dataclass(frozen=True)
class Objects:
    """One rank's Python values, sealed, and the digest of those that all ranks share."""

    document: bytes
    values_digest: str


@dataclass(frozen=True)
class Part:
    """One rank's share of a save, complete: its receipt lists its files."""

    receipt: FileEntry
    files: tuple[FileEntry, ...]
    tensor_bytes: int


def continued(storage: Storage, step: int, onto: int | None) -> CommitRef | None:
    """The commit that a new one of `step` continues; None on a root without commits.

    Without `onto` it is the latest. Raises NotFoundError if `onto` is no step of the lineage,
    CorruptError if nothing to continue verifies, BadInputError unless `step` is above it.
    """
    catalog = Catalog(storage)
    if onto is not None:
        parent = catalog.find(onto)
        if parent.record is None:
            raise CorruptError(f"step {onto}: {parent.problem}; continue another step")
    else:
        latest = catalog.latest()
        if latest is None:
            if lineage := catalog.lineage():
                raise CorruptError(
                    f"{storage.url}: none of its {len(lineage)} checkpoints verifies; see `ckpt verify`"
                )
            return None
        parent = latest
    if step <= parent.ref.step:
        raise BadInputError(
            f"step {step} isn't above step {parent.ref.step} of {storage.url}, which it would continue; "
            f"give a higher step, or an older one to go on from (onto)"
        )
    return parent.ref


def seal_objects(values: Json, per_rank: Mapping[str, Json]) -> Objects:
    """The objects of a rank. `values` is the JSON node of the shared tree, `per_rank` those of its own."""
    document = seal(OBJECTS_KIND, {"values": values, "per_rank": per_rank})
    return Objects(document, digest_of(canonical(values)))


def store_part(
    storage: Storage, terms: SaveTerms, written: Written, objects: Objects, digest: DigestName
) -> Part:
    """Store a rank's values and its receipt, after its data."""
    key = layout.rank_objects_key(terms.prefix, terms.rank)
    entry = _store(storage, key, objects.document, digest)
    receipt = Receipt(
        epoch=terms.epoch,
        step=terms.step,
        save_id=terms.save_id,
        rank=terms.rank,
        world_size=terms.world_size,
        plan_id=terms.plan_id,
        values_digest=objects.values_digest,
        tensor_bytes=written.tensor_bytes,
        files=(*written.files, entry),
    )
    key = layout.rank_receipt_key(terms.prefix, terms.rank)
    return Part(_store(storage, key, encode(receipt), digest), receipt.files, written.tensor_bytes)


def commit_parts(
    storage: Storage,
    attempt: AttemptRecord,
    terms: SaveTerms,
    parts: Sequence[Part],
    note: CommitNote,
) -> CommitRef:
    """Make the checkpoint exist, over the parts of all ranks in rank order.

    Raises ConflictError if a newer attempt owns the root, or the step is committed already.
    """
    files = tuple(f for p in parts for f in p.files)
    record = CommitRecord(
        run_id=attempt.run_id,
        epoch=attempt.epoch,
        attempt_token=attempt.token,
        step=terms.step,
        save_id=terms.save_id,
        world_size=terms.world_size,
        parent=note.parent,
        saved_at_s=note.saved_at_s,
        committed_at_s=note.clock.time(),
        tensor_bytes=sum(p.tensor_bytes for p in parts),
        stored_bytes=sum(f.size_bytes for f in files),
        annotations=dict(note.annotations),
        receipts=tuple(p.receipt for p in parts),
        files=files,
    )
    check_not_superseded(storage, attempt)
    return write_commit(storage, record)


@dataclass(frozen=True)
class CommitNote:
    """What a commit says beside its files. `clock` gives the time of the commit itself."""

    parent: CommitRef | None
    saved_at_s: float
    annotations: Mapping[str, str]
    clock: Clock


def _store(storage: Storage, key: str, data: bytes, digest: DigestName) -> FileEntry:
    storage.create(key, data)
    return FileEntry(key, len(data), digest_of(data, digest))
