"""What a save and a restore leave on the trainer's own tensors: nothing (E23)."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer
from ckpt.errors import StorageError
from ckpt.storage import MemoryStorage
from tests.faults import FaultyStorage

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

MODES: list[Literal["guarded", "copied"]] = ["guarded", "copied"]


class Training:
    """Tensors of many kinds: parameters with their optimizer's state, buffers, plain ones, views."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.EmbeddingBag(50, 4, mode="sum", sparse=True),
            torch.nn.Linear(4, 3),
            torch.nn.BatchNorm1d(3),
        )
        dense = [p for n, p in self.model.named_parameters() if not n.startswith("0.")]
        self.optimizers = [
            torch.optim.Adagrad(self.model[0].parameters(), lr=0.1),
            torch.optim.Adam(dense, lr=0.1),
        ]
        self.plain = torch.arange(1000.0)
        self.large = torch.zeros(3 << 20)
        self.external = torch.from_numpy(np.zeros(3 << 20, np.float32))
        self.transposed = torch.arange(12.0).view(3, 4).t()
        self.scalar = torch.tensor(3)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        own = {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        return {"model": self.model, "opt": list(self.optimizers), "own": own}

    @property
    def tensors(self) -> list[torch.Tensor]:
        held = [*self.model.parameters(), *self.model.buffers()]
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                held += [t for t in state.values() if isinstance(t, torch.Tensor)]
        return [*held, self.plain, self.large, self.transposed, self.scalar]

    def step(self) -> None:
        out = self.model[2](self.model[1](self.model[0](torch.tensor([[1, 2], [3, 4]]))))
        out.sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def marks(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What others could see of a tensor, apart from its values."""
    storage = tensor.untyped_storage()
    return (
        type(tensor),
        vars(tensor),
        storage.resizable(),
        storage.is_shared(),
        tensor.is_pinned() if torch.cuda.is_available() else False,
        tensor.is_inference(),
        tensor._version,
        tensor.requires_grad,
        tensor.grad_fn,
        tensor._backward_hooks,
        getattr(tensor, "_post_accumulate_grad_hooks", None),
        tensor.data_ptr(),
        tensor.stride(),
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_save_leaves_no_mark_on_a_tensor(mode: Literal["guarded", "copied"]) -> None:
    training = Training()
    before = [marks(t) for t in training.tensors]
    with Checkpointer(MemoryStorage(), CheckpointConfig(snapshot=mode)) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step, training.state)
            assert [marks(t) for t in training.tensors] == before
            handle.committed.result(60)
            assert [marks(t) for t in training.tensors] == before
        training.plain.resize_(2000)
        training.large.resize_(1)
        training.scalar.resize_(3)
        checkpointer.save(3, training.state).committed.result(60)
        training.step()  # and training goes on


@pytest.mark.parametrize("mode", MODES)
def test_a_restore_leaves_only_values(mode: Literal["guarded", "copied"]) -> None:
    storage, config = MemoryStorage(), CheckpointConfig(snapshot=mode)
    with Checkpointer(storage, config) as checkpointer:
        checkpointer.save(1, Training().state).committed.result(60)
    training = Training()
    before = [marks(t) for t in training.tensors]
    with Checkpointer(storage, config) as checkpointer:
        checkpointer.restore(training.state)
        versions = 6  # a write in place counts up, as any does
        after = [marks(t) for t in training.tensors]
        assert [m[:versions] for m in after[:-4]] == [m[:versions] for m in before[:-4]]
        assert after[-4:] == [
            (*m[:versions], after[k - 4][versions], *m[versions + 1 :])
            for k, m in enumerate(before[-4:])
        ]
        assert all(t.untyped_storage().resizable() for t in training.tensors)
        checkpointer.save(2, training.state).committed.result(60)
        assert all(t.untyped_storage().resizable() for t in training.tensors)


@pytest.mark.parametrize("mode", MODES)
def test_a_save_in_inference_mode_binds_no_later_one(mode: Literal["guarded", "copied"]) -> None:
    """What is allocated there can't be written outside of it."""
    storage, training = MemoryStorage(), Training()
    with Checkpointer(storage, CheckpointConfig(snapshot=mode)) as checkpointer:
        with torch.inference_mode():
            checkpointer.save(1, training.state).committed.result(60)
        training.step()
        checkpointer.save(2, training.state).committed.result(60)
        with torch.no_grad():
            training.plain.add_(1)
        checkpointer.save(3, training.state).committed.result(60)
    other = Training()
    with Checkpointer(storage) as checkpointer:
        checkpointer.restore(other.state)
    assert torch.equal(other.plain, training.plain)


@pytest.mark.parametrize("native", [True, False])
def test_a_start_in_inference_mode_binds_no_step(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags and prints that are made there are written by training, and by a persist thread."""
    if not native:
        monkeypatch.setattr("ckpt.rows.guards.load", lambda: None)
        monkeypatch.setattr("ckpt.rows.prints.load", lambda: None)
    storage, training = MemoryStorage(), Training()
    with Checkpointer(storage) as checkpointer:
        with torch.inference_mode():
            checkpointer.restore(training.state)
        for step in (1, 2, 3):
            training.step()
            with torch.inference_mode():
                handle = checkpointer.save(step, training.state)
            training.step()
            handle.committed.result(60)
            assert checkpointer.stats.failed == 0


def test_a_fused_lookup_is_guarded_in_inference_mode() -> None:
    tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    lookup = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 4, common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)]
    )
    with Checkpointer(MemoryStorage()) as checkpointer:
        with torch.inference_mode():
            checkpointer.restore({"lookup": lookup})
        lookup(torch.tensor([1, 2]), torch.tensor([0, 2])).sum().backward()
        with torch.inference_mode():
            handle = checkpointer.save(1, {"lookup": lookup})
        assert handle.committed.result(60).step == 1


@pytest.mark.parametrize("mode", MODES)
def test_what_is_dropped_after_its_save_is_freed(mode: Literal["guarded", "copied"]) -> None:
    """Without the garbage collector, which trainers turn off."""
    training = Training()
    gc.collect()
    gc.disable()
    try:
        with Checkpointer(MemoryStorage(), CheckpointConfig(snapshot=mode)) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, training.state).committed.result(60)
            checkpointer.wait()
            memory = np.zeros(3 << 20, np.float32)
            training.external = torch.from_numpy(memory)
            gone = [
                weakref.ref(memory),
                weakref.ref(training.external),
                weakref.ref(training.plain),
            ]
            del memory
            checkpointer.save(3, training.state).committed.result(60)
            training.external, training.plain = torch.zeros(3 << 20), torch.zeros(1000)
            checkpointer.wait()
            assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("op", ["create", "writer", ""])
def test_a_save_that_failed_is_freed(op: str) -> None:
    """Without the garbage collector: a store in trouble, or (no op) a writer behind the guards."""
    training, store, full = Training(), FaultyStorage(MemoryStorage()), StorageError("full")
    gc.collect()
    gc.disable()
    try:
        with Checkpointer(store) as checkpointer:
            checkpointer.save(1, training.state).committed.result(60)
            if op:
                store.on(op, "*").fail(full)
            else:
                training.model[0].weight.data.add_(1)
            handle = checkpointer.save(2, training.state)
            assert handle.committed.exception(60) is not None
            full.__traceback__ = None  # a real store keeps no error
            gone = weakref.ref(handle.staged), weakref.ref(handle.committed)
            del handle
            checkpointer.save(3, training.state).committed.result(60)
            checkpointer.wait()
            assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
