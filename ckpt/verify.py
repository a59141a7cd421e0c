"""Checks a committed checkpoint against the sizes and digests in its commit. No torch.

"quick" looks at the size of every file and reads the small ones (receipts, indexes, values),
so that its cost hardly depends on the size of the tables. "full" reads every byte once, checks
files and chunks in the same pass, and that what belongs together is there: ckpt.belonging.

xxh3-128 digests find accidents; only sha256 digests find tampering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from ckpt.belonging import incomplete_state, missing_tensors
from ckpt.digest import Hasher, check_digest, new_hasher
from ckpt.errors import BadInputError, CorruptError, NotFoundError, UnsupportedFormatError
from ckpt.index import ChunkEntry, TensorEntry, TensorInfo, decode_index
from ckpt.layout import DATA_SUFFIX, INDEX_SUFFIX, OBJECTS_SUFFIX
from ckpt.manifest import OBJECTS_KIND, CommitRecord, Receipt, decode, unseal
from ckpt.parallel import each
from ckpt.storage import Readable
from ckpt.types import FileEntry
from ckpt.united import UnitedValues
from ckpt.values import decode_value

Level = Literal["quick", "full"]

_PIECE_BYTES = 8 << 20
_WORKERS = 8  # small reads in flight: an object store takes tens of milliseconds for each
_MOST_PER_FILE = 10  # problems told of one file: a wiped disk need not print a million lines


@dataclass(frozen=True)
class VerifyReport:
    """What is wrong with a commit, each problem in one line; what was checked, and bytes read."""

    problems: list[str]
    files: int
    bytes: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_commit(
    storage: Readable,
    record: CommitRecord,
    *,
    level: Level,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check a commit's files. Damage is reported; only a store that fails raises (StorageError).

    `progress` is called, on this thread, with the bytes of the commit's files just read; those
    of a sound commit add up to `record.stored_bytes` if the level is full.
    """
    check = _Check(storage, progress or (lambda _: None))
    present = check.sizes((*record.receipts, *record.files))
    _check_receipts(check, record, dict(check.small([f for f in record.receipts if f in present])))
    big = (DATA_SUFFIX,) if level == "quick" else (DATA_SUFFIX, INDEX_SUFFIX)
    small = [f for f in record.files if f in present and not f.key.endswith(big)]
    parts = _Parts()
    for entry, content in check.small(small):
        check.progress(entry.size_bytes)
        if level == "full" and entry.key.endswith(OBJECTS_SUFFIX):
            _read_objects(check, entry.key, content, parts)
    if level == "full":
        _check_data(check, record, present, parts)
        if not check.problems:  # of what is damaged a part may be missing
            _check_belonging(check, parts)
    return VerifyReport(check.problems, len(record.receipts) + len(record.files), check.bytes)


