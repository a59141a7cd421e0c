"""What fbgemm's fused kernels count and are set to is restored with their tables, for any trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.errors import BadInputError
from ckpt.events import ListSink
from ckpt.storage.memory import MemoryStorage
from tests.checkpointer.ranks import on_ranks, values

training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")

from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: E402
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # noqa: E402

DIM = 4
ROWS = {"a": 8, "b": 6}


def kernel_of(*names: str) -> Any:
    """Row-wise Adagrad whose weight decay goes by how often each row, and all, were looked up."""
    torch.manual_seed(3)
    kernel = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS[n], DIM, EmbeddingLocation.HOST, training.ComputeDevice.CPU) for n in names],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        weight_decay=0.1,
        weight_decay_mode=training.WeightDecayMode.COUNTER,
        counter_based_regularization=training.CounterBasedRegularizationDefinition(
            counter_halflife=4, adjustment_iter=0
        ),
    )
    kernel.init_embedding_weights_uniform(-1.0, 1.0)
    return kernel


def train(kernel: Any, begin: int, end: int) -> list[float]:
    losses = []
    for step in range(begin, end):
        g = torch.Generator().manual_seed(step)
        tables = len(kernel.embedding_specs)
        ids = torch.randint(0, 6, (2 * tables,), generator=g)
        out = kernel(ids, torch.arange(2 * tables + 1))
        loss = (out * torch.rand(out.shape, generator=g)).sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def tensors_of(kernel: Any, *names: str) -> dict[str, Any]:
    """A state of nothing but tensors, as a trainer with a model of its own may have it."""
    return {
        "tables": dict(zip(names, kernel.split_embedding_weights(), strict=True)),
        "moments": dict(zip(names, kernel.split_optimizer_states(), strict=True)),
    }


def save(storage: MemoryStorage, *states: dict[str, Any]) -> None:
    def rank(r: int, job: dict[str, Any]) -> None:
        with Checkpointer(storage, sink=ListSink(), **job) as c:
            c.save(1, states[r]).committed.result()

    values(on_ranks(len(states), rank))


def restore(storage: MemoryStorage, *states: dict[str, Any], **terms: Any) -> None:
    def rank(r: int, job: dict[str, Any]) -> None:
        with Checkpointer(storage, sink=ListSink(), **job) as c:
            c.restore(states[r], **terms)

    values(on_ranks(len(states), rank))


def counts(kernel: Any) -> tuple[int, int, float]:
    return int(kernel.iter), int(kernel.iter_cpu), kernel.get_learning_rate()


def momentum_of(kernel: Any) -> dict[str, Any]:
    """A state that has forgotten that there is more."""
    state = tensors_of(kernel, "a", "b")
    return {**state, "moments": {n: m[0] for n, m in state["moments"].items()}}


@pytest.mark.parametrize(
    "state_of", [lambda k: {"model": k}, lambda k: tensors_of(k, "a", "b"), momentum_of]
)
def test_a_resume_counts_on(state_of: Callable[[Any], dict[str, Any]]) -> None:

    storage, unbroken = MemoryStorage(), kernel_of("a", "b")
    train(unbroken, 0, 5)
    unbroken.set_learning_rate(0.07)
    save(storage, state_of(unbroken))
    fresh = kernel_of("a", "b")
    train(fresh, 90, 93)  # even one that has counted already
    restore(storage, state_of(fresh))
    assert counts(fresh) == counts(unbroken) == (5, 5, pytest.approx(0.07))
    assert float(fresh.max_counter) == float(unbroken.max_counter)
    assert train(fresh, 5, 12) == train(unbroken, 5, 12)


def test_hyperparameters_are_those_of_the_save() -> None:
    storage, kernel = MemoryStorage(), kernel_of("a")
    kernel.update_hyper_parameters({"eps": 0.5, "weight_decay": 0.25, "lower_bound": 0.125})
    save(storage, tensors_of(kernel, "a"))
    fresh = kernel_of("a")
    restore(storage, tensors_of(fresh, "a"))
    assert fresh.optimizer_args.eps == 0.5
    assert fresh.optimizer_args.weight_decay == 0.25
    assert fresh.gwd_lower_bound == 0.125


def two_ranks(*counted: int) -> tuple[MemoryStorage, list[Any]]:
    """Saved by two ranks with a table each, whose kernels have run so often."""
    storage, kernels = MemoryStorage(), [kernel_of("a"), kernel_of("b")]
    for kernel, n in zip(kernels, counted, strict=True):
        train(kernel, 0, n)
    save(storage, *(tensors_of(k, n) for k, n in zip(kernels, ROWS, strict=True)))
    return storage, kernels


def test_each_rank_gets_its_own_counts() -> None:
    storage, kernels = two_ranks(2, 5)
    fresh = [kernel_of("a"), kernel_of("b")]
    restore(storage, *(tensors_of(k, n) for k, n in zip(fresh, ROWS, strict=True)))
    assert [counts(k) for k in fresh] == [counts(k) for k in kernels]


def test_on_other_ranks_counts_go_by_the_tables() -> None:
    storage, _ = two_ranks(3, 3)
    one = kernel_of("a", "b")
    restore(storage, tensors_of(one, "a", "b"))
    assert counts(one)[:2] == (3, 3)


def test_one_kernel_cant_have_two_counts() -> None:
    storage, _ = two_ranks(2, 5)
    one = kernel_of("a", "b")
    before = one.split_embedding_weights()[0].clone()
    with pytest.raises(BadInputError, match=r"tables\.a, tables\.b: .*different iter \(2, 5\)"):
        restore(storage, tensors_of(one, "a", "b"))
    assert one.split_embedding_weights()[0].equal(before)
    restore(storage, tensors_of(one, "a", "b"), exclude=["fused_kernels"])
    assert counts(one)[:2] == (0, 0)


def test_tables_without_a_kernel_take_no_notice() -> None:
    storage, kernels = two_ranks(2, 5)
    plain = [tensors_of(kernel_of(n), n) for n in ROWS]
    copies = [{k: {n: _copied(v) for n, v in x.items()} for k, x in s.items()} for s in plain]
    restore(storage, *copies)
    assert copies[0]["tables"]["a"].equal(kernels[0].split_embedding_weights()[0])


def _copied(value: Any) -> Any:
    return [v.clone() for v in value] if isinstance(value, list) else value.clone()


def test_a_state_cant_have_the_key_of_the_kernels() -> None:
    with (
        Checkpointer(MemoryStorage()) as c,
        pytest.raises(BadInputError, match="fused_kernels: .*rename"),
    ):
        c.save(1, {"fused_kernels": torch.zeros(1)})
