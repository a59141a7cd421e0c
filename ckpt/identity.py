"""Whose root is this? The id of its run, from RUN.json or, where that is lost, from what the run wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt import layout
from ckpt.digest import digest_of
from ckpt.errors import ConflictError, CorruptError, NotFoundError, UnsupportedFormatError
from ckpt.manifest import (
    AttemptRecord,
    CommitRecord,
    OriginRecord,
    RunRecord,
    decode,
)
from ckpt.parallel import each
from ckpt.storage import Readable
from ckpt.types import CommitRef

TOOL = "sidestage"
_WORKERS = 8  # small reads in flight: an object store takes tens of milliseconds for each


@dataclass(frozen=True)
class Identity:
    """The run of a root. `lost` says what is wrong with RUN.json and who has told the id instead.

    damaged: RUN.json is there, and must be written over.
    """

    record: RunRecord
    lost: str | None = None
    damaged: bool = False


def identify(storage: Readable) -> Identity | None:
    """The run that a root belongs to; None where no run has begun.

    Where RUN.json is lost or damaged, it's the run of all commits, or of all attempts where there
    is no commit; a branch's first commit is its source's and doesn't count.

    Raises ConflictError if they are of several runs, CorruptError if there is something and nothing
    says whose, UnsupportedFormatError for a RUN.json of another version.
    """
    try:
        return Identity(decode(RunRecord, storage.read(layout.RUN), layout.RUN))
    except NotFoundError:
        problem = None
    except CorruptError as e:
        problem = str(e)
    commits = [o.key for o in storage.list(layout.COMMITS) if layout.parse_commit_key(o.key)]
    attempts = [o.key for o in storage.list(layout.ATTEMPTS) if layout.parse_attempt_key(o.key)]
    (told, unread), who = _of_commits(storage, commits), "commits"
    if not told:
        told, who = _of_attempts(storage, attempts), "attempts"
    if problem is None and not told and not unread and not attempts:
        return None  # at most what a branch begins with
    what = "is missing" if problem is None else f"is damaged ({problem})"
    if len(told) > 1:
        runs = "; ".join(f"run {run}: {len(keys)}, as {keys[0]}" for run, (keys, _) in told.items())
        raise ConflictError(
            f"{storage.url}: its {layout.RUN} {what}, and its {who} are of {len(told)} runs ({runs}); put "
            f"{layout.RUN} back from a copy, or move the files of all runs but one away"
        )
    if not told:
        left = (
            f"put it back from a copy, or use another root: {unread} of its commits can't be read"
            if unread
            else "put it back from a copy, or remove it if a new run is to begin here"
        )
        raise CorruptError(
            f"{storage.url}: its {layout.RUN} {what}, and nothing else says which run this is; {left}"
        )
    ((run_id, (keys, since_s)),) = told.items()
    lost = f"{layout.RUN} {what}; the run's id {run_id} is taken from its {len(keys)} {who}"
    return Identity(RunRecord(run_id, since_s, TOOL), lost, damaged=problem is not None)


_Told = dict[str, tuple[list[str], float]]
"""By run id the keys of its records, and the earliest time in them."""


def _of_commits(storage: Readable, keys: list[str]) -> tuple[_Told, int]:
    """What the run's own commits say, and how many commits can't be read."""
    found = list(_commits(storage, keys))
    origin = _origin(storage)
    # Where ORIGIN.json is lost, the branch's own commits name what they began with.
    begun = {(r.continues, r.run_id) for _, r, _ in found if r.continues is not None}
    told: _Told = {}
    for key, r, ref in found:
        if origin is not None and (origin.commit, origin.source_run_id) == (ref, r.run_id):
            continue
        if any(named == ref and run_id != r.run_id for named, run_id in begun):
            continue
        _add(told, r.run_id, key, r.saved_at_s)
    return told, len(keys) - len(found)


def _of_attempts(storage: Readable, keys: list[str]) -> _Told:
    told: _Told = {}
    for key, data in zip(keys, each(lambda k: _read(storage, k), keys, _WORKERS), strict=True):
        try:
            record = decode(AttemptRecord, data, key)
        except (CorruptError, UnsupportedFormatError):
            continue
        _add(told, record.run_id, key, record.started_at_s)
    return told


def _add(told: _Told, run_id: str, key: str, at_s: float) -> None:
    keys, since_s = told.get(run_id, ([], at_s))
    told[run_id] = [*keys, key], min(since_s, at_s)


def _commits(storage: Readable, keys: list[str]) -> Iterator[tuple[str, CommitRecord, CommitRef]]:
    for key, data in zip(keys, each(lambda k: _read(storage, k), keys, _WORKERS), strict=True):
        try:
            record = decode(CommitRecord, data, key)
        except (CorruptError, UnsupportedFormatError):
            continue
        yield key, record, CommitRef(record.epoch, record.step, digest_of(data))


def _read(storage: Readable, key: str) -> bytes:
    try:
        return storage.read(key)
    except NotFoundError:  # deleted a moment ago
        return b""


def _origin(storage: Readable) -> OriginRecord | None:
    try:
        return decode(OriginRecord, storage.read(layout.ORIGIN), layout.ORIGIN)
    except (CorruptError, NotFoundError, UnsupportedFormatError):
        return None