class _Parts:
    """What the files of a checkpoint say: tensors by key, and the value trees of all ranks."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.shared = UnitedValues()
        self.own: list[Any] = []

    def add(self, tensors: list[TensorEntry]) -> None:
        for t in tensors:
            known = self.tensors.get(t.fqn)
            boxes = (*(known.boxes if known else ()), *((s.offsets, s.sizes) for s in t.shards))
            self.tensors[t.fqn] = TensorInfo(t.fqn, t.kind, t.dtype, t.shape, boxes)


class _Check:
    """One verification: reads from the store, and collects what is wrong."""

    def __init__(self, storage: Readable, progress: Callable[[int], None]) -> None:
        self._storage = storage
        self.progress = progress
        self.problems: list[str] = []
        self.bytes = 0

    def sizes(self, entries: tuple[FileEntry, ...]) -> set[FileEntry]:
        """Those files that exist with their size. One listing a folder, not one call a file."""
        folders = sorted({f.key[: f.key.rfind("/") + 1] for f in entries})
        stored: dict[str, int] = {}
        for prefix in folders:
            # A key that no store accepts is as good as missing.
            with suppress(BadInputError):
                stored |= {o.key: o.size_bytes for o in self._storage.list(prefix)}
        present = set()
        for f in entries:
            if f.key not in stored:
                self.problems.append(f"{f.key}: missing; the commit says {f.size_bytes} bytes")
            elif stored[f.key] != f.size_bytes:
                self.problems.append(
                    f"{f.key}: has {stored[f.key]} bytes, the commit says {f.size_bytes}"
                )
            else:
                present.add(f)
        return present

    def small(self, entries: list[FileEntry]) -> Iterator[tuple[FileEntry, bytes]]:
        """The files that match their digest, with their contents. Reads several at once."""
        read = each(self._read_small, entries, _WORKERS)
        for entry, found in zip(entries, read, strict=True):
            if isinstance(found, str):
                self.problems.append(found)
            else:
                self.bytes += len(found)
                yield entry, found

    def data(self, entry: FileEntry, chunks: list[_Chunk]) -> None:
        """Read a data file once, in pieces, against its own digest and those of its chunks."""
        buffer = memoryview(bytearray(min(_PIECE_BYTES, entry.size_bytes)))
        try:
            whole = new_hasher(entry.digest.partition(":")[0])
            waiting = iter(chunks)
            chunk = next(waiting, None)
            damaged = []
            for start in range(0, entry.size_bytes, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, entry.size_bytes - start)]
                self._storage.read_into(entry.key, start, piece)
                self.bytes += len(piece)
                self.progress(len(piece))
                whole.update(piece)
                while chunk is not None and chunk.feed(start, piece):
                    if not chunk.matches():
                        damaged.append(chunk.what)
                    chunk = next(waiting, None)
        except (CorruptError, NotFoundError, UnsupportedFormatError) as e:
            self.problems.append(_line(entry.key, e))
            return
        if f"{entry.digest.partition(':')[0]}:{whole.hexdigest()}" != entry.digest:
            self.problems.append(f"{entry.key}: doesn't match its digest {entry.digest}")
        self.several(entry.key, [f"{what}: doesn't match its digest" for what in damaged])

    def several(self, key: str, problems: list[str]) -> None:
        """Report the problems inside one file, the first few of them in full."""
        self.problems += [f"{key}: {p}" for p in problems[:_MOST_PER_FILE]]
        if len(problems) > _MOST_PER_FILE:
            self.problems.append(f"{key}: and {len(problems) - _MOST_PER_FILE} more like these")

    def _read_small(self, entry: FileEntry) -> bytes | str:
        """A file's content, or what is wrong with it."""
        try:
            data = self._storage.read(entry.key, 0, entry.size_bytes)
            check_digest(data, entry.digest, entry.key)
        except (CorruptError, NotFoundError, UnsupportedFormatError) as e:
            return _line(entry.key, e)
        return data


class _Chunk:
    """A chunk of a data file whose bytes go by, a piece at a time."""

    def __init__(self, what: str, entry: ChunkEntry, hasher: Hasher) -> None:
        self.what = what
        self.start = entry.offset
        self.end = entry.offset + entry.stored_bytes
        self._expected = entry.digest
        self._hasher = hasher

    def feed(self, start: int, piece: memoryview) -> bool:
        """Take what `piece`, bytes of the file from `start` on, holds of it; was that the last?"""
        self._hasher.update(piece[max(0, self.start - start) : max(0, self.end - start)])
        return self.end <= start + len(piece)

    def matches(self) -> bool:
        return self._hasher.digest().ljust(len(self._expected), b"\0") == self._expected


def _check_receipts(check: _Check, record: CommitRecord, receipts: dict[FileEntry, bytes]) -> None:
    """The ranks' own words agree with the commit: same save, all ranks, the same files."""
    told: set[FileEntry] = set()
    for entry, data in receipts.items():
        try:
            receipt = decode(Receipt, data, entry.key)
        except (CorruptError, UnsupportedFormatError) as e:
            check.problems.append(_line(entry.key, e))
            continue
        theirs = (receipt.epoch, receipt.step, receipt.save_id, receipt.world_size)
        ours = (record.epoch, record.step, record.save_id, record.world_size)
        if theirs != ours:
            check.problems.append(
                f"{entry.key}: is of (epoch, step, save, ranks) {theirs}, the commit of {ours}"
            )
        told.update(receipt.files)
    if len(record.receipts) != record.world_size:
        check.problems.append(
            f"the commit lists {len(record.receipts)} receipts for {record.world_size} ranks"
        )
    elif len(receipts) == len(record.receipts) and told != set(record.files):
        differing = sorted({f.key for f in told ^ set(record.files)})
        check.several("commit", [f"{key}: not the same file in its receipt" for key in differing])


