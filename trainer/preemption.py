"""All ranks stop at one place when any of them is told to end.

SIGTERM reaches ranks at different moments, or only one of them. A rank that stopped where it
noticed would leave the others in a collective (ray#65183). So the ranks agree, without
collectives and at no cost to a step:

    tick     every call of `session.step()` and `session.poll()`; all ranks run the same program,
             so a tick's number means the same place on each of them
    asked    a rank that is told to end says so in the job's store; the others look every so often
    proposal each rank's watcher thread proposes the tick that its rank comes to next, and from then
             on the rank doesn't pass it before all proposals are known
    stop     the highest proposal; every rank goes on to it, and stops there

It can't deadlock: proposals come from watcher threads, whatever the main threads wait for, and a rank
that waits at its own proposal is no higher than the stop, so nobody beyond it needs it to go on.
A rank that is dead proposes nothing: after `agree_s` the others end as SIGTERM would have
ended them.

SIGTERM often reaches the workers of a loader, too, and then a rank has no batch for its last step. So that
step is begun together, as far as that can be told: a rank that has its batch, and hasn't begun, waits a
moment for those that have none yet. A rank whose loop raises can't go on to the stop, but all can still
stop at the step where it is, if its state is that of this step and the others have begun nothing beyond it:

    ready    a rank that has its batch says so; rank 0 announces that all are
    out      a rank whose loop has raised after the request says so in the job's store
    here     each rank's watcher thread answers: the step it could stop at, first of all, from now on
    stop     rank 0 announces the step of those that are out, if all can stop there; else there is none

Where there is none, and where a rank leaves by an error that nobody was asked before, the agreement is over:
SIGTERM is then the launcher's, which ends what a crash has left over (trainer.roll_call).

An error that ends the whole run, such as a root that another attempt has claimed, asks in the same way: all
ranks stop at one tick, and raise it there.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt.coordinator import Coordinator, describe
from ckpt.errors import DeadlineError, SidestageError, StorageError
from ckpt.forks import forget_in_children
from ckpt.types import Clock, SystemClock
from trainer.places import Places, where_all_stop
from trainer.roll_call import Patience, RollCall
from trainer.signals import EndSignals

_log = logging.getLogger("sidestage")

PREEMPTED = 75
"""Exit code: stopped on request, everything trained is committed. EX_TEMPFAIL: run it again."""
PREEMPTED_LATE = 76
"""Exit code: stopped on request, but the last save was not committed within the grace."""
ENDED_BY_SIGTERM = 128 + signal.SIGTERM
"""Exit code: the ranks could not agree, one of them is gone; as if SIGTERM had not been handled."""

_ASKED, _STOP = "preempt-asked", "preempt-stop"
_READY, _OUT, _HERE = "preempt-ready", "preempt-out", "preempt-here"
_POLL_S = 0.25
_POLLS_PER_S = 1000.0  # of all ranks together: what a job's store bears beside its work
_AGREE_S = 5.0
_ANSWER_S = 0.5
_TOGETHER_S = 5.0
ALONE_S = 1.0
"""For a save that a dead rank was part of: its part may be there already, and only ours be missing."""
_PARTLESS_S = 3.0
"""For earlier saves, where a rank fails instead of saving with the others."""
_FAILING = "error"
_CALLED = b"\0"  # no signal has this number


class PreemptedError(SidestageError):
    """The run was asked to end and has saved; start it again to go on."""

    exit_code = PREEMPTED


class PreemptedLateError(PreemptedError):
    """The run was asked to end, and its last save has no commit: what came after the last one is lost."""

    exit_code = PREEMPTED_LATE


@dataclass(frozen=True)
class Ask:
    """Who was told to end first, and how: a signal's name, "callback", or "error": that rank is failing.

    error: what all ranks are to raise where they stop, as a payload; None: they save and end.
    """

    rank: int
    why: str
    error: Mapping[str, Any] | None = None


class _FailingError(Exception):
    """A rank leaves by an error: nothing is left to agree on."""


class _OutError(Exception):
    """The loop of a rank has raised after the request: can all stop where it is?"""


class Flush(Protocol):
    """Wait until pending saves have ended; False if some have not within `timeout_s`."""

    def __call__(self, timeout_s: float) -> bool: ...


class Preemption:
    """Watches for the wish to end, and finds the tick at which all ranks stop.

    Args:
        coordinator: this rank's end of the job's store, for the watcher thread alone.
        grace_s: from being asked until the process must be gone.
        flush: drains pending saves. Called on the watcher thread at half of the grace, if the run has
            not stopped by then: a phase that doesn't poll must not cost what is staged already.
        when: asked every so often; True asks all ranks to end, such as at a cloud's notice.
        fatal: an error that ends the whole run, once there is one: all ranks stop, and raise it.
        signals: that ask; none where the session isn't on the main thread.
        end: ends the process at the end of the grace; os._exit by default.
        say: told of what a ledger should know.
        waiting: entered while the training thread waits for what the ranks agree on.
        agree_s: how long ranks may take to propose, before one of them counts as gone.
        answer_s: how long they may take to answer a roll call.
        together_s: how long a rank waits for the others, before it begins the last step without them.
    """

    def __init__(  # noqa: PLR0913 - the injected parts are keyword-only and have defaults
        self,
        coordinator: Coordinator,
        grace_s: float,
        flush: Flush,
        *,
        when: Callable[[], bool] | None = None,
        fatal: Callable[[], SidestageError | None] = lambda: None,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        end: Callable[[int], object] = os._exit,
        say: Callable[..., object] = lambda event, **fields: None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        clock: Clock | None = None,
        agree_s: float | None = None,
        answer_s: float | None = None,
        together_s: float = _TOGETHER_S,
    ) -> None:
        self.grace_s = grace_s
        self._talk = coordinator
        self._flush = flush
        self._when = when
        self._fatal = fatal
        self._end = end
        self._say = say
        self._clock = clock or SystemClock()
        self._poll_s = max(_POLL_S, coordinator.world_size / _POLLS_PER_S)
        self._agree_s = _AGREE_S + 2 * self._poll_s if agree_s is None else agree_s
        self._answer_s = _ANSWER_S + 2 * self._poll_s if answer_s is None else answer_s
        self._together_s = min(together_s, grace_s / 4)
        self._patience = Patience(self._poll_s, self._clock)
        self._places = Places(self._wake_up, waiting)
        self._told: Ask | None = None  # by our own signal or callback
        self.ask: Ask | None = None
        """What all ranks were asked by; None while nobody was."""
        self._heard = threading.Event()  # that somebody was asked
        self._out: _Out | None = None  # this rank's loop has raised after the request
        self._settled = threading.Event()  # whether all stop there is known, or will never be
        self._deadline_s: float | None = None
        self._saved = False
        self._failing = False  # this rank is
        self._roll = RollCall(coordinator, self._patience, self._answer_s)
        self._all_here = False
        self._called = threading.Event()  # _all_here is known, or will never be
        self._finishing = False
        self._closed = False
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.signals: EndSignals | None = None
        if signals and threading.current_thread() is threading.main_thread():
            self.signals = EndSignals(signals, self._tell, self._woken)
        forget_in_children(self)
        self._thread = threading.Thread(target=self._watch, name="sidestage-preempt", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """What is left of the grace; all of it while nobody has asked."""
        if self._deadline_s is None:
            return self.grace_s
        return max(0.0, self._deadline_s - self._clock.monotonic())

    @property
    def postponed(self) -> BaseException | None:
        """What an earlier handler of the signal raised to end this process, which waits for a save."""
        return self.signals.postponed if self.signals is not None else None

    def tick(self, step: int | None = None, *, free: bool = False) -> bool:
        """Count one place at which this rank could stop; True if all ranks stop here.

        step: the number of the step that has ended; None: the place is in a phase that trains nothing.
        free: whether the next step begins only where `begins` is called. Of a step only.
        """
        return self._places.tick(step, free=free)

    def begins(self) -> bool:
        """A step is about to begin, on the training thread; True if all ranks stop here instead."""
        return self._places.begins()

    def asked_within(self, seconds: float) -> bool:
        """Was any rank asked to end, or is one in so many seconds? Not by a fatal error."""
        self._heard.wait(seconds)
        return self.ask is not None and self.ask.error is None

    def stops_here(self, *, whole: bool) -> bool:
        """This rank's loop has raised after the request: do all ranks stop at its last step?

        whole: its state is that of the step that it counted last, and of nothing else.
        """
        if self._places.stopped or self._closed:
            return False
        self._out = _Out(whole)
        self._wake_up()
        self._settled.wait(self._longest_s)
        return whole and self._places.stops_whole()

    def saved(self) -> None:
        """All that was trained is committed: leaving may take what is left of the grace, and more."""
        self._saved = True

    def finishing(self) -> None:
        """Training has ended by itself: other ranks may be gone already, and that is no trouble."""
        self._finishing = True

    def failing(self) -> None:
        """This rank leaves by an error: ask which ranks are still there."""
        self._failing = True
        self._wake_up()

    def all_here(self) -> bool:
        """After `failing`: is every rank still there, so that pending saves can end? Waits for answers."""
        return self._called.wait(self._longest_s) and self._all_here

    def close(self) -> None:
        """Watch no more, and give signals back to whom they belonged. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.signals is not None:
            self.signals.close()
        self._wake_up()
        self._thread.join(self._longest_s)
        if not self._thread.is_alive():  # else it is in a call to a store that doesn't answer
            os.close(self._wake)
            os.close(self._woken)

    def forget(self) -> None:
        """In a forked child: the signals are its own, and nobody watches."""
        if self._closed:
            return
        self._closed = True
        if self.signals is not None:
            self.signals.close()
        os.close(self._wake)
        os.close(self._woken)
        self._wake = self._woken = -1
        self._places.forget()
        for name in ("_heard", "_settled", "_called"):  # a lock of theirs may have been held
            setattr(self, name, threading.Event())

    @property
    def _longest_s(self) -> float:
        """The watcher thread takes no longer, unless the host of the job's store vanishes silently."""
        return 2 * self._agree_s + 4 * self._answer_s

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # full, as of signals of others: it wakes as it is
            os.write(self._woken, _CALLED)

    def _tell(self, number: signal.Signals) -> None:
        self._told = self._told or Ask(self._talk.rank, number.name)
        if not self._closed:
            self._wake_up()

    # -- on the watcher thread ------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            try:
                ask = self._wait_to_be_asked()
                if ask is None:
                    return
                if ask.why == _FAILING:
                    raise _FailingError
                self.ask = ask
                if ask.error is None:
                    self._deadline_s = self._clock.monotonic() + self.grace_s
                self._heard.set()
                try:
                    self._agree(ask)
                    self._see_to_the_end()
                    return
                except _OutError:
                    self._settle()
                self._see_to_the_end()
                return
            except _FailingError:
                self._call_roll()
            self._see_to_the_end()
        except StorageError as e:  # a rank or the store's host is gone: nothing can be agreed on
            _log.warning("preemption: the ranks don't agree on where to stop: %s", e)
            self._say("preempt_failed", error=str(e))
            self._leave()
            self._see_to_the_end()
        finally:
            self._over_and_done()

    def _over_and_done(self) -> None:
        """Nobody waits for this thread any more."""
        self._places.release()
        for event in (self._heard, self._settled, self._called):
            event.set()

    def _leave(self) -> None:
        """End as SIGTERM would have ended this process, unless it is about to end by itself."""
        if not self._ends_itself():
            self._flush(ALONE_S)  # a save that all have written can be committed still
        if not self._ends_itself():
            self._end(ENDED_BY_SIGTERM)
        self._over_and_done()

    def _ends_itself(self) -> bool:
        return self._failing or self._finishing or self._closed or self._out is not None

    def _fails(self) -> bool:
        """Does this rank leave by an error, or has another one said so?"""
        if self._failing:
            return True
        heard = self._talk.peek(_ASKED)
        return heard is not None and heard["why"] == _FAILING

    def _heard_failing(self) -> bool:
        with suppress(StorageError):  # the store's host may have saved and left
            return self._fails()
        return self._failing

    def _call_roll(self) -> None:
        """A rank is failing, maybe this one; if not, this one may wait for it until SIGTERM."""
        self._places.release()
        self._settled.set()
        if self._failing:
            with suppress(StorageError):
                self._talk.announce(_ASKED, {"rank": self._talk.rank, "why": _FAILING})
        if self._deadline_s is not None and self._places.stopped and not self._failing:
            # What this rank saves where all stop is never whole: that one has no part of it.
            soon_s = self._clock.monotonic() + _PARTLESS_S
            self._deadline_s = min(self._deadline_s, soon_s)
        self._all_here = self._roll.all_here(lambda: self._closed)
        self._called.set()
        # The failing rank's saves have parts here, which are hurried.
        pending = self._all_here
        while not (self._told or self._closed):
            if pending and not self._failing:
                pending = not self._flush(self._poll_s)
            self._pause(0.0 if pending else self.grace_s)
        if self._deadline_s is None:
            self._deadline_s = self._clock.monotonic() + self.grace_s
        if pending and not self._ends_itself():
            self._flush(self.left_s)
        self._leave()

    def _wait_to_be_asked(self) -> Ask | None:
        while not self._closed:
            self._pause(self._poll_s)
            if self._failing:
                return Ask(self._talk.rank, _FAILING)
            if self._told is None and self._noticed():
                self._told = Ask(self._talk.rank, "callback")
            if (heard := self._talk.peek(_ASKED)) is not None:
                return Ask(int(heard["rank"]), str(heard["why"]), heard.get("error"))
            ask = self._told
            if ask is None and (error := self._fatal()) is not None:
                ask = Ask(self._talk.rank, str(error), describe(error))
            if ask is not None:
                said = {"rank": ask.rank, "why": ask.why, "error": ask.error}
                self._talk.announce(_ASKED, said)
                return ask
        return Ask(self._talk.rank, _FAILING) if self._failing else None

    def _noticed(self) -> bool:
        try:
            return self._when is not None and self._when()
        except Exception:  # the user's; signals must go on working
            _log.exception("preempt_when failed; it isn't asked any more")
            self._when = None
            return False

    def _agree(self, ask: Ask) -> None:
        mine = {"tick": self._places.propose()}
        if ask.error is None:
            _log.warning(
                "rank %d was asked to end (%s): all ranks stop and save, within %g s",
                *(ask.rank, ask.why, self.grace_s),
            )
        else:
            _log.error("rank %d: %s; all ranks stop", ask.rank, ask.why)
        if self._talk.rank == 0:
            told = self._patience.wait(
                lambda s: self._talk.collect(_STOP, mine, s), self._agree_s, self._given_up
            )
            stop = max(p["tick"] for p in told)
            self._talk.announce(_STOP, {"tick": stop})
        else:
            self._talk.post(_STOP, mine)
            heard = self._patience.wait(
                lambda s: self._talk.hear(_STOP, s), self._agree_s, self._given_up
            )
            stop = int(heard["tick"])
        self._places.stop_at(stop)
        self._begin_together()

    def _given_up(self) -> bool:
        if self._fails():
            raise _FailingError
        if self._is_out():
            raise _OutError
        return self._closed

    def _is_out(self) -> bool:
        """Has a rank's loop raised after the request, this one's or another's, and isn't that settled yet?"""
        if self._settled.is_set():
            return False
        return self._out is not None or self._talk.peek(_OUT) is not None

    def _begin_together(self) -> None:
        """Say that this rank has its batch, or needs none, and wait for all others, for a while."""
        until_s = self._clock.monotonic() + self._together_s
        with suppress(DeadlineError):  # some rank is slow, or asks for its batches elsewhere
            self._wait_for_batches(until_s)
        # Not where that was ended by a rank that is out: who waits has to be told where all stop.
        self._places.begin_last()

    def _wait_for_batches(self, until_s: float) -> None:
        while not (self._places.ready() or self._finishing or self._given_up()):
            if self._clock.monotonic() >= until_s:
                return
            self._pause(self._poll_s)
        left_s = max(0.0, until_s - self._clock.monotonic())
        if self._talk.rank == 0:
            self._patience.wait(lambda s: self._talk.collect(_READY, {}, s), left_s, self._given_up)
            self._talk.announce(_READY, {})
        else:
            self._talk.post(_READY, {})
            self._patience.wait(lambda s: self._talk.hear(_READY, s), left_s, self._given_up)

    def _settle(self) -> None:
        """Find out whether all ranks can stop at the step of those whose loop has raised."""
        out = self._out
        mine = self._places.least(out=out is not None, whole=out is not None and out.whole)
        if out is not None:
            self._talk.announce(_OUT, {})
        if self._talk.rank == 0:
            told = self._patience.wait(
                lambda s: self._talk.collect(_HERE, mine, s), self._agree_s, self._gone
            )
            step = where_all_stop(told)
            self._talk.announce(_HERE, {"step": step})
        else:
            self._talk.post(_HERE, mine)
            heard = self._patience.wait(
                lambda s: self._talk.hear(_HERE, s), self._agree_s, self._gone
            )
            step = heard["step"]
        if step is None:
            _log.warning(
                "preemption: a rank's loop has raised and the ranks can't all stop at its last step: "
                "what came after the last commit is lost"
            )
        self._places.settle(step)
        self._settled.set()

    def _gone(self) -> bool:
        if self._fails():
            raise _FailingError
        return self._closed

    def _see_to_the_end(self) -> None:
        """Half of the grace belongs to training, to get to the stop; the rest to what is staged."""
        self._wait_until_left(self.grace_s / 2)
        if not self._over():
            self._flush(self.left_s)
        self._wait_until_left(0.0)
        if self._over():
            return
        if self._failing:
            self._end(ENDED_BY_SIGTERM)
            return
        _log.error(
            "preemption: not stopped within the grace of %g s; steps since the last commit are lost: "
            "call session.poll() in long phases, or give a longer grace",
            self.grace_s,
        )
        self._say("preempt_late", grace_s=self.grace_s)
        self._end(PREEMPTED_LATE)

    def _wait_until_left(self, least_s: float) -> None:
        while self.left_s > least_s and not self._over():
            self._pause(min(self.left_s - least_s, self._poll_s))
            if (
                self._deadline_s is None and self._told is not None
            ):  # asked for a fatal error before
                self._deadline_s = self._clock.monotonic() + self.grace_s
            if not self._called.is_set() and self._heard_failing():
                raise _FailingError
            if self._heard_out():
                raise _OutError

    def _heard_out(self) -> bool:
        with suppress(StorageError):
            return self._is_out()
        return self._out is not None

    def _over(self) -> bool:
        return self._closed or self._saved

    def _pause(self, seconds: float) -> None:
        """Wait, or until a signal of ours came or `_wake_up` was called."""
        ours = self.signals.numbers if self.signals is not None else frozenset()
        until_s = time.monotonic() + seconds
        while select.select([self._wake], [], [], max(0.0, until_s - time.monotonic()))[0]:
            found = set(os.read(self._wake, 512))
            for number in found & ours:  # written at C level, see EndSignals
                self._told = self._told or Ask(self._talk.rank, signal.Signals(number).name)
            if found & {*ours, *_CALLED}:  # not of a profiler's timer, a thousand times a second
                return


@dataclass(frozen=True)
class _Out:
    """A loop has raised: see `Preemption.stops_here`."""

    whole: bool
