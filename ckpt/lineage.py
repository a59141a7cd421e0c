"""The order of a run's commits, from keys and records alone.

The lineage of an epoch, newest first: its own commits by falling step; then, if its attempt
continued commit P of an older epoch, P and that epoch's commits below P's step; and so on.
The run's lineage is that of the newest epoch that has one. All other commits are abandoned:
a run that was taken back to an older step passes the same steps again, and a zombie of an
older epoch may still be writing.

What an attempt continued stands in its record and in each of its commits: where the record is
lost or damaged, they are asked. Only where both are gone isn't it known.

Modification times mean nothing: they don't survive a copy, and an object store's clock is
not the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ckpt import layout
from ckpt.digest import digest_of
from ckpt.errors import CorruptError, NotFoundError, UnsupportedFormatError
from ckpt.manifest import AttemptRecord, CommitRecord, OriginRecord, decode
from ckpt.storage import Readable
from ckpt.types import CommitRef, ObjectInfo

CommitStatus = Literal["latest", "ancestor", "abandoned", "corrupt"]


@dataclass(frozen=True)
class CommitInfo:
    """One commit as found. `record` is None where it can't be read; `problem` says why.

    An ancestor or abandoned commit has had its record checked, not its files.
    """

    record: CommitRecord | None
    ref: CommitRef
    status: CommitStatus
    problem: str | None = None


@dataclass(frozen=True)
class AttemptInfo:
    """The record of one attempt as found. It is None where it can't be read; `problem` says why."""

    epoch: int
    record: AttemptRecord | None
    problem: str | None = None


@dataclass(frozen=True)
class Life:
    """What an attempt's commits carry, and the commit that it continued (None: from scratch)."""

    token: str
    parent: CommitRef | None


@dataclass(frozen=True)
class Place:
    """Where a commit of the lineage is, and the digest it must have if an attempt names one."""

    epoch: int
    step: int
    digest: str | None


