"""The loop that publishes commits as they appear, until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.errors import NotFoundError, SidestageError, StorageError
from ckpt.events import LogSink
from ckpt.types import Clock, EventSink, SystemClock
from publisher.gates import GateError
from publisher.lease import LeaseLostError, told
from publisher.publish import Outcome, Publisher
from publisher.records import Source, source_of

Wait = Callable[[float], bool]
"""Waits so many seconds; True, at once, when it is time to stop. Like threading.Event.wait."""


@dataclass(frozen=True)
class Pace:
    """Seconds between looks at the root, and the longest wait after failures."""

    interval_s: float = 1.0
    max_backoff_s: float = 60.0

    def backoff_s(self, failures: int) -> float:
        return min(self.interval_s * 2.0**failures, self.max_backoff_s)


class Daemon:
    """Publishes the newest commit, again and again.

    When it is behind it takes the newest commit and skips those between. A commit that a gate
    refused is tried again after a growing pause and, after so many attempts, given up; the
    next older one is tried meanwhile, and newer ones go first. While another publisher holds the
    lease it only waits for it.

    Args:
        open_publisher: opens the root; NotFoundError while there is none yet.
        wait: sleeps, and says when to stop.
        pace, clock, sink: intervals, time, events.
        after: called with each version that was made; it must return at once.
    """

    def __init__(  # noqa: PLR0913 - all but the first two have defaults and are keyword-only
        self,
        open_publisher: Callable[[], Publisher],
        wait: Wait,
        *,
        pace: Pace | None = None,
        clock: Clock | None = None,
        sink: EventSink | None = None,
        after: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._open = open_publisher
        self._wait = wait
        self._pace = pace or Pace()
        self._clock = clock or SystemClock()
        self._sink = sink or LogSink()
        self._publisher: Publisher | None = None
        self._after = after
        self._failures = 0
        self._led = False
        self._refused: dict[Source, tuple[int, float]] = {}
        self._done: tuple[object, ...] | None = None
        self._told: set[str] = set()

    def run(self) -> None:
        """Work until `wait` says stop. What was begun is finished first.

        Raises BadInputError if the root or the registry can't be what it is said to be; all
        other failures are told and tried again.
        """
        pause_s = 0.0
        while not self._wait(pause_s):
            self.tick()
            failing = self._failures > 0
            pause_s = self._pace.backoff_s(self._failures) if failing else self._pace.interval_s

    def tick(self) -> Outcome | None:
        """One look at the root: what was published, if anything."""
        try:
            if self._publisher is None:
                self._publisher = self._open()
        except NotFoundError as e:
            self._tell_once("waiting_for_root", str(e))
            return None
        except StorageError as e:
            self._failed(e)
            return None
        try:
            if not self._leads(self._publisher):
                self._failures = 0
                return None
            outcome = self._publish_newest(self._publisher)
        except LeaseLostError as e:
            self._lose(str(e))
            return None
        except SidestageError as e:
            self._failed(e)
            return None
        self._failures = 0
        return outcome

    def _leads(self, publisher: Publisher) -> bool:
        """Is this the one publisher that works? If not, say once whose turn it is."""
        lease = publisher.lease
        if lease is None:
            return True
        if lease.held:
            lease.check()
            return True
        if self._led:
            self._lose("another publisher has taken over")
        if lease.acquire():
            self._led, self._done = True, None
            self._sink.emit("lease_taken", epoch=lease.epoch)
            return True
        if lease.rival is not None:
            self._tell_once("standby", f"{told(lease.rival)} publishes")
        return False

    def _lose(self, reason: str) -> None:
        """Another publisher goes on with the work: be a candidate again."""
        if self._publisher is not None and self._publisher.lease is not None:
            self._publisher.lease.forget()
        self._led, self._done = False, None
        self._refused.clear()
        self._sink.emit("lease_lost", reason=reason)

    def _publish_newest(self, publisher: Publisher) -> Outcome | None:
        state = publisher.root_state()
        if state == self._done:
            return None  # nothing came since all was done: no record need be read again
        self._done = None
        commits = publisher.catalog.commits()
        for info in commits:
            if info.record is None:
                self._tell_once("commit_corrupt", f"step {info.ref.step}: {info.problem}")
        candidates = publisher.candidates(commits)
        outcome, waiting = None, False
        for tried, info in enumerate(candidates):
            assert info.record is not None
            source = source_of(info.record, info.ref)
            if publisher.given_up(source):
                continue
            attempts, not_before = self._refused.get(source, (0, 0.0))
            if attempts and self._clock.monotonic() < not_before:
                waiting = True
                continue
            if tried and self._wait(0.0):
                return None
            try:
                outcome = publisher.publish(info, "newest commit")
            except GateError:
                waiting = True
                pause_s = self._pace.backoff_s(attempts + 1)
                self._refused[source] = (attempts + 1, self._clock.monotonic() + pause_s)
                continue
            self._prune(publisher)
            if self._after is not None:
                self._after(outcome)
            if older := len(candidates) - tried - 1:
                self._sink.emit("commits_skipped", count=older, before_step=source.step)
            break
        if not waiting:
            self._done = state
            self._refused.clear()
        return outcome

    def _prune(self, publisher: Publisher) -> None:
        """What isn't deleted now is deleted after the next version: it stops nobody."""
        try:
            publisher.prune()
        except LeaseLostError:
            raise
        except SidestageError as e:
            self._sink.emit("deleting_failed", reason=str(e))

    def _failed(self, error: SidestageError) -> None:
        self._failures += 1
        self._sink.emit("publish_failed", reason=str(error), failures=self._failures)

    def _tell_once(self, event: str, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            self._sink.emit(event, reason=reason)
