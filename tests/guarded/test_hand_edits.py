"""Guarded tables edited by hand without touched(): each fails the open save, by name; nothing else does."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ckpt import CheckpointConfig, Checkpointer, SaveHandle
from ckpt.catalog import Catalog
from ckpt.errors import UntrackedWriteError
from ckpt.events import ListSink
from ckpt.pump import Pump
from ckpt.snapshot import Snapshot
from ckpt.storage.memory import MemoryStorage
from tests.faults import DEADLINE_S

# Adagrad makes its sparse tensors unchecked, and torch tells so.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

ROWS = 20_000  # so many that the sampled proof all but never looks at an edited one


class HeldCheckpointer(Checkpointer):
    """Its persist thread begins a save when the gate opens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.gate = threading.Event()
        super().__init__(*args, **kwargs)

    def _pump(self, snapshot: Snapshot) -> Pump:
        assert self.gate.wait(DEADLINE_S), "the test never opened the gate"
        return super()._pump(snapshot)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.items = nn.Embedding(ROWS, 4, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.users(ids), self.items(ids[:, 0])], 1))
        return out

    def tables(self) -> list[nn.Parameter]:
        return [self.users.weight, self.items.weight]


def ids(seed: int) -> Tensor:
    return torch.randint(0, ROWS, (5, 2), generator=torch.Generator().manual_seed(seed))


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd foreach": lambda p: SGD(p, lr=0.1, foreach=True),
    "sgd maximize": lambda p: SGD(p, lr=0.1, foreach=False, maximize=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.01),
    "adagrad foreach": lambda p: Adagrad(p, lr=0.1, foreach=True),
    "sparse_adam": lambda p: SparseAdam(p, lr=0.1),
}


class Run:
    """Plain tables that have trained for a step, a checkpointer with one commit, and no open snapshot."""

    def __init__(self, kind: str = "adagrad") -> None:
        torch.manual_seed(0)
        self.model: Any = Model()
        self.dense = torch.optim.Adam(self.model.head.parameters())
        self.users = KINDS[kind]([self.model.users.weight])
        self.items = KINDS[kind]([self.model.items.weight])
        self.begin(Saver())

    def begin(self, saver: Saver) -> None:
        self.saver = saver
        self.train(0)
        self.save()
        self.finish()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "users": self.users, "items": self.items, "dense": self.dense}

    def train(self, seed: int) -> None:
        self.model(ids(seed)).sum().backward()
        for optimizer in (self.users, self.items, self.dense):
            optimizer.step()
            optimizer.zero_grad()

    def save(self) -> SaveHandle:
        return self.saver.save(self.state)

    def finish(self) -> None:
        """The save that is open has a commit."""
        self.saver.end().result(0)

    def fails(self, *names: str) -> None:
        """The save that is open fails by name, and the next one doesn't."""
        before = self.saver.c.stats.untracked_writes
        error = self.saver.end().exception(0)
        assert isinstance(error, UntrackedWriteError)
        assert "in place" in str(error)
        assert "touched()" in str(error)
        for name in names:
            assert name in str(error)
        event = self.saver.sink.named("untracked_write")[-1]
        assert event["step"] == self.saver.step
        assert names[0].split(":")[0] in event["table"]
        assert self.saver.c.stats.untracked_writes == before + 1
        self.train(90)
        self.save()
        self.train(91)
        self.finish()
        assert self.saver.c.stats.untracked_writes == before + 1
        steps = [c.ref.step for c in Catalog(self.saver.storage).lineage()]
        assert sorted(steps) == [1, self.saver.step]


_savers: list[Saver] = []


class Saver:
    def __init__(self, storage: MemoryStorage | None = None) -> None:
        self.storage, self.sink, self.step = storage or MemoryStorage(), ListSink(), 0
        config = CheckpointConfig(
            max_pending=2,
            staging_bytes=16 << 20,
            chunk_bytes=65536,
            persist_target_s=0.0,
            compression="off",
        )
        self.c = HeldCheckpointer(self.storage, config, sink=self.sink, rank=0, world_size=1)
        _savers.append(self)

    def save(self, state: dict[str, Any]) -> SaveHandle:
        """The snapshot stays open until `end`."""
        self.c.gate.clear()
        self.step += 1
        self.handle = self.c.save(self.step, state)
        return self.handle

    def end(self) -> Any:
        self.c.gate.set()
        self.handle.committed.exception(DEADLINE_S)
        return self.handle.committed


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Each test's checkpointers are closed after it, which takes their hooks off."""
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [set(h) for h in hooks]
    yield
    for saver in _savers:
        saver.c.gate.set()
        saver.c.close()
    _savers.clear()
    assert [set(h) for h in hooks] == before


