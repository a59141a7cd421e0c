"""Snapshots, steps, failures and hand edits in any order, through a Checkpointer: each commit is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ckpt import CheckpointConfig, SaveHandle, native
from ckpt.catalog import Catalog
from ckpt.errors import NotFoundError, SaveSkippedError, StorageError
from ckpt.events import ListSink
from ckpt.rows.torch_pool import TorchPool
from ckpt.storage.memory import MemoryStorage
from tests.faults import DEADLINE_S, FaultyStorage
from tests.guarded.oracle import Oracle

pytest.importorskip("fbgemm_gpu")
from tests.guarded.job import Job
from tests.guarded.turnstile import SteppedCheckpointer

SEEDS = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Saved:
    handle: SaveHandle
    oracle: Oracle


class Machine(RuleBasedStateMachine):
    """The persist thread stands before a block while the job goes on, and is let on in between."""

    native = "1"

    @initialize(
        seed=SEEDS,
        busy=st.sampled_from([("block", 1), ("block", 2), ("skip", 1), ("skip", 2), ("coalesce", 2)]),
        proof=st.sampled_from(["sampled", "full"]),
        chunk_bytes=st.sampled_from([24576, 65536, 1 << 20]),
    )  # fmt: skip
    def begin(self, seed: int, busy: tuple[Any, int], proof: Any, chunk_bytes: int) -> None:
        torch.manual_seed(seed)
        self.storage = FaultyStorage(MemoryStorage())
        self.config = CheckpointConfig(
            chunk_bytes=chunk_bytes,
            staging_bytes=16 << 20,
            compression="off",
            when_busy=busy[0],
            max_pending=busy[1],
            proof=proof,
            persist_target_s=0,
            persist_priority="normal",
            commit_timeout_s=DEADLINE_S,
        )
        self.step_number = 0
        self.last: Saved | None = None
        self.job = Job(seed)
        self.make()

    def make(self) -> None:
        self.checkpointer = SteppedCheckpointer(self.storage, self.config, sink=ListSink())
        if self.native == "0":
            self.checkpointer._stager._guards._pool = TorchPool()
        assert isinstance(self.checkpointer._stager._guards._pool, TorchPool) == (
            self.native == "0"
        )
        self.checkpointer.guard(*self.job.objects)
        self.saves: list[Saved] = []
        self.checked = 0

    @rule(seed=SEEDS, times=st.integers(1, 3))
    def train(self, seed: int, times: int) -> None:
        for n in range(times):
            self.job.step(seed + n)

    @rule(seed=SEEDS, mode=st.sampled_from(["train", "eval", "no_grad"]))
    def forward_only(self, seed: int, mode: str) -> None:
        self.job.model.train(mode != "eval")
        with torch.set_grad_enabled(mode != "no_grad"):
            self.job.forward(seed)
        self.job.model.train()

    @rule(seed=SEEDS, order=st.booleans())
    def look_ahead(self, seed: int, order: bool) -> None:
        self.job.model.eval()  # a second forward would change what the first one's backward needs
        outs = [self.job.forward(seed), self.job.forward(seed + 1)]
        for out in outs if order else reversed(outs):
            self.job.backward(out)
        self.job.apply()
        self.job.model.train()

    @rule(seed=SEEDS)
    def accumulate(self, seed: int) -> None:
        """Fused tables change at each backward, all else at a later step."""
        self.job.backward(self.job.forward(seed))

    @rule()
    def save(self) -> None:
        if self.config.when_busy == "block" and self.pending >= self.config.max_pending:
            self.finish()
        self.step_number += 1
        oracle = Oracle(self.job.state)
        handle = self.checkpointer.save(self.step_number, self.job.state)
        self.saves.append(Saved(handle, oracle))

    @rule(turns=st.lists(st.tuples(st.integers(0, 30), SEEDS), min_size=1, max_size=5))
    def save_and_train(self, turns: list[tuple[int, int]]) -> None:
        """Steps between the blocks of one snapshot."""
        self.save()
        for blocks, seed in turns:
            self.checkpointer.turnstile.go(blocks)
            self.job.step(seed)

    @precondition(lambda self: self.pending)
    @rule(blocks=st.integers(1, 40))
    def go_on(self, blocks: int) -> None:
        self.checkpointer.turnstile.go(blocks)

    @precondition(lambda self: self.pending)
    @rule()
    def finish(self) -> None:
        """Let everything that is pending end, and check it."""
        self.checkpointer.turnstile.open()
        self.checkpointer.wait()
        self.checkpointer.turnstile.close()
        self.check()
        self.swapped = False

    @rule(
        nth=st.integers(1, 40),
        where=st.sampled_from(
            [
                ("write", "data/*"),
                ("finish", "data/*"),
                ("create", "data/*"),
                ("create", "commits/*"),
            ]
        ),
    )
    def break_storage(self, nth: int, where: tuple[str, str]) -> None:
        self.storage.on(*where).nth(nth if where[0] == "write" else 1 + nth % 3).fail(
            StorageError("injected: the store is down")
        )
        self.breakable = True

    @rule(
        table=st.integers(0, 4),
        how=st.sampled_from(["rows", "mask", "all"]),
        factor=st.floats(0.5, 0.9),
        seed=SEEDS,
    )
    def edit_table(self, table: int, how: str, factor: float, seed: int) -> None:
        if self.swapped:
            return  # a false alarm that is known: announced, but of memory that no snapshot has yet
        weight = self.job.tables[table].detach()
        g = torch.Generator().manual_seed(seed)
        mask = torch.rand(weight.shape[0], generator=g) < 0.1
        given = {"rows": mask.nonzero().flatten(), "mask": mask, "all": None}[how]
        if how == "all":
            self.checkpointer.turnstile.open()  # it waits for the snapshots to have the table
        self.checkpointer.touched(weight, given)
        if how == "all":
            weight.mul_(factor)
            self.checkpointer.turnstile.close()
        else:
            weight[mask] *= factor

    @rule(which=st.integers(0, 3))
    def edit_dense(self, which: int) -> None:
        parameter = list(self.job.model.top.parameters())[which]
        self.checkpointer.touched(parameter)
        with torch.no_grad():
            parameter.mul_(0.99)

    @rule()
    def edit_what_no_optimizer_has(self) -> None:
        """It was copied in save(): anybody may change it."""
        with torch.no_grad():
            self.job.model.fixed.weight.add_(1)
            self.job.model.norm.running_mean.mul_(0.5)
            for value in self.job.average.values():
                value.neg_()

    @rule(what=st.sampled_from(["table", "state", "dense", "load", "fused"]))
    def replace(self, what: str) -> None:
        """Put other memory in the place of what is guarded or fenced."""
        job, model = self.job, self.job.model
        if what == "table":
            model.items.weight.data = model.items.weight.data.clone()
            self.swapped = True
        elif what == "dense":
            model.top[0].weight.data = model.top[0].weight.data.clone()
        elif what == "load":
            for optimizer in job.optimizers:
                optimizer.load_state_dict(optimizer.state_dict())
        elif what == "fused":
            job.fused.weights_host.data = job.fused.weights_host.data.clone()
        elif (state := job.users.state.get(model.users.weight)) and "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].clone()

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        """Another process goes on from the last commit."""
        if self.pending:
            self.finish()
        self.check()
        self.checkpointer.close()
        if not clean:
            self.job.step(0)
        self.job = Job(self.step_number)
        self.make()
        try:
            newest = Catalog(self.storage).latest()
        except NotFoundError:
            newest = None
        # Adam's state exists only after a step; a checkpoint has it or not.
        if self.last is not None and any(
            f.startswith("adam.state") for f in self.last.oracle.boxes
        ):
            self.job.step(1)
        result = self.checkpointer.restore(self.job.state, fresh=newest is None)
        assert (result is None) == (self.last is None)
        if result is not None and self.last is not None:
            assert result.step == self.last.handle.step
            now = Oracle(self.job.state)
            for fqn, boxes in self.last.oracle.boxes.items():
                assert torch.equal(now.boxes[fqn][0][1], boxes[0][1]), fqn

    @property
    def pending(self) -> int:
        """Saves that weren't waited for: their number doesn't depend on how fast threads are."""
        return len(getattr(self, "saves", [])) - getattr(self, "checked", 0)

    breakable = False
    swapped = False

    def check(self) -> None:
        """All saves have ended: what is committed is exact, what isn't left nothing."""
        commits = {e.ref.step for e in Catalog(self.storage).commits()}
        failed = skipped = 0
        for saved in self.saves:
            step, error = saved.handle.step, saved.handle.committed.exception()
            if error is None:
                assert step in commits
                if saved in self.saves[self.checked :]:
                    saved.oracle.check(self.storage, step)
                self.last = saved
            elif isinstance(error, SaveSkippedError):
                assert step not in commits
                skipped += 1
            else:
                assert self.breakable, error
                assert isinstance(error, StorageError), error
                failed += 1
            assert saved.handle.staged.done()
        self.checked = len(self.saves)
        stats = self.checkpointer.stats
        assert (stats.failed, stats.skipped) == (failed, skipped)
        assert stats.commits + failed + skipped == len(self.saves)
        assert stats.untracked_writes == 0
        guards = self.checkpointer._stager._guards
        assert not guards.busy
        assert guards.overlay_bytes == 0

    def teardown(self) -> None:
        if hasattr(self, "checkpointer"):
            self.checkpointer.turnstile.open()
            self.checkpointer.wait()
            self.check()
            self.checkpointer.close()


class TorchMachine(Machine):
    native = "0"


Machine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TorchMachine.TestCase.settings = settings(max_examples=4, stateful_step_count=25, deadline=None)

# Adagrad makes its sparse tensors unchecked, and torch tells so.
quiet = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@quiet
class TestTorch(TorchMachine.TestCase):
    pass


@quiet
@pytest.mark.skipif(native.load() is None, reason="no C compiler at installation")
class TestNative(Machine.TestCase):
    pass
