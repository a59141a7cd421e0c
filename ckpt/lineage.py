"""The order of a run's commits, from keys and records alone.

The lineage of an epoch, newest first: its own commits by falling step; then, if its attempt
continued commit P of an older epoch, P and that epoch's commits below P's step; and so on.
The run's lineage is that of the newest epoch that has one. All other commits are abandoned:
a run that was taken back to an older step passes the same steps again, and a zombie of an
older epoch may still be writing.

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
    """One attempt as found. `record` is None where it can't be read; `problem` says why.

    Its lineage then goes on where its first commit says; without a commit it has none.
    """

    epoch: int
    record: AttemptRecord | None
    problem: str | None = None


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

    @cached_property
    def epochs(self) -> set[int]:
        """Of all attempts."""
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

    def lineage(self, *, strict: bool) -> list[Place]:
        """That of the newest epoch that has one; empty if no attempt has."""
        for epoch in sorted(self.epochs, reverse=True):
            if places := list(self._lineage(epoch, strict=strict)):
                return places
        return []

    def newest(self) -> Place | None:
        """The first place of the lineage, without reading the rest of it."""
        for epoch in sorted(self.epochs, reverse=True):
            if place := next(self._lineage(epoch, strict=False), None):
                return place
        return None

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
        if self._run_id not in (None, record.run_id) and not self._is_origin(record, ref):
            return f"{key}: belongs to run {record.run_id}, this is run {self._run_id}"
        attempt = self.attempt(place.epoch).record
        if attempt is not None and attempt.token != record.attempt_token:
            return f"{key}: isn't by the attempt in {layout.attempt_key(place.epoch)}"
        if place.digest not in (None, ref.digest):
            return (
                f"{key}: isn't the commit that the next attempt continued: digest is {ref.digest}, "
                f"expected {place.digest}"
            )
        return None

    def _is_origin(self, record: CommitRecord, ref: CommitRef) -> bool:
        """A branch begins with a commit of the run that it came from."""
        origin = self.origin
        return origin is not None and (origin.commit, origin.source_run_id) == (ref, record.run_id)

    def _lineage(self, epoch: int, *, strict: bool) -> Iterator[Place]:
        limit: CommitRef | None = None
        while True:
            for step in sorted(self.steps.get(epoch, ()), reverse=True):
                if limit is None or step < limit.step:
                    yield Place(epoch, step, None)
                elif step == limit.step:
                    yield Place(epoch, step, limit.digest)
            limit = self._parent(epoch, strict=strict)
            if limit is None:
                return
            epoch = limit.epoch  # always smaller, so that this ends

    def _parent(self, epoch: int, *, strict: bool) -> CommitRef | None:
        """The commit that an attempt continued."""
        record = self.attempt(epoch, strict=strict).record
        if record is not None:
            return record.parent
        # Its first commit says it too, so that one damaged record doesn't cut off a lineage.
        if epoch in self.steps:
            first = self.commit(Place(epoch, min(self.steps[epoch]), None), "ancestor")
            if first and first.record and first.record.parent:
                parent = first.record.parent
                return parent if parent.epoch < epoch else None
        return None

    def _attempt_problem(self, epoch: int, record: AttemptRecord) -> str | None:
        key = layout.attempt_key(epoch)
        if record.epoch != epoch:
            return f"{key}: is the record of epoch {record.epoch}"
        if self._run_id not in (None, record.run_id):
            return f"{key}: belongs to run {record.run_id}, this is run {self._run_id}"
        if record.parent is not None and record.parent.epoch >= epoch:
            return f"{key}: continues epoch {record.parent.epoch}, which isn't older"
        return None
