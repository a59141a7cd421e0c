"""Restores a run's state on all ranks together: choose, check, read, or fall back together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.canonical import Canonical
from ckpt.canonical.kernels import give_kernel
from ckpt.catalog import Catalog, CommitInfo
from ckpt.coordinator import Coordinator, describe, raise_first
from ckpt.errors import (
    BadInputError,
    CorruptError,
    NotFoundError,
    RestoreError,
    SidestageError,
    StorageError,
)
from ckpt.finish import finish_newest
from ckpt.giving import Giving, GivingError, check_places
from ckpt.manifest import CommitRecord
from ckpt.pieces import Piece
from ckpt.pins import Pin
from ckpt.placing import Target
from ckpt.prefetch import Prefetch
from ckpt.restore import CheckpointReader
from ckpt.restore_plan import RestorePlan, Source, plan_restore, refuse
from ckpt.shared_memory import check_shared_memory
from ckpt.storage import Storage
from ckpt.terms import RestoreTerms, Spell, as_argument
from ckpt.tree import FlatState
from ckpt.types import Clock, CommitRef, EventSink, SystemClock


@dataclass(frozen=True)
class RestoreResult:
    """What was restored. `not_restored` names the keys that stayed as they were."""

    step: int
    commit: CommitRef
    world_size: int
    not_restored: tuple[str, ...]


class Restorer:
    """One restore, on one rank. Rank 0 chooses the checkpoint and decides when to fall back."""

    def __init__(  # noqa: PLR0913 - keyword-only, the clock has a default
        self,
        storage: Storage,
        coordinator: Coordinator,
        sink: EventSink,
        *,
        timeout_s: float,
        tag: str,
        clock: Clock | None = None,
        prefetched: Prefetch | None = None,
        spell: Spell = as_argument,
    ) -> None:
        self._spell = spell
        self._storage = storage
        self._prefetched = prefetched
        self._reading = prefetched or storage
        self._coordinator = coordinator
        self._sink = sink
        self._timeout_s = timeout_s
        self._tag = tag
        self._clock = clock or SystemClock()
        self.pins = ExitStack()
        """Holds what was restored, until the caller's attempt names it as its parent."""

    def newest_step(self) -> int | None:
        """Step of the newest checkpoint of the current lineage, damaged ones included.

        A save that all ranks of the last attempt had written is one: it is committed now.
        """
        found: int | None = self._coordinator.decide(
            f"{self._tag}/newest",
            {},
            lambda _: next((c.ref.step for c in self._candidates(None)), None),
            self._timeout_s,
        )
        return found

    def restore(
        self,
        state: Mapping[str, Any],
        flat: FlatState,
        canonical: Canonical,
        *,
        step: int | None,
        terms: RestoreTerms,
    ) -> RestoreResult | None:
        """See Checkpointer.restore."""
        refs = self._coordinator.decide(
            f"{self._tag}/candidates",
            {},
            lambda _: [asdict(c.ref) for c in self._candidates(step)],
            self._timeout_s,
        )
        for n, ref in enumerate(CommitRef(**r) for r in refs):
            try:
                return self._restore_one(ref, state, _Wanted(flat, canonical, terms, n))
            except (CorruptError, NotFoundError) as e:  # damaged, or pruned a moment ago
                if step is not None:
                    raise
                self._sink.emit(
                    "checkpoint_set_aside", step=ref.step, epoch=ref.epoch, error=str(e)
                )
        if refs:
            raise CorruptError(
                f"{self._storage.url}: none of the {len(refs)} checkpoints of this lineage verifies, and "
                f"nothing was changed; see `ckpt verify`, or start from scratch with "
                f"{self._spell('fresh', True)}"
            )
        return None

    def _restore_one(
        self, ref: CommitRef, state: Mapping[str, Any], wanted: _Wanted
    ) -> RestoreResult:
        """Restore one checkpoint on all ranks; CorruptError on every rank if it is damaged for any.

        Plan, agree, read and check, agree, and only then change.
        """
        tag = f"{self._tag}/{wanted.number}"
        opened: _Opened | None = None
        plan: RestorePlan | None = None
        try:
            self._pin(ref)
            opened = self._open(ref, wanted.terms)
            plan = plan_restore(
                wanted.flat, opened.source, wanted.terms, wanted.canonical, self._spell
            )
            check_places(state, plan.tree, plan.per_rank)
            mine = payload_of(plan)
        except Exception as e:  # the other ranks must not wait for one that gave up
            mine = describe(e)
        source = opened.source if opened else None

        def agree(payloads: list[dict[str, Any]]) -> dict[str, Any]:
            raise_first(payloads)
            assert source is not None
            return verdict(payloads, source, ref.step, wanted.terms, self._spell)

        agreed = self._coordinator.decide(f"{tag}/fits", mine, agree, self._timeout_s)
        assert opened is not None
        assert plan is not None
        self._together(f"{tag}/checked", lambda: self._check(opened.reader, plan))
        if ahead := self._prefetched:
            told = {"objects": ahead.used, "warmed_bytes": ahead.warmed_bytes, "error": ahead.error}
            self._sink.emit("prefetched", **told)
        self._together(f"{tag}/given", lambda: self._change(opened.reader, plan, state, ref.step))
        skipped = tuple(agreed["skip"])
        for note in agreed["notes"]:
            self._sink.emit("restored_with", step=ref.step, note=note)
        if skipped:
            self._sink.emit("not_restored", step=ref.step, keys=list(skipped))
        self._sink.emit("restored", step=ref.step, epoch=ref.epoch)
        return RestoreResult(ref.step, ref, opened.reader.record.world_size, skipped)

    def _together(self, tag: str, work: Callable[[], None]) -> None:
        """Do it on every rank; an error of any is everybody's, at once."""
        mine: dict[str, Any] = {}
        error: Exception | None = None
        try:
            work()
        except Exception as e:
            mine, error = describe(e), e
        try:
            self._coordinator.decide(tag, mine, raise_first, self._timeout_s)
        except SidestageError as e:
            raise e from error

    def _check(self, reader: CheckpointReader, plan: RestorePlan) -> None:
        """Read all that this rank needs, and find what is damaged, before anything is changed."""
        pieces = plan.pieces
        reader.load(_targets(p for p in pieces if p.ours))
        reader.check(_targets(p for p in pieces if not p.ours))
        check_shared_memory(reader, pieces, self._spell)
        for why, counts in plan.alike:
            if len({float(count.reshape(())) for count in counts}) > 1:
                raise BadInputError(why)

    def _change(
        self, reader: CheckpointReader, plan: RestorePlan, state: Mapping[str, Any], step: int
    ) -> None:
        """From here on the state isn't what it was. Whoever fails says so."""
        giving = Giving(plan.per_rank)
        try:
            reader.fill(_targets(p for p in plan.pieces if not p.ours))
            for merge in plan.merges:
                merge.fill()
            giving.give(state, plan.tree)
            for kernel, values in plan.kernels:
                give_kernel(kernel, values)
        except GivingError as e:
            raise RestoreError(
                f"step {step}: {e}. Its tensors and those of {len(plan.pieces)} keys were filled, and "
                f"{', '.join(giving.given) or 'no object'} had been given its state: the state is neither "
                f"what it was nor the checkpoint; mend load_state_dict of {e.path} and build the state anew"
            ) from e.error
        except Exception as e:
            raise RestoreError(
                f"step {step}: {type(e).__name__}: {e}. The state is partly filled: build it anew"
            ) from e

    def _pin(self, ref: CommitRef) -> None:
        """On rank 0: keep other attempts from pruning this commit. Without a writable store, go on."""
        self.pins.close()
        if self._coordinator.rank == 0:
            with suppress(StorageError):
                self.pins.enter_context(Pin(self._storage, ref, "restore"))

    def _open(self, ref: CommitRef, terms: RestoreTerms) -> _Opened:
        record: CommitRecord = Catalog(self._reading).read(ref)
        reader = CheckpointReader(self._reading, record)
        here = self._coordinator
        source = source_for(reader, here.rank, here.world_size, terms, self._spell)
        return _Opened(reader, source)

    def _candidates(self, step: int | None) -> list[CommitInfo]:
        """What may be restored, best first: the lineage, or the one that was asked for."""
        # The epoch that is claimed next would end this for good.
        finish_newest(self._storage, self._clock, self._sink)
        catalog = Catalog(self._reading)
        if step is not None:
            return [catalog.find(step)]
        try:
            return catalog.lineage(lambda k, why: self._sink.emit("record_lost", key=k, why=why))
        except NotFoundError:
            return []  # a root that no trainer has used yet


