"""Starts a run from another root's checkpoint, without copying it. No torch.

See docs/design/0004-branches.md. The new root gets the source's commit record as it is, an
attempt record that fits it, and ORIGIN.json, which says where its data lies; a permanent pin in
the source keeps retention there from deleting it. `ckpt.storage.BranchedStorage` reads on in the
source, so that nothing else has to know that a root is a branch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.digest import check_digest, new_hasher
from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.manifest import (
    AttemptRecord,
    CommitRecord,
    OriginRecord,
    RunRecord,
    decode,
    encode,
)
from ckpt.pins import add_pin, pinned, remove_pin
from ckpt.schema import decode_description
from ckpt.storage import Storage, check_place, exists, open_storage, owned
from ckpt.types import Clock, CommitRef, FileEntry, SystemClock
from ckpt.verify import verify_commit

TOOL = "sidestage"
_PIECE_BYTES = 16 << 20
_DESCRIPTION = "serving_description"  # the annotation that names what a publisher needs


@dataclass(frozen=True)
class Branch:
    """A branch that was made. `why_copied` says why it had to be, where nobody asked for it."""

    origin: OriginRecord
    copied_bytes: int
    why_copied: str | None


def create_branch(  # noqa: PLR0913 - the injected parts are keyword-only and have defaults
    source: Storage,
    ref: CommitRef,
    target: Storage,
    *,
    copy: bool = False,
    clock: Clock | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Branch:
    """Make `target` a run that begins with the commit `ref` of `source`.

    Where the source can't be pinned, or with `copy`, the data is copied, each file checked
    against its digest; `progress` gets the bytes. Calling it again completes what was
    interrupted, and with `copy` makes a branch independent of its source later.

    Raises NotFoundError if the commit is gone, CorruptError if it is damaged, ConflictError if
    the target is in use for anything else.
    """
    target = owned(target)
    record = Catalog(source).read(ref)
    report = verify_commit(source, record, level="quick")
    if not report.ok:
        raise CorruptError(f"step {ref.step} can't be branched from: {report.problems[0]}")
    strange = [
        f.key for f in (*record.receipts, *record.files) if not f.key.startswith(layout.DATA)
    ]
    if strange:
        raise CorruptError(f"step {ref.step} can't be branched from: it lists {strange[0]} as data")
    making = _Making(source, record, ref, target, clock or SystemClock(), progress)
    origin = making.claimed()
    why_copied = None
    if origin is None:
        pin_id = None
        if not copy:
            try:
                pin_id = making.pin(f"branch-{secrets.token_hex(8)}")
            except StorageError as e:
                copy, why_copied = True, f"the source can't be pinned: {e}"
        origin = making.claim(pin_id)
    elif origin.pin_id is not None:
        with suppress(ConflictError):  # it is still there
            making.pin(origin.pin_id)
    copied = 0
    if copy or origin.pin_id is None:
        copied = making.copy()
        origin = making.set_free(origin)
    making.complete()
    return Branch(origin, copied, why_copied)


def move_source(source: Storage, target: Storage, *, clock: Clock | None = None) -> OriginRecord:
    """Say where the root that `target` branched from lies now. Nothing is copied.

    Raises BadInputError if `target` is no branch or has a copy of its own, NotFoundError if `source`
    hasn't the commit that it began with, CorruptError if that is damaged there, StorageError if it
    can't be pinned there.
    """
    own = owned(target)
    try:
        origin = decode(OriginRecord, own.read(layout.ORIGIN), layout.ORIGIN)
    except NotFoundError:
        raise BadInputError(
            f"{own.url}: is no branch, it has no {layout.ORIGIN}; name the branch whose parent has moved"
        ) from None
    if origin.pin_id is None:
        raise BadInputError(
            f"{own.url}: reads nothing from {origin.source_url}, it has a copy of its own; nothing to do"
        )
    ref = origin.commit
    try:
        record = Catalog(source).read(ref)
    except (NotFoundError, CorruptError) as e:
        raise NotFoundError(
            f"{source.url}: isn't the parent of {own.url}: it hasn't the commit of epoch {ref.epoch}, step "
            f"{ref.step} that this began with ({e}); name the folder that was {origin.source_url}"
        ) from e
    report = verify_commit(source, record, level="quick")
    if not report.ok:
        raise CorruptError(f"step {ref.step} of {source.url} is damaged: {report.problems[0]}")
    moved = replace(origin, source_url=source.url)
    making = _Making(source, record, ref, own, clock or SystemClock(), lambda _: None)
    if not exists(source, layout.pin_key(origin.pin_id)):  # it has moved along, as a rule
        making.pin(origin.pin_id)
    own.put(layout.ORIGIN, encode(moved))
    return moved


@dataclass(frozen=True)
class _Making:
    """The steps of making one branch. Each may be repeated after a crash."""

    source: Storage
    record: CommitRecord
    ref: CommitRef
    target: Storage
    clock: Clock
    progress: Callable[[int], None]

    def claimed(self) -> OriginRecord | None:
        """The target's ORIGIN.json if it is this very branch; None if the target is empty."""
        try:
            origin = decode(OriginRecord, self.target.read(layout.ORIGIN), layout.ORIGIN)
        except NotFoundError:
            check_place(self.target)
            first = next(iter(self.target.list()), None)
            if first is not None:
                raise ConflictError(
                    f"{self.target.url}: isn't empty, it holds {first.key}; name a new root"
                ) from None
            return None
        if (origin.commit, origin.source_url) != (self.ref, self.source.url):
            raise ConflictError(
                f"{self.target.url}: is a branch of {origin.source_url}@{origin.commit.step} already; "
                f"name a new root"
            )
        epochs = [layout.parse_attempt_key(o.key) for o in self.target.list(layout.ATTEMPTS)]
        used = any(e is not None and e > self.ref.epoch for e in epochs)
        if used and not exists(self.target, layout.commit_key(self.ref.epoch, self.ref.step)):
            raise ConflictError(
                f"{self.target.url}: is in use and has deleted step {self.ref.step} of its origin; "
                f"name a new root"
            )
        return origin

    def pin(self, pin_id: str) -> str:
        """Keep the commit in the source, which must be a root that can be found again."""
        open_storage(self.source.url, must_exist=True)
        add_pin(self.source, self.ref, f"branch {self.target.url}", pin_id=pin_id, clock=self.clock)
        return pin_id

    def claim(self, pin_id: str | None) -> OriginRecord:
        origin = OriginRecord(
            source_url=self.source.url,
            source_run_id=self.record.run_id,
            commit=self.ref,
            prefixes=tuple(self._prefixes()),
            pin_id=pin_id,
            created_at_s=self.clock.time(),
        )
        try:
            self.target.create(layout.ORIGIN, encode(origin))
        except SidestageError:
            if pin_id is not None:
                with suppress(SidestageError):
                    remove_pin(self.source, pin_id)
            raise
        return origin

    def copy(self) -> int:
        """Copy what the commit lists, and what a publisher needs with it; the bytes copied."""
        listed = (*self.record.receipts, *self.record.files)
        with pinned(self.source, self.ref, f"copy to {self.target.url}", refused=lambda _: None):
            copied = sum(self._copy_file(f) for f in listed)
            data = {f.key for f in listed}
            for prefix in self._prefixes():
                others = [o for o in self.source.list(prefix) if o.key not in data]
                for o in others:
                    with suppress(ConflictError):
                        self.target.create(o.key, self.source.read(o.key))
                        copied += o.size_bytes
        return copied

    def set_free(self, origin: OriginRecord) -> OriginRecord:
        """Say that nothing is read from the source any more, then let go of it."""
        if origin.pin_id is None:
            return origin
        free = replace(origin, pin_id=None)
        self.target.put(layout.ORIGIN, encode(free))
        with suppress(NotFoundError):
            remove_pin(self.source, origin.pin_id)
        return free

    def complete(self) -> None:
        """Write the records of a run whose only commit so far is the source's."""
        key = layout.commit_key(self.ref.epoch, self.ref.step)
        if exists(self.target, key):
            return
        run = RunRecord(secrets.token_hex(8), self.clock.time(), TOOL)
        with suppress(ConflictError):
            self.target.create(layout.RUN, encode(run))
        run = decode(RunRecord, self.target.read(layout.RUN), layout.RUN)
        attempt = AttemptRecord(
            epoch=self.ref.epoch,
            run_id=run.run_id,
            token=self.record.attempt_token,
            world_size=self.record.world_size,
            started_at_s=self.clock.time(),
            parent=None,
        )
        with suppress(ConflictError):
            self.target.create(layout.attempt_key(self.ref.epoch), encode(attempt))
        data = encode(self.record)
        check_digest(data, self.ref.digest, key)
        self.target.create(key, data)

    def _copy_file(self, entry: FileEntry) -> int:
        if exists(self.target, entry.key):
            return 0  # objects appear whole
        hasher = new_hasher(entry.digest.partition(":")[0])
        buffer = memoryview(bytearray(min(_PIECE_BYTES, entry.size_bytes)))
        with self.target.writer(entry.key) as out:
            for start in range(0, entry.size_bytes, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, entry.size_bytes - start)]
                self.source.read_into(entry.key, start, piece)
                hasher.update(piece)
                out.write(piece)
                self.progress(len(piece))
            if not entry.digest.endswith(f":{hasher.hexdigest()}"):
                raise CorruptError(
                    f"{entry.key}: doesn't match its digest {entry.digest}; branch from another step"
                )
        return entry.size_bytes

    def _prefixes(self) -> Iterator[str]:
        """What the keys of the commit's objects begin with, its serving description included."""
        listed = (*self.record.receipts, *self.record.files)
        yield from sorted({f.key[: f.key.rfind("/") + 1] for f in listed})
        described = self.record.annotations.get(_DESCRIPTION)
        if described is None:
            return
        prefix = layout.description_prefix(described)
        try:
            key = f"{prefix}description.json"
            description = decode_description(self.source.read(key), key)
        except (BadInputError, CorruptError, NotFoundError):
            return  # a publisher will say what is wrong with it; a trainer exports a new one
        yield prefix
        if description.program_key.startswith(layout.CODE):
            yield description.program_key
