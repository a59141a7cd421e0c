"""Priorities of the write threads, on a record of what was set."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ckpt import threads as module
from ckpt.events import ListSink
from ckpt.pace import Pace
from ckpt.threads import WriteThreads, set_thread_policy, use_one_core

DEADLINE_S = 30.0


class StillClock:
    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


class Policies:
    """The last policy of each thread, instead of the system's."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def set(self, native_id: int, policy: int) -> None:
        self.of[native_id] = policy

    def all(self) -> set[int]:
        return set(self.of.values())


@pytest.fixture
def policies() -> Policies:
    return Policies()


@pytest.fixture
def clock() -> StillClock:
    return StillClock()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch, policies: Policies) -> Iterator[WriteThreads]:
    """Threads whose watchdog is the test: it calls check() itself."""
    monkeypatch.setattr(module, "_may_come_back", lambda: True)
    monkeypatch.setattr(WriteThreads, "_watch", lambda self: None)
    threads = WriteThreads(2, "idle", ListSink(), set_policy=policies.set)
    yield threads
    threads.close()


def pace(clock: StillClock, pressure: Callable[[], float] = lambda: 0.0) -> Pace:
    return Pace(10.0, 1000, pressure, clock)


def test_caller_and_writers_are_lowered_in_the_block_only(
    idle: WriteThreads, policies: Policies, clock: StillClock
) -> None:
    with idle.paced(pace(clock)):
        assert threading.get_native_id() in policies.of
        assert len(policies.of) == 3
        assert policies.all() == {os.SCHED_IDLE}
    assert policies.all() == {os.SCHED_OTHER}


def test_an_error_in_the_block_raises_them_too(
    idle: WriteThreads, policies: Policies, clock: StillClock
) -> None:
    with pytest.raises(ValueError, match="mine"), idle.paced(pace(clock)):
        raise ValueError("mine")
    assert policies.all() == {os.SCHED_OTHER}


def test_the_watchdog_raises_late_threads_and_lowers_them_once_they_are_ahead(
    idle: WriteThreads, policies: Policies, clock: StillClock
) -> None:
    p = pace(clock)
    with idle.paced(p):
        idle.check()
        assert policies.all() == {os.SCHED_IDLE}
        clock.now_s = p.slack_s + 0.01
        idle.check()
        assert policies.all() == {os.SCHED_OTHER}
        clock.now_s = p.slack_s / 2  # within the slack, but not ahead yet
        idle.check()
        assert policies.all() == {os.SCHED_OTHER}
        clock.now_s = 0.0
        idle.check()
        assert policies.all() == {os.SCHED_IDLE}


def test_hurry_raises_at_once_and_for_good(
    idle: WriteThreads, policies: Policies, clock: StillClock
) -> None:
    p = pace(clock)
    with idle.paced(p):
        idle.hurry()
        assert policies.all() == {os.SCHED_OTHER}
        assert p.hurried
        idle.check()
        assert policies.all() == {os.SCHED_OTHER}


def test_pressure_raises(idle: WriteThreads, policies: Policies, clock: StillClock) -> None:
    full = 0.0
    with idle.paced(pace(clock, lambda: full)):
        full = 0.85
        idle.check()
        assert policies.all() == {os.SCHED_OTHER}


def test_who_waits_hurries_also_the_save_that_begins_meanwhile(
    idle: WriteThreads, policies: Policies, clock: StillClock
) -> None:
    with idle.hurried():
        p = pace(clock)
        with idle.paced(p):
            assert p.hurried
            assert os.SCHED_IDLE not in policies.all()
    with idle.paced(pace(clock)):
        assert policies.all() == {os.SCHED_IDLE}


def test_normal_priority_is_left_alone(policies: Policies, clock: StillClock) -> None:
    threads = WriteThreads(2, "normal", ListSink(), set_policy=policies.set)
    p = pace(clock)
    with threads.paced(p):
        threads.check()
        threads.hurry()
        assert p.hurried
    threads.close()
    assert policies.of == {}


def test_where_idle_is_for_good_batch_is_used_and_said_once(
    idle: WriteThreads,
    policies: Policies,
    clock: StillClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_may_come_back", lambda: False)
    sink: Any = idle._sink
    for _ in range(2):
        with idle.paced(pace(clock)):
            assert policies.all() == {os.SCHED_BATCH}
        assert policies.all() == {os.SCHED_OTHER}
    assert len(sink.named("idle_priority_refused")) == 1


def test_errors_of_work_are_in_its_future_and_the_thread_goes_on() -> None:
    threads = WriteThreads(1, "normal", ListSink())

    def broken() -> None:
        raise ValueError("mine")

    assert isinstance(threads.start(broken).exception(DEADLINE_S), ValueError)
    assert threads.start(lambda: None).exception(DEADLINE_S) is None
    threads.close()


def test_the_system_lowers_and_raises_another_thread() -> None:
    """The real calls; where a thread may not come back, nothing is lowered to idle."""
    sink = ListSink()
    threads = WriteThreads(2, "idle", sink)
    started = StillClock()
    with threads.paced(pace(started)):
        mine = os.sched_getscheduler(0)
        refused = bool(sink.named("idle_priority_refused"))
        assert mine == (os.SCHED_BATCH if refused else os.SCHED_IDLE)
        threads.hurry()
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    threads.close()


def test_a_thread_that_has_ended_is_no_error() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join(DEADLINE_S)
    assert thread.native_id is not None
    set_thread_policy(thread.native_id, os.SCHED_OTHER)


def test_the_watchdog_itself_raises_a_late_save() -> None:
    """Its thread, on the system's clock: only the setting of policies is recorded."""
    raised = threading.Event()
    lowered = threading.Event()

    def record(native_id: int, policy: int) -> None:
        if policy != os.SCHED_OTHER:
            lowered.set()
        elif lowered.is_set():
            raised.set()

    clock = StillClock()
    threads = WriteThreads(1, "idle", ListSink(), set_policy=record)
    with threads.paced(pace(clock)):
        assert lowered.is_set()
        clock.now_s = 100.0
        assert raised.wait(DEADLINE_S)
    threads.close()


def test_one_core_is_a_threads_own_setting() -> None:
    def count(use: bool) -> int:
        found: list[int] = []

        def look() -> None:
            if use:
                use_one_core()
            found.append(torch.get_num_threads())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join(DEADLINE_S)
        return found[0]

    before = count(use=False)
    assert count(use=True) == 1
    assert count(use=False) == before
