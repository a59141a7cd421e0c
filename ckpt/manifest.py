"""Codec of the small JSON records: run, attempt, receipt, commit. Never pickle.

A record is one JSON object {"format", "kind", "body", "checksum"}; the checksum covers
the other three in canonical form, so a record that was cut short or edited is found
before any of it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from ckpt.digest import digest_of
from ckpt.errors import CorruptError, UnsupportedFormatError
from ckpt.types import Buffer, CommitRef, FileEntry, Json

FORMAT_VERSION = 0
OBJECTS_KIND = "objects"
"""The document with a rank's values."""


@dataclass(frozen=True)
class RunRecord:
    """`RUN.json`: made once, by the first trainer of a root."""

    KIND: ClassVar[str] = "run"

    run_id: str
    created_at_s: float
    tool: str


@dataclass(frozen=True)
class AttemptRecord:
    """One life of the process group, and the commit that it continues (None: from scratch)."""

    KIND: ClassVar[str] = "attempt"

    epoch: int
    run_id: str
    token: str
    world_size: int
    started_at_s: float
    parent: CommitRef | None


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote for one save, and all that a commit says of it.

    With those of all ranks anybody can write the commit; `parent`, `saved_at_s` and `annotations`
    are then rank 0's. `guarded_bytes` are of tensors that stayed in place when save() returned,
    `copied_bytes` of those that it copied, `copied_tables` why a table was copied, by name.
    """

    KIND: ClassVar[str] = "receipt"

    epoch: int
    attempt_token: str
    step: int
    save_id: str
    rank: int
    world_size: int
    plan_id: str
    parent: CommitRef | None
    saved_at_s: float
    annotations: dict[str, str]
    values_digest: str
    tensor_bytes: int
    guarded_bytes: int
    copied_bytes: int
    copied_tables: dict[str, str]
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class CommitRecord:
    """The one object that makes a checkpoint exist. What it doesn't list doesn't exist.

    `parent` is the previous commit of this lineage, `continues` the one that its attempt began
    with (None: from scratch), so that the lineage is found without the attempt's record. `digest`
    in a CommitRef that names this commit is that of this record's bytes. `annotations` are the
    trainer's own notes, such as which serving description fits.
    """

    KIND: ClassVar[str] = "commit"

    run_id: str
    epoch: int
    attempt_token: str
    step: int
    save_id: str
    world_size: int
    parent: CommitRef | None
    saved_at_s: float
    committed_at_s: float
    tensor_bytes: int
    stored_bytes: int
    annotations: dict[str, str]
    receipts: tuple[FileEntry, ...]
    files: tuple[FileEntry, ...]
    continues: CommitRef | None = None


@dataclass(frozen=True)
class PinRecord:
    """A reader's claim on a commit, which stops retention.

    `ttl_s` is how long the owner's `beats` may stand still, on an observer's clock, before
    the pin counts for nothing; None: until somebody removes it.
    """

    KIND: ClassVar[str] = "pin"

    pin_id: str
    token: str
    commit: CommitRef
    holder: str
    ttl_s: float | None
    beats: int
    created_at_s: float


@dataclass(frozen=True)
class OriginRecord:
    """`ORIGIN.json` of a branch: the commit of another root that it starts from.

    `prefixes` are what the keys of that commit's objects begin with. While `pin_id` isn't
    None they are read from the source, in which that pin keeps them; else they were copied.
    """

    KIND: ClassVar[str] = "origin"

    source_url: str
    source_run_id: str
    commit: CommitRef
    prefixes: tuple[str, ...]
    pin_id: str | None
    created_at_s: float


Record = TypeVar("Record", RunRecord, AttemptRecord, Receipt, CommitRecord, PinRecord, OriginRecord)


# Fields that records of an earlier version lack: None there.
_NEWER = frozenset(("continues",))


def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


# Fields and their types. Found once: thousands of receipts are read for one commit.
_FIELDS: Mapping[type, dict[str, Any]] = {
    kind: _fields(kind)
    for kind in (
        *(RunRecord, AttemptRecord, Receipt, CommitRecord, PinRecord, OriginRecord),
        *(FileEntry, CommitRef),
    )
}


def canonical(value: Json) -> bytes:
    """The one way we spell a JSON value, so that equal values have equal bytes."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def encode(record: Record) -> bytes:
    """The bytes of a record."""
    return seal(record.KIND, asdict(record))


