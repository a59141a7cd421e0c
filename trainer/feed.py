"""A reader's batches as training takes them: timed, and read anew where a request to end has broken it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from ckpt.types import Clock
from trainer.ledger import Ledger
from trainer.signals import EndSignals

B_co = TypeVar("B_co", covariant=True)

_log = logging.getLogger("sidestage")
_NO_BATCH: Any = object()
_TRIES = 2  # again


class Source(Protocol[B_co]):
    """What is used of a `trainer.Reader`."""

    @property
    def position(self) -> int: ...
    def seek(self, position: int) -> None: ...
    def __iter__(self) -> Iterator[B_co]: ...


class Feed(Generic[B_co]):
    """Batches for the training thread, or for a thread that reads ahead of it.

    Args:
        reader: of which `position` and `seek` must agree with what it hands out.
        ledger: told of the first batch and of waits.
        asked: was a rank asked to end, or is one in a moment? Then a reader's error is mostly that of
            workers which the same signal has ended.
        signals: those of the session, once it is open and if it handles any.
    """

    def __init__(
        self,
        reader: Source[B_co],
        ledger: Ledger,
        clock: Clock,
        asked: Callable[[], bool],
        signals: Callable[[], EndSignals | None],
    ) -> None:
        self._reader = reader
        self._ledger = ledger
        self._clock = clock
        self._asked = asked
        self._signals = signals
        self._began = False

    def batches(self) -> Iterator[B_co]:
        """From the reader's position to the end that it gives.

        Where it fails after the request it is iterated anew, from the position that it had.
        """
        batches, tries = iter(self._reader), 0
        while True:
            position = self._reader.position
            try:
                batch = self._next(batches)
            except Exception as e:
                tries += 1
                if tries > _TRIES or not self._ledger.on_training_thread or not self._asked():
                    raise
                _log.warning("asked to end, and the reader failed (%r); it is iterated anew", e)
                batches = iter(())
                _let_go(e)  # what the failed iterator had, such as its workers, goes first
                if (signals := self._signals()) is not None:
                    signals.worker_error = None
                self._reader.seek(position)
                batches = iter(self._reader)
                continue
            if batch is _NO_BATCH:
                return
            tries = 0
            yield batch

    def _next(self, batches: Iterator[B_co]) -> Any:
        """The next batch, or _NO_BATCH."""
        if not self._ledger.on_training_thread:  # the reader is ahead, and nobody waits
            return next(batches, _NO_BATCH)
        with self._between_steps():
            if not self._began:
                with self._ledger.span("get_first_batch_data"):
                    batch = next(batches, _NO_BATCH)
                self._began = batch is not _NO_BATCH
                return batch
            asked_s = self._clock.monotonic()
            try:
                return next(batches, _NO_BATCH)
            finally:
                self._ledger.waited("data", self._clock.monotonic() - asked_s)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Here an error of a worker's end does no harm, and what was kept of one is raised."""
        signals = self._signals()
        if signals is None:
            yield
            return
        signals.between_steps = True
        try:
            error, signals.worker_error = signals.worker_error, None
            if error is not None:
                raise error
            yield
            signals.hold_worker_errors()  # a loader installs its handler when it begins
        finally:
            signals.between_steps = False


def _let_go(error: BaseException | None) -> None:
    """Drop the frames that an error and those behind it hold."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
