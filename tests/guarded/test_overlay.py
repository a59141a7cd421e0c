"""A full overlay and a store that is down: training waits a bounded time, in bounded memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointConfig, native
from ckpt.errors import SaveError, StorageError
from ckpt.events import ListSink
from ckpt.rows.torch_pool import TorchPool
from ckpt.storage.memory import MemoryStorage
from tests.faults import DEADLINE_S, FaultyStorage
from tests.guarded.oracle import Oracle
from tests.guarded.turnstile import SteppedCheckpointer

ROWS, DIM = 400_000, 16  # 25 MiB: more than the overlay may hold


@pytest.fixture(params=["native", "torch"])
def pool(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.load() is None:
        pytest.skip("the native part wasn't built: no C compiler at installation")
    return str(request.param)


class Run:
    def __init__(self, pool: str, **options: Any) -> None:
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.5)
        self.state = {"table": self.table, "optimizer": self.optimizer}
        self.storage, self.sink = FaultyStorage(MemoryStorage()), ListSink()
        options = {"staging_bytes": 16 << 20, **options}
        config = CheckpointConfig(
            compression="off",
            persist_target_s=0,
            persist_priority="normal",
            **options,
        )
        self.checkpointer = SteppedCheckpointer(self.storage, config, sink=self.sink)
        self.guards = self.checkpointer._stager._guards
        if pool == "torch":
            self.guards._pool = TorchPool()
        self.number = 0
        self.most_bytes = 0

    def save(self) -> Any:
        self.number += 1
        self.oracle = Oracle(self.state)
        self.handle = self.checkpointer.save(self.number, self.state)
        return self.handle

    def step(self, first: int, rows: int) -> None:
        """Rows from the end: those that are copied last."""
        ids = (ROWS - 1 - torch.arange(first, first + rows)) % ROWS
        self.table(ids).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.most_bytes = max(self.most_bytes, self.guards.overlay_bytes)
        assert self.guards.overlay_bytes <= self.guards.capacity_bytes

    def fill(self) -> None:
        """Touch rows until the overlay has room for few more."""
        first = 0
        while self.guards.pressure() < 0.9:
            self.step(first, 5000)
            first += 5000

    def finish(self) -> None:
        self.checkpointer.turnstile.open()
        self.handle.committed.result(DEADLINE_S)
        self.checkpointer.wait()
        self.checkpointer.turnstile.close()
        self.oracle.check(self.storage, self.number)


def test_training_waits_for_a_full_overlay_and_goes_on_when_the_store_does(pool: str) -> None:
    run = Run(pool, chunk_bytes=1 << 20)
    gate = run.storage.on("write", "data/*").block()
    run.checkpointer.turnstile.open()
    run.save()
    gate.wait_reached()
    run.fill()
    assert run.checkpointer.stats.overlay_wait_s == 0
    waiting = threading.Event()
    hurry = run.guards._hurry

    def open_when_waited() -> None:
        hurry()
        if not waiting.is_set():
            waiting.set()
            gate.open()

    run.guards._hurry = open_when_waited
    run.step(0, ROWS)
    assert waiting.is_set()
    assert run.checkpointer.stats.overlay_wait_s > 0
    assert any(e["why"] == "overlay" for n, e in run.sink.events if n == "trainer_waited")
    run.finish()
    assert 0.8 * run.guards.capacity_bytes < run.most_bytes <= run.guards.capacity_bytes
    assert not run.guards.busy
    assert run.guards.overlay_bytes == 0
    assert run.guards.capacity_bytes + run.checkpointer._stager.ring.held_bytes <= 16 << 20


def test_a_snapshot_that_holds_training_up_too_long_is_given_up(pool: str) -> None:
    run = Run(pool, stall_limit_s=0.05)
    gate = run.storage.on("write", "data/*").block()
    run.checkpointer.turnstile.open()
    run.save()
    gate.wait_reached()
    run.step(0, ROWS)
    run.step(0, ROWS)  # nothing is kept for it any more
    assert run.checkpointer.stats.overlay_wait_s >= 0.05
    gate.open()
    error = run.handle.committed.exception(DEADLINE_S)
    assert isinstance(error, SaveError)
    assert "stall_limit_s" in str(error)
    assert "staging_bytes" in str(error)
    run.checkpointer.wait()
    assert run.checkpointer.stats.failed == 1
    assert run.handle.staged.done()
    run.save()
    run.step(0, 1000)
    run.finish()


def test_a_store_that_fails_frees_the_overlay(pool: str) -> None:
    run = Run(pool)
    run.storage.on("write", "data/*").fail(StorageError("injected: the store is down"))
    run.save()
    run.checkpointer.turnstile.wait_standing()
    run.fill()
    run.checkpointer.turnstile.open()
    run.step(0, ROWS)
    assert isinstance(run.handle.committed.exception(DEADLINE_S), StorageError)
    run.checkpointer.wait()
    assert not run.guards.busy
    assert run.guards.overlay_bytes == 0
    run.checkpointer.turnstile.close()
    run.save()
    run.step(0, 1000)
    run.finish()


def test_touching_a_whole_table_waits_for_it_and_no_longer(pool: str) -> None:
    run = Run(pool)
    run.save()
    run.checkpointer.turnstile.wait_standing()
    hurry = run.guards._hurry

    def go_on() -> None:
        hurry()
        run.checkpointer.turnstile.go(1)

    run.guards._hurry = go_on
    run.checkpointer.touched(run.table.weight)
    with torch.no_grad():
        run.table.weight.zero_()
    assert run.checkpointer.stats.overlay_wait_s > 0
    run.finish()


def test_saving_always_before_the_last_snapshot_is_through_goes_on_for_ever(pool: str) -> None:
    """Rows have tags of one byte: after 254 snapshots that overlap they must begin anew."""
    run = Run(pool, max_pending=2)
    run.state = {"table": run.table}
    small = nn.Embedding(50, 4, sparse=True)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.5)
    run.state = {"table": small, "optimizer": optimizer}
    run.checkpointer.turnstile.open()
    pending: list[tuple[Any, Oracle]] = []
    for n in range(270):
        run.checkpointer.turnstile.close()
        oracle = Oracle(run.state)
        handle = run.checkpointer.save(n + 1, run.state)
        pending.append((handle, oracle))
        small(torch.tensor([n % 50])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(pending) == 2:
            run.checkpointer.turnstile.wait_standing()
            first, want = pending.pop(0)
            run.checkpointer.turnstile.open()
            first.committed.result(DEADLINE_S)
            if n % 30 == 0 or n > 240:
                want.check(run.storage, first.step)
    run.checkpointer.turnstile.open()
    run.checkpointer.wait()
    assert run.checkpointer.stats.failed == 0
