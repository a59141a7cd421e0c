"""Which earlier attempts were failures, told from the ends of their ledgers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from ckpt import commit
from ckpt.checkpointer import SaveStats
from ckpt.coordinator import Coordinator
from ckpt.layout import ledger_key
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from tests.faults import FaultyStorage
from tests.trainer.fake_clock import FakeClock
from trainer import BatchReader, Session
from trainer.failures import Record, failures_before
from trainer.interval import DAY_S
from trainer.preemption import PreemptedError
from trainer.schedule import SaveSchedule


def live(root: str | Storage, *, until: str = "end", ledger: Path | None = None) -> None:
    """One attempt that ends, crashes in its second step or is preempted."""
    reader = BatchReader(6, 2, lambda index: torch.ones(len(index), 2))
    session = Session(
        root,
        {"model": torch.nn.Linear(2, 2)},
        reader,
        ledger=ledger,
        preempt_when=lambda: until == "preempted",
    )
    with session:
        while True:
            for n, _ in enumerate(session.batches()):
                session.step()
                if n == 1 and until == "crash":
                    raise ZeroDivisionError
            if until == "end":
                return


def failures(root: Path, epoch: int) -> int:
    storage = LocalStorage(root)
    return failures_before(epoch, storage, storage).failures


def test_only_failures_count(tmp_path: Path) -> None:
    assert failures(tmp_path, 1) == 0
    live(str(tmp_path))
    assert failures(tmp_path, 2) == 0, "ended"
    with pytest.raises(ZeroDivisionError):
        live(str(tmp_path), until="crash")
    assert failures(tmp_path, 3) == 1
    with pytest.raises(PreemptedError):
        live(str(tmp_path), until="preempted")
    assert failures(tmp_path, 4) == 1, "preempted"
    live(str(tmp_path))
    ledger = tmp_path / ledger_key(4, 0)
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"eve')
    assert failures(tmp_path, 5) == 2, "killed"
    live(str(tmp_path))
    (tmp_path / ledger_key(5, 0)).unlink()
    assert failures(tmp_path, 6) == 3, "killed before it had a ledger"
    assert failures(tmp_path, 5) == 2, "those before, whatever came later"


def test_ledgers_of_an_object_store_and_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDESTAGE_SPOOL_DIR", str(tmp_path / "spool"))
    storage, other = MemoryStorage(), MemoryStorage("other")
    live(storage)
    assert failures_before(2, storage, storage).failures == 0
    live(other, ledger=tmp_path / "kept")
    assert failures_before(2, other, LocalStorage(tmp_path / "kept")).failures == 0
    assert failures_before(2, other, other).failures == 1


def test_reads_are_bounded_however_long_the_run_is() -> None:
    storage, clock = FaultyStorage(MemoryStorage()), FakeClock()
    run = commit.open_run(storage, clock)
    steps = json.dumps({"event": "saved", "t": 1.0, "step": 1, "blocked_s": 0.1}) + "\n"
    ends = [json.dumps({"event": e, "t": 2.0, "error": None}) + "\n" for e in ("closing", "closed")]
    process = json.dumps({"event": "process", "t": 0.0, "created_at_s": 1.0}) + "\n"
    for epoch in range(1, 101):
        commit.claim_epoch(storage, run, 1, None, clock)
        text = process + steps * 2000 + "".join(ends if epoch % 2 else [])
        storage.put(ledger_key(epoch, 0), text.encode())
        clock.advance(10.0)
    storage.calls.clear()
    found = failures_before(101, storage, storage)
    assert found == Record(32, clock.time() - 640.0), "of the newest 64, since the first of them"
    assert len(storage.calls) <= 3 * 64 + 4


def test_a_schedule_asks_rank_0_and_only_where_it_matters(caplog: pytest.LogCaptureFixture) -> None:
    clock, stats = FakeClock(), SaveStats()

    def unasked() -> Record:
        raise AssertionError

    every = SaveSchedule(3, clock)
    every.begin(0, Coordinator(0, 1, None, ""), unasked)
    assert [n for n in range(1, 8) if every.due(n, 1.0, stats)] == [3, 6]
    auto = SaveSchedule("auto", clock)
    record = Record(3, clock.time() - 3 * DAY_S)
    auto.begin(0, Coordinator(0, 1, None, ""), lambda: record)
    with caplog.at_level(logging.INFO, "sidestage"):
        for step in range(1, 40):
            clock.advance(1.0)
            auto.due(step, 1.0, stats)
    assert "a failure every 24 h" in caplog.text
