"""Restores a run's state on all ranks together: choose, check, read, or fall back together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckpt.asking import ask
from ckpt.catalog import Catalog, CommitInfo
from ckpt.coordinator import Coordinator, describe, raise_first
from ckpt.errors import (
    BadInputError,
    CorruptError,
    NotFoundError,
    StorageError,
)
from ckpt.finish import finish_newest
from ckpt.manifest import CommitRecord
from ckpt.pins import Pin
from ckpt.prefetch import Prefetch
from ckpt.restore import CheckpointReader
from ckpt.storage import Storage
from ckpt.target import (
    Mismatch,
    Source,
    absorbing_prefixes,
    allocate,
    check,
    extra_keys,
    loaded_tree,
    refuse,
)
from ckpt.terms import Spell, as_argument
from ckpt.tree import FlatState, assign
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
        *,
        step: int | None,
        elastic: bool,
        partial: bool,
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
                terms = _Terms(f"{self._tag}/{n}", elastic, partial)
                return self._restore_one(ref, state, flat, terms)
            except (CorruptError, NotFoundError) as e:  # damaged, or pruned a moment ago
                if step is not None:
                    raise
                self._sink.emit(
                    "checkpoint_set_aside", step=ref.step, epoch=ref.epoch, error=str(e)
                )
        if refs:
            raise CorruptError(
                f"{self._storage.url}: none of the {len(refs)} checkpoints of this lineage verifies; "
                f"see `ckpt verify`, or start from scratch with {self._spell('fresh', True)}"
            )
        return None

    def _restore_one(
        self, ref: CommitRef, state: Mapping[str, Any], flat: FlatState, terms: _Terms
    ) -> RestoreResult:
        """Restore one checkpoint on all ranks; CorruptError on every rank if it is damaged for any."""
        opened: _Opened | None = None
        try:
            self._pin(ref)
            opened = self._open(ref, elastic=terms.elastic)
            absorbing = absorbing_prefixes(state)
            ask(state, opened.source.values, opened.source.per_rank)
            mine: dict[str, Any] = {
                **asdict(check(flat, opened.source, absorbing)),
                "held": list(flat.leaves),
                "absorbing": absorbing,
            }
        except Exception as e:  # the other ranks must not wait for one that gave up
            mine = describe(e)
        source = opened.source if opened else None

        def agree(payloads: list[dict[str, Any]]) -> dict[str, Any]:
            raise_first(payloads)
            assert source is not None
            return _verdict(
                payloads,
                source,
                ref.step,
                partial=terms.partial,
                advised=self._spell("partial", True),
            )

        verdict = self._coordinator.decide(f"{terms.tag}/fits", mine, agree, self._timeout_s)
        assert opened is not None
        try:
            tree, per_rank = self._read(opened, flat, set(verdict["make"]), set(verdict["skip"]))
            done: dict[str, Any] = {}
        except Exception as e:
            done = describe(e)
        self._coordinator.decide(f"{terms.tag}/read", done, raise_first, self._timeout_s)
        if ahead := self._prefetched:
            told = {"objects": ahead.used, "warmed_bytes": ahead.warmed_bytes, "error": ahead.error}
            self._sink.emit("prefetched", **told)
        assign(state, tree, per_rank)
        if verdict["skip"]:
            self._sink.emit("not_restored", step=ref.step, keys=verdict["skip"])
        self._sink.emit("restored", step=ref.step, epoch=ref.epoch)
        return RestoreResult(ref.step, ref, opened.reader.record.world_size, tuple(verdict["skip"]))

    def _pin(self, ref: CommitRef) -> None:
        """On rank 0: keep other attempts from pruning this commit. Without a writable store, go on."""
        self.pins.close()
        if self._coordinator.rank == 0:
            with suppress(StorageError):
                self.pins.enter_context(Pin(self._storage, ref, "restore"))

    def _open(self, ref: CommitRef, *, elastic: bool) -> _Opened:
        record: CommitRecord = Catalog(self._reading).read(ref)
        rank, world = self._coordinator.rank, self._coordinator.world_size
        same_world = record.world_size == world
        reader = CheckpointReader(self._reading, record)
        per_rank = reader.per_rank_values(rank) if same_world else {}
        source = Source(reader.tensors, reader.values(), per_rank, same_world)
        if not same_world and not elastic and (keys := reader.per_rank_keys()):
            raise BadInputError(
                f"step {ref.step} was saved by {record.world_size} ranks, this job has {world}, and "
                f"{', '.join(keys)} belong to single ranks; pass "
                f"{self._spell('elastic', True)} to leave those as they are"
            )
        return _Opened(reader, source)

    def _read(
        self, opened: _Opened, flat: FlatState, make: set[str], skip: set[str]
    ) -> tuple[Any, dict[str, Any]]:
        """Fill this rank's tensors; returns its value trees with live tensors in them."""
        reader, source = opened.reader, opened.source
        live: dict[str, Any] = {}
        for fqn, leaf in flat.leaves.items():
            live[fqn] = leaf.source
            if fqn in source.tensors and fqn not in skip and not self._foreign(leaf.kind, source):
                for shard in leaf.shards:
                    reader.read_into(fqn, shard.tensor, shard.offsets)
        for fqn in make:
            if source.tensors[fqn].kind == "per_rank" and not self._mine(fqn):
                continue
            live[fqn] = allocate(source.tensors[fqn])
            reader.read_into(fqn, live[fqn], (0,) * len(source.tensors[fqn].shape))
        tree = loaded_tree(flat.values, source.values, live.get)
        per_rank = {
            path: loaded_tree(flat.per_rank.get(path), stored, live.get)
            for path, stored in source.per_rank.items()
        }
        return tree, per_rank

    def _mine(self, fqn: str) -> bool:
        return fqn.endswith(f"@{self._coordinator.rank}")

    @staticmethod
    def _foreign(kind: str, source: Source) -> bool:
        return kind == "per_rank" and not source.same_world

    def _candidates(self, step: int | None) -> list[CommitInfo]:
        """What may be restored, best first: the lineage, or the one that was asked for."""
        # The epoch that is claimed next would end this for good.
        finish_newest(self._storage, self._clock, self._sink)
        catalog = Catalog(self._reading)
        if step is not None:
            return [catalog.find(step)]
        try:
            return catalog.lineage()
        except NotFoundError:
            return []  # a root that no trainer has used yet


