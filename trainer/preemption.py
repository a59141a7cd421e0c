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
ended them. A rank that leaves by an error ends the agreement at once: SIGTERM is then the launcher's,
which ends what a crash has left over (trainer.roll_call).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from ckpt.coordinator import Coordinator
from ckpt.errors import SidestageError, StorageError
from ckpt.types import Clock, SystemClock
from trainer.roll_call import Patience, RollCall

_log = logging.getLogger("sidestage")

PREEMPTED = 75
"""Exit code: stopped on request, everything trained is committed. EX_TEMPFAIL: run it again."""
PREEMPTED_LATE = 76
"""Exit code: stopped on request, but the last save was not committed within the grace."""
ENDED_BY_SIGTERM = 128 + signal.SIGTERM
"""Exit code: the ranks could not agree, one of them is gone; as if SIGTERM had not been handled."""

_ASKED, _STOP = "preempt-asked", "preempt-stop"
_POLL_S = 0.25
_POLLS_PER_S = 1000.0  # of all ranks together: what a job's store bears beside its work
_AGREE_S = 5.0
_ANSWER_S = 0.5
ALONE_S = 1.0
"""For a save that a dead rank was part of: its part may be there already, and only ours be missing."""
_FAILING = "error"


class PreemptedError(SidestageError):
    """The run was asked to end and has saved; start it again to go on."""

    exit_code = PREEMPTED


class PreemptedLateError(PreemptedError):
    """The run was asked to end, and its last save has no commit: what came after the last one is lost."""

    exit_code = PREEMPTED_LATE


@dataclass(frozen=True)
class Ask:
    """Who was told to end first, and how: a signal's name, "callback", or "error": that rank is failing."""

    rank: int
    why: str


