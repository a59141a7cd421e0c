"""What the registry stores: claims, version manifests, moves of the live pointer, refusals.

Each is a sealed JSON document (`ckpt.manifest.seal`). No torch here: `publisher status`
must start fast.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt.errors import CorruptError
from ckpt.manifest import CommitRecord, seal, unseal
from ckpt.types import Buffer, CommitRef, FileEntry

GateName = Literal[
    "digests", "trusted_code", "names_and_shapes", "coverage", "finite", "golden_parity", "build"
]
TableFormat = Literal["int8_rowwise"]
MoveKind = Literal["publish", "rollback"]


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
    """Who took a version's number, and for which commit. Numbers are never reused."""

    KIND: ClassVar[str] = "claim"

    version: int
    source: Source
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
class PublishedTable:
    """One table: its rows are `row_bytes` apart in each of its parts."""

    fqn: str
    rows: int
    dim: int
    format: TableFormat
    row_bytes: int
    parts: tuple[TablePart, ...]


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
    to the version's folder.
    """

    KIND: ClassVar[str] = "version"

    version: int
    parent: int | None
    source: Source
    saved_at_s: float
    committed_at_s: float
    model: str
    description_id: str
    files: tuple[FileEntry, ...]
    tables: tuple[PublishedTable, ...]
    gates: tuple[GateResult, ...]
    published_by: str
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
    """One move of the live pointer: `live.json` holds the newest, `history/` all of them.

    sequence: counts the moves from 1.
    falls_back_to: the sequence of the move that `rollback` returns to; None: there is none.
    newest: per run, the newest commit that ever went live; older ones never do by themselves.
    token: unique, so that a publisher whose reply was lost knows its own move.
    """

    KIND: ClassVar[str] = "move"

    sequence: int
    kind: MoveKind
    from_version: int | None
    to_version: int
    source: Source
    who: str
    why: str
    at_s: float
    falls_back_to: int | None
    newest: tuple[Source, ...]
    token: str


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


Document = Claim | VersionManifest | Move | Refusal
D = TypeVar("D", Claim, VersionManifest, Move, Refusal)
T = TypeVar("T")


def encode(document: Document) -> bytes:
    return seal(document.KIND, asdict(document))


def decode(kind: type[D], data: Buffer, key: str) -> D:
    """Read a document back; CorruptError names `key` and the field that is wrong."""
    return _build(kind, unseal(kind.KIND, data, key), key)


def _build(kind: type[T], body: Any, what: str) -> T:
    """A dataclass from a JSON object that has exactly its fields."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(body, Mapping) or set(body) != set(names):
        found = sorted(body) if isinstance(body, Mapping) else body
        raise CorruptError(
            f"{what}: a {kind.__name__} has the fields {sorted(names)}, found {found}"
        )
    hints = get_type_hints(kind)
    return kind(**{n: _value(hints[n], body[n], f"{what}: {n}") for n in names})


def _value(hint: Any, value: Any, what: str) -> Any:
    """One JSON value as a field's type, strictly."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(args[0], value, what)
    if origin is Literal:
        if value not in args:
            raise CorruptError(f"{what}: {value!r} is not one of {', '.join(args)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise CorruptError(f"{what}: expected a list, found {value!r}")
        return tuple(_value(args[0], v, what) for v in value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, what)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise CorruptError(f"{what}: expected {hint.__name__}, found {value!r}")
    if hint is int and value < 0:
        raise CorruptError(f"{what}: {value} is below 0")
    return value
