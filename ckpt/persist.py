"""One save, from staged to committed: write, receipt, agreement, commit.

Runs on the persist thread, on every rank. No collectives: each rank stores a receipt and
posts its name; rank 0 commits when all are in and tells the others how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ckpt import layout
from ckpt.config import CheckpointConfig
from ckpt.coordinator import Coordinator, describe, revive
from ckpt.digest import digest_of
from ckpt.errors import (
    BadInputError,
    CorruptError,
    SaveError,
    SaveSkippedError,
    SidestageError,
)
from ckpt.index import TensorKind
from ckpt.manifest import AttemptRecord, Receipt, decode, unseal
from ckpt.plan import RankPlan, StagedPlanner
from ckpt.receipts import CommitNote, Objects, Part, SaveTerms, Written, commit_parts, store_part
from ckpt.restore import OBJECTS_KIND, merge_values
from ckpt.storage import Storage
from ckpt.types import Clock, CommitRef, FileEntry
from ckpt.values import decode_value
from ckpt.writer import ChunkWriter, Placement

_GRACE_S = 10.0


@dataclass(frozen=True)
class StagedSave:
    """A snapshot in host memory, complete in itself.

    saved_at_s: wall clock at save(); deadline_s: monotonic time by which it must be committed.
    """

    step: int
    sequence: int
    plan: RankPlan
    kinds: Mapping[str, TensorKind]
    tensors: list[torch.Tensor]
    objects: Objects
    annotations: Mapping[str, str]
    saved_at_s: float
    deadline_s: float


class Persister:
    """Carries staged saves to their commit, one at a time."""

    def __init__(
        self,
        storage: Storage,
        coordinator: Coordinator,
        attempt: AttemptRecord,
        config: CheckpointConfig,
        clock: Clock,
    ) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._attempt = attempt
        self._config = config
        self._clock = clock
        self._parent = attempt.parent
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
        try:
            report = self._write(save)
        except SidestageError as e:
            report = describe(e)
        except BaseException as e:  # DCP's CheckpointException is no Exception
            report = describe(SaveError(f"{type(e).__name__}: {e}"))
        if self._coordinator.rank != 0:
            self._coordinator.post(tag, report)
            # Rank 0 may wait for receipts until the deadline itself, and says then how it ended.
            outcome = self._coordinator.hear(tag, self._left_s(save) + _GRACE_S)
        else:
            outcome = self._commit(save, tag, report)
            self._coordinator.announce(tag, outcome)
            if "commit" in outcome:
                self._tidy(save.sequence)
        if "error" in outcome:
            raise revive(outcome)
        self._parent = CommitRef(**outcome["commit"])
        return self._parent

    def _write(self, save: StagedSave) -> dict[str, Any]:
        """Store this rank's files and receipt; returns the receipt's file entry as a payload."""
        terms = self._terms(save)
        placement = Placement(terms.prefix, terms.rank, save.kinds)
        writer = ChunkWriter(self._storage, placement, self._config)
        writer.write_data(save.plan.plan, StagedPlanner(save.plan, save.tensors))
        written = Written(tuple(writer.files), writer.tensor_bytes)
        part = store_part(self._storage, terms, written, save.objects, self._config.digest)
        return asdict(part.receipt)

    def _commit(self, save: StagedSave, tag: str, report: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: wait for all receipts, commit, and say how it ended."""
        try:
            reports = self._coordinator.collect(tag, report, self._left_s(save))
            # A rank that skips tells so at once, while its thread may still write an earlier save.
            if not any(r.get("error") == SaveSkippedError.__name__ for r in reports):
                self.settled = save.sequence
            self._collected.add(save.sequence)
            for rank, r in enumerate(reports):
                if "error" in r:
                    return {"error": r["error"], "message": f"rank {rank}: {r['message']}"}
            entries = tuple(FileEntry(**r) for r in reports)
            receipts = [self._receipt(e) for e in entries]
            self._check(save, receipts)
            parts = [
                Part(entry, r.files, r.tensor_bytes)
                for entry, r in zip(entries, receipts, strict=True)
            ]
            note = CommitNote(self._parent, save.saved_at_s, save.annotations, self._clock)
            ref = commit_parts(self._storage, self._attempt, self._terms(save), parts, note)
        except SidestageError as e:
            return describe(e)
        except BaseException as e:
            return describe(SaveError(f"rank 0: {type(e).__name__}: {e}"))
        return {"commit": asdict(ref)}

    def _tidy(self, sequence: int) -> None:
        """Rank 0: drop what was said of earlier saves, so that the job's store doesn't grow.

        Who sent a receipt for this save has heard how all before it ended, and posts nothing more.
        """
        for n in range(self._tidied, sequence):
            for tag in (save_tag(n), plan_tag(n)):
                self._coordinator.forget(tag, posts=n not in self._collected)
        self._collected = {n for n in self._collected if n >= sequence}
        self._tidied = sequence

    def _terms(self, save: StagedSave) -> SaveTerms:
        return SaveTerms(
            epoch=self._attempt.epoch,
            step=save.step,
            save_id=f"{save.sequence:06d}",
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            plan_id=save.plan.plan_id,
        )

    def _receipt(self, entry: FileEntry) -> Receipt:
        data = self._storage.read(entry.key)
        if self._digest(data) != entry.digest:
            raise CorruptError(
                f"{entry.key}: not what its rank wrote; is another job using this root?"
            )
        return decode(Receipt, data, entry.key)

    def _check(self, save: StagedSave, receipts: list[Receipt]) -> None:
        """All ranks wrote the same save of the same state."""
        for rank, r in enumerate(receipts):
            if (r.rank, r.step, r.plan_id) != (rank, save.step, save.plan.plan_id):
                raise BadInputError(
                    f"rank {rank} saved step {r.step} with plan {r.plan_id[-8:]}, rank 0 step {save.step} "
                    f"with plan {save.plan.plan_id[-8:]}; call save() in step, with the same state"
                )
        if len({r.values_digest for r in receipts}) > 1:
            self._merge_all(receipts)

    def _merge_all(self, receipts: list[Receipt]) -> None:
        """Ranks may have different keys, but no two values for one key: name the one that has."""
        merged: Any = None
        for r in receipts:
            key = layout.rank_objects_key(self._prefix_of(r), r.rank)
            tree = decode_value(unseal(OBJECTS_KIND, self._storage.read(key), key)["values"], key)
            merged = tree if r.rank == 0 else merge_values(merged, tree, "")

    def _prefix_of(self, r: Receipt) -> str:
        return layout.data_prefix(r.epoch, r.step, r.save_id)

    def _digest(self, data: bytes) -> str:
        return digest_of(data, self._config.digest)

    def _left_s(self, save: StagedSave) -> float:
        return save.deadline_s - self._clock.monotonic()


def save_tag(sequence: int) -> str:
    """Key of one save in the job's store. Every rank counts its save() calls alike."""
    return f"save/{sequence}"


def plan_tag(sequence: int) -> str:
    """Key of the plan that is made for a save, if one is."""
    return f"plan/{sequence}"
