"""Checkpoints, exact resume and the ledger around a training loop that stays the user's own.

    with Session(root, {"model": model, "optimizer": optimizer}, reader, save_every=100) as session:
        while reader.epoch < epochs:
            for batch in session.batches():
                train_step(batch)
                session.step()

The session restores when the block is entered. It uses torch and ckpt only; a TorchRec
pipeline passes `session.batches()` to `pipeline.progress` and tells `step` what is in flight.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn, Protocol, TypeVar

import torch.distributed as dist

from ckpt import CheckpointConfig, Checkpointer, RestoreResult, RngState, SaveHandle
from ckpt.checkpointer import SaveStats
from ckpt.config import restart_count, trace_folder
from ckpt.coordinator import join, revive
from ckpt.errors import BadInputError, ConflictError, DeadlineError, SaveError, SidestageError
from ckpt.events import LogSink, TeeSink
from ckpt.forks import forget_in_children
from ckpt.layout import ledger_key
from ckpt.outcomes import was_skipped
from ckpt.prefetch import Prefetch
from ckpt.schema import EVENT_TIME
from ckpt.storage import LocalStorage, Root, owned, storage_of
from ckpt.terms import RestoreTerms
from ckpt.types import Clock, SystemClock
from trainer.compile_spans import CompileSpans
from trainer.failures import failures_before
from trainer.feed import Feed
from trainer.last_step import LastStep
from trainer.ledger import Ledger, SaveEvents
from trainer.mirror import Mirror
from trainer.origin import origin
from trainer.preemption import ALONE_S, PreemptedError, Preemption
from trainer.progress import Progress
from trainer.schedule import SaveSchedule
from trainer.spool import check_own, mark_own, spool_of
from trainer.stopping import save_and_stop
from trainer.tracing import StepTrace

B_co = TypeVar("B_co", covariant=True)

_log = logging.getLogger("sidestage")

_OWN = "session"
_RNG = "rng"
_SOON_S = 0.5  # an error and the request to end may have one cause, and come in either order


class Reader(Protocol[B_co]):
    """Where batches come from. `trainer.BatchReader` is one.

    `position` counts the global batches handed out; `seek` goes to one. Iterating gives the
    batches from there on, to the end of an epoch or of everything. `batch_size` is the
    samples of a global batch: a checkpoint's position means nothing at another size.

    A reader that knows when its samples happened may also have

        def event_time_s(self, position: int) -> float | None

    the newest event time, Unix seconds, of the batches before `position` (None: there are none).
    Commits then carry it as the annotation `ckpt.schema.EVENT_TIME`, for the freshness of what is served.

    A reader that knows what it counts may also have

        data: Mapping[str, Any]

    plain values, the same on all ranks: {"samples": 640, "identity": "..."}. They are stored beside the
    position, and a restore whose reader has others is refused, unless the reader says itself what to make of
    them:

        def continues(self, data: Mapping[str, Any], position: int) -> None

    is called before anything is changed, and raises BadInputError to refuse. A reader for which the position
    isn't enough to go on has

        def state_at(self, position: int) -> Any
        def load_state(self, state: Any, position: int) -> None

    what this rank needs to hand out the batches after `position`, plain values and tensors, and its way
    back, in the place of `seek`. It belongs to its rank: another number of ranks is refused. With

        def check_state(self, state: Any, position: int) -> None

    it is asked before anything is changed, with None for each tensor, and raises BadInputError to refuse.
    """

    @property
    def position(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    def seek(self, position: int) -> None: ...
    def __iter__(self) -> Iterator[B_co]: ...


class Session(Generic[B_co]):
    """One attempt at training. Make it on every rank, after the process group.

    Args:
        root: where the run is kept: a path (text or a pathlib.Path), a URL or a Storage.
        state: what to save: a dict of modules, optimizers, schedules, values. Random number
            generators, the step and the reader's position are added; its keys "rng" and
            "session" are therefore taken.
        reader: where `batches` takes them from.
        save_every: steps from one save to the next, or "auto": as often as loses least, by what saves
            cost and how often this run fails (trainer.interval).
        checkpoint: how to save.
        restore: what the restore may do where checkpoint and state aren't alike.
        elastic: the same as `restore=RestoreTerms(elastic=True)`: permit a restore at another number of
            ranks. Generators then start afresh.
        prefetched: what the start began early to read ahead of this root.
        annotations: strings that every commit carries.
        events: the ledger of this process, if it was begun before the session, for the stages of a start.
        ledger: a local folder for the ledgers of this run alone; by default the root itself where that
            is local, else a spool folder of this host, from which they are copied to the root.
        grace_s: from SIGTERM on any rank until all of them have saved and ended, see
            trainer.preemption; None leaves the signal alone.
        preempt_when: asked a few times a second; True asks all ranks to end, as SIGTERM does.
        clock: for tests.
    """

    def __init__(  # noqa: PLR0913 - all but the first three have defaults and are keyword-only
        self,
        root: Root,
        state: Mapping[str, Any],
        reader: Reader[B_co],
        *,
        save_every: int | Literal["auto"] = 100,
        checkpoint: CheckpointConfig | None = None,
        restore: RestoreTerms | None = None,
        elastic: bool = False,
        prefetched: Prefetch | None = None,
        annotations: Mapping[str, str] | None = None,
        ledger: str | os.PathLike[str] | None = None,
        events: Ledger | None = None,
        grace_s: float | None = 25.0,
        preempt_when: Callable[[], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        taken = sorted({_OWN, _RNG} & set(state))
        if taken:
            raise BadInputError(f"state: the key {taken[0]!r} is the session's own; rename yours")
        if grace_s is not None and not grace_s > 0:
            raise BadInputError(f"grace_s = {grace_s}: give seconds above 0, or None")
        storage = storage_of(root)
        self._ledger = events or Ledger(clock)
        self._compilations = CompileSpans(self._ledger)
        self._clock = clock or SystemClock()
        self._schedule = SaveSchedule(save_every, self._clock)
        self._mirror: Mirror | None = None
        self._ledger_folder = None if ledger is None else Path(ledger)
        if self._ledger_folder is not None:
            check_own(self._ledger_folder, storage)
        elif not isinstance(owned(storage), LocalStorage):
            self._mirror = Mirror(spool_of(storage.url), storage)
        self._reader = reader
        self._feed = Feed(
            reader,
            self._ledger,
            self._clock,
            lambda: self._preemption is not None and self._preemption.asked_within(_SOON_S),
            lambda: self._preemption.signals if self._preemption is not None else None,
        )
        terms = restore or RestoreTerms()
        self._terms = replace(terms, elastic=terms.elastic or elastic)
        self._prefetched = prefetched
        self._progress = Progress(reader, terms)
        self.state: dict[str, Any] = {**state, _OWN: self._progress, _RNG: RngState()}
        """All that is saved."""
        self.restored: RestoreResult | None = None
        """What this attempt began from; None when it began from scratch."""
        self._checkpointer = Checkpointer(
            storage,
            checkpoint,
            sink=TeeSink(LogSink(), SaveEvents(self._ledger), *filter(None, [self._mirror])),
            clock=clock,
            annotations=annotations,
            spell=terms.spelled,
        )
        self._coordinator = join(storage.url, None, None, None)
        self._grace_s = grace_s
        self._preempt_when = preempt_when
        self._preemption: Preemption | None = None
        self._newest: SaveHandle | None = None
        self._entered = False
        self._last: LastStep | None = None
        self._trace: StepTrace | None = None
        self._gated = False  # the batch of this step came through `batches`, on the training thread
        self._stopping = False  # at the place where all ranks stop
        self._elsewhere = False  # this is a child that was forked off
        forget_in_children(self)

    @property
    def steps(self) -> int:
        """Training steps done, those before a restart included."""
        return self._progress.step

    @property
    def position(self) -> int:
        """Global batches trained on. Less than the reader's position while batches are in flight."""
        return self._progress.position

    @property
    def stats(self) -> SaveStats:
        return self._checkpointer.stats

    def __enter__(self) -> Session[B_co]:
        self._ledger.record("process", **self._place())
        self._compilations.attach()
        if self._grace_s is not None:
            self._preemption = Preemption(
                self._coordinator.clone(),
                self._grace_s,
                self._checkpointer.flush,
                when=self._preempt_when,
                fatal=lambda: self._checkpointer.fatal,
                say=self._ledger.record,
                waiting=lambda: self._ledger.span("shutdown"),
            )
            self._last = LastStep()
        try:
            with self._ledger.span("restore"):
                self.restored = self._checkpointer.restore(
                    self.state, prefetched=self._prefetched, **self._terms.asked()
                )
            with self._ledger.span("pre_train"):
                self._begin()
            self._entered = True
            if (folder := trace_folder()) is not None:
                self._trace = StepTrace(folder, _rank(), self.state)
            self._tick(self.steps)  # asked while it restored: nothing is trained
        except BaseException as e:
            self.__exit__(type(e), e, e.__traceback__)
            raise
        return self

    def batches(self) -> Iterator[B_co]:
        """The reader's batches from where training stands.

        Raises PreemptedError where all ranks stop here, see `poll`. A reader that fails after one was asked
        to end, such as for workers that the same signal has ended, is iterated anew from where it was.
        """
        self._check_entered()
        self._compilations.attach()
        for batch in self._feed.batches():
            if self._ledger.on_training_thread:
                if self._preemption is not None and self._preemption.begins():
                    self._stop(self._preemption)
                self._gated = True
            if self._last is not None:
                self._last.begins()
            if self._trace is not None:
                self._trace.batch(self._reader.position, batch)
            yield batch

    def step(
        self,
        in_flight: int = 0,
        *,
        loss: Any = None,
        annotations: Mapping[str, str] | None = None,
        save: bool = True,
    ) -> SaveHandle | None:
        """Count one training step that has just ended, and save if one is due.

        Args:
            in_flight: batches that the reader has handed out and no step has trained on:
                `len(pipeline.batches)` for TorchRec's TrainPipelineSparseDist.
            loss: a number or a tensor of one, looked at only while a resume is proved (trainer.proving).
            annotations: strings that the commit carries if a save is due, see `save`.
            save: False before an evaluation whose result the save of this step is to carry: call `save`
                after it. The same on all ranks.

        Raises BadInputError if no batch was trained on since the last step: `in_flight` is wrong.
        """
        self._check_entered()
        gated, self._gated = self._gated, False
        if self._last is not None:
            self._last.begins()  # what fails below leaves a step that isn't counted
        position = self._reader.position - in_flight
        if position <= self.position:
            raise BadInputError(
                f"step {self.steps + 1} trained on no batch: the reader has handed out "
                f"{self._reader.position}, {in_flight} are in flight and {self.position} were trained "
                f"on before; pass the right in_flight to session.step()"
            )
        self._progress.step += 1
        self._progress.position = position
        if self._last is not None:
            self._last.counted(in_flight)
        self._ledger.stepped(self.steps, position)
        if self._trace is not None:
            self._trace.step(self.steps, loss)
        due = self._schedule.due(self.steps, self._ledger.step_s, self.stats)
        fatal = self._checkpointer.fatal is not None
        if due and save and fatal:
            self._checkpointer.decline()  # the other ranks may not know yet, and save
        self._end_if_fatal()
        handle = self.save(annotations) if due and save and not fatal else None
        self._tick(self.steps, free=gated and not in_flight)
        return handle

    def poll(self) -> None:
        """A place where all ranks could stop, if one of them was asked to end (trainer.preemption).

        `step` is one. Call this in phases that train nothing and take long, such as for each batch of
        an evaluation: on every rank, equally often.

        Raises PreemptedError at the place where all ranks stop, after they have saved; there also, once it
        is known, what no later save can mend, see `Checkpointer.fatal`.
        """
        self._check_entered()
        self._end_if_fatal()
        self._tick()

    def _tick(self, step: int | None = None, *, free: bool = False) -> None:
        if self._preemption is not None and self._preemption.tick(step, free=free):
            self._stop(self._preemption)

    def _end_if_fatal(self) -> None:
        """Several ranks stop at one place, by agreement, if they can agree."""
        if self._preemption is None or self._coordinator.world_size == 1:
            self._checkpointer.raise_fatal()

    def save(self, annotations: Mapping[str, str] | None = None) -> SaveHandle:
        """Save now, after a step. Returns when the snapshot is fixed. Collective: call on every rank.

        annotations: strings that the commit carries besides those of the session, such as the metric of this
            state by which `keep_best` chooses: {"val_loss": "0.31"}.
        """
        self._check_entered()
        with self._ledger.span("blocked_in_save"):
            handle = self._checkpointer.save(
                self.steps, self.state, annotations={**self._event_time(), **(annotations or {})}
            )
        self._newest = handle
        self._schedule.saved(handle)
        return handle

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Tell the ledger that what runs inside is evaluation, not training."""
        with self._ledger.span("evaluation"):
            yield

    def finish(self) -> None:
        """Save the last step if it isn't saved, and wait for every commit. Collective.

        SaveError if the last step has no commit. Leaving the block does this too; call it
        where something else has to follow before the process ends.
        """
        self._check_entered()
        if self._preemption is not None:
            self._preemption.finishing()
        with self._ledger.span("shutdown"):
            self._drain()

    def _drain(self) -> None:
        with suppress(DeadlineError):  # so that no policy can skip the last save; slow ones go on
            self._checkpointer.wait()
        if self._unsaved:
            self.save()
            self._checkpointer.wait()
        last = self.stats.last_commit
        if (last.step if last else self._restored_step) < self.steps:
            self._checkpointer.raise_fatal()
        if self.steps and (last.step if last else self._restored_step) < self.steps:
            raise SaveError(
                f"the last step, {self.steps}, was not committed: {self.stats.last_error}; "
                f"what was trained since step {last.step if last else self._restored_step} is lost"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._elsewhere:
            return  # all of this is the parent's
        self._compilations.detach()
        self._ledger.record("closing", error=_said(error))
        stop: BaseException | None = None
        try:
            try:
                if error is None:
                    self.finish()
                else:
                    stop = self._stopped_after(error)
            except Exception as e:
                self._ledger.record("closing", error=_said(e))
                raise
            finally:
                self._checkpointer.close(self._drain_limit_s(stop or error))
        except SidestageError:
            if error is None:  # never hide what ended the block
                raise
        finally:
            self._entered = False
            if self._preemption is not None:
                self._preemption.close()
            if self._last is not None:
                self._last.close()
            if self._trace is not None:
                self._trace.close()
            self._ledger.record("closed")
            self._ledger.close()
            if self._mirror is not None:
                self._mirror.copy()
        if stop is not None:
            raise stop from error
        postponed = self._preemption.postponed if self._preemption is not None else None
        if error is None and postponed is not None:
            raise postponed  # asked too late to stop at a step

    def _drain_limit_s(self, error: BaseException | None) -> float | None:
        """After an error: 0 where a dead rank's part is missing, for such a save never ends."""
        if isinstance(self._checkpointer.fatal, ConflictError):
            return 0.0  # nothing can be committed any more
        if error is None or isinstance(error, PreemptedError) or self._preemption is None:
            return None
        if self._stopping:
            return None
        self._preemption.failing()
        if self._checkpointer.flush(ALONE_S) or self._preemption.all_here():
            return None
        return 0.0

    def _stopped_after(self, error: BaseException) -> BaseException | None:
        """What ends the block instead of an error that followed a request to end; None: that error.

        All ranks save the last whole step, if it is still whole on each of them, and the same.
        """
        p, last = self._preemption, self._last
        if p is None or last is None or self._stopping:
            return None
        if not isinstance(error, Exception | SystemExit) or isinstance(error, ConflictError):
            return None
        whole = last.whole
        if not p.asked_within(_SOON_S if whole else 0.0) or not p.stops_here(whole=whole):
            return None
        _log.warning("an error has followed the request to end: %s", _said(error))
        try:
            self._stop(p)
        except Exception as stop:
            return stop

    def forget(self) -> None:
        """In a forked child: nothing of this is its own."""
        self._elsewhere = True
        self._entered = False

    def _begin(self) -> None:
        """Take up where the checkpoint left off, and open the ledger of this attempt."""
        self._progress.begin()
        if self._last is not None:
            self._last.counted(0)
        epoch = self.restored.commit.epoch if self.restored else None
        self._ledger.record("restored", step=self.steps, position=self.position, epoch=epoch)
        attempt = self._checkpointer.attempt
        assert attempt is not None, "restore() has claimed an epoch"
        key = ledger_key(attempt.epoch, _rank())
        root = self._checkpointer.storage
        ledgers, file = root, Path(root.url) / key
        if self._mirror is not None:
            file = self._mirror.follow(attempt.run_id, key)
            self._mirror.copy_left_over(_rank())
        elif self._ledger_folder is not None:
            mark_own(self._ledger_folder, root)
            ledgers, file = LocalStorage(self._ledger_folder), self._ledger_folder / key
        self._schedule.begin(
            self.steps, self._coordinator, lambda: failures_before(attempt.epoch, root, ledgers)
        )
        self._ledger.open(file, beating=True)

    def _event_time(self) -> dict[str, str]:
        """The annotation with the event time of the newest batch trained, if the reader knows it."""
        event_time_s = getattr(self._reader, "event_time_s", None)
        newest = None if event_time_s is None else event_time_s(self.position)
        if newest is None:
            return {}
        if not 0 <= newest < 1e12:  # NaN too: no publisher could read the commit
            raise BadInputError(
                f"step {self.steps}: the reader's event_time_s({self.position}) is {newest}; give Unix "
                f"seconds from 0, below 1e12, or None where there are none"
            )
        return {EVENT_TIME: f"{abs(newest):.6f}"}

    def _stop(self, preemption: Preemption) -> NoReturn:
        """All ranks are at the place where they stop. Collective."""
        ask = preemption.ask
        assert ask is not None, "nobody stops unasked"
        self._stopping = True
        if ask.error is not None:
            raise revive(dict(ask.error))
        self._ledger.record(
            "preempted", step=self.steps, position=self.position, asked=ask.rank, why=ask.why
        )
        save_and_stop(
            preemption,
            self._checkpointer,
            self.steps,
            self._restored_step,
            lambda: self.save() if self._unsaved else None,
        )

    @property
    def _unsaved(self) -> bool:
        """Is there no save of the last step, or one that was skipped? All ranks know once none is pending."""
        newest = self._newest
        if newest is None or newest.step < self.steps:
            return self.steps > self._restored_step
        return was_skipped(newest.committed)

    @property
    def _restored_step(self) -> int:
        return self.restored.step if self.restored else 0

    def _check_entered(self) -> None:
        if self._elsewhere:
            raise BadInputError(
                "this session is that of the process which forked this one; use it there"
            )
        if not self._entered:
            raise BadInputError(
                "the session isn't open: use it inside `with Session(...) as session:`"
            )

    def _place(self) -> dict[str, Any]:
        return {
            "created_at_s": self._ledger.created_at_s,
            "rank": _rank(),
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "restarts": restart_count(),
            "batch_size": self._reader.batch_size,
            **origin(),
        }


def _said(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"[:500]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
