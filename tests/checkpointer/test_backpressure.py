"""Stores that are slow, down, or hang: training goes on, memory is bounded, counts add up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from ckpt import CheckpointConfig, Checkpointer
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, SaveSkippedError, StorageError
from ckpt.events import ListSink, chain
from ckpt.metrics import PrometheusSink
from ckpt.restore import CheckpointReader
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.protocol import ObjectWriter
from ckpt.types import Buffer, ObjectInfo
from tests.checkpointer.ranks import on_ranks, values
from tests.faults import FaultyStorage

POLICIES = [("block", 1), ("block", 3), ("skip", 1), ("skip", 2), ("coalesce", 2)]


class FakeClock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


class DownStore(MemoryStorage):
    """Refuses every write while `clock` is between two times."""

    def __init__(self, clock: FakeClock, from_s: float, to_s: float) -> None:
        super().__init__()
        self._clock, self._from_s, self._to_s = clock, from_s, to_s

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        self._check(key)
        return super().create(key, data)

    def writer(self, key: str) -> AbstractContextManager[ObjectWriter]:
        self._check(key)
        return super().writer(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._check(prefix)
        return super().list(prefix)

    def _check(self, key: str) -> None:
        if self._from_s <= self._clock.now_s < self._to_s:
            raise StorageError(f"{key}: 503, the store is down")


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((2000,), float(step)), "step": step}


def check_counts(c: Checkpointer, saves: int) -> None:
    stats = c.stats
    assert stats.commits + stats.failed + stats.skipped == saves
    assert len(stats.blocked_s) == saves


def check_commits(storage: Any) -> list[int]:
    """Each commit holds the state of its own step; the steps."""
    infos = Catalog(storage).commits()
    for info in infos:
        assert info.record is not None
        reader = CheckpointReader(storage, info.record)
        assert reader.values()["step"] == info.ref.step
        assert reader.read("w").unique().tolist() == [info.ref.step]
    return [i.ref.step for i in infos]


def arena_bytes(c: Checkpointer) -> int:
    """Host memory of all arenas, once nothing is pending."""
    return sum(a.capacity_bytes for a in c._engine._free)


@pytest.mark.parametrize(("policy", "pending"), POLICIES)
def test_d07_saving_every_step_under_each_policy(policy: Any, pending: int) -> None:
    storage, saves = MemoryStorage(), 40
    config = CheckpointConfig(when_busy=policy, max_pending=pending)
    with Checkpointer(storage, config) as c:
        most = 0
        for step in range(1, saves + 1):
            c.save(step, state(step))
            most = max(most, c._engine.pending)
        c.wait()
        assert most <= pending
        check_counts(c, saves)
        assert c.stats.failed == 0
        assert c.stats.commits == saves or policy != "block"
        assert arena_bytes(c) <= pending * 8192
        steps = check_commits(storage)
        assert len(steps) == c.stats.commits
        assert policy != "coalesce" or steps[-1] == saves, "the newest is what coalescing keeps"


@pytest.mark.parametrize(("policy", "pending"), POLICIES)
def test_a_slow_store_bounds_what_is_pending(policy: Any, pending: int) -> None:
    """The store stands still at its first write until many saves were due."""
    faulty, saves = FaultyStorage(MemoryStorage()), 12
    gate = faulty.on("write", "*000001/r00000.bin").block()
    config = CheckpointConfig(when_busy=policy, max_pending=pending)
    with Checkpointer(faulty, config) as c:
        handles = [c.save(1, state(1))]
        gate.wait_reached()
        if policy == "block":
            threading.Timer(0.05, gate.open).start()  # the trainer waits for a slot
        for step in range(2, saves + 1):
            handles.append(c.save(step, state(step)))
            assert c._engine.pending <= pending
        gate.open()
        c.wait()
        check_counts(c, saves)
        expected = {"block": saves, "skip": pending, "coalesce": pending}[policy]
        assert c.stats.commits == expected
        assert c.stats.skipped == saves - expected
        assert arena_bytes(c) <= pending * 8192
    steps = check_commits(faulty)
    assert steps == [h.step for h in handles if h.committed.exception() is None]
    assert steps[-1] == {"block": saves, "skip": pending, "coalesce": saves}[policy]


@pytest.mark.parametrize(("policy", "pending"), POLICIES)
def test_a_store_that_is_down_for_a_minute_costs_the_saves_of_that_minute(
    policy: Any, pending: int
) -> None:
    clock, sink = FakeClock(), ListSink()
    storage = DownStore(clock, 1005.0, 1065.0)
    config = CheckpointConfig(when_busy=policy, max_pending=pending)
    with Checkpointer(storage, config, clock=clock, sink=sink) as c:
        for step in range(1, 101):  # a step a second, a save every fifth
            clock.now_s = 999.0 + step
            if step % 5 == 0:
                handle = c.save(step, state(step))
                error = handle.committed.exception(60)
                assert (error is not None) == (6 <= step < 66), f"step {step}: {error}"
                assert error is None or "503, the store is down" in str(error)
        check_counts(c, 20)
        assert (c.stats.commits, c.stats.failed) == (8, 12)
        assert arena_bytes(c) <= pending * 8192
    assert [e["step"] for e in sink.named("save_failed")] == [*range(10, 70, 5)]
    assert check_commits(storage) == [5, 70, 75, 80, 85, 90, 95, 100]
    listed = {o.key.split("/")[1][7:19] for o in storage.list("data/")}
    assert len(listed) == 8, "what failed saves left is swept"


@pytest.mark.parametrize("op", ["writer", "write", "finish", "create"])
@pytest.mark.parametrize("policy", ["block", "skip"])
def test_a_store_that_hangs_until_released(op: str, policy: Any) -> None:
    """A save during a save: it waits or is skipped; after the release all goes on."""
    faulty = FaultyStorage(MemoryStorage())
    key = "commits/*" if op == "create" else "*000001/r00000.bin"
    gate = faulty.on(op, key).block()
    config = CheckpointConfig(when_busy=policy, commit_timeout_s=0.2)
    with Checkpointer(faulty, config) as c:
        first = c.save(1, state(1))
        gate.wait_reached()
        second = c.save(2, state(2))  # by "block": no slot within 0.2 s
        assert isinstance(second.committed.exception(1), SaveSkippedError)
        assert second.blocked_s < 20
        gate.open()
        assert first.committed.exception(60) is None
        c.wait()
        assert c.save(3, state(3)).committed.result(60).step == 3
        check_counts(c, 3)
    assert check_commits(faulty) == [1, 3]


def test_close_gives_up_at_its_deadline_with_a_store_that_hangs() -> None:
    faulty, sink = FaultyStorage(MemoryStorage()), ListSink()
    gate = faulty.on("write", "*000001/r00000.bin").block()
    config = CheckpointConfig(max_pending=3, close_timeout_s=0.2)
    c = Checkpointer(faulty, config, sink=sink)
    handles = [c.save(step, state(step)) for step in (1, 2, 3)]
    gate.wait_reached()
    c.close()
    waiting = [h.committed.exception(60) for h in handles[1:]]
    assert all("close() gave up after 0.2 s" in str(e) for e in waiting)
    assert "close() gave up waiting" in str(sink.named("save_failed"))
    gate.open()
    assert handles[0].committed.result(60).step == 1, "what was being written goes on alone"


def test_failures_of_the_outage_are_reported_once_by_policy() -> None:
    clock = FakeClock()
    storage = DownStore(clock, 1000.5, 1060.0)
    config = CheckpointConfig(raise_after_failures=3)
    with Checkpointer(storage, config, clock=clock) as c:
        c.save(1, state(1)).committed.result(60)
        clock.now_s = 1001.0
        for step in (2, 3, 4):
            assert c.save(step, state(step)).committed.exception(60)
        with pytest.raises(Exception, match="3 saves in a row failed"):
            c.save(5, state(5))
        clock.now_s = 1061.0
        assert c.save(6, state(6)).committed.result(60).step == 6
    assert check_commits(storage) == [1, 6]


def test_case_e43_a_skipped_save_is_told_as_one_that_took_no_snapshot() -> None:
    faulty, sink, registry = FaultyStorage(MemoryStorage()), ListSink(), CollectorRegistry()
    gate = faulty.on("writer", "*000001/r00000.bin").block()
    config = CheckpointConfig(when_busy="skip")
    with Checkpointer(faulty, config, sink=chain(sink, PrometheusSink(registry))) as c:
        c.save(1, state(1))
        gate.wait_reached()
        skipped = c.save(2, state(2))
        assert skipped.staged.done()
        gate.open()
        c.wait()
        # Another rank, or `coalesce`, gives up a save that was staged here: its event has no blocked_s.
        faulty.on("writer", "*000003/*").fail(StorageError("no room"))
        c.save(3, state(3))
        c.wait()
    assert [e["step"] for e in sink.named("save_staged")] == [1, 3]
    (told,) = sink.named("save_skipped")
    assert told == {
        "step": 2,
        "error": "step 2: skipped, 1 earlier saves are pending",
        "blocked_s": skipped.blocked_s,
    }
    found = {
        name: registry.get_sample_value(f"sidestage_{name}")
        for name in ("save_blocked_seconds_count", "saves_skipped_total", "pending_saves")
    }
    assert found == {
        "save_blocked_seconds_count": 3,
        "saves_skipped_total": 1,
        "pending_saves": 0,
    }


def test_a_skipped_step_can_be_saved_again_and_a_saved_one_can_not() -> None:
    faulty, registry = FaultyStorage(MemoryStorage()), CollectorRegistry()
    gate = faulty.on("writer", "*000001/r00000.bin").block()
    sink = PrometheusSink(registry)
    with Checkpointer(faulty, CheckpointConfig(when_busy="skip"), sink=sink) as c:
        c.save(1, state(1))
        gate.wait_reached()
        for _ in range(2):
            assert isinstance(c.save(2, state(2)).committed.exception(), SaveSkippedError)
        gate.open()
        c.wait()
        assert registry.get_sample_value("sidestage_pending_saves") == 0
        handle = c.save(2, state(2))
        with pytest.raises(BadInputError, match="the last one was step 2; steps must rise"):
            c.save(2, state(2))
        assert handle.committed.result(60).step == 2
        for step in (1, 2):
            with pytest.raises(BadInputError, match="the last one was step 2; steps must rise"):
                c.save(step, state(step))
        check_counts(c, 4)
    assert check_commits(faulty) == [1, 2]


@pytest.mark.parametrize("policy", ["skip", "coalesce"])
def test_a_step_that_one_rank_skipped_is_saved_again_by_all(policy: Any) -> None:
    """Rank 0 has written its part by then, under another name."""
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("writer", "*000001/r00001.bin").block()

    def body(rank: int, place: dict[str, Any]) -> list[int]:
        pending = 2 if policy == "coalesce" else 1
        config = CheckpointConfig(when_busy=policy, max_pending=pending if rank else 4)
        with Checkpointer(faulty, config, **place) as c:
            for step in (1, 2, 3):
                c.save(step, state(step))
                if rank and step == 1:
                    gate.wait_reached()
            if rank:
                gate.open()
            c.wait()
            if policy == "skip":  # coalescing gave step 2 up, and kept the newest
                assert c.stats.skipped == 2
                c.save(3, state(3))
                c.wait()
            assert c.stats.last_commit is not None
            assert c.stats.last_commit.step == 3
            return [c.stats.commits, c.stats.skipped, c.stats.failed]

    expected = [2, 2, 0] if policy == "skip" else [2, 1, 0]
    assert values(on_ranks(2, body)) == [expected] * 2
    assert check_commits(faulty) == [1, 3]


@pytest.mark.parametrize("policy", ["block", "coalesce"])
@pytest.mark.parametrize("slow", [0, 1])
def test_case_e39_one_ranks_slow_store_holds_training_up_once_and_all_skip_alike(
    policy: Any, slow: int
) -> None:
    faulty, sinks = FaultyStorage(MemoryStorage()), [ListSink(), ListSink()]
    gate = faulty.on("writer", f"*000001/r0000{slow}.bin").block()
    passed = threading.Barrier(2)

    def body(rank: int, place: dict[str, Any]) -> list[int]:
        pending = 2 if policy == "coalesce" else 1
        config = CheckpointConfig(when_busy=policy, max_pending=pending, stall_limit_s=0.1)
        with Checkpointer(faulty, config, sink=sinks[rank], **place) as c:
            handles = [c.save(1, state(1))]
            gate.wait_reached()
            handles += [c.save(step, state(step)) for step in (2, 3, 4)]
            passed.wait(60)
            gate.open()
            c.wait()
            handles.append(c.save(5, state(5)))
            c.wait()
            check_counts(c, 5)
            return [h.step for h in handles if h.committed.exception() is None]

    expected = [1, 5] if policy == "block" else [1, 4, 5]
    assert values(on_ranks(2, body)) == [expected] * 2
    assert check_commits(faulty) == expected
    for sink in sinks:
        waited = [e["wait_s"] for e in sink.named("trainer_waited") if e["why"] == "slot"]
        assert sum(waited) < 20
        assert policy == "coalesce" or len(waited) == 1, "once, not for each of them"


def test_training_waits_anew_for_each_save_that_commits() -> None:
    """A slow store that works: the limit is on what training waits for one commit, not on a run."""
    clock, sink = FakeClock(), ListSink()
    faulty = FaultyStorage(MemoryStorage())
    gates = [faulty.on("writer", f"*{n:06d}/r00000.bin").block() for n in range(1, 4)]
    config = CheckpointConfig(stall_limit_s=60.0)
    with Checkpointer(faulty, config, clock=clock, sink=sink) as c:
        for n, gate in enumerate(gates, 1):
            c.save(n, state(n))
            gate.wait_reached()

            def later(gate: Any = gate) -> None:
                clock.now_s += 50.0
                gate.open()

            threading.Timer(0.05, later).start()
        c.wait()
        assert (c.stats.commits, c.stats.skipped) == (3, 0)
    assert [e["wait_s"] for e in sink.named("trainer_waited")] == [50.0, 50.0]