@dataclass(frozen=True)
class _Terms:
    """What a restore accepts, and its key in the job's store."""

    tag: str
    elastic: bool
    partial: bool


@dataclass(frozen=True)
class _Opened:
    reader: CheckpointReader
    source: Source


def _verdict(
    payloads: list[dict[str, Any]], source: Source, step: int, *, partial: bool, advised: str
) -> dict[str, Any]:
    """Rank 0's judgement over all ranks: refuse, or which keys to make anew and which to skip."""
    found = [Mismatch(p["wrong"], p["missing"], p["unclaimed"], p["extra"]) for p in payloads]
    held = {k for p in payloads for k in p["held"]}
    absorbing = tuple(a for p in payloads for a in p["absorbing"])
    extra = extra_keys(source, held)
    make = [k for k in extra if k.startswith(absorbing) and source.tensors[k].kind != "sharded"]
    # A value that some rank's state has a place for isn't extra.
    values = set.intersection(*(set(m.extra) for m in found))
    unwanted = sorted({*values, *(k for k in extra if k not in set(make))})
    wrong = sorted({w for m in found for w in m.wrong})
    missing = sorted({k for m in found for k in m.missing})
    if not partial:
        wrong += [f"{k}: is in the state but not in the checkpoint" for k in missing]
        wrong += [f"{k}: is in the checkpoint but not in the state" for k in unwanted]
    if wrong:
        raise refuse(
            wrong,
            step,
            f"Nothing was changed. Build the state as it was at save, or pass {advised} to leave "
            f"keys that only one side has as they are",
        )
    skip = sorted({*missing, *unwanted, *(k for m in found for k in m.unclaimed)})
    return {"make": make, "skip": skip}