@torch.no_grad()
def edit_row(run: Run) -> None:
    run.model.users.weight[5] = 0


def edit_state_dict(run: Run) -> None:
    run.model.state_dict()["users.weight"][3].zero_()


def edit_detached(run: Run) -> None:
    run.model.users.weight.detach().view(-1)[8:12].mul_(2)


def edit_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.model.users.weight[7] += 1


EDITS = [edit_row, edit_state_dict, edit_detached, edit_in_inference_mode]


@pytest.mark.parametrize("when", ["alone", "before a step", "after a step", "between steps"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_table_fails_the_open_save(edit: Callable[[Run], None], when: str) -> None:
    run = Run()
    run.save()
    if when in {"after a step", "between steps"}:
        run.train(1)
    edit(run)
    if when in {"before a step", "between steps"}:
        run.train(2)
    run.fails("model.users: weight")


@pytest.mark.parametrize("kind", KINDS)
def test_training_alone_is_no_edit_and_edits_are_found_under_every_optimizer(kind: str) -> None:
    run = Run(kind)
    for seed in range(3):
        run.save()
        for _ in range(seed):
            run.train(seed)
        run.finish()
    assert not run.saver.sink.named("untracked_write")
    run.save()
    run.train(4)
    edit_row(run)
    error = run.saver.end().exception(0)
    assert isinstance(error, UntrackedWriteError)
    assert "model.users: weight" in str(error)


@pytest.mark.parametrize(("kind", "state"), [("adagrad", "sum"), ("sparse_adam", "exp_avg_sq")])
def test_an_edit_of_row_aligned_state_is_found(kind: str, state: str) -> None:
    run = Run(kind)
    run.save()
    run.items.state[run.model.items.weight][state][3].zero_()
    number = {"sum": 1, "exp_avg_sq": 2}[state]
    run.fails(f"model.items: optimizer state {number}")


def test_all_edited_tables_are_named() -> None:
    run = Run()
    run.save()
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    error = run.saver.end().exception(0)
    assert isinstance(error, UntrackedWriteError)
    assert (
        "model.users: weight was changed in place outside of training; model.items: weight"
        in str(error)
    )
    tables = [e["table"] for e in run.saver.sink.named("untracked_write")]
    assert tables == ["model.users", "model.items"]
    assert run.saver.c.stats.untracked_writes == 2


def test_an_edit_fails_every_open_save_and_none_that_comes_after() -> None:
    run = Run()
    first = run.save()
    edit_row(run)
    second = run.save()
    run.train(1)
    run.saver.end()
    assert isinstance(first.committed.exception(DEADLINE_S), UntrackedWriteError)
    second.committed.result(DEADLINE_S)


def load_state(run: Run) -> None:
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))


def replace_optimizer_state(run: Run) -> None:
    for optimizer in (run.users, run.items, run.dense):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace_weight(run: Run) -> None:
    run.model.users.weight = nn.Parameter(run.model.users.weight.detach().clone())
    run.users = Adagrad([run.model.users.weight])


def schedule(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.users, 1)
    run.users.step()
    scheduler.step()


@pytest.mark.parametrize(
    "change", [edit_row, load_state, replace_optimizer_state, replace_weight, schedule]
)
def test_between_saves_everything_may_change(change: Callable[[Run], None]) -> None:
    run = Run()
    for seed in range(2):
        change(run)
        run.save()
        run.train(seed)
        run.finish()
        change(run)


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(ids(8))
    with torch.inference_mode():
        run.model(ids(9))
    run.model.train()


def convert(run: Run) -> None:
    run.model.float()
    run.model.cpu()
    run.model.requires_grad_(True)


def read(run: Run) -> None:
    copy.deepcopy(run.model)
    copy.deepcopy(run.model.state_dict())
    copy.deepcopy(run.users.state_dict())
    torch.nn.utils.parameters_to_vector(run.model.parameters())


