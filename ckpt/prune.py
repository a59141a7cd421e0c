"""Deletes what retention doesn't keep, and the data that no commit lists. No torch.

A commit goes in this order: its record, then, if nobody has pinned it meanwhile, its data. A
crash in between leaves data that no commit lists, which the next prune sweeps.

Such data is judged by epoch and number, never by age. In the newest epoch, a save is over once a
later one of the same attempt is committed, or once every rank has reported; nothing else of that
epoch is touched. Everything unlisted of older epochs is garbage: their attempts can't commit any
more. A backend's own temporary files are the backend's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.config import RetentionPolicy
from ckpt.digest import digest_of
from ckpt.errors import ConflictError, NotFoundError, SidestageError
from ckpt.parallel import each
from ckpt.pins import PinBoard
from ckpt.retention import Candidate, Verdict, choose, without_metric
from ckpt.storage import BranchedStorage, LocalStorage, Storage, owned
from ckpt.survey import (
    KeepsParts,
    SavedData,
    Surveyor,
    unfinished_uploads,
    unlisted,
)
from ckpt.types import Clock, CommitRef

_WORKERS = 8  # deletes in flight: an object store takes tens of milliseconds for each


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do.

    epoch: the newest one, in whose name it is done.
    strays: data that no commit lists; unsettled: the same, where its save may still go on.
    places: of all commits found. no_metric: the metric of `keep_best` if no commit has it and all
        stay for that, with the annotations that they do have.
    """

    epoch: int
    keep: list[Verdict]
    delete: list[Verdict]
    strays: list[SavedData]
    unsettled: list[SavedData]
    expired_pins: list[str]
    places: frozenset[tuple[int, int]]
    no_metric: dict[str, Any] | None = None


@dataclass
class PruneResult:
    """What a prune did. no_metric: as in PrunePlan.

    problems: what it couldn't do, a line each. vanished: a commit was gone before it was its
    turn. The next prune sees to both.
    """

    deleted: list[CommitRef] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    vanished: bool = False
    no_metric: dict[str, Any] | None = None