def decode(kind: type[Record], data: Buffer, key: str) -> Record:
    """Read a record back.

    Raises CorruptError if it was cut short, altered or isn't of this kind, and
    UnsupportedFormatError if another version of the format wrote it; both name `key`.
    """
    body = unseal(kind.KIND, data, key)
    hints = _FIELDS[kind]
    names = [n for n in hints if n in body or n not in _NEWER]
    if set(body) != set(names):
        raise CorruptError(
            f"{key}: a {kind.KIND} record has fields {sorted(names)}, found {sorted(body)}"
        )
    return kind(**{n: _field(body[n], hints[n], f"{key}: {n}") for n in names})


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Wrap any JSON object as a checksummed document of this project."""
    # Through JSON once, so that tuples and lists give the same checksum.
    return seal_text(kind, canonical(json.loads(canonical(dict(body)))))


def seal_text(kind: str, body: bytes) -> bytes:
    """`seal` of a body that is canonical JSON already, which isn't looked at again."""
    rest = b'"format":%d,"kind":%s}' % (FORMAT_VERSION, canonical(kind))
    checksum = digest_of(b'{"body":%s,%s' % (body, rest))
    return b'{"body":%s,"checksum":"%s",%s\n' % (body, checksum.encode(), rest)


def unseal(kind: str, data: Buffer, key: str) -> dict[str, Any]:
    """The body of a sealed document, or an error that names `key` and what to do."""
    try:
        doc = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{key}: not a whole JSON document ({len(data)} bytes): {e}") from None
    if not isinstance(doc, dict) or "format" not in doc or "kind" not in doc:
        raise CorruptError(f"{key}: not a Sidestage record: no format and kind in it")
    if doc["format"] != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{key}: format version {doc['format']!r}, but this version reads {FORMAT_VERSION}; "
            f"install the version of sidestage that wrote it"
        )
    checksum = doc.pop("checksum", None)
    try:
        expected = digest_of(canonical(doc))
        # Compared whole, so that not even a blank can differ from what was written.
        same = canonical({**doc, "checksum": expected}) + b"\n" == bytes(data)
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{key}: not as this project spells JSON: {e}") from None
    if not same:
        raise CorruptError(
            f"{key}: was cut or altered: checksum is {str(checksum)[:80]}, expected {expected}; "
            f"take another copy"
        )
    if doc["kind"] != kind or not isinstance(doc.get("body"), dict):
        raise CorruptError(f"{key}: is a {doc['kind']!r} record, expected {kind!r}")
    return dict(doc["body"])


def commit_ref(record: CommitRecord, data: Buffer) -> CommitRef:
    """The name of a commit whose stored bytes are `data`."""
    return CommitRef(record.epoch, record.step, digest_of(data))


def _field(value: Any, hint: Any, what: str) -> Any:
    """Convert one JSON value to a field's type, strictly."""
    args = get_args(hint)
    if type(None) in args:
        return None if value is None else _field(value, args[0], what)
    if getattr(hint, "__origin__", None) is tuple:
        if not isinstance(value, list):
            raise CorruptError(f"{what}: expected a list")
        return tuple(_field(v, args[0], what) for v in value)
    if hint in (FileEntry, CommitRef):
        sub = _FIELDS[hint]
        if not isinstance(value, dict) or set(value) != set(sub):
            raise CorruptError(f"{what}: expected a {hint.__name__}")
        return hint(**{k: _field(v, sub[k], f"{what}.{k}") for k, v in value.items()})
    if getattr(hint, "__origin__", None) is dict:
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise CorruptError(f"{what}: expected an object of strings")
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value, what)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise CorruptError(f"{what}: expected {hint.__name__}, found {value!r}")
    if hint is int and value < 0:
        raise CorruptError(f"{what}: {value} is below 0")
    return value


def _float(value: int, what: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise CorruptError(f"{what}: a number too large for a time") from None
