"""What the registry stores: claims, manifests, moves and the pointer, pins, refusals, the lease.

Each is a sealed JSON document (`ckpt.manifest.seal`). No torch here: `publisher status`
must start fast.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar, Literal, TypeVar

from ckpt.errors import CorruptError
from ckpt.manifest import CommitRecord, seal, unseal
from ckpt.typed import decode_stored
from ckpt.types import Buffer, CommitRef, FileEntry

GateName = Literal[
    "digests",
    "trusted_code",
    "names_and_shapes",
    "coverage",
    "finite",
    "norm_drift",
    "dequantisation",
    "id_maps",
    "golden_parity",
    "metric",
    "build",
]
TableFormat = Literal["int8_rowwise", "int4_rowwise", "fp16", "fp32"]
MoveKind = Literal["publish", "canary", "promote", "rollback"]


@dataclass(frozen=True)
class Source:
    """The commit that a version is made of. Two versions never have the same one."""

    run_id: str
    epoch: int
    step: int
    digest: str

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.epoch, self.step, self.digest)

    @property
    def order(self) -> tuple[int, int]:
        """Commits of a run are newer by epoch, then step: no old attempt outruns a new one."""
        return self.epoch, self.step


def source_of(record: CommitRecord, ref: CommitRef) -> Source:
    return Source(record.run_id, ref.epoch, ref.step, ref.digest)


@dataclass(frozen=True)
class Claim:
    """Who took a version's number, under which lease and for which commit. Numbers are never reused."""

    KIND: ClassVar[str] = "claim"

    version: int
    source: Source
    lease_epoch: int
    who: str
    at_s: float


@dataclass(frozen=True)
class TablePart:
    """Rows [first_row, first_row + rows) of a table, from byte `offset` of a version's file."""

    file: str
    offset: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class TableStats:
    """What was seen of a table's fp32 rows while they were streamed.

    mean_norm, max_norm: of the rows' Euclidean lengths.
    norm_counts: how many rows have a length of 0, and then in each power of two from
        [2^-20, 2^-19) on; the first of them takes all that are shorter, the last all longer ones.
    max_abs_err: the largest |stored value - fp32 value|. rms_err, rms: root mean squares of that
        error and of the values.
    mean_row_err: mean of the relative errors of rows that aren't zero, each 0 to 1, see
        `publisher.sums.row_errors`; it shows what a few large rows or columns hide in `rms_err`.

    Errors are those of every fourth row, and of all rows of tables of up to 65,536.
    """

    mean_norm: float
    max_norm: float
    norm_counts: tuple[int, ...]
    max_abs_err: float
    rms_err: float
    rms: float
    mean_row_err: float


@dataclass(frozen=True)
class PublishedTable:
    """One table: its rows are `row_bytes` apart in each of its parts, which tile [0, rows) in order."""

    fqn: str
    rows: int
    dim: int
    format: TableFormat
    row_bytes: int
    parts: tuple[TablePart, ...]
    stats: TableStats


@dataclass(frozen=True)
class GateResult:
    """What one gate found. `value` and `threshold` where the gate compares numbers."""

    name: GateName
    passed: bool
    detail: str
    value: float | None = None
    threshold: float | None = None


@dataclass(frozen=True)
class VersionManifest:
    """Written last: a version exists when this does. What it doesn't list isn't part of it.

    `parent` is the version that was live when this one was begun. Keys in `files` are relative
    to the version's folder. `dense_step`, `table_step` and `id_map_step` say of which step each kind
    of content is: today all are the source's, and a host refuses a version in which they differ.

    event_time_s: event time of the newest batch that the commit was trained on, if the trainer said.
    lease_epoch: under which lease it was published.
    """

    KIND: ClassVar[str] = "version"

    version: int
    parent: int | None
    source: Source
    dense_step: int
    table_step: int
    id_map_step: int
    saved_at_s: float
    committed_at_s: float
    event_time_s: float | None
    model: str
    description_id: str
    files: tuple[FileEntry, ...]
    tables: tuple[PublishedTable, ...]
    gates: tuple[GateResult, ...]
    published_by: str
    lease_epoch: int
    started_at_s: float
    published_at_s: float

    def file(self, name: str) -> FileEntry:
        """The entry of one file; CorruptError if the manifest doesn't list it."""
        for entry in self.files:
            if entry.key == name:
                return entry
        raise CorruptError(f"version {self.version}: its manifest lists no {name}")


@dataclass(frozen=True)
class Move:
    """One move of the live pointer: the pointer holds the newest, `history/` all of them.

    sequence: counts the moves from 1.
    from_version, to_version: the live version before and after; None: nothing was live yet.
    canary: the canary after this move, if there is one. `canary` moves change only this.
    source: the commit of the version that moved; of the canary, if only that changed.
    lease_epoch: the newest lease that the pointer had seen by then.
    falls_back_to: the sequence of the move that `rollback` returns to; None: there is none.
    newest: per run, the newest commit that ever was live or the canary; neither it nor an older one
        becomes that by itself.
    token: unique, so that a publisher whose reply was lost knows its own move.
    """

    KIND: ClassVar[str] = "move"

    sequence: int
    kind: MoveKind
    from_version: int | None
    to_version: int
    canary: int | None
    source: Source
    lease_epoch: int
    who: str
    why: str
    at_s: float
    falls_back_to: int | None
    newest: tuple[Source, ...]
    token: str


@dataclass(frozen=True)
class Pointer:
    """`live.json`: where the pointer is, and what stops moves that were decided before.

    move: the newest; None: nothing was live yet, but a lease was taken.
    lease_epoch: the newest lease; a publisher that holds an older one moves the pointer no more.
    retired: versions that are being deleted; nothing moves to them and nobody can pin them.
    changes: counts the writes, so that content never comes back: on an object store the etag may be
        a digest of it.
    """

    KIND: ClassVar[str] = "pointer"

    move: Move | None
    lease_epoch: int
    retired: tuple[int, ...]
    changes: int


@dataclass(frozen=True)
class Pin:
    """Keeps a version from being deleted by retention until somebody removes it."""

    KIND: ClassVar[str] = "version_pin"

    version: int
    who: str
    why: str
    at_s: float


@dataclass(frozen=True)
class LeaseOwner:
    """One process that publishes. `token` is what tells it from all others."""

    host: str
    pid: int
    token: str


@dataclass(frozen=True)
class LeaseRecord:
    """`lease.json`: who may publish.

    epoch: grows by one or more at each change of the owner.
    beats: the owner raises it while it lives; who sees it stand still for `ttl_s` may take over.
    released: the owner has left; the next one needn't wait.
    """

    KIND: ClassVar[str] = "lease"

    epoch: int
    owner: LeaseOwner
    beats: int
    ttl_s: float
    released: bool
    since_s: float


@dataclass(frozen=True)
class Refusal:
    """One attempt to publish a commit that a gate refused."""

    KIND: ClassVar[str] = "refusal"

    source: Source
    attempt: int
    gate: GateName
    reason: str
    gates: tuple[GateResult, ...]
    version: int | None
    who: str
    at_s: float


Document = Claim | VersionManifest | Move | Pointer | Pin | LeaseRecord | Refusal
D = TypeVar("D", Claim, VersionManifest, Move, Pointer, Pin, LeaseRecord, Refusal)


def encode(document: Document) -> bytes:
    return seal(document.KIND, asdict(document))


def decode(kind: type[D], data: Buffer, key: str) -> D:
    """Read a document back; CorruptError names `key` and the field that is wrong."""
    return decode_stored(kind, unseal(kind.KIND, data, key), key)
