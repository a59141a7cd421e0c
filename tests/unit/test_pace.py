"""Pacing on a clock that only waiting moves."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckpt.pace import Pace
from ckpt.types import SystemClock

DEADLINE_S = 30.0


class Timeline:
    """A clock, and the pauses that move it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.full = 0.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def pace(self, target_s: float, total_bytes: int = 1000, **options: Any) -> Pace:
        return Pace(target_s, total_bytes, lambda: self.full, self, pause=self.pause, **options)

    @property
    def passed_s(self) -> float:
        return self.now_s - 100.0


@pytest.fixture
def line() -> Timeline:
    return Timeline()


def test_blocks_are_spread_evenly(line: Timeline) -> None:
    pace, at = line.pace(10.0), []
    for done in range(0, 1000, 100):
        pace.wait(done)
        at.append(line.passed_s)
    assert at == pytest.approx([float(n) for n in range(10)])


def test_time_that_copying_takes_counts(line: Timeline) -> None:
    pace = line.pace(10.0)
    line.now_s += 0.7  # the first block
    pace.wait(100)
    assert line.passed_s == pytest.approx(1.0)
    line.now_s += 3.5  # a slow one: the next are due already
    pace.wait(200)
    pace.wait(300)
    assert line.passed_s == pytest.approx(4.5)
    pace.wait(500)
    assert line.passed_s == pytest.approx(5.0)


def test_as_fast_as_possible_never_waits(line: Timeline) -> None:
    pace = line.pace(0.0)
    for done in range(0, 1000, 100):
        pace.wait(done)
    assert line.passed_s == 0.0


def test_pressure_shortens_what_is_left(line: Timeline) -> None:
    pace = line.pace(10.0)
    pace.wait(500)
    assert line.passed_s == pytest.approx(5.0)
    line.full = 0.4
    pace.wait(1000)
    assert line.passed_s == pytest.approx(5.0 + 5.0 * 0.6)


def test_pressure_that_rises_during_a_wait_ends_it(line: Timeline) -> None:
    pace = Pace(100.0, 1000, lambda: line.full, line, pause=lambda s: line_up(line, s))
    pace.wait(1000)
    assert line.passed_s < 1.0
    assert pace.hurried


def line_up(line: Timeline, seconds: float) -> None:
    line.pause(seconds)
    line.full += 0.1


def test_hurry_ends_all_waiting_but_the_limit(line: Timeline) -> None:
    pace = line.pace(1000.0, limit_bytes_per_s=100)
    pace.hurry()
    pace.wait(500)
    assert line.passed_s == pytest.approx(5.0)
    pace.wait(700)
    assert line.passed_s == pytest.approx(7.0)


def test_the_limit_gives_no_burst_after_lost_time(line: Timeline) -> None:
    pace = line.pace(0.0, limit_bytes_per_s=100)
    pace.wait(100)
    line.now_s += 50.0
    pace.wait(200)
    start = line.now_s
    pace.wait(300)
    pace.wait(400)
    assert line.now_s - start == pytest.approx(2.0)


def test_close_ends_even_the_limit(line: Timeline) -> None:
    pace = line.pace(1000.0, limit_bytes_per_s=1)
    pace.close()
    pace.wait(1000)
    assert line.passed_s == 0.0
    assert pace.hurried


def test_late_is_measured_against_the_plan(line: Timeline) -> None:
    pace = line.pace(10.0)
    pace.wait(100)
    assert pace.late_s == pytest.approx(0.0)
    line.now_s += 0.5
    assert pace.late_s == pytest.approx(0.5)
    assert pace.late_s < pace.slack_s
    line.now_s += 2.0
    assert pace.late_s > pace.slack_s


def test_an_unpaced_save_is_late_below_a_quarter_of_a_gigabyte_a_second(line: Timeline) -> None:
    pace = line.pace(0.0, 1 << 30)
    line.now_s += 4.0
    pace.wait(1 << 30)
    assert pace.late_s == pytest.approx(0.0)


def test_a_limit_slower_than_the_target_is_not_late(line: Timeline) -> None:
    pace = line.pace(1.0, limit_bytes_per_s=10)
    pace.wait(500)
    assert line.passed_s == pytest.approx(50.0)
    assert pace.late_s == pytest.approx(0.0)


@pytest.mark.parametrize("end", ["hurry", "close"])
def test_another_thread_ends_a_real_wait_at_once(end: str) -> None:
    waiting = threading.Event()

    def pressure() -> float:
        waiting.set()
        return 0.0

    pace = Pace(1e6, 1000, pressure, SystemClock())
    thread = threading.Thread(target=pace.wait, args=(500,))
    thread.start()
    assert waiting.wait(DEADLINE_S)
    getattr(pace, end)()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    getattr(pace, end)()  # again is no error
