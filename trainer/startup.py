"""A start as a graph of named stages: what doesn't depend on each other runs at the same time.

    start = Startup(ledger)
    start.stage("process_group_init", join)
    start.stage("preproc_creation", load_data)
    start.stage("train_module_creation", build, after=("process_group_init", "preproc_creation"))
    model = start.run()["train_module_creation"]  # build(what join returned, what load_data returned)

Each stage is a span of the ledger, so `trainer ett` shows which one the start waited for. Threads
help where a stage waits (for peers, storage, a device) or runs outside of Python; stages of plain
Python share one interpreter. Import heavy packages before: imports on two threads can meet half-made modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from ckpt.errors import BadInputError, SidestageError


class Spans(Protocol):
    """What is used of `trainer.ledger.Ledger`."""

    def span(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class _Stage:
    name: str
    run: Callable[..., Any]
    after: tuple[str, ...]
    main_thread: bool
    span: str


class Startup:
    """Stages, and the one run of them.

    Args:
        ledger: gets a span for each stage.
        threads: False runs all stages one after another on the calling thread, in the order they
            were named as far as `after` allows: the same at every start, to find a defect.
    """

    def __init__(self, ledger: Spans, *, threads: bool = True) -> None:
        self._ledger = ledger
        self._threads = threads
        self._stages: dict[str, _Stage] = {}

    def stage(
        self,
        name: str,
        run: Callable[..., Any],
        *,
        after: Sequence[str] = (),
        main_thread: bool = False,
        span: str | None = None,
    ) -> None:
        """Add a stage. It may depend on stages that are added later.

        Args:
            name: of the stage and its result.
            run: called with the results of the stages in `after`, in that order.
            after: names of the stages that must have ended.
            main_thread: call it on the thread that calls `Startup.run`. Needed where something is
                bound to a thread, such as the current CUDA device or signal handlers.
            span: the ledger's name for it, where that isn't `name`: an area of `trainer.ett.records`.
        """
        if name in self._stages:
            raise BadInputError(f"start-up stage {name!r} is there already; give each its own name")
        self._stages[name] = _Stage(name, run, tuple(after), main_thread, span or name)

    def run(self) -> Mapping[str, Any]:
        """Run all stages once; returns each one's result by name.

        The first error ends the start: no stage begins after it, those that run are waited for, and
        it is raised, saying the stage: an error of this package as the same class with the stage
        before its message, any other error as it is with a note. An interrupt of this thread
        (KeyboardInterrupt, SystemExit) waits for nothing.

        BadInputError, before anything runs, where a stage is unknown or depends on itself.
        """
        order = self._order()
        if self._threads:
            return _Parallel(self._ledger, order).run()
        results: dict[str, Any] = {}
        for stage in order:
            try:
                results[stage.name] = _call(self._ledger, stage, results)
            except Exception as e:
                raise _named(e, stage) from e.__cause__
        return results

    def _order(self) -> list[_Stage]:
        """All stages, each behind those it depends on."""
        left = dict(self._stages)
        for stage in left.values():
            if unknown := sorted(set(stage.after) - set(left)):
                raise BadInputError(
                    f"start-up stage {stage.name!r} comes after {unknown[0]!r}, which isn't a stage; "
                    f"there are {', '.join(left)}"
                )
        order: list[_Stage] = []
        while left:
            ready = next((s for s in left.values() if not set(s.after) & set(left)), None)
            if ready is None:
                raise BadInputError(f"start-up stages wait for each other: {_cycle(left)}")
            order.append(left.pop(ready.name))
        return order


class _Parallel:
    """One run on threads. Whichever thread ends a stage starts those that waited for it only."""

    def __init__(self, ledger: Spans, order: Sequence[_Stage]) -> None:
        self._ledger = ledger
        self._waiting = list(order)
        self._running = 0
        self._lock = threading.Lock()  # of all of the above and below
        self._results: dict[str, Any] = {}
        self._failed: tuple[_Stage, BaseException] | None = None
        self._stopped = False
        self._for_main: SimpleQueue[_Stage | None] = SimpleQueue()  # None: all is over

    def run(self) -> Mapping[str, Any]:
        with self._lock:
            self._start_ready()
        try:
            while (stage := self._for_main.get()) is not None:
                self._execute(stage)
        except BaseException:  # an interrupt; errors of stages are kept in _failed
            with self._lock:
                self._stopped = True
            raise
        if self._failed:
            stage, error = self._failed
            raise _named(error, stage) from error.__cause__
        return self._results

    def _start_ready(self) -> None:
        """With the lock held: start what may start, and end the run where nothing is left to wait for."""
        if not (self._failed or self._stopped):
            ready = [s for s in self._waiting if all(n in self._results for n in s.after)]
            for stage in ready:
                self._waiting.remove(stage)
                self._running += 1
                if stage.main_thread:
                    self._for_main.put(stage)
                else:
                    # A daemon, so that an interrupted start doesn't hang in a stage that waits for peers.
                    name = f"startup-{stage.name}"
                    threading.Thread(
                        target=self._execute, args=(stage,), name=name, daemon=True
                    ).start()
        if not self._running:
            self._for_main.put(None)

    def _execute(self, stage: _Stage) -> None:
        with self._lock:
            # Another stage may have failed while this one was queued for the main thread.
            skip = self._failed is not None
        result: Any = None
        error: BaseException | None = None
        if not skip:
            try:
                result = _call(self._ledger, stage, self._results)
            except Exception as e:
                error = e
            except BaseException as e:
                if stage.main_thread:
                    raise
                error = e
        with self._lock:
            self._running -= 1
            if error is None and not skip:
                self._results[stage.name] = result
            elif error is not None and self._failed is None:
                self._failed = (stage, error)
            self._start_ready()


def _call(ledger: Spans, stage: _Stage, results: Mapping[str, Any]) -> Any:
    with ledger.span(stage.span):
        return stage.run(*(results[name] for name in stage.after))


def _named(error: BaseException, stage: _Stage) -> BaseException:
    """The error, saying in which stage it was."""
    if isinstance(error, SidestageError):
        named = type(error)(f"start-up stage {stage.name}: {error}")
        return named.with_traceback(error.__traceback__)
    error.add_note(f"in the start-up stage {stage.name}")
    return error


def _cycle(left: Mapping[str, _Stage]) -> str:
    """One circle among stages that each wait for another one of them, as `a -> b -> a`."""
    seen = [next(iter(left))]
    while True:
        after = next(n for n in left[seen[-1]].after if n in left)
        if after in seen:
            return " -> ".join([*seen[seen.index(after) :], after])
        seen.append(after)