class Tree:
    """Attempts and commits as listed at one moment; their records are read as needed."""

    def __init__(self, storage: Readable, run_id: str | None) -> None:
        self._storage = storage
        self._run_id = run_id
        self._attempts: dict[int, AttemptInfo] = {}
        self._told: dict[int, Life | None] = {}

    @cached_property
    def epochs(self) -> set[int]:
        """Of all attempts whose records are there. Those that only commits show are in `steps`."""
        found = (layout.parse_attempt_key(o.key) for o in self._storage.list(layout.ATTEMPTS))
        return {epoch for epoch in found if epoch is not None}

    @cached_property
    def stored(self) -> dict[tuple[int, int], ObjectInfo]:
        """The objects of all commits, by (epoch, step)."""
        found = ((layout.parse_commit_key(o.key), o) for o in self._storage.list(layout.COMMITS))
        return {place: o for place, o in found if place is not None}

    @cached_property
    def steps(self) -> dict[int, set[int]]:
        """Of all commits, by epoch."""
        found: dict[int, set[int]] = {}
        for epoch, step in self.stored:
            found.setdefault(epoch, set()).add(step)
        return found

    @cached_property
    def origin(self) -> OriginRecord | None:
        """What this run branched from, if it did. A damaged record is as good as none."""
        try:
            return decode(OriginRecord, self._storage.read(layout.ORIGIN), layout.ORIGIN)
        except (CorruptError, NotFoundError, UnsupportedFormatError):
            return None

    @property
    def newest_epoch(self) -> int:
        """The newest that anything shows; 0 for none."""
        return max({*self.epochs, *self.steps}, default=0)

    def lineage(self, *, strict: bool) -> list[Place]:
        """That of the newest epoch that has one; empty if none has, see `lost`."""
        for epoch in self._begun():
            if places := list(self._lineage(epoch, strict=strict)):
                return places
            if self._continued(epoch):
                break
        return []

    def newest(self) -> Place | None:
        """The first place of the lineage, without reading the rest of it."""
        for epoch in self._begun():
            if place := next(self._lineage(epoch, strict=False), None):
                return place
            if self._continued(epoch):
                break
        return None

    def lost(self) -> str | None:
        """Why there is no lineage although there are commits, in one line; None where that isn't so."""
        if not self.stored or self.newest() is not None:
            return None
        epoch, parent = self._gone()[0]
        return (
            f"{layout.attempt_key(epoch)} continues {layout.commit_key(parent.epoch, parent.step)}, which "
            f"is gone with all before it; the commits that are left were abandoned before that"
        )

    def losses(self, lineage: list[Place]) -> Iterator[tuple[str, str]]:
        """The keys of records that the run's lineage lacks, each with what that means for it."""
        if not lineage:
            return
        top = lineage[0]
        taken = f"epoch {top.epoch}, step {top.step} is taken"
        for epoch, parent in self._gone():
            if epoch > top.epoch:
                key = layout.commit_key(parent.epoch, parent.step)
                yield key, f"{layout.attempt_key(epoch)} continues it, and it is gone; {taken}"
        epochs = {p.epoch for p in lineage}
        parents = (self._continued(e) for e in epochs)
        epochs |= {p.epoch for p in parents if p is not None}
        epochs |= {e for e in self.epochs if e > top.epoch}
        for epoch in sorted(epochs, reverse=True):
            if (problem := self.attempt(epoch).problem) is None:
                continue
            if self.life(epoch) is not None:
                what = "its commits say what it continued"
            elif epoch > top.epoch:
                what = f"what it continued isn't known; {taken}"
            else:
                what = "what it continued isn't known, so nothing older is used"
            yield layout.attempt_key(epoch), f"{problem}; {what}"

    def _gone(self) -> list[tuple[int, CommitRef]]:
        """Epochs above the lineage's first commit that continue one which isn't there, newest first."""
        top = self.newest()
        found = []
        for epoch in self._begun():
            if top is not None and epoch <= top.epoch:
                break
            parent = self._continued(epoch)
            if parent is not None and (parent.epoch, parent.step) not in self.stored:
                found.append((epoch, parent))
        return found

    def doubt(self, epoch: int) -> str | None:
        """Why it can't be told that a commit of an epoch, in no lineage, was abandoned; else None."""
        return next((why for e, why in self._unclear.items() if e >= epoch), None)

    @cached_property
    def _unclear(self) -> dict[int, str]:
        """The epochs of which nothing says what they continued, and why, by rising epoch."""
        lives = {epoch: self.life(epoch) for epoch in self._begun()}
        named = {life.parent.epoch for life in lives.values() if life and life.parent}
        return {
            epoch: self.attempt(epoch).problem or ""
            for epoch in sorted(named | set(lives))
            if self.life(epoch) is None
        }

    def attempt(self, epoch: int, *, strict: bool = False) -> AttemptInfo:
        if epoch not in self._attempts:
            key = layout.attempt_key(epoch)
            try:
                record = decode(AttemptRecord, self._storage.read(key), key)
                problem = self._attempt_problem(epoch, record)
            except (CorruptError, NotFoundError, UnsupportedFormatError) as e:
                if strict and isinstance(e, UnsupportedFormatError):
                    raise
                record, problem = None, str(e)
            info = AttemptInfo(epoch, record if problem is None else None, problem)
            self._attempts[epoch] = info
        return self._attempts[epoch]

    def life(self, epoch: int, *, strict: bool = False) -> Life | None:
        """What is known of an attempt, from its record or else from its newest sound commit."""
        record = self.attempt(epoch, strict=strict).record
        if record is not None:
            return Life(record.token, record.parent)
        if epoch not in self._told:
            steps = sorted(self.steps.get(epoch, ()), reverse=True)
            told = (self._life_in(Place(epoch, step, None)) for step in steps)
            self._told[epoch] = next((life for life in told if life is not None), None)
        return self._told[epoch]

    def commit(
        self, place: Place, status: CommitStatus, *, strict: bool = False
    ) -> CommitInfo | None:
        """A commit with that status, or corrupt; None if it has been deleted since."""
        key = layout.commit_key(place.epoch, place.step)
        try:
            data = self._storage.read(key)
        except NotFoundError:
            return None
        ref = CommitRef(place.epoch, place.step, digest_of(data))
        try:
            record = decode(CommitRecord, data, key)
        except (CorruptError, UnsupportedFormatError) as e:
            if strict and isinstance(e, UnsupportedFormatError):
                raise
            return CommitInfo(None, ref, "corrupt", str(e))
        problem = self.problem(place, record, ref)
        if problem is not None:
            return CommitInfo(None, ref, "corrupt", problem)
        return CommitInfo(record, ref, status)

    def problem(self, place: Place, record: CommitRecord, ref: CommitRef) -> str | None:
        """Why a sound record isn't the commit of its place."""
        key = layout.commit_key(place.epoch, place.step)
        if (record.epoch, record.step) != (place.epoch, place.step):
            return f"{key}: is the record of epoch {record.epoch}, step {record.step}"
        if self._run_id not in (None, record.run_id) and not self._inherited(record, ref):
            return f"{key}: belongs to run {record.run_id}, this is run {self._run_id}"
        life = self.life(place.epoch)
        if life is not None and life.token != record.attempt_token:
            known = self.attempt(place.epoch).record is not None
            by = layout.attempt_key(place.epoch) if known else "the newest commit of its epoch"
            return f"{key}: isn't by the attempt in {by}"
        if place.digest not in (None, ref.digest):
            return (
                f"{key}: isn't the commit that the next attempt continued: digest is {ref.digest}, "
                f"expected {place.digest}"
            )
        return None

    def _inherited(self, record: CommitRecord, ref: CommitRef) -> bool:
        """A branch begins with a commit of the run that it came from."""
        return self._is_origin(record, ref) or ref in self._continued_refs

    def _is_origin(self, record: CommitRecord, ref: CommitRef) -> bool:
        origin = self.origin
        return origin is not None and (origin.commit, origin.source_run_id) == (ref, record.run_id)

    @cached_property
    def _continued_refs(self) -> set[CommitRef]:
        """The commits that attempts of this run name: one of another run is a branch's first."""
        lives = [self.life(epoch) for epoch in self._begun()]
        return {life.parent for life in lives if life is not None and life.parent is not None}

    def _begun(self) -> list[int]:
        """The epochs that anything shows, newest first."""
        return sorted({*self.epochs, *self.steps}, reverse=True)

    def _lineage(self, epoch: int, *, strict: bool) -> Iterator[Place]:
        limit: CommitRef | None = None
        while True:
            for step in sorted(self.steps.get(epoch, ()), reverse=True):
                if limit is None or step < limit.step:
                    yield Place(epoch, step, None)
                elif step == limit.step:
                    yield Place(epoch, step, limit.digest)
            limit = self._continued(epoch, strict=strict)
            if limit is None:
                return
            epoch = limit.epoch  # always smaller, so that this ends

    def _continued(self, epoch: int, *, strict: bool = False) -> CommitRef | None:
        """The commit that an attempt continued, as far as it's known."""
        life = self.life(epoch, strict=strict)
        return life.parent if life is not None else None

    def _life_in(self, place: Place) -> Life | None:
        """What a commit says of its attempt; None where it isn't sound, or isn't this run's."""
        key = layout.commit_key(place.epoch, place.step)
        try:
            data = self._storage.read(key)
            record = decode(CommitRecord, data, key)
        except (CorruptError, NotFoundError, UnsupportedFormatError):
            return None
        if (record.epoch, record.step) != (place.epoch, place.step):
            return None
        if self._is_origin(record, CommitRef(place.epoch, place.step, digest_of(data))):
            return Life(record.attempt_token, None)  # what it continued lies in the other root
        older = record.continues is None or record.continues.epoch < place.epoch
        if not older or self._run_id not in (None, record.run_id):
            return None
        return Life(record.attempt_token, record.continues)

    def _attempt_problem(self, epoch: int, record: AttemptRecord) -> str | None:
        key = layout.attempt_key(epoch)
        if record.epoch != epoch:
            return f"{key}: is the record of epoch {record.epoch}"
        if self._run_id not in (None, record.run_id):
            return f"{key}: belongs to run {record.run_id}, this is run {self._run_id}"
        if record.parent is not None and record.parent.epoch >= epoch:
            return f"{key}: continues epoch {record.parent.epoch}, which isn't older"
        return None
