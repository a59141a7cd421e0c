"""Retention as a trainer meets it: after commits, never in their way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer, PerRank
from ckpt.catalog import Catalog
from ckpt.config import KeepBest, RetentionPolicy
from ckpt.errors import CorruptError, SaveError, StorageError
from ckpt.events import ListSink
from ckpt.layout import DATA, commit_key
from ckpt.pins import Pin
from ckpt.prune import Pruner
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.types import SystemClock
from ckpt.verify import verify_commit
from tests import warm
from tests.checkpointer.ranks import on_ranks, values
from tests.faults import FaultyStorage

KEEP_1 = CheckpointConfig(keep_last=1)


def state(step: int) -> dict[str, Any]:
    return {"t": torch.full((2000,), float(step)), "step": step}


def save(c: Checkpointer, step: int, **notes: str) -> None:
    """Save a step and wait for its commit and for the prune after it."""
    c.save(step, state(step), annotations=notes).committed.result()
    c.wait()


def resumed(storage: Storage) -> int:
    """The step that a new job resumes from, with the right content. Claims an epoch."""
    live = state(0)
    with Checkpointer(storage) as c:
        result = c.restore(live)
        assert result is not None
        assert live["step"] == result.step
        assert torch.equal(live["t"], state(result.step)["t"])
        return result.step


def steps(storage: Storage) -> list[int]:
    return [c.ref.step for c in Catalog(storage).commits()]


def latest(storage: Storage) -> int:
    found = Catalog(storage).latest()
    assert found is not None
    return found.ref.step


def saves_with_data(storage: Storage) -> set[str]:
    return {o.key.split("/")[1] for o in storage.list(DATA)}


def test_d12_the_old_one_goes_only_after_the_new_one_is_durable() -> None:
    faulty = FaultyStorage(MemoryStorage())
    with Checkpointer(faulty, KEEP_1) as c:
        save(c, 1)
        gate = faulty.on("write", f"{DATA}*").block()
        handle = c.save(2, state(2))
        gate.wait_reached()
        assert (latest(faulty), steps(faulty)) == (1, [1])
        faulty.calls.clear()
        gate.open()
        handle.committed.result()
        c.wait()
        assert (latest(faulty), steps(faulty)) == (2, [2])
        order = [
            (op, key)
            for op, key in faulty.calls
            if key.startswith("commits/") and op in ("create", "delete")
        ]
        assert order == [("create", commit_key(1, 2)), ("delete", commit_key(1, 1))]
        assert len(saves_with_data(faulty)) == 1
        assert c.stats.pruned == 1
    assert resumed(faulty) == 2


BLOCKED = """
import sys, torch
from ckpt import CheckpointConfig, Checkpointer
from ckpt.storage import LocalStorage
from tests.faults import FaultyStorage
from tests.retention.test_saving import save, state
faulty = FaultyStorage(LocalStorage(sys.argv[1]))
c = Checkpointer(faulty, CheckpointConfig(keep_last=1))
save(c, 1)
gate = faulty.on("write", "data/*").block()
c.save(2, state(2))
gate.wait_reached()
print("blocked", flush=True)
c.wait()
"""


@pytest.mark.crash
def test_d12_killed_while_the_new_one_is_written_the_old_one_is_there(tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = warm.Popen([sys.executable, "-c", BLOCKED, root], stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "blocked\n"
        assert latest(LocalStorage(root)) == 1
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.communicate(timeout=60)
    assert resumed(LocalStorage(root)) == 1


def test_d14_a_quota_at_the_commit_loses_that_save_and_never_the_next_start() -> None:
    faulty = FaultyStorage(MemoryStorage())
    quota = OSError(errno.EDQUOT, "disk quota exceeded")
    faulty.on("create", f"commits/*{2:012d}.json").times(3).fail(quota)
    done: list[int] = []
    for life in range(3):
        live = state(0)
        with Checkpointer(faulty, KEEP_1) as c:
            result = c.restore(live)
            assert (result.step if result else None) == (done[-1] if done else None)
            if life == 0:
                save(c, 1)
                done.append(1)
            handle = c.save(2, state(2))
            with pytest.raises(SaveError, match="disk quota exceeded"):
                handle.committed.result()
    live = state(0)
    with Checkpointer(faulty, KEEP_1) as c:
        result = c.restore(live)
        assert result is not None
        assert result.step == 1
        save(c, 2)  # the same step again, in a folder of its own
    assert resumed(faulty) == 2
    assert (steps(faulty), len(saves_with_data(faulty))) == ([2], 1)


def test_d15_pieces_of_an_abandoned_attempt_are_ignored_told_and_swept() -> None:
    storage = MemoryStorage()

    def three(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, **place) as c:
            c.save(1, {"mine": PerRank(torch.full((9,), float(rank)))}).committed.result()

    values(on_ranks(3, three))
    storage.delete(commit_key(1, 1))  # the attempt died before it could commit,
    storage.delete("data/000001-000000000001-000001/r00002.receipt.json")  # with one rank at work
    left = "data/000001-000000000001-000001/r00001.bin"

    def two(rank: int, place: dict[str, Any]) -> None:
        live = {"mine": PerRank(torch.full((9,), 10.0 + rank))}
        with Checkpointer(storage, **place) as c:
            assert c.restore(live) is None
            c.save(1, live).committed.result()
            c.wait()

    stray = storage.read(left)
    plan = Pruner(storage, RetentionPolicy(), SystemClock()).plan()
    assert [s.prefix for s in plan.unsettled] == [left.removesuffix("r00001.bin")]
    values(on_ranks(2, two))
    assert not [o.key for o in storage.list(DATA) if o.key.startswith("data/000001-")]
    info = Catalog(storage).latest()
    assert info is not None
    assert info.record is not None
    assert verify_commit(storage, info.record, level="full").ok

    # A stray under a name that the commit lists is found by its digest.
    mine = next(f.key for f in info.record.files if f.key.endswith("r00001.bin"))
    assert len(stray) == len(storage.read(mine))
    storage.put(mine, stray)
    assert not verify_commit(storage, info.record, level="full").ok

    def restore(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, **place) as c:
            c.restore({"mine": PerRank(torch.zeros(9))})

    for error in on_ranks(2, restore):
        assert isinstance(error, CorruptError)


def test_d17_after_a_failed_save_the_latest_is_read_from_storage_again() -> None:
    faulty, sink = FaultyStorage(MemoryStorage()), ListSink()
    with Checkpointer(faulty, sink=sink) as c:
        save(c, 10)
        faulty.on("create", f"commits/*{20:012d}.json").fail(StorageError("the slice died"))
        assert c.save(20, state(20)).committed.exception() is not None
        c.wait()
    assert [e["step"] for e in sink.named("save_failed")] == [20]
    assert latest(faulty) == 10
    live = state(0)
    with Checkpointer(faulty, CheckpointConfig(when_busy="skip"), sink=sink) as c:
        result = c.restore(live)
        assert result is not None
        assert result.step == 10
        save(c, 15)
        assert latest(faulty) == 15
        gate = faulty.on("write", f"{DATA}*").block()
        c.save(30, state(30))
        gate.wait_reached()
        c.save(31, state(31))
        gate.open()
    (skipped,) = sink.named("save_skipped")
    assert skipped["step"] == 31
    assert "1 earlier saves are pending" in skipped["error"]


def test_d36_rolled_back_the_abandoned_future_goes_and_the_past_stays() -> None:
    faulty = FaultyStorage(MemoryStorage())
    with Checkpointer(faulty) as c:
        for step in (100, 200, 300, 400, 500, 5000):
            save(c, step)
    with Checkpointer(faulty, CheckpointConfig(keep_last=2)) as c:
        c.restore(state(0), step=300)
        save(c, 400)
        assert [(i.ref.epoch, i.ref.step) for i in Catalog(faulty).commits()] == [
            (1, 300),
            (2, 400),
        ]
        assert latest(faulty) == 400
        faulty.on("writer", f"{DATA}*").fail(StorageError("no"))
        assert c.save(500, state(500)).committed.exception() is not None
        c.wait()
        assert steps(faulty) == [300, 400]
    assert resumed(faulty) == 400


def test_d37_the_newest_stays_beside_the_best() -> None:
    storage = MemoryStorage()
    losses = {1: "1", 2: "2", 3: "3", 4: "4", 5: "nan"}
    with Checkpointer(storage, CheckpointConfig(keep_best=KeepBest("loss", 2))) as c:
        for step in range(1, 7):
            save(c, step, **({"loss": losses[step]} if step in losses else {}))
    assert steps(storage) == [1, 2, 6]
    assert resumed(storage) == 6


@pytest.mark.parametrize("failing", ["commits/*", f"{DATA}*"])
def test_d38_a_failed_delete_is_a_warning_and_is_tried_again(failing: str) -> None:
    faulty, sink = FaultyStorage(MemoryStorage()), ListSink()
    with Checkpointer(faulty, KEEP_1, sink=sink) as c:
        save(c, 1)
        faulty.on("delete", failing).fail(StorageError("operation not permitted"))
        save(c, 2)
        assert (c.stats.commits, c.stats.failed, c.stats.prune_failed) == (2, 0, 1)
        assert latest(faulty) == 2
        assert [e["error"] for e in sink.named("prune_failed")] == ["operation not permitted"]
        save(c, 3)
        assert (steps(faulty), len(saves_with_data(faulty))) == ([3], 1)
        assert c.stats.prune_failed == 1


@pytest.mark.parametrize("error", [StorageError("down"), OSError(5, "down"), ValueError("defect")])
def test_d38_nothing_that_a_prune_meets_becomes_a_saves_failure(error: Exception) -> None:
    faulty, sink = FaultyStorage(MemoryStorage()), ListSink()
    with Checkpointer(faulty, KEEP_1, sink=sink) as c:
        faulty.on("list", "pins/*").times(2).fail(error)
        save(c, 1)
        save(c, 2)
        assert (c.stats.commits, c.stats.failed, c.stats.prune_failed) == (2, 0, 2)
        save(c, 3)
        assert steps(faulty) == [3]
    assert len(sink.named("prune_failed")) == 2


def test_d38_pinned_ones_are_passed_over_and_removed_ones_no_trouble(tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "run"
    storage = LocalStorage(root)
    with Checkpointer(storage, KEEP_1) as c:
        save(c, 1)
        first = Catalog(storage).find(1).ref
        with Pin(storage, first, "reader"):
            save(c, 2)
            save(c, 3)
            assert steps(storage) == [1, 3]
            info = Catalog(storage).find(1)
            assert info.record is not None
            assert verify_commit(storage, info.record, level="full").ok
        shutil.rmtree(next((root / "data").glob("*-000000000003-*")))
        save(c, 4)
        assert steps(storage) == [4]
        (root / "commits" / "000001" / f"{4:012d}.json").unlink()
        save(c, 5)
        assert (c.stats.prune_failed, c.stats.failed) == (0, 0)
        assert steps(storage) == [5]


def test_what_a_failed_save_left_is_swept_once_no_rank_writes_it_any_more() -> None:
    faulty = FaultyStorage(MemoryStorage())

    def body(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(faulty, **place) as c:
            for step in (1, 2, 3):
                c.save(step, {"t": PerRank(torch.full((9,), float(step)))}).committed.exception()

    faulty.on("writer", "*000002/r00001.bin").fail(StorageError("no space left on rank 1"))
    values(on_ranks(2, body))
    assert steps(faulty) == [1, 3]
    assert len(saves_with_data(faulty)) == 2


def test_an_interrupted_prune_is_finished_by_the_next_attempt() -> None:
    faulty = FaultyStorage(MemoryStorage())
    with Checkpointer(faulty, KEEP_1) as c:
        save(c, 1)
        faulty.on("delete", f"{DATA}*").always().fail(StorageError("the job is being killed"))
        save(c, 2)
    assert (steps(faulty), len(saves_with_data(faulty))) == ([2], 2)
    again = FaultyStorage(faulty.inner)
    with Checkpointer(again) as c:  # a job that keeps all sweeps what nothing lists, too
        c.restore(state(0))
        save(c, 3)
    assert (steps(again), len(saves_with_data(again))) == ([2, 3], 2)


def test_a_slow_prune_does_not_keep_the_next_save_waiting() -> None:
    faulty = FaultyStorage(MemoryStorage())
    with Checkpointer(faulty, KEEP_1) as c:
        save(c, 1)
        gate = faulty.on("delete", "commits/*").block()
        c.save(2, state(2)).committed.result()
        gate.wait_reached()
        handle = c.save(3, state(3))  # the staging memory is free already
        assert handle.staged.done()
        gate.open()
        handle.committed.result()
    assert steps(faulty) == [3]