class Pruner:
    """Prunes one root, again and again: what a prune couldn't do, the next one does.

    Args:
        storage: the run's root.
        policy: what to keep.
        epoch: the attempt that prunes; it stops once there is a newer one. None: whichever is
            the newest, for a command.
    """

    def __init__(
        self, storage: Storage, policy: RetentionPolicy, clock: Clock, *, epoch: int | None = None
    ) -> None:
        self._storage = storage
        self._own = owned(storage)
        self._policy = policy
        self._epoch = epoch
        self._board = PinBoard(storage, clock)
        self._survey = Surveyor(storage, policy.keep_last or 1)
        self._owed: dict[str, bytes] = {}  # records that must be put back and couldn't be yet
        self._scope: str | None = layout.DATA  # where unlisted data may be; None: nowhere
        self._uncommitted = 0
        self._released = False

    def after_save(self, settled: int, *, committed: bool, uncommitted: int) -> PruneResult:
        """What rank 0 does after each save. Runs on the persist thread.

        After one that wasn't committed only unlisted data goes. What couldn't be deleted is in
        the result; raises as `plan` does.

        Args:
            settled: number of the attempt's last save that has ended on every rank.
            committed: whether this save was.
            uncommitted: how many of the attempt's saves so far were not.
        """
        if uncommitted > self._uncommitted and self._scope is None and self._epoch is not None:
            self._scope = layout.epoch_data_prefix(self._epoch)
        self._uncommitted = uncommitted
        judge = committed and not self._policy.keeps_all
        if not judge and self._scope is None and not self._owed:
            return PruneResult()
        return self.apply(self.plan(settled, judge=judge))

    def watch_pins(self, wait: Callable[[], None]) -> None:
        """Look at the pins now and after `wait`, to find out which ones nobody holds any more."""
        self._board.look()
        wait()

    def plan(self, settled: int = 0, *, judge: bool = True) -> PrunePlan:
        """Find out what to delete; changes nothing. `judge`: commits too, not only unlisted data.

        Raises what reading the root raises, and CorruptError or UnsupportedFormatError where it
        isn't certain what may go.
        """
        # Pins before attempts: a restore unpins its commit once its attempt names it as parent.
        # Data before commits: what is listed only a moment later must not look unlisted.
        pins = self._board.holders()
        expired = self._board.expired()
        data = list(self._survey.saves(self._scope)) if self._scope else []
        tree = Catalog(self._storage).tree()
        newest = tree.newest_epoch
        places = frozenset(tree.stored)
        if self._epoch not in (None, newest):
            return PrunePlan(newest, [], [], [], [], [], places)
        # One save for each commit: then no record has to be read to know that all are listed.
        found = [(d.epoch, d.step) for d in data]
        in_doubt = len(set(found) & places) < len(found)
        commits = self._survey.candidates(tree) if judge or in_doubt else []
        keep, delete = choose(commits, pins, self._policy if judge else RetentionPolicy())
        strays, unsettled = unlisted(data if in_doubt else [], commits, newest, settled)
        strays = [s for s in strays if (s.epoch, s.step) not in pins]
        no_metric: dict[str, Any] | None = None
        if judge and (metric := without_metric(commits, self._policy)) is not None:
            have = sorted({name for c in commits for name in c.annotations})
            no_metric = {"metric": metric, "checkpoints": len(commits), "annotations": have}
        return PrunePlan(newest, keep, delete, strays, unsettled, expired, places, no_metric)

    def apply(self, plan: PrunePlan) -> PruneResult:
        """Carry a plan out. What the store refuses is a problem in the result, never an error."""
        result = PruneResult(no_metric=plan.no_metric)
        self._pay_owed(result)
        for pin_id in plan.expired_pins:
            self._delete(layout.pin_key(pin_id), result)
        records = [(v.commit, self._remove_record(v.commit, result)) for v in plan.delete]
        removed = [(commit, data) for commit, data in records if data is not None]
        if removed or plan.strays:
            self._sweep(self._doomed(plan, removed, result), result)
        self._release_origin(plan, result)
        if result.problems or result.vanished:
            self._scope = layout.DATA
        elif plan.unsettled:
            self._scope = layout.epoch_data_prefix(plan.epoch)
        else:
            self._scope = None
        return result

    def _doomed(
        self, plan: PrunePlan, removed: list[tuple[Candidate, bytes]], result: PruneResult
    ) -> list[str]:
        """The prefixes whose data may go, now that the records are gone.

        Records that somebody has pinned meanwhile are put back; so are all of them if this
        attempt is no longer the newest, since the new one may continue any of them.
        """
        pins: dict[tuple[int, int], list[str]] = {}
        try:
            pins = self._board.holders()
            stop = Catalog(self._storage).tree().newest_epoch != plan.epoch
        except SidestageError as e:
            result.problems.append(str(e))
            stop = True
        kept = {p for v in plan.keep for p in v.commit.prefixes}
        doomed: set[str] = set()
        for commit, data in removed:
            if stop or commit.place in pins:
                self._put_back(layout.commit_key(*commit.place), data, result)
                kept |= commit.prefixes
            else:
                result.deleted.append(commit.ref)
                doomed |= commit.prefixes
        if not stop:
            doomed |= {s.prefix for s in plan.strays if (s.epoch, s.step) not in pins}
        return sorted(doomed - kept)

    def _remove_record(self, commit: Candidate, result: PruneResult) -> bytes | None:
        """Delete a commit record; its bytes, or None if it is still there or was gone before."""
        key = layout.commit_key(*commit.place)
        try:
            data = self._own.read(key)
        except NotFoundError:
            # Another pruner's doing, perhaps in this moment: its data is left to a later sweep.
            result.vanished = True
            return None
        except SidestageError as e:
            result.problems.append(str(e))
            return None
        if digest_of(data) != commit.ref.digest:
            result.problems.append(f"{key}: holds another commit than a moment ago; left alone")
            return None
        return data if self._delete(key, result) else None

    def _delete(self, key: str, result: PruneResult) -> bool:
        """Delete an object; was it done?"""
        try:
            self._own.delete(key)
        except SidestageError as e:
            try:
                self._own.stat(key)
            except NotFoundError:
                return True  # only the reply was lost
            except SidestageError:
                pass
            result.problems.append(str(e))
            return False
        return True

    def _put_back(self, key: str, data: bytes, result: PruneResult) -> None:
        try:
            self._own.create(key, data)
        except ConflictError:
            pass
        except SidestageError as e:
            self._owed[key] = data
            result.problems.append(f"{e} (the record must be put back)")
            return
        self._owed.pop(key, None)

    def _pay_owed(self, result: PruneResult) -> None:
        for key, data in list(self._owed.items()):
            self._put_back(key, data, result)

    def _sweep(self, prefixes: list[str], result: PruneResult) -> None:
        """Delete all objects below these prefixes, several at a time."""
        for prefix in prefixes:
            try:
                for upload in unfinished_uploads(self._own, prefix):
                    cast(KeepsParts, self._own).abort(upload)
                keys = [o.key for o in self._own.list(prefix)]
            except SidestageError as e:
                result.problems.append(str(e))
                continue
            if all(list(each(lambda k: self._delete(k, result), keys, _WORKERS))):
                result.swept.append(prefix)
                if isinstance(self._own, LocalStorage):
                    self._own.drop_folder(prefix)

    def _release_origin(self, plan: PrunePlan, result: PruneResult) -> None:
        """Remove this branch's pin from its source once the commit it came from is gone here."""
        origin = self._storage.origin if isinstance(self._storage, BranchedStorage) else None
        if not isinstance(self._storage, BranchedStorage) or origin is None or self._released:
            return
        left = plan.places - {(r.epoch, r.step) for r in result.deleted}
        grown = any(v.commit.status == "latest" for v in plan.keep)  # else it's being made
        if grown and origin.pin_id and (origin.commit.epoch, origin.commit.step) not in left:
            try:
                self._storage.source.delete(layout.pin_key(origin.pin_id))
                self._released = True
            except SidestageError as e:
                result.problems.append(str(e))