@dataclass(frozen=True)
class _Wanted:
    """What is to be restored into, on which terms, and how many checkpoints were tried before."""

    flat: FlatState
    canonical: Canonical
    terms: RestoreTerms
    number: int


@dataclass(frozen=True)
class _Opened:
    reader: CheckpointReader
    source: Source


def _targets(pieces: Iterable[Piece]) -> list[Target]:
    return [Target(p.stored, s.tensor, s.offsets) for p in pieces for s in p.shards]


def source_for(
    reader: CheckpointReader, rank: int, world_size: int, terms: RestoreTerms, spell: Spell
) -> Source:
    """A checkpoint as one of so many ranks sees it. BadInputError if parts of ranks belong to nobody."""
    record = reader.record
    same_world = record.world_size == world_size
    if not same_world and not terms.elastic and (keys := reader.per_rank_keys()):
        raise BadInputError(
            f"step {record.step} was saved by {record.world_size} ranks, this job has {world_size}, and "
            f"{', '.join(keys)} belong to single ranks; pass {spell('elastic', True)} to leave those as "
            f"they are"
        )
    per_rank = reader.per_rank_values(rank) if same_world else {}
    return Source(reader.tensors, reader.values(), per_rank, same_world)


def payload_of(plan: RestorePlan) -> dict[str, Any]:
    """What the other ranks must know of a plan."""
    return {
        "wrong": plan.wrong,
        "missing": plan.missing,
        "extra": plan.extra,
        "unclaimed": plan.unclaimed,
        "kept": plan.kept,
        "claimed": sorted(plan.claimed),
        "notes": plan.notes,
    }


