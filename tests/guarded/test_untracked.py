"""Writes that no guard sees: found and named, or announced with touched() and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt import CheckpointConfig, SaveHandle
from ckpt.catalog import Catalog
from ckpt.errors import UntrackedWriteError
from ckpt.events import ListSink
from ckpt.storage.memory import MemoryStorage
from tests.faults import DEADLINE_S
from tests.guarded.oracle import Oracle

pytest.importorskip("fbgemm_gpu")
from tests.guarded.job import Job
from tests.guarded.turnstile import SteppedCheckpointer

# Adagrad makes its sparse tensors unchecked, and torch tells so.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Run:
    """A job that has trained, and a checkpointer with one commit."""

    def __init__(self, **options: Any) -> None:
        options = {"chunk_bytes": 65536, "persist_target_s": 0.0, **options}
        self.storage, self.sink, self.job = MemoryStorage(), ListSink(), Job(0)
        self.checkpointer = SteppedCheckpointer(
            self.storage,
            CheckpointConfig(
                staging_bytes=16 << 20,
                compression="off",
                persist_priority="normal",
                **options,
            ),
            sink=self.sink,
        )
        self.job.step(0)
        self.checkpointer.guard(*self.job.objects)
        self.step = 0
        self.save()
        self.finish()

    def save(self) -> SaveHandle:
        """Save; the persist thread stands before the first block."""
        self.step += 1
        self.oracle = Oracle(self.job.state)
        self.handle = self.checkpointer.save(self.step, self.job.state)
        self.checkpointer.turnstile.wait_standing()
        return self.handle

    def finish(self) -> BaseException | None:
        """Let the save end; if it has a commit, it is exact."""
        self.checkpointer.turnstile.open()
        error = self.handle.committed.exception(DEADLINE_S)
        self.checkpointer.wait()
        self.checkpointer.turnstile.close()
        if error is None:
            self.oracle.check(self.storage, self.step)
        return error

    def steps(self) -> list[int]:
        return sorted(c.ref.step for c in Catalog(self.storage).lineage())


@pytest.fixture(params=range(5))
def table(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_full_proof_finds_one_row_and_names_it(table: int) -> None:
    run = Run(proof="full")
    run.save()
    weight = run.job.tables[table].detach()
    weight[7] += 1
    run.job.step(1)
    error = run.finish()
    assert isinstance(error, UntrackedWriteError)
    [event] = [e for name, e in run.sink.events if name == "untracked_write"]
    assert event == {"step": 2, "table": event["table"], "rows": [7]}
    assert f"{event['table']}: weight: rows [7] were changed in place" in str(error)
    assert run.checkpointer.stats.untracked_writes == 1
    assert run.steps() == [1]
    assert run.save() is run.handle
    assert run.finish() is None
    assert run.steps() == [1, 3]


@pytest.mark.parametrize("copied", [0, 6, 15])  # of 18 blocks of tables
def test_sampled_proof_always_finds_a_change_of_a_whole_table(table: int, copied: int) -> None:
    run = Run()
    run.save()
    run.checkpointer.turnstile.go(copied)
    weight = run.job.tables[table].detach()
    weight.mul_(0.999)  # a decay
    run.job.step(1)
    assert isinstance(run.finish(), UntrackedWriteError)
    assert run.checkpointer.stats.untracked_writes == 1
    assert run.steps() == [1]


def test_sampled_proof_finds_a_change_of_all_optimizer_state() -> None:
    run = Run()
    run.save()
    run.job.users.state[run.job.model.users.weight]["exp_avg_sq"].add_(1)
    assert isinstance(run.finish(), UntrackedWriteError)


def test_a_write_to_optimizer_state_is_found() -> None:
    run = Run(proof="full")
    run.save()
    run.job.users.state[run.job.model.users.weight]["exp_avg_sq"][11] = 3.0
    error = run.finish()
    assert isinstance(error, UntrackedWriteError)
    assert "rows [11]" in str(error)


def test_a_dense_parameter_changed_before_the_step_fails_by_name_and_is_copied_from_then_on() -> (
    None
):
    run = Run()
    run.save()
    with torch.no_grad():
        run.job.model.top[2].weight.mul_(0.5)
    error = run.finish()
    assert isinstance(error, UntrackedWriteError)
    assert "model.top.2.weight: changed outside of an optimizer's step" in str(error)
    assert "touched()" in str(error)
    run.save()
    with torch.no_grad():
        run.job.model.top[2].weight.mul_(0.5)  # the same, every time
    assert run.finish() is None
    assert run.steps() == [1, 3]


def test_a_dense_parameter_rewritten_through_data_is_found_by_sample() -> None:
    """Torch counts no change through `.data`: swapping in averaged weights is one."""
    run = Run()
    weight = run.job.model.top[2].weight
    run.save()
    weight.data.add_(1)
    error = run.finish()
    assert isinstance(error, UntrackedWriteError)
    assert "model.top.2.weight" in str(error)


@pytest.mark.parametrize("what", ["table", "dense", "data", "buffer", "state"])
def test_copied_snapshots_accept_everything(what: str) -> None:
    run = Run(snapshot="copied")
    model = run.job.model
    targets: dict[str, Tensor] = {
        "table": model.users.weight.detach(),
        "dense": model.top[2].weight.detach(),
        "data": model.top[2].weight.data,
        "buffer": model.norm.running_mean,
        "state": run.job.users.state[model.users.weight]["exp_avg"],
    }
    run.save()
    targets[what].add_(1)
    run.job.step(1)
    assert run.finish() is None


@pytest.mark.parametrize(
    "rows",
    [None, "rows", "mask", "int32", "negative", "twice", "empty"],
)
@pytest.mark.parametrize("table", [0, 4])  # a plain one and a fused one
def test_touched_rows_may_change(table: int, rows: str | None) -> None:
    run = Run(proof="full")
    run.save()
    run.checkpointer.turnstile.go(5)
    weight = run.job.tables[table].detach()
    mask = torch.zeros(weight.shape[0], dtype=torch.bool)
    mask[::50] = rows != "empty"
    found = mask.nonzero().flatten()
    if rows is None:
        run.checkpointer.turnstile.open()
        mask[:] = True
    given = {
        None: None,
        "rows": found,
        "mask": mask,
        "int32": found.int(),
        "negative": found - weight.shape[0],
        "twice": torch.cat([found, found.flip(0)]),
        "empty": found,
    }[rows]
    run.checkpointer.touched(weight, given)
    weight[mask] += 1
    run.job.step(1)
    assert run.finish() is None


VIEWS = {
    "a row": lambda w: w[40],
    "rows": lambda w: w[40:90],
    "every other row": lambda w: w[40:90:2],
    "a column": lambda w: w[:, 1],
    "transposed": lambda w: w.t(),
    "flat": lambda w: w.view(-1),
    "an element": lambda w: w[40, 1],
    "other bits": lambda w: w.view(torch.int32),
    "the end": lambda w: w[-3:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_touched_takes_any_view_of_a_table(view: str) -> None:
    run = Run(proof="full")
    run.save()
    part = VIEWS[view](run.job.model.users.weight.detach())
    run.checkpointer.turnstile.open()
    run.checkpointer.touched(part)
    part.add_(1)
    assert run.finish() is None


def test_touched_dense_state_may_change() -> None:
    run = Run()
    run.save()
    adam = run.job.adam
    for tensor in (
        run.job.model.top[0].weight,
        adam.state[run.job.model.top[2].weight]["exp_avg"],
        run.job.model.top[2].bias,
    ):
        run.checkpointer.touched(tensor)
        with torch.no_grad():
            tensor.mul_(0.5)
    run.job.step(1)
    assert run.finish() is None


def test_touched_without_an_open_snapshot_does_nothing() -> None:
    run = Run()
    run.checkpointer.touched(run.job.model.users.weight)
    run.checkpointer.touched(run.job.model.top[0].weight, torch.tensor([0]))
    run.checkpointer.touched(torch.zeros(3))
    run.save()
    assert run.finish() is None


def test_an_optimizer_that_the_state_doesnt_know_is_seen_all_the_same() -> None:
    """Made after the save, as when a schedule changes optimizers."""
    run = Run(proof="full")
    run.save()
    weight = run.job.model.users.weight
    other = torch.optim.SGD([weight], lr=0.5)
    run.job.backward(run.job.forward(3))
    other.step()
    dense = torch.optim.SGD(run.job.model.top.parameters(), lr=0.5)
    dense.step()
    assert run.finish() is None
