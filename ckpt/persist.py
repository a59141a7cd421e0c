"""One save, from staged to committed: write, receipt, agreement, commit.

Runs on the persist thread, on every rank. No collectives: each rank stores a receipt and
posts its name; rank 0 commits when all are in and tells the others how it ended. A rank that
hears nothing looks into storage, and finishes what it finds complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.commit import check_not_superseded, committed
from ckpt.config import CheckpointConfig
from ckpt.coordinator import Coordinator, describe, revive
from ckpt.errors import (
    BadInputError,
    ConflictError,
    SaveError,
    SaveSkippedError,
    SidestageError,
    StorageError,
)
from ckpt.finish import check_agreement, finish
from ckpt.index import TensorKind
from ckpt.manifest import AttemptRecord
from ckpt.plan import RankPlan
from ckpt.pump import Pump
from ckpt.receipts import (
    Part,
    SaveTerms,
    Taken,
    Written,
    commit_parts,
    seal_object_texts,
    store_part,
)
from ckpt.replicas import Replicas
from ckpt.snapshot import Snapshot, SnapshotPlanner
from ckpt.storage import Storage
from ckpt.storage.limits import limited
from ckpt.types import Clock, CommitRef, EventSink, FileEntry
from ckpt.writer import ChunkWriter, Placement
from ckpt.written import read_receipts, written_save

FATAL = "fatal"
"""In the payload of an error: later saves will end like this one, for it isn't the store's fault."""
_GRACE_S = 10.0
_LOOKS = 5  # into storage, once rank 0 is silent, and the seconds between them
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True)
class StagedSave:
    """A snapshot and all that its commit needs.

    values, per_rank: canonical JSON of the values that all ranks share, and of this rank's own.
    replicas: what this rank has of some tensors that all have.
    saved_at_s: wall clock at save(); deadline_s: monotonic time by which it must be committed;
    taken: for its receipt, how it was taken.
    """

    step: int
    sequence: int
    plan: RankPlan
    kinds: Mapping[str, TensorKind]
    snapshot: Snapshot
    values: bytes
    per_rank: Mapping[str, bytes]
    replicas: Replicas
    annotations: Mapping[str, str]
    saved_at_s: float
    deadline_s: float
    taken: Taken = field(default_factory=Taken)


class Persister:
    """Carries staged saves to their commit, one at a time.

    Args:
        storage, coordinator, attempt, config, clock: of this rank and this attempt.
        pump: makes what writes a snapshot, when its writing begins.
        sink: told of each save that this rank has written. Must not raise.
    """

    def __init__(  # noqa: PLR0913 - the injected parts are keyword-only and have defaults
        self,
        storage: Storage,
        coordinator: Coordinator,
        attempt: AttemptRecord,
        config: CheckpointConfig,
        clock: Clock,
        *,
        pump: Callable[[Snapshot], Pump],
        sink: EventSink | None = None,
    ) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._attempt = attempt
        self._config = config
        self._clock = clock
        self._pump = pump
        self._sink = sink
        self._parent = attempt.parent
        self.fatal: SidestageError | None = None
        """Why no later save can be committed, once that is known: see `Checkpointer.fatal`."""
        # On rank 0: the last save that has ended on every rank. What an earlier or this one left
        # unlisted is garbage.
        self.settled = 0
        self._tidied = 1
        self._collected: set[int] = set()

    def persist(self, save: StagedSave) -> CommitRef:
        """Write this rank's part and see the save to its commit on all ranks.

        Raises the error that ended it, the same on every rank.
        """
        tag = save_tag(save.sequence)
        with limited(self._left_s(save)):
            return self._persist(save, tag)

    def _persist(self, save: StagedSave, tag: str) -> CommitRef:
        try:
            report = self._write(save)
        except SidestageError as e:
            report = self._described(e)
        except BaseException as e:  # DCP's CheckpointException is no Exception
            report = describe(SaveError(f"{type(e).__name__}: {e}"))
        if self._coordinator.rank != 0:
            outcome = self._hear(save, tag, report)
        else:
            outcome, ended = self._commit(save, tag, report)
            with suppress(StorageError):  # without the job's store the others look into storage,
                self._coordinator.announce(tag, outcome)
                if ended:  # and may commit what must not be swept meanwhile
                    self.settled = save.sequence
            if "commit" in outcome:
                self._tidy(save.sequence)
        if "error" in outcome:
            error = revive(outcome)
            if outcome.get(FATAL):
                self.fatal = error
            raise error
        self._parent = CommitRef(**outcome["commit"])
        return self._parent

    def _write(self, save: StagedSave) -> dict[str, Any]:
        """Store this rank's files and receipt; returns the receipt's file entry as a payload."""
        started = self._clock.monotonic()
        terms = self._terms(save)
        placement = Placement(terms.prefix, terms.rank, save.kinds)
        try:
            pump = self._pump(save.snapshot)
            writer = ChunkWriter(self._storage, placement, self._config, pump)
            writer.write_data(save.plan.plan, SnapshotPlanner(save.snapshot))
        finally:
            save.snapshot.close()
        written = Written(tuple(writer.files), writer.tensor_bytes, save.taken)
        objects = seal_object_texts(save.values, save.per_rank, save.replicas.digests())
        part = store_part(self._storage, terms, written, objects, self._config.digest)
        if self._sink is not None:
            self._sink.emit(
                "save_persisted",
                step=save.step,
                bytes=sum(f.size_bytes for f in part.receipt.files),
                persist_s=self._clock.monotonic() - started,
                lag_s=max(0.0, self._clock.time() - save.saved_at_s),
            )
        return asdict(part.entry)

    def _hear(self, save: StagedSave, tag: str, report: dict[str, Any]) -> dict[str, Any]:
        """Other ranks: post the receipt, and learn how the save ended."""
        try:
            self._coordinator.post(tag, report)
            # Rank 0 may wait for receipts until the deadline itself, and says then how it ended.
            return self._coordinator.hear(tag, self._left_s(save) + _GRACE_S)
        except StorageError as silence:
            return report if "error" in report else self._looked(save, silence)

    def _looked(self, save: StagedSave, silence: StorageError) -> dict[str, Any]:
        """See `_look`, which begins at the deadline or after it."""
        with limited(max(0.0, self._left_s(save)) + _GRACE_S):
            return self._look(save, silence)

    def _look(self, save: StagedSave, silence: StorageError) -> dict[str, Any]:
        """With no word from the others: how the save ended by what lies on storage.

        It ends here if all receipts are there and nobody else commits. That is tried in the order of
        ranks, so that a thousand of them don't read all receipts at once.
        """
        attempt, save_id, prefix = self._attempt, _save_id(save), self._terms(save).prefix
        turn = min(max(self._coordinator.rank - 1, 0), _LOOKS - 1)
        try:
            for n in range(_LOOKS):
                if n:
                    time.sleep(_LOOK_EVERY_S)
                ref = committed(self._storage, attempt.epoch, save.step, attempt.token, save_id)
                if ref is None:
                    written = written_save(self._storage, prefix, attempt.world_size)
                    if written is not None and n >= turn:
                        ref = finish(self._storage, attempt, written, self._clock)
                    elif written is None and self._left_s(save) <= 0:
                        break
                if ref is not None:
                    return {"commit": asdict(ref)}
        except BadInputError as e:
            return {**describe(e), FATAL: True}  # what rank 0 would have refused
        except SidestageError as e:
            return self._described(e)
        except BaseException as e:
            return describe(SaveError(f"{type(e).__name__}: {e}"))
        return describe(silence)

    def _commit(
        self, save: StagedSave, tag: str, report: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Rank 0: wait for all receipts and commit; how it ended, and whether on every rank."""
        try:
            reports = self._coordinator.collect(tag, report, self._left_s(save))
        except StorageError as silence:
            return report if "error" in report else self._looked(save, silence), False
        self._collected.add(save.sequence)
        # A rank that skips tells so at once, while its thread may still write an earlier save.
        ended = not any(r.get("error") == SaveSkippedError.__name__ for r in reports)
        return self._agree(reports), ended

    def _agree(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Rank 0: commit what all ranks have reported."""
        try:
            for rank, r in enumerate(reports):
                if "error" in r:
                    return {**r, "message": f"rank {rank}: {r['message']}"}
            entries = [FileEntry(**r) for r in reports]
            receipts = read_receipts(self._storage, entries)
            try:
                check_agreement(self._storage, receipts)
            except BadInputError as e:
                return {**describe(e), FATAL: True}
            parts = [Part(e, r) for e, r in zip(entries, receipts, strict=True)]
            ref = commit_parts(self._storage, self._attempt, parts, self._clock)
        except SidestageError as e:
            return self._described(e)
        except BaseException as e:
            return describe(SaveError(f"rank 0: {type(e).__name__}: {e}"))
        return {"commit": asdict(ref)}

    def look(self) -> None:
        """Rank 0, while nothing is saved: does another attempt own the root by now?"""
        with limited(_GRACE_S), suppress(SidestageError):  # else the next save will tell
            if self._config.when_superseded == "end":
                try:
                    check_not_superseded(self._storage, self._attempt)
                except ConflictError as e:
                    self.fatal = e

    def _described(self, error: SidestageError) -> dict[str, Any]:
        """An error of a save as a payload: fatal where another attempt owns the root."""
        told = describe(error)
        if isinstance(error, ConflictError) and self._config.when_superseded == "end":
            try:
                check_not_superseded(self._storage, self._attempt)
            except ConflictError:
                told[FATAL] = True
            except SidestageError:  # it will be found out at the next one
                return told
        return told

    def _tidy(self, sequence: int) -> None:
        """Rank 0: drop what was said of earlier saves, so that the job's store doesn't grow.

        Who sent a receipt for this save has heard how all before it ended, and posts nothing more.
        """
        for n in range(self._tidied, sequence):
            plan = plan_tag(n)
            for tag in (save_tag(n), plan, f"{plan}/digests", f"{plan}/values"):
                self._coordinator.forget(tag, posts=n not in self._collected)
        self._collected = {n for n in self._collected if n >= sequence}
        self._tidied = sequence

    def _terms(self, save: StagedSave) -> SaveTerms:
        return SaveTerms(
            epoch=self._attempt.epoch,
            attempt_token=self._attempt.token,
            step=save.step,
            save_id=_save_id(save),
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            plan_id=save.plan.plan_id,
            parent=self._parent,
            saved_at_s=save.saved_at_s,
            annotations=save.annotations,
        )

    def _left_s(self, save: StagedSave) -> float:
        return save.deadline_s - self._clock.monotonic()


def _save_id(save: StagedSave) -> str:
    return f"{save.sequence:06d}"


def save_tag(sequence: int) -> str:
    """Key of one save in the job's store. Every rank counts its save() calls alike."""
    return f"save/{sequence}"


def plan_tag(sequence: int) -> str:
    """Key of the plan that is made for a save, if one is."""
    return f"plan/{sequence}"