def verdict(
    payloads: list[dict[str, Any]], source: Source, step: int, terms: RestoreTerms, spell: Spell
) -> dict[str, Any]:
    """Rank 0's judgement over all ranks: refuse, or which keys stay as they are."""

    def of_any(what: str) -> set[str]:
        return {k for p in payloads for k in p[what]}

    claimed = of_any("claimed")
    extra = [
        k
        for k, info in source.tensors.items()
        if k not in claimed
        and (info.kind != "per_rank" or source.same_world)
        and not terms.excludes(k)
        and not terms.excludes(terms.renamed(k))
    ]
    # A value that some rank's state has a place for isn't extra.
    unwanted = sorted({*set.intersection(*(set(p["extra"]) for p in payloads)), *extra})
    missing = sorted(of_any("missing"))
    wrong = sorted(of_any("wrong"))
    advice = "Nothing was changed. Build the state as it was at save"
    if not terms.partial:
        one_sided = [f"{k}: is in the state but not in the checkpoint" for k in missing]
        one_sided += [f"{k}: is in the checkpoint but not in the state" for k in unwanted]
        if one_sided:
            advice += f", or pass {spell('partial', True)} to leave keys that only one side has as they are"
        wrong += one_sided
    if wrong:
        raise refuse(wrong, step, advice)
    skip = sorted({*missing, *unwanted, *of_any("unclaimed"), *of_any("kept")})
    return {"skip": skip, "notes": sorted(of_any("notes"))}