def scale(run: Run) -> None:
    """A step that a scaler skips, and one that it doesn't."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        scaler.scale(run.model(ids(5)).sum() * factor).backward()
        for optimizer in (run.users, run.items, run.dense):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def raise_in_a_step(run: Run) -> None:
    def fail() -> float:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        run.users.step(fail)


def step_without_gradients(run: Run) -> None:
    run.users.zero_grad()
    run.users.step()


def step_with_other_optimizers(run: Run) -> None:
    other = nn.Embedding(10, 2, sparse=True)
    optimizer = SparseAdam(other.parameters())
    other(torch.tensor([1])).sum().backward()
    optimizer.step()


def accumulate(run: Run) -> None:
    for seed in range(3):
        run.model(ids(seed)).sum().backward()
    run.train(7)


def announce(run: Run) -> None:
    rows = torch.tensor([5])
    run.saver.c.touched(run.model.users.weight, rows)
    edit_row(run)
    with torch.no_grad():
        run.model.users.weight[rows] -= 1
    run.saver.c.touched(run.users.state[run.model.users.weight]["sum"], rows)
    run.users.state[run.model.users.weight]["sum"][rows] = 0


QUIET = [
    *(evaluate, convert, read, schedule, scale, step_without_gradients, accumulate),
    *(step_with_other_optimizers, replace_optimizer_state, announce),
]


@pytest.mark.parametrize("act", QUIET)
def test_what_is_no_edit_fails_no_save(act: Callable[[Run], None]) -> None:
    run = Run()
    run.save()
    act(run)
    run.finish()
    run.save()
    run.train(1)
    act(run)
    run.train(2)
    run.finish()
    assert not run.saver.c.stats.untracked_writes


def test_a_step_that_raises_is_no_edit() -> None:
    """It waits for the whole table, since it has a closure."""
    run = Run()
    run.save()
    run.saver.c.gate.set()
    raise_in_a_step(run)
    run.finish()
    run.train(1)
    run.save()
    run.train(2)
    run.finish()
    assert not run.saver.c.stats.untracked_writes


def test_after_an_announced_edit_and_a_step_others_are_found_again() -> None:
    run = Run()
    run.save()
    announce(run)
    run.train(1)
    edit_row(run)
    run.fails("model.users: weight")


def test_saves_inside_hooks_of_a_step() -> None:
    run = Run()
    handle = run.users.register_step_post_hook(lambda *_: run.save() and None)
    run.train(1)
    handle.remove()
    run.finish()
    run.users.register_step_pre_hook(lambda *_: run.save() and None)
    run.train(2)  # announces its rows after all hooks before it
    run.finish()


def test_a_restore_is_no_edit() -> None:
    run = Run()
    run.saver.c.close()
    again = Run()
    again.saver = Saver(run.saver.storage)
    again.saver.step = 1
    assert again.saver.c.restore(again.state) is not None
    for seed in range(2):
        again.save()
        again.train(seed)
        again.finish()
    assert not again.saver.c.stats.untracked_writes


# Said by torch about its own module.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_optimizers_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    run = Run()
    run.saver.c.close()
    run.model = Model()
    _apply_optimizer_in_backward(SGD, run.model.tables(), {"lr": 0.1})
    state = {"model": run.model, "dense": run.dense}
    saver = Saver()
    for seed in range(3):
        saver.save(state)
        run.model(ids(seed)).sum().backward()
        saver.end().result(0)
    assert not saver.sink.named("table_copied")
    saver.save(state)
    run.model(ids(4)).sum().backward()
    edit_row(run)
    error = saver.end().exception(0)
    assert isinstance(error, UntrackedWriteError)
    assert "model.users: weight" in str(error)


def test_under_distributed_data_parallel(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        run = Run()
        run.model = nn.parallel.DistributedDataParallel(run.model)
        for seed in range(3):
            run.save()
            run.train(seed)
            run.finish()
        assert not run.saver.c.stats.untracked_writes
        run.save()
        run.train(4)
        run.model.module.users.weight.detach()[5] = 0
        error = run.saver.end().exception(0)
        assert isinstance(error, UntrackedWriteError)
        assert "users: weight" in str(error)
    finally:
        dist.destroy_process_group()


class FusedRun(Run):
    """The same with two tables of one fused lookup."""

    def __init__(self, optimizer: str = "EXACT_ROWWISE_ADAGRAD", **options: Any) -> None:
        tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
        self.model = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, 4, common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)] * 2,
            optimizer=getattr(configs.EmbOptimType, optimizer),
            learning_rate=0.1,
            table_names=["users", "items"],
            **options,
        )
        self.model.init_embedding_weights_uniform(-1, 1)
        saver = Saver()
        saver.c.guard({"model": self.model})
        self.train(0)
        self.begin(saver)

    @property
    def state(self) -> dict[str, Any]:
        weights = self.model.split_embedding_weights()
        states = self.model.split_optimizer_states() or [[], []]
        return {
            f"t{n}": {"weight": w.detach(), **{f"m{k}": x for k, x in enumerate(s)}}
            for n, (w, s) in enumerate(zip(weights, states, strict=True))
        }

    def train(self, seed: int) -> None:
        rows = torch.randint(0, ROWS, (10,), generator=torch.Generator().manual_seed(seed))
        self.model(rows, torch.arange(0, 11, 1)).sum().backward()


def fused_row(run: FusedRun) -> None:
    run.model.split_embedding_weights()[0][3] = 0


def fused_state_dict(run: FusedRun) -> None:
    run.state["t0"]["weight"][3].zero_()


@torch.no_grad()
def fused_parameter(run: FusedRun) -> None:
    """Through all the memory of the module's tables."""
    max(run.model.parameters(), key=torch.numel)[7] = 1


