"""The engine's queue and policies, and that whoever waits hurries what is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckpt.engine import Engine, Job
from ckpt.pace import Pace
from ckpt.types import SystemClock

DEADLINE_S = 30.0


class PacedJob:
    """Holds the persist thread in a paced block until it is hurried."""

    def __init__(self, engine: Engine[str]) -> None:
        self.engine = engine
        self.began, self.ended = threading.Event(), threading.Event()
        self.order: list[str] = []

    def run(self) -> None:
        def pressure() -> float:
            self.began.set()
            return 0.0

        pace = Pace(1e6, 1000, pressure, SystemClock())
        with self.engine.threads.paced(pace):
            pace.wait(500)
        self.ended.set()

    def job(self, slot: str) -> Job[str]:
        return Job(self.run, self.order.append, slot)


@pytest.fixture
def engine() -> Iterator[Engine[str]]:
    engine = Engine(["a"], "block", "normal")
    yield engine
    engine.close(DEADLINE_S)


def begun(engine: Engine[str]) -> PacedJob:
    slot = engine.acquire(DEADLINE_S)
    assert slot is not None
    paced = PacedJob(engine)
    engine.submit(paced.job(slot))
    assert paced.began.wait(DEADLINE_S)
    assert not paced.ended.is_set()
    return paced


def test_waiting_for_a_slot_hurries(engine: Engine[str]) -> None:
    paced = begun(engine)
    assert engine.acquire(DEADLINE_S) == "a"
    assert paced.ended.is_set()
    engine.release("a")


def test_draining_hurries(engine: Engine[str]) -> None:
    paced = begun(engine)
    assert engine.drain(DEADLINE_S)
    assert paced.ended.is_set()


def test_closing_hurries_and_ends_every_thread(engine: Engine[str]) -> None:
    paced = begun(engine)
    assert engine.close(DEADLINE_S)
    assert paced.ended.is_set()
    for thread in (engine._thread, *engine.threads._threads):
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("policy", ["skip", "coalesce"])
def test_other_policies_hurry_nobody(policy: str) -> None:
    engine: Engine[str] = Engine(["a", "b"], policy, "normal")  # type: ignore[arg-type]
    paced = begun(engine)
    waiting = engine.acquire(DEADLINE_S)
    assert waiting == "b"
    engine.submit(Job(lambda: None, paced.order.append, waiting))
    got = engine.acquire(DEADLINE_S)
    assert not paced.ended.is_set()
    if policy == "skip":
        assert got is None
    else:
        assert got == "b"
        assert paced.order == ["a newer save took its place"]
        engine.release("b")
    assert engine.close(DEADLINE_S)


def test_draining_hurries_saves_that_have_not_begun_yet() -> None:
    engine: Engine[str] = Engine(["a", "b"], "block", "normal")
    first = begun(engine)
    slot = engine.acquire(DEADLINE_S)
    assert slot is not None
    second = PacedJob(engine)
    engine.submit(second.job(slot))
    assert engine.close(DEADLINE_S)
    assert first.ended.is_set()
    assert second.ended.is_set()


def test_a_save_that_is_being_written_when_close_gives_up_still_has_its_threads() -> None:
    engine: Engine[str] = Engine(["a"], "block", "normal")
    began, gate, wrote = threading.Event(), threading.Event(), threading.Event()

    def run() -> None:
        began.set()
        gate.wait(DEADLINE_S)
        engine.threads.start(wrote.set).result(DEADLINE_S)

    slot = engine.acquire(DEADLINE_S)
    assert slot is not None
    engine.submit(Job(run, lambda why: None, slot))
    assert began.wait(DEADLINE_S)
    assert not engine.close(0.0)
    gate.set()
    assert wrote.wait(DEADLINE_S)
    engine._thread.join(DEADLINE_S)
