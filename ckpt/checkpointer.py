"""What a trainer calls: save without waiting for storage, restore, close.

state = {"model": model, "optimizer": optimizer, "progress": {"step": 0}}
with Checkpointer("/data/run") as checkpointer:
    checkpointer.restore(state)
    for step, batch in ...:
        ...
        checkpointer.save(step, state)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ckpt import commit
from ckpt.canonical import Canonical
from ckpt.canonical.alike import comparable
from ckpt.canonical.kernels import Kernels
from ckpt.config import CheckpointConfig
from ckpt.coordinator import Store, describe, join, raise_first
from ckpt.description import of_rank, united
from ckpt.digest import digest_of
from ckpt.engine import Engine, Job
from ckpt.errors import (
    BadInputError,
    ConflictError,
    DeadlineError,
    SaveError,
    SaveSkippedError,
    SidestageError,
    StorageError,
)
from ckpt.events import GuardedSink, LogSink
from ckpt.live import Layout, LiveState, live_state
from ckpt.manifest import AttemptRecord
from ckpt.manifest import canonical as encoded
from ckpt.outcomes import Outcomes, SaveHandle, SaveStats, uncommitted, was_skipped
from ckpt.pace import Pace
from ckpt.persist import FATAL, Persister, StagedSave, plan_tag, save_tag
from ckpt.plan import RankPlan, make_plan, schema_key
from ckpt.prefetch import Prefetch
from ckpt.prune import Pruner
from ckpt.pump import Pump
from ckpt.receipts import Objects, Taken, seal_objects
from ckpt.replicas import ReplicaCheck, Replicas
from ckpt.restorer import Restorer, RestoreResult
from ckpt.snapshot import Snapshot
from ckpt.stager import Stager
from ckpt.staging import Arena
from ckpt.storage import Root, Storage, check_place, storage_of
from ckpt.storage.limits import limited
from ckpt.terms import RestoreTerms, Spell, as_argument, patterns
from ckpt.tree import FlatState
from ckpt.types import Clock, CommitRef, EventSink, SystemClock
from ckpt.united import UnitedValues
from ckpt.values import decode_value, encode_value
from ckpt.walk import StateWalk

_WORTH_TELLING_S = 0.001
_LOOK_S = 60.0  # without a save: after that rank 0 looks whether another attempt owns the root
_SLOWEST_BYTES_PER_S = 64 << 20  # a save isn't spread thinner than this
_MOST_TALK_BYTES = 64 << 20  # that rank 0 takes in of values which differ, of all ranks together

__all__ = ["Checkpointer", "RestoreResult", "SaveHandle", "SaveStats"]


class Checkpointer:
    """Saves and restores one run's state. Make one per process, on every rank.

    Args:
        root: where the run is kept: a path (text or a pathlib.Path), a URL, or a Storage.
        config: how to save.
        rank, world_size, store: this process among the others; by default those of
            torch.distributed, or a single process where it isn't initialised.
        sink: receives events; by default they go to the `sidestage` logger.
        annotations: strings that every commit carries, such as a serving description's id.
        spell: how the caller writes what a refused restore advises, if not as an argument of restore().

    Raises:
        BadInputError, StorageError: the root can't be used.
    """

    def __init__(  # noqa: PLR0913 - the injected parts are keyword-only and all have defaults
        self,
        root: Root,
        config: CheckpointConfig | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        store: Store | None = None,
        sink: EventSink | None = None,
        clock: Clock | None = None,
        annotations: Mapping[str, str] | None = None,
        spell: Spell = as_argument,
    ) -> None:
        self._spell = spell
        self._config = config or CheckpointConfig()
        self._storage = storage_of(root)
        self._clock = clock or SystemClock()
        self._sink = GuardedSink(sink or LogSink())
        self._coordinator = join(self._storage.url, rank, world_size, store)
        self.annotations = _checked(annotations or {})
        self._outcomes = Outcomes(self._config.raise_after_failures, self._sink)
        self._attempt: AttemptRecord | None = None
        self._persister: Persister | None = None
        self._pruner: Pruner | None = None  # on rank 0
        self._told_no_metric = False
        self._kernels = Kernels()
        self._walk = StateWalk(self._coordinator.rank, self._clock, self._sink, self._kernels)
        self._layout: Layout | None = None  # of the last save, which `_plan` is for
        self._plan: RankPlan | None = None
        self._replica_check: tuple[Layout, ReplicaCheck] | None = None
        pinned = torch.cuda.is_available()
        arenas = [Arena(pinned=pinned) for _ in range(self._config.max_pending)]
        self._engine = Engine(
            arenas,
            self._config.when_busy,
            self._config.persist_priority,
            self._sink,
            idle=self._look if self._coordinator.rank == 0 else None,
            idle_s=_LOOK_S,
        )
        self._stager = Stager(
            self._config,
            self._clock,
            self._sink,
            upload_bytes=self._storage.upload_bytes,
            waited=self._outcomes.waited,
            untracked=self._outcomes.untracked,
            hurry=self._engine.threads.hurry,
            lift=self._engine.threads.lift,
            living=self._kernels.living,
        )
        self._sequence = 0
        self._rounds = 0  # of talks about what to restore and which epoch to claim
        self._last_step: int | None = None
        self._newest: Future[CommitRef] | None = None  # of the save of that step
        self._stalled_s = 0.0  # that save() has waited for slots since so many commits
        self._stalled_since = 0
        self._last_save_s: float | None = None
        self._interval_s = math.inf  # between the last two saves
        self._closed = False
        self._process = os.getpid()
        atexit.register(self._at_exit)

    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def stats(self) -> SaveStats:
        """Counts of this checkpointer's saves."""
        return self._outcomes.stats

    @property
    def attempt(self) -> AttemptRecord | None:
        """This life of the job, once restore() or the first save() has claimed its epoch."""
        return self._attempt

    @property
    def fatal(self) -> SidestageError | None:
        """Why no later save can be committed, whatever the store does; None while nothing is known.

        ConflictError where another attempt has claimed the root (see `when_superseded`), BadInputError
        where a save failed for the state itself, on any rank. The next save() raises it.
        """
        return self._persister.fatal if self._persister is not None else None

    def raise_fatal(self) -> None:
        """Raise what `fatal` says: of the state once, of another attempt that owns the root always."""
        if (fatal := self.fatal) is not None:
            assert self._persister is not None
            if not isinstance(fatal, ConflictError):
                self._persister.fatal = None
            raise fatal

    def restore(  # noqa: PLR0913 - keyword-only, and with defaults
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        elastic: bool = False,
        partial: bool = False,
        exclude: Sequence[str] | str = (),
        rename: Mapping[str, str] | None = None,
        rows: Sequence[str] | str = (),
        other_optimizer: bool = False,
        approximate: bool = False,
        fresh: bool = False,
        prefetched: Prefetch | None = None,
    ) -> RestoreResult | None:
        """Fill `state` in place from the newest checkpoint that verifies. Collective: call on every rank.

        Args:
            state: as for save(). Tensors are filled in place, objects get load_state_dict,
                values inside dicts are replaced, and so is the value of each PerRank.
            step: restore this step instead of the newest; later commits become abandoned.
            elastic: accept another number of ranks; parts of single ranks then stay as they are.
            partial: accept keys that only one side has; those of the state stay as they are.
            exclude: patterns of keys that aren't restored, see ckpt.terms.RestoreTerms.
            rename: beginnings of keys in the checkpoint, and what they are in this state.
            rows: patterns of tensors whose sizes may differ: what both have is restored.
            other_optimizer: accept the state of another optimizer class.
            approximate: accept row-wise optimizer state of a whole column shard for a part of it.
            fresh: start from scratch although the root has checkpoints.
            prefetched: what was read ahead of this root. The result is the same as without; it is
                closed at the end.

        Returns None on a root without checkpoints.

        Every rank plans, all agree, all that is needed is read and checked, and only then anything
        changes. Raises BadInputError, on all ranks, if names, shapes, dtypes, optimizers or groups
        differ, and CorruptError if no checkpoint verifies: nothing was changed then. A damaged
        checkpoint is set aside, said in an event, and the next older one is used. RestoreError, on
        all ranks, if a `load_state_dict` fails: what was changed is said.
        """
        self._check_open()
        if self._attempt is not None:
            raise BadInputError("restore() comes once, before the first save()")
        self._coordinator.check_place()
        terms = RestoreTerms(
            partial=partial,
            exclude=patterns(exclude),
            rename=dict(rename or {}),
            rows=patterns(rows),
            elastic=elastic,
            other_optimizer=other_optimizer,
            approximate=approximate,
        )
        tag = self._round("restore")
        try:
            canonical = Canonical(self._coordinator.rank, self._kernels)
            flat = canonical.flat(state)
            self._objects(flat)  # refuses what couldn't be saved, before training begins
            if prefetched is not None and prefetched.url != self._storage.url:
                raise BadInputError(
                    f"prefetched is of {prefetched.url}, this is {self._storage.url}"
                )
        except Exception as e:
            with contextlib.suppress(SidestageError):
                self._agree_on(tag, describe(e))
            raise
        self._agree_on(tag, {})
        self._check_root()
        restorer = Restorer(
            self._storage,
            self._coordinator,
            self._sink,
            timeout_s=self._config.commit_timeout_s,
            tag=tag,
            prefetched=prefetched,
            spell=self._spell,
        )
        result = None
        # An older attempt that is still alive must not prune what this one is about to continue.
        with (
            restorer.pins,
            prefetched or contextlib.nullcontext(),
            limited(None, self._outcomes.retried),
        ):
            if not fresh:
                result = restorer.restore(state, flat, canonical, step=step, terms=terms)
            elif step is not None:
                raise BadInputError("restore(): give step or fresh, not both")
            if result is None:  # else they are the same values by now, on all ranks
                self._compare_values(tag, flat.values)
            self._begin_attempt(result, fresh=fresh)
        if result is not None:
            self._last_step = result.step
        self._stager.guard(state)  # now, at start-up: its memory is touched once
        return result

    def guard(self, *objects: Any) -> None:
        """Guard the tables of modules that aren't in the state themselves, only their tensors.

        objects: modules and the optimizers that change their tables. Those inside the state of
        restore() and save() are found without.
        """
        self._check_open()
        self._stager.guard(*objects)

    def touched(self, tensor: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Say that something other than training is about to change a tensor of the state.

        Call it right before, on the training thread, if a snapshot may be open (until its
        `handle.staged` is done). It may wait until the snapshot has what it needs.

        rows: of a table, their numbers or a mask; None: all.
        """
        if os.getpid() == self._process:  # a forked child's memory is in no snapshot
            self._stager.touched(tensor, rows)

    def save(
        self, step: int, state: Mapping[str, Any], *, annotations: Mapping[str, str] | None = None
    ) -> SaveHandle:
        """Fix a snapshot of `state` and persist it in the background. Collective: call on every rank.

        When this returns the snapshot is fixed. Guarded tables and what optimizers own may from
        then on be changed by training only, until `handle.staged` is done: anything else must
        call `touched` first, or the save fails and names it. All else was copied and may be
        changed at once; with `snapshot = "copied"`, everything may. What it costs is that copy,
        and by the policy `when_busy` a wait for an earlier save.

        Raises BadInputError for state that can't be stored (by key), here or, as soon as that is known,
        on another rank or in an earlier save; ConflictError once another attempt has claimed the root, see
        `when_superseded`; BadInputError for annotations that aren't
        strings, or a step that isn't above the last one, unless that one was skipped; SaveError once
        `raise_after_failures` saves in a row have failed. Trouble with storage never raises here: the
        handle carries it.
        """
        started = self._clock.monotonic()
        self._check_open()
        self._outcomes.raise_by_policy()
        if type(step) is not int or step < 0:
            raise BadInputError(f"save(step={step!r}): give a whole number from 0 on")
        again = step == self._last_step and self._newest is not None and was_skipped(self._newest)
        if self._last_step is not None and step <= self._last_step and not again:
            raise BadInputError(
                f"save(step={step}): the last one was step {self._last_step}; steps must rise"
            )
        notes = _checked({**self.annotations, **(annotations or {})})
        if self._attempt is None:
            self._begin_unrestored()
        if self._last_save_s is not None:
            self._interval_s = started - self._last_save_s
        self._last_save_s = started
        self._sequence += 1  # first of all: whatever fails below, the ranks' counts stay alike
        try:
            self.raise_fatal()
        except SidestageError as e:
            self._excuse_from_save(
                e
                if isinstance(e, ConflictError)
                else SaveSkippedError(
                    f"step {step}: skipped, an earlier save's error was raised instead"
                )
            )
            raise
        try:
            parts = self._walk.take(state, self._stager.looking())
            self._stager.guard(early=True)
            live = live_state(parts, self._layout)
        except Exception as e:
            self._excuse_from_save(e)
            raise
        try:
            return self._take(step, live, notes, started)
        finally:
            live.release()

    def describe(self, state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
        """Write what `state` is like to a local file of rank 0, without its bytes, for `ckpt explain`.

        Collective. Raises BadInputError as save() does for what can't be stored, StorageError.
        """
        canonical = Canonical(self._coordinator.rank, self._kernels)
        try:
            mine = of_rank(canonical.flat(state))
        except Exception as e:
            mine = describe(e)
        finally:
            canonical.release()

        def written(parts: list[dict[str, Any]]) -> None:
            raise_first(parts)
            try:
                Path(path).write_bytes(encoded(united(parts)))
            except OSError as e:
                raise StorageError(f"{os.fspath(path)}: can't be written: {e.strerror}") from e

        tag = self._round("describe")
        self._coordinator.decide(tag, mine, written, self._config.commit_timeout_s)

    def decline(self) -> None:
        """Take no part in a save, where `fatal` is known here already. Call it in the place of save().

        Ranks that don't know yet and do save are told at once, and don't wait for this one's part.
        """
        fatal = self.fatal
        if fatal is None:
            raise BadInputError("decline() is for ranks that know why nothing can be committed")
        self._sequence += 1  # ranks count their saves alike
        self._excuse_from_save(fatal)

    def wait(self) -> None:
        """Wait until every save has ended; report failures by policy.

        Raises DeadlineError if that takes longer than `close_timeout_s`.
        """
        self._check_process()
        if not self._engine.drain(self._config.close_timeout_s):
            raise DeadlineError(
                f"{self._engine.pending} saves are still pending after "
                f"{self._config.close_timeout_s:g} s; is the store slow or gone?"
            )
        self._outcomes.raise_by_policy()

    def flush(self, timeout_s: float) -> bool:
        """Hurry pending saves to their end; False if some still aren't there. From any thread.

        Says nothing of how they ended: `stats` and the handles do.
        """
        self._check_process()
        return self._engine.drain(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Drain pending saves within `timeout_s`, then report by policy. Idempotent.

        timeout_s: `close_timeout_s` by default; less where it is known that they can't end.

        A save that is being written then goes on alone; the event `save_failed` says so.
        Call it before the process group is destroyed: the last commit needs the job's store.
        """
        if self._closed or os.getpid() != self._process:
            return  # in a forked child the saves, and the locks of their threads, are the parent's
        self._closed = True
        atexit.unregister(self._at_exit)
        self._drain_and_end("close() gave up waiting", timeout_s)
        self._outcomes.raise_by_policy()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SidestageError:
            if error is None:  # never hide what ended the block
                raise

    def _take(
        self, step: int, live: LiveState, notes: dict[str, str], started: float
    ) -> SaveHandle:
        """Snapshot a state that was taken apart, and hand it to the persist threads."""
        self._last_step = step
        plan = self._planned(live)
        arena = self._acquire()
        if arena is None:
            return self._skip(step, started)
        try:
            replicas = self._look_at_replicas(live)
            snapshot = self._stager.stage(step, plan, live, arena)
        except SaveError as e:  # not of the state: training goes on
            self._engine.release(arena)
            self._excuse(save_tag(self._sequence), e)
            committed = self._newest = uncommitted()
            self._outcomes.failed(step, committed, e)
            return self._outcomes.staged(step, self._clock.monotonic() - started, committed)
        except BaseException as e:
            self._engine.release(arena)
            self._excuse(save_tag(self._sequence), SaveError(f"step {step}: {e!r}"))
            raise
        save = StagedSave(
            step=step,
            sequence=self._sequence,
            plan=plan,
            kinds=live.layout.kinds,
            snapshot=snapshot,
            values=live.values,
            per_rank=live.per_rank,
            replicas=replicas,
            annotations=notes,
            saved_at_s=self._clock.time(),
            deadline_s=self._clock.monotonic() + self._config.commit_timeout_s,
            taken=Taken(
                snapshot.guarded_bytes, snapshot.staged_bytes, dict(self._stager.copied_tables)
            ),
        )
        return self._submit(save, arena, started)

    def _submit(self, save: StagedSave, arena: Arena, started: float) -> SaveHandle:
        committed = self._newest = uncommitted()
        persister = self._persister
        assert persister is not None

        def run() -> None:
            try:
                with limited(None, self._outcomes.retried):
                    ref = persister.persist(save)
            except BaseException as e:  # the thread must go on, whatever a save met
                self._outcomes.failed(save.step, committed, e)
            else:
                self._outcomes.committed(save.step, committed, ref)
            peak_bytes, fraction = self._stager.overlay_peak()
            self._sink.emit("overlay", bytes=peak_bytes, fraction=fraction)

        def drop(why: str) -> None:
            save.snapshot.close()
            self._outcomes.failed(
                save.step, committed, self._given_up(save.step, save.sequence, why)
            )

        def after() -> None:
            with limited(None, self._outcomes.retried):
                self._prune(persister.settled, committed=committed.exception() is None)

        self._engine.submit(Job(run, drop, arena, after))
        return self._outcomes.staged(
            save.step,
            self._clock.monotonic() - started,
            committed,
            staged=save.snapshot.fixed,
            staged_bytes=save.snapshot.staged_bytes,
            guarded_bytes=save.snapshot.guarded_bytes,
            proof_s=save.snapshot.proof_s,
        )

    def _pump(self, snapshot: Snapshot) -> Pump:
        """What writes a snapshot, spread over a while; its time starts now."""
        target_s = self._config.persist_target_s
        if target_s is None:
            target_s = min(snapshot.total_bytes / _SLOWEST_BYTES_PER_S, self._interval_s / 2)
        pace = Pace(
            target_s,
            snapshot.total_bytes,
            snapshot.pressure,
            self._clock,
            limit_bytes_per_s=self._config.persist_bytes_per_s,
        )
        return Pump(self._stager.ring, self._config, self._engine.threads, pace)

    def _look(self) -> None:
        if self._persister is not None:
            self._persister.look()

    def _prune(self, settled: int, *, committed: bool) -> None:
        """Retention, after a save has ended. Whatever happens here, the save stays what it was."""
        if self._pruner is None:
            return
        uncommitted = self.stats.failed + self.stats.skipped
        try:
            done = self._pruner.after_save(settled, committed=committed, uncommitted=uncommitted)
            self._outcomes.pruned([ref.step for ref in done.deleted], done.problems)
            if done.no_metric and not self._told_no_metric:
                self._told_no_metric = True
                self._sink.emit("keep_best_without_metric", **done.no_metric)
        except Exception as e:
            self._outcomes.pruned([], [str(e) if isinstance(e, SidestageError) else repr(e)])

    def _acquire(self) -> Arena | None:
        """A slot for a save. Training waits for a slow store `stall_limit_s` in all until a save commits."""
        config, commits = self._config, self.stats.commits
        if commits != self._stalled_since:
            self._stalled_since, self._stalled_s = commits, 0.0
        most_s = min(config.stall_limit_s, config.commit_timeout_s)
        asked = self._clock.monotonic()
        arena = self._engine.acquire(max(0.0, most_s - self._stalled_s))
        wait_s = self._clock.monotonic() - asked
        self._stalled_s += wait_s
        if wait_s > _WORTH_TELLING_S:
            self._outcomes.waited("slot", wait_s)
        return arena

    def _skip(self, step: int, started: float) -> SaveHandle:
        error = self._given_up(
            step, self._sequence, f"{self._engine.pending} earlier saves are pending"
        )
        handle = self._outcomes.skipped(step, self._clock.monotonic() - started, error)
        self._newest = handle.committed
        return handle

    def _given_up(self, step: int, sequence: int, why: str) -> SaveSkippedError:
        """Why a save ends without being written, as all ranks are told."""
        error = SaveSkippedError(f"step {step}: skipped, {why}")
        self._excuse(save_tag(sequence), error)
        return error

    def _excuse_from_save(self, error: Exception) -> None:
        self._excuse(plan_tag(self._sequence), error)
        self._excuse(save_tag(self._sequence), error)

    def _excuse(self, tag: str, error: Exception) -> None:
        """Say on the other ranks why this one takes no part: they must not wait for it."""
        told = describe(error)
        if isinstance(error, BadInputError | ConflictError):
            told[FATAL] = True  # of the state, or of the root: not of the store
        with contextlib.suppress(StorageError):  # without the job's store nobody can commit
            if self._coordinator.rank == 0:
                self._coordinator.announce(tag, told)
            else:
                self._coordinator.post(tag, told)

    def _look_at_replicas(self, live: LiveState) -> Replicas:
        if self._coordinator.world_size == 1:
            return Replicas(())
        if self._replica_check is None or self._replica_check[0] is not live.layout:
            self._replica_check = live.layout, ReplicaCheck(live.layout.replicated())
        return self._replica_check[1].look(live.replica, self._sequence)

    def _objects(self, flat: FlatState) -> Objects:
        """This rank's values; refuses those that can't be stored."""
        per_rank = {k: encode_value(v, k) for k, v in flat.per_rank.items()}
        return seal_objects(encode_value(flat.values), per_rank)

    def _planned(self, live: LiveState) -> RankPlan:
        """The plan of this state: made anew where its layout isn't that of the last save."""
        if self._plan is not None and live.layout is self._layout:
            return self._plan
        flat = live.flat
        rank, world_size = self._coordinator.rank, self._coordinator.world_size

        def decide(mine: dict[str, Any], rule: Callable[[list[dict[str, Any]]], Any]) -> Any:
            def checked(payloads: list[dict[str, Any]]) -> Any:
                raise_first(payloads)
                return rule(payloads)

            tag = plan_tag(self._sequence)
            return self._coordinator.decide(tag, mine, checked, self._config.commit_timeout_s)

        if self._plan is None or self._plan.key != schema_key(flat, world_size):
            self._plan = None  # what is refused below is refused again
            plan = make_plan(flat, rank, world_size, decide, live.layout.led)
            values = decode_value(json.loads(live.values), "values")
            self._compare_values(plan_tag(self._sequence), values)
            self._plan = plan
        self._layout = live.layout  # only now: the next save of this layout has a plan
        return self._plan

    def _compare_values(self, tag: str, values: Any) -> None:
        """BadInputError on all ranks if two hold different values for one key. Collective.

        What is too long to be sent about is compared by receipts, when the save is to be committed.
        """
        if self._coordinator.world_size == 1:
            return
        timeout_s = self._config.commit_timeout_s
        text = comparable(values)
        mine: dict[str, Any] = {"digest": digest_of(text)}
        if self._coordinator.decide(
            f"{tag}/digests", mine, lambda ps: len({p["digest"] for p in ps}) == 1, timeout_s
        ):
            return

        def unite(payloads: list[dict[str, Any]]) -> None:
            united = UnitedValues()
            for rank, p in enumerate(payloads):
                if p["values"] is not None:
                    united.add(
                        rank, decode_value(json.loads(p["values"]), f"values of rank {rank}")
                    )

        short = len(text) <= _MOST_TALK_BYTES // self._coordinator.world_size
        mine = {"values": text.decode() if short else None}
        self._coordinator.decide(f"{tag}/values", mine, unite, timeout_s)

    def _begin_unrestored(self) -> None:
        """A first save without restore(): only on a root that has nothing to lose."""
        self._coordinator.check_place()
        self._check_root()
        restorer = Restorer(
            self._storage,
            self._coordinator,
            self._sink,
            timeout_s=self._config.commit_timeout_s,
            tag=self._round("restore"),
        )
        newest = restorer.newest_step()
        if newest is not None:
            raise ConflictError(
                f"{self._storage.url} has checkpoints up to step {newest}: call restore(state) before "
                f"the first save, or restore(state, fresh=True) to start from scratch beside them"
            )
        self._begin_attempt(None)

    def _check_root(self) -> None:
        """Raise on all ranks what stands against this root, before anything is changed. Collective."""

        def look(_: list[dict[str, Any]]) -> None:
            check_place(self._storage)  # before the probe, which writes
            if not self._storage.probe():
                self._sink.emit("single_writer_only", root=self._storage.url)
            commit.check_run(self._storage)

        self._coordinator.decide(self._round("root"), {}, look, self._config.commit_timeout_s)

    def _begin_attempt(self, restored: RestoreResult | None, *, fresh: bool = False) -> None:
        """Claim an epoch for all ranks, and start to be able to commit."""
        parent = restored.commit if restored else None
        world_size = restored.world_size if restored else None

        def claim(_: list[dict[str, Any]]) -> dict[str, Any]:
            why = commit.how_it_starts(self._storage, parent, world_size, fresh=fresh)
            run = commit.open_run(self._storage, self._clock, self._sink)
            world = self._coordinator.world_size
            mine = commit.claim_epoch(self._storage, run, world, parent, self._clock)
            step = parent.step if parent else None
            self._sink.emit("started", step=step, root=self._storage.url, why=why)
            return {
                "epoch": mine.epoch,
                "run_id": mine.run_id,
                "token": mine.token,
                "started_at_s": mine.started_at_s,
            }

        claimed = self._coordinator.decide(
            self._round("attempt"), {}, claim, self._config.commit_timeout_s
        )
        self._attempt = AttemptRecord(
            world_size=self._coordinator.world_size, parent=parent, **claimed
        )
        self._persister = Persister(
            self._storage,
            self._coordinator.clone(),
            self._attempt,
            self._config,
            self._clock,
            pump=self._pump,
            sink=self._sink,
        )
        if self._coordinator.rank == 0:
            self._pruner = Pruner(
                self._storage, self._config.retention, self._clock, epoch=self._attempt.epoch
            )
        self._sink.emit("attempt_claimed", epoch=self._attempt.epoch, parent=parent)

    def _agree_on(self, tag: str, mine: dict[str, Any]) -> None:
        """Raise on every rank what any rank has to say against this state."""
        self._coordinator.decide(f"{tag}/state", mine, raise_first, self._config.commit_timeout_s)

    def _round(self, name: str) -> str:
        """A key in the job's store that no earlier try has used: its answers still lie there."""
        self._rounds += 1
        return f"{name}/{self._rounds}"

    def _check_open(self) -> None:
        if self._closed:
            raise BadInputError("this Checkpointer is closed; make a new one")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise BadInputError(
                "this Checkpointer was made before a fork; use it in its own process"
            )

    def _at_exit(self) -> None:
        """The process ends without close(): drain all the same, and say so if that fails."""
        self._drain_and_end("the process ended first")

    def _drain_and_end(self, why: str, timeout_s: float | None = None) -> None:
        if os.getpid() != self._process:
            return  # a fork: the thread and the saves are the other process's
        if timeout_s is None:
            timeout_s = self._config.close_timeout_s
        if self._engine.close(timeout_s):
            self._stager.close()
        else:  # what is still being written stays guarded
            self._sink.emit("save_failed", step=self._last_step, error=why)


def _checked(annotations: Mapping[str, str]) -> dict[str, str]:
    """A copy of annotations that a commit record can hold: anything else would make it unreadable."""
    for key, note in annotations.items():
        if type(key) is not str or type(note) is not str:
            raise BadInputError(f"annotations: {key!r}: {note!r}: only strings are kept")
        encode_value({key: note}, "annotations")
    return dict(annotations)