def _read_objects(check: _Check, key: str, content: bytes, parts: _Parts) -> None:
    try:
        body = unseal(OBJECTS_KIND, content, key)
        parts.shared.add(len(parts.own), decode_value(body.get("values"), key))
        parts.own.append([decode_value(v, key) for v in (body.get("per_rank") or {}).values()])
    except (BadInputError, CorruptError) as e:
        check.problems.append(_line(key, e))


def _check_belonging(check: _Check, parts: _Parts) -> None:
    """Values name tensors that are there, and optimizers have all that belongs to their parameters."""
    values, tensors = parts.shared.tree, parts.tensors
    found = [*missing_tensors(values, tensors), *incomplete_state(values, tensors)]
    found += [p for tree in parts.own for p in missing_tensors(dict(enumerate(tree)), tensors)]
    check.several("values", [str(p) for p in found])


def _check_data(
    check: _Check, record: CommitRecord, present: set[FileEntry], parts: _Parts
) -> None:
    """Each data file, with the chunks that the index beside it says it holds."""
    files = {f.key: f for f in record.files}
    for key, entry in files.items():
        partner_key = _other(key, DATA_SUFFIX, INDEX_SUFFIX) or _other(
            key, INDEX_SUFFIX, DATA_SUFFIX
        )
        if partner_key and partner_key not in files:
            check.problems.append(f"{key}: the commit lists no {partner_key} beside it")
        if not key.endswith(DATA_SUFFIX):
            continue
        chunks: list[_Chunk] = []
        # An index that is missing or damaged gets reported, and the data is read all the same.
        partner = files.get(partner_key or "")
        indexes = [partner] if partner and partner in present else []
        for index, content in check.small(indexes):
            check.progress(index.size_bytes)
            chunks = _read_index(check, index.key, content, entry.size_bytes, parts)
        if entry in present:
            check.data(entry, chunks)


def _read_index(
    check: _Check, key: str, content: bytes, data_bytes: int, parts: _Parts
) -> list[_Chunk]:
    """The chunks of a data file in the order of their bytes; none if the index is wrong."""
    try:
        tensors, digest = decode_index(content, key)
        parts.add(tensors)
        chunks = sorted(_chunks(tensors, digest), key=lambda c: (c.start, c.end))
    except (CorruptError, UnsupportedFormatError) as e:
        check.problems.append(_line(key, e))
        return []
    misplaced, end = [], 0
    for chunk in chunks:
        if chunk.start < end or chunk.end > data_bytes:
            misplaced.append(
                f"{chunk.what}: bytes [{chunk.start}, {chunk.end}) overlap another chunk or pass "
                f"the end of the data file at {data_bytes}"
            )
        end = max(end, chunk.end)
    check.several(key, misplaced)
    return [] if misplaced else chunks


def _other(key: str, suffix: str, other: str) -> str | None:
    return key.removesuffix(suffix) + other if key.endswith(suffix) else None


def _chunks(tensors: list[TensorEntry], digest: str) -> Iterator[_Chunk]:
    for tensor in tensors:
        for shard in tensor.shards:
            for c in shard.chunks:
                what = f"{tensor.fqn} rows {c.row}+{c.rows} at {c.offset}"
                yield _Chunk(what, c, new_hasher(digest))


def _line(key: str, e: Exception) -> str:
    """A problem in one line that begins with the key it is about."""
    text = str(e)
    return text if text.startswith(key) else f"{key}: {text}"