def fused_load(run: FusedRun) -> None:
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))


@pytest.mark.parametrize("when", ["alone", "before", "after"])
@pytest.mark.parametrize("edit", [fused_row, fused_state_dict, fused_parameter])
def test_an_edit_of_a_fused_table_is_found(edit: Callable[[FusedRun], None], when: str) -> None:
    run = FusedRun()
    run.save()
    if when == "after":
        run.train(1)
    edit(run)
    if when == "before":
        run.train(1)
    run.fails("model.users: weight: rows")


def test_an_edit_of_fused_momentum_is_found() -> None:
    run = FusedRun()
    run.save()
    run.model.split_optimizer_states()[1][0][3] = 7
    run.fails("model.items: optimizer state 1: rows [3]")


def test_a_load_of_a_fused_module_is_found() -> None:
    run = FusedRun()
    run.save()
    fused_load(run)
    run.fails("model.users or model.items: weight", "optimizer state 1")


def ask(run: FusedRun) -> None:
    run.model.set_learning_rate(0.2)
    run.model.split_embedding_weights()
    run.model.split_optimizer_states()
    run.model.get_optimizer_state()
    run.model.reset_cache_states()
    run.model.flush()
    run.model.state_dict()


def look_up_only(run: FusedRun) -> None:
    run.model(torch.arange(10), torch.arange(0, 11, 1))
    with torch.no_grad():
        run.model(torch.arange(10), torch.arange(0, 11, 1))


def look_ahead(run: FusedRun) -> None:
    outs = [run.model(torch.arange(n, 10 + n), torch.arange(0, 11, 1)) for n in range(2)]
    for out in outs:
        out.sum().backward()


def announce_fused(run: FusedRun) -> None:
    weight = run.model.split_embedding_weights()[1]
    run.saver.c.touched(weight, torch.tensor([4]))
    weight[4] = 1
    run.model.split_optimizer_states()[1][0][4] = 0


FUSED = ["EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD", "EXACT_SGD"]


@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("act", [ask, look_up_only, look_ahead, None])
def test_training_a_fused_table_is_no_edit(
    optimizer: str, act: Callable[[FusedRun], None] | None
) -> None:
    run = FusedRun(optimizer)
    for seed in range(3):
        run.save()
        run.train(seed)
        if act is not None:
            act(run)
        run.train(seed)
        run.finish()
    assert not run.saver.c.stats.untracked_writes


def test_the_first_updates_of_a_fused_table_are_no_edit() -> None:
    run = FusedRun()
    run.saver.c.close()
    run.saver = Saver()
    run.saver.c.guard({"model": run.model})
    for seed in range(4):
        run.save()
        run.train(seed)
        run.finish()
    assert not run.saver.c.stats.untracked_writes


def test_an_announced_edit_of_a_fused_table_is_none_until_the_next_update() -> None:
    run = FusedRun()
    run.save()
    announce_fused(run)
    run.train(1)
    run.finish()
    run.save()
    announce_fused(run)
    run.train(2)
    fused_row(run)
    error = run.saver.end().exception(0)
    assert isinstance(error, UntrackedWriteError)


@pytest.mark.parametrize("change", [fused_row, fused_load])
def test_between_saves_fused_tables_may_change(change: Callable[[FusedRun], None]) -> None:
    run = FusedRun()
    for seed in range(2):
        change(run)
        run.save()
        run.train(seed)
        run.finish()
        change(run)


def test_a_component_that_isnt_saved_may_change() -> None:
    run = FusedRun()
    weights = {n: {"weight": t["weight"]} for n, t in run.state.items()}
    run.saver.save(weights)
    run.model.split_optimizer_states()[1][0][3] = 7
    run.finish()
