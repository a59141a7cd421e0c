"""What a save leaves on storage: each rank's files and receipt, and one create-only commit over them.

A Checkpointer, stock DCP and an import differ in how ranks agree; this is what they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.commit import check_not_superseded, committed, create_mine, write_commit
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, ConflictError, CorruptError
from ckpt.manifest import (
    OBJECTS_KIND,
    AttemptRecord,
    CommitRecord,
    Receipt,
    canonical,
    encode,
    seal_text,
)
from ckpt.storage import Storage
from ckpt.types import Clock, CommitRef, DigestName, FileEntry, Json

_MOST_TABLES = 100  # that a receipt names, and how much it says of each
_REASON_CHARS = 200


@dataclass(frozen=True)
class SaveTerms:
    """What a rank must know of a save: the same on all ranks but for `rank`. Plain, so it can travel.

    Of `parent`, `saved_at_s` and `annotations` those of rank 0 count.
    """

    epoch: int
    attempt_token: str
    step: int
    save_id: str
    rank: int
    world_size: int
    plan_id: str
    parent: CommitRef | None
    saved_at_s: float
    annotations: Mapping[str, str]

    @property
    def prefix(self) -> str:
        return layout.data_prefix(self.epoch, self.step, self.save_id)


@dataclass(frozen=True)
class Taken:
    """How a rank's snapshot was taken: see Receipt."""

    guarded_bytes: int = 0
    copied_bytes: int = 0
    copied_tables: Mapping[str, str] = field(default_factory=dict)

    def bounded_tables(self) -> dict[str, str]:
        """`copied_tables` as a receipt keeps them: the first hundred by name, in short."""
        names = sorted(self.copied_tables)
        kept = {name: self.copied_tables[name][:_REASON_CHARS] for name in names[:_MOST_TABLES]}
        if len(names) > _MOST_TABLES:
            kept["..."] = f"and {len(names) - _MOST_TABLES} more tables"
        return kept


@dataclass(frozen=True)
class Written:
    """The data files of one rank, and the bytes of the tensors in them."""

    files: tuple[FileEntry, ...]
    tensor_bytes: int
    taken: Taken = Taken()


@dataclass(frozen=True)
class Objects:
    """One rank's Python values, sealed, and the digest of what all ranks share."""

    document: bytes
    values_digest: str


@dataclass(frozen=True)
class Part:
    """One rank's share of a save, complete: its receipt, and where that is stored."""

    entry: FileEntry
    receipt: Receipt


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
    return seal_object_texts(canonical(values), {k: canonical(v) for k, v in per_rank.items()})


def seal_object_texts(
    values: bytes, per_rank: Mapping[str, bytes], replicas: Mapping[str, str] | None = None
) -> Objects:
    """`seal_objects` of nodes that are canonical JSON already.

    replicas: digests of parts of the tensors that all ranks have; see `ckpt.replicas`.
    """
    own = b",".join(b"%s:%s" % (canonical(k), per_rank[k]) for k in sorted(per_rank))
    shared = values if not replicas else values + canonical(replicas)
    seen = b"" if not replicas else b'"replicas":%s,' % canonical(replicas)
    document = seal_text(OBJECTS_KIND, b'{"per_rank":{%s},%s"values":%s}' % (own, seen, values))
    return Objects(document, digest_of(shared))


def store_part(
    storage: Storage, terms: SaveTerms, written: Written, objects: Objects, digest: DigestName
) -> Part:
    """Store a rank's values and its receipt, after its data."""
    key = layout.rank_objects_key(terms.prefix, terms.rank)
    entry = _store(storage, key, objects.document, digest)
    receipt = Receipt(
        epoch=terms.epoch,
        attempt_token=terms.attempt_token,
        step=terms.step,
        save_id=terms.save_id,
        rank=terms.rank,
        world_size=terms.world_size,
        plan_id=terms.plan_id,
        parent=terms.parent,
        saved_at_s=terms.saved_at_s,
        annotations=dict(terms.annotations),
        values_digest=objects.values_digest,
        tensor_bytes=written.tensor_bytes,
        guarded_bytes=written.taken.guarded_bytes,
        copied_bytes=written.taken.copied_bytes,
        copied_tables=written.taken.bounded_tables(),
        files=(*written.files, entry),
    )
    key = layout.rank_receipt_key(terms.prefix, terms.rank)
    return Part(_store(storage, key, encode(receipt), digest), receipt)


def commit_parts(
    storage: Storage, attempt: AttemptRecord, parts: Sequence[Part], clock: Clock
) -> CommitRef:
    """Make the checkpoint exist, over the parts of all ranks in rank order.

    If somebody else has committed this very save meanwhile, that is success, too. Raises
    ConflictError if a newer attempt owns the root, or the step is committed already.
    """
    first = parts[0].receipt
    files = tuple(f for p in parts for f in p.receipt.files)
    record = CommitRecord(
        run_id=attempt.run_id,
        epoch=attempt.epoch,
        attempt_token=attempt.token,
        step=first.step,
        save_id=first.save_id,
        world_size=first.world_size,
        parent=first.parent,
        continues=attempt.parent,
        saved_at_s=first.saved_at_s,
        committed_at_s=clock.time(),
        tensor_bytes=sum(p.receipt.tensor_bytes for p in parts),
        stored_bytes=sum(f.size_bytes for f in files),
        annotations=first.annotations,
        receipts=tuple(p.entry for p in parts),
        files=files,
    )
    try:
        check_not_superseded(storage, attempt)
    except ConflictError:
        # The attempt after this one finishes what it finds complete, before it begins.
        found = committed(storage, attempt.epoch, first.step, attempt.token, first.save_id)
        if found is None:
            raise
        return found
    return write_commit(storage, record)


def _store(storage: Storage, key: str, data: bytes, digest: DigestName) -> FileEntry:
    if not create_mine(storage, key, data):
        raise ConflictError(f"{key}: somebody else's already; is another job using this root?")
    return FileEntry(key, len(data), digest_of(data, digest))