class _FailingError(Exception):
    """A rank leaves by an error: nothing is left to agree on."""


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
        signals: that ask; none where the session isn't on the main thread.
        end: ends the process at the end of the grace; os._exit by default.
        say: told of what a ledger should know.
        agree_s: how long ranks may take to propose, before one of them counts as gone.
        answer_s: how long they may take to answer a roll call.
    """

    def __init__(  # noqa: PLR0913 - the injected parts are keyword-only and have defaults
        self,
        coordinator: Coordinator,
        grace_s: float,
        flush: Flush,
        *,
        when: Callable[[], bool] | None = None,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        end: Callable[[int], object] = os._exit,
        say: Callable[..., object] = lambda event, **fields: None,
        clock: Clock | None = None,
        agree_s: float | None = None,
        answer_s: float | None = None,
    ) -> None:
        self.grace_s = grace_s
        self._talk = coordinator
        self._flush = flush
        self._when = when
        self._end = end
        self._say = say
        self._clock = clock or SystemClock()
        self._poll_s = max(_POLL_S, coordinator.world_size / _POLLS_PER_S)
        self._agree_s = _AGREE_S + 2 * self._poll_s if agree_s is None else agree_s
        self._answer_s = _ANSWER_S + 2 * self._poll_s if answer_s is None else answer_s
        self._patience = Patience(self._poll_s, self._clock)
        self._lock = threading.Lock()
        self._ticks = 0
        self._proposal: int | None = None
        self._stop: int | None = None
        self._known = threading.Event()  # the stop is known, or will never be
        self._told: Ask | None = None  # by our own signal or callback
        self.ask: Ask | None = None
        """What all ranks were asked by; None while nobody was."""
        self.postponed: BaseException | None = None
        """What an earlier handler of the signal raised to end this process, which waits for a save."""
        self._deadline_s: float | None = None
        self._saved = False
        self._failing = False  # this rank is
        self._roll = RollCall(coordinator, self._patience, self._answer_s)
        self._all_here = False
        self._called = threading.Event()  # _all_here is known, or will never be
        self._finishing = False
        self._closed = False
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: Mapping[signal.Signals, Any] = {}
        self._old_fd = -1
        if signals and threading.current_thread() is threading.main_thread():
            self._handle(signals)
        self._thread = threading.Thread(target=self._watch, name="sidestage-preempt", daemon=True)
        self._thread.start()

    @property
    def left_s(self) -> float:
        """What is left of the grace; all of it while nobody has asked."""
        if self._deadline_s is None:
            return self.grace_s
        return max(0.0, self._deadline_s - self._clock.monotonic())

    def tick(self) -> bool:
        """Count one place at which this rank could stop; True if all ranks stop here."""
        with self._lock:
            self._ticks += 1
            if self._proposal is None or self._ticks < self._proposal:
                return False
        self._known.wait()
        return self._stop is not None and self._ticks >= self._stop

    def saved(self) -> None:
        """All that was trained is committed: leaving may take what is left of the grace, and more."""
        self._saved = True

    def finishing(self) -> None:
        """Training has ended by itself: other ranks may be gone already, and that is no trouble."""
        self._finishing = True

    def failing(self) -> None:
        """This rank leaves by an error: ask which ranks are still there."""
        self._failing = True
        os.write(self._woken, b"\0")

    def all_here(self) -> bool:
        """After `failing`: is every rank still there, so that pending saves can end? Waits for answers."""
        return self._called.wait(self._longest_s) and self._all_here

    def close(self) -> None:
        """Watch no more, and give signals back to whom they belonged. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for number, handler in self._before.items():
            # None is a handler that C code installed: it can't be given back from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._before:
            signal.set_wakeup_fd(self._old_fd)
        os.write(self._woken, b"\0")
        self._thread.join(self._longest_s)
        if not self._thread.is_alive():  # else it is in a call to a store that doesn't answer
            os.close(self._wake)
            os.close(self._woken)

    @property
    def _longest_s(self) -> float:
        """The watcher thread takes no longer, unless the host of the job's store vanishes silently."""
        return self._agree_s + 4 * self._answer_s

    def _handle(self, signals: tuple[signal.Signals, ...]) -> None:
        self._before = {number: signal.getsignal(number) for number in signals}
        # Python's handlers run on the main thread, which may be in a collective that never ends; the
        # descriptor is written to at once. It is left alone where somebody else has one.
        self._old_fd = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        if self._old_fd != -1:
            signal.set_wakeup_fd(self._old_fd)
        for number in signals:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._tell(signal.Signals(number))
        before = self._before[signal.Signals(number)]
        if callable(before):
            try:
                before(number, frame)
            except (SystemExit, KeyboardInterrupt) as e:  # Ray's handler does; the save goes first
                self.postponed = e.with_traceback(None)  # its frames hold the training's tensors

    def _tell(self, number: signal.Signals) -> None:
        self._told = self._told or Ask(self._talk.rank, number.name)
        if not self._closed:
            os.write(self._woken, b"\0")

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
                self._deadline_s = self._clock.monotonic() + self.grace_s
                self._agree(ask)
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
            self._known.set()
            self._called.set()

    def _leave(self) -> None:
        """End as SIGTERM would have ended this process, unless it is about to end by itself."""
        if not self._ends_itself():
            self._flush(ALONE_S)  # a save that all have written can be committed still
        if not self._ends_itself():
            self._end(ENDED_BY_SIGTERM)
        self._known.set()
        self._called.set()

    def _ends_itself(self) -> bool:
        return self._failing or self._finishing or self._closed

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
        self._known.set()
        if self._failing:
            with suppress(StorageError):
                self._talk.announce(_ASKED, {"rank": self._talk.rank, "why": _FAILING})
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
                return Ask(int(heard["rank"]), str(heard["why"]))
            if self._told is not None:
                self._talk.announce(_ASKED, {"rank": self._told.rank, "why": self._told.why})
                return self._told
        return Ask(self._talk.rank, _FAILING) if self._failing else None

    def _noticed(self) -> bool:
        try:
            return self._when is not None and self._when()
        except Exception:  # the user's; signals must go on working
            _log.exception("preempt_when failed; it isn't asked any more")
            self._when = None
            return False

    def _agree(self, ask: Ask) -> None:
        with self._lock:
            self._proposal = self._ticks + 1
        _log.warning(
            "rank %d was asked to end (%s): all ranks stop and save, within %g s",
            *(ask.rank, ask.why, self.grace_s),
        )
        mine = {"tick": self._proposal}
        if self._talk.rank == 0:
            told = self._patience.wait(
                lambda s: self._talk.collect(_STOP, mine, s), self._agree_s, self._given_up
            )
            ticks = [p["tick"] for p in told]
            self._talk.announce(_STOP, {"tick": max(ticks)})
            self._stop = max(ticks)
        else:
            self._talk.post(_STOP, mine)
            heard = self._patience.wait(
                lambda s: self._talk.hear(_STOP, s), self._agree_s, self._given_up
            )
            self._stop = int(heard["tick"])
        self._known.set()

    def _given_up(self) -> bool:
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
            if not self._called.is_set() and self._heard_failing():
                raise _FailingError

    def _over(self) -> bool:
        return self._closed or self._saved

    def _pause(self, seconds: float) -> None:
        """Wait, or until a signal came or `close` was called."""
        if not select.select([self._wake], [], [], max(0.0, seconds))[0]:
            return
        for number in os.read(self._wake, 512):
            if number in {int(n) for n in self._before}:  # written at C level, see _handle
                self._told = self._told or Ask(self._talk.rank, signal.Signals(number).name)
