"""Saves of a job on CUDA, with plain tables: exact, in the background, and the host never waits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.catalog import Catalog
from ckpt.checkpointer import Checkpointer
from ckpt.config import CheckpointConfig
from ckpt.restore import CheckpointReader
from ckpt.rows import Group
from ckpt.storage import open_storage
from tests.gpu.guards_job import Job, no_host_sync, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]
SPARSE = [torch.optim.SGD, torch.optim.Adagrad]


def check(root: Path, step: int, want: dict[str, torch.Tensor]) -> None:
    """The checkpoint of a step is, bit for bit, what was copied at its save()."""
    storage = open_storage(str(root))
    record = Catalog(storage).find(step).record
    assert record is not None
    reader = CheckpointReader(storage, record)
    for name, tensor in want.items():
        assert torch.equal(reader.read(name), tensor.cpu()), f"step {step}: {name} differs"


@pytest.mark.parametrize("sparse", SPARSE)
def test_snapshots_are_exact_while_training_goes_on(sparse: Any, tmp_path: Path) -> None:
    job = Job(sparse)
    config = CheckpointConfig(persist_target_s=0.5)
    wants = {}
    with Checkpointer(str(tmp_path / "run"), config) as c:
        job.step()
        for step in range(1, 6):
            wants[step] = job.copy()
            handle = c.save(step, job.state)
            steps = until(handle.committed.done, job.step)
            assert steps > 1, "nothing was trained beside the save"
            handle.committed.result()
            job.step()
        assert c._stager._guards.guarded_bytes >= 2 * job.rows * 32 * 4
        assert not c._stager.copied_tables
        assert c.stats.failed == 0
    for step, want in wants.items():
        check(tmp_path / "run", step, want)


@pytest.mark.parametrize("sparse", SPARSE)
def test_a_proof_of_all_rows_holds(sparse: Any, tmp_path: Path) -> None:
    job = Job(sparse)
    with Checkpointer(str(tmp_path / "run"), CheckpointConfig(proof="full")) as c:
        for step in (1, 2):
            handle = c.save(step, job.state)
            until(handle.committed.done, job.step)
            handle.committed.result()


@pytest.mark.parametrize("sparse", SPARSE)
def test_save_makes_the_host_wait_for_nothing(sparse: Any, tmp_path: Path) -> None:
    job = Job(sparse)
    with Checkpointer(str(tmp_path / "run"), CheckpointConfig(persist_target_s=0)) as c:
        job.step()
        c.save(1, job.state).committed.result()  # plans, allocates, compares replicas
        for step in (2, 3):
            job.step()
            want = job.copy()
            with no_host_sync():
                handle = c.save(step, job.state)
            until(handle.committed.done, job.step)
            handle.committed.result()
            check(tmp_path / "run", step, want)


@pytest.mark.parametrize("sparse", SPARSE)
def test_touches_make_the_host_wait_for_nothing(
    sparse: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch, calls = Group.touch, []

    def watched(group: Group, *args: Any) -> None:
        with no_host_sync():
            touch(group, *args)
        calls.append(group)

    monkeypatch.setattr(Group, "touch", watched)
    job = Job(sparse)
    with Checkpointer(str(tmp_path / "run"), CheckpointConfig(persist_target_s=0.5)) as c:
        for step in (1, 2):
            handle = c.save(step, job.state)
            until(handle.committed.done, job.step)
            handle.committed.result()
    assert len(calls) > 4
    assert c.stats.overlay_wait_s == 0


def waits_of_a_step(job: Job) -> int:
    """How often the host waits for the device in a step, as far as torch notices."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            job.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing" in str(w.message) for w in caught)


@pytest.mark.parametrize("sparse", SPARSE)
def test_a_step_beside_a_snapshot_waits_no_more_than_one_without(
    sparse: Any, tmp_path: Path
) -> None:
    job = Job(sparse)
    job.step()
    alone = waits_of_a_step(job)  # torch's Adagrad itself reads its step counter
    with Checkpointer(str(tmp_path / "run"), CheckpointConfig(persist_target_s=2)) as c:
        c.save(1, job.state).committed.result()
        handle = c.save(2, job.state)
        assert waits_of_a_step(job) <= alone
        assert waits_of_a_step(job) <= alone
        until(handle.committed.done, job.step)
        handle.committed.result()


def test_dense_state_is_fenced_and_exact(tmp_path: Path) -> None:
    """The copies run beside forward and backward; a step comes after them, on the device."""
    job = Job(torch.optim.SGD)
    with Checkpointer(str(tmp_path / "run")) as c:
        job.step()
        c.save(1, job.state).committed.result()
        for step in (2, 3, 4):
            want = job.copy()
            handle = c.save(step, job.state)
            job.backward()
            with no_host_sync():
                c._stager._fence.finish()  # type: ignore[union-attr]
            for p in job.model.top.parameters():
                with torch.no_grad():
                    p.add_(1)  # what a step may do from here on
            until(handle.committed.done, job.step)
            handle.committed.result()
            check(tmp_path / "run", step, want)


def test_changes_behind_the_guards_are_found(tmp_path: Path) -> None:
    job = Job(torch.optim.SGD)
    with Checkpointer(str(tmp_path / "run"), CheckpointConfig(proof="full")) as c:
        job.step()
        c.save(1, job.state).committed.result()
        handle = c.save(2, job.state)
        job.model.bags[1].weight.data.add_(1)
        assert "bags.1" in str(handle.committed.exception())
        assert c.stats.untracked_writes == 1


def test_a_gathered_table_is_announced_by_hand(tmp_path: Path) -> None:
    job = Job(torch.optim.SGD)
    with Checkpointer(str(tmp_path / "run")) as c:
        c.save(1, job.state).committed.result()
        want = job.copy()
        handle = c.save(2, job.state)
        weight = job.model.bags[0].weight
        rows = torch.arange(0, job.rows, 7, device="cuda")
        c.touched(weight, rows)
        with torch.no_grad():
            weight[rows] = 0
        c.touched(weight)
        with torch.no_grad():
            weight.zero_()
        handle.committed.result()
        check(tmp_path / "run", 2, want)
