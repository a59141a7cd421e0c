"""Ranks that train with TorchRec's keyed optimizers, lose all they have, and resume: `keyed_ranks.py ROOT`.

A life is a model, an optimizer and a schedule built anew; nothing of one life is seen by the next but what a
checkpoint holds. The unbroken run is the oracle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LRScheduler
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ckpt import CheckpointConfig, Checkpointer
from ckpt.tree import flatten
from tests.distributed.launch import join, leave
from tests.faults import DEADLINE_S

CPU = torch.device("cpu")
ROWS, DIM, BATCH, DENSE_IN = 40, 8, 6, 4
STEPS, KILLED_AT = 200, (12, 90, 150)  # in the warm-up, in the decay, and after it
CONFIG = CheckpointConfig(commit_timeout_s=DEADLINE_S, persist_target_s=0)

WAYS: dict[str, Callable[[], Any]] = {
    "t_tw0": lambda: table_wise(0),
    "t_tw1": lambda: table_wise(1),
    "t_rw": row_wise,
    "t_cw": lambda: column_wise(ranks=[0, 1]),
    "t_cw0": lambda: column_wise(ranks=[0, 0]),  # two shards in one kernel
    "t_dp": data_parallel,
}


class WarmUpThenDecay(LRScheduler):
    """The schedule of the public DLRM trainer: a linear warm-up, a plateau, then a polynomial decay."""

    def __init__(self, optimizer: Any, warmup: int, decay_from: int, decay_for: int) -> None:
        self.warmup, self.decay_from, self.decay_for = warmup, decay_from, decay_for
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        step = self.last_epoch
        if step < self.warmup:
            return [lr * (step + 1) / self.warmup for lr in self.base_lrs]
        if step < self.decay_from:
            return list(self.base_lrs)
        if step < self.decay_from + self.decay_for:
            left = 1 - (step - self.decay_from) / self.decay_for
            return [max(1e-7, lr * left**2) for lr in self.base_lrs]
        return [group["lr"] for group in self.optimizer.param_groups]  # frozen


@dataclass
class Life:
    model: Any
    optimizer: Any
    schedule: Any
    state: dict[str, Any]

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss.item()

    def train(self, rank: int, begin: int, end: int) -> list[float]:
        return [self.step(batch_of(rank, n)) for n in range(begin, end)]


def build(
    tables: dict[str, str],
    dense: Callable[[Any], torch.optim.Optimizer],
    fused: type[torch.optim.Optimizer] = RowWiseAdagrad,
    fused_params: dict[str, Any] | None = None,
    *,
    dtensor: bool = False,
) -> tuple[Any, Any, Any]:
    """(model, fused optimizer, dense one). tables: name -> a way of WAYS."""
    torch.manual_seed(5)
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f_{name}"]
            )
            for name in tables
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(
        fused,
        [p for n, p in collection.named_parameters() if "t_dp" not in n],
        {"lr": 0.2},
    )
    dlrm = DLRM(collection, DENSE_IN, [16, DIM], [16, 1], dense_device=CPU)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    plan = construct_module_sharding_plan(
        collection,
        per_param_sharding={name: WAYS[way]() for name, way in tables.items()},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.output_dtensor = dtensor
    if dtensor:
        env.device_mesh = init_device_mesh("cpu", (2,))
    model = DistributedModelParallel(
        DLRMTrain(dlrm),
        env=env,
        device=CPU,
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, model.fused_optimizer, KeyedOptimizerWrapper(rest, dense)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02, weight_decay=1e-3)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.02, eps=1e-8)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02)


def batch_of(rank: int, number: int) -> Batch:
    g = torch.Generator().manual_seed(number * 2 + rank)
    keys = [f"f_{name}" for name in WAYS]
    lengths = torch.randint(1, 4, (len(keys) * BATCH,), generator=g)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
    return Batch(
        dense_features=torch.rand(BATCH, DENSE_IN, generator=g),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(keys, values, lengths),
        labels=torch.randint(0, 2, (BATCH,), generator=g),
    )


EVERY_WAY = {name: name for name in WAYS}


def dlrm(dense: Callable[[Any], torch.optim.Optimizer], *, groups: bool = False) -> Life:
    """The shape of the public DLRM trainer."""
    model, fused, rest = build(EVERY_WAY, dense)
    optimizer = CombinedOptimizer([fused, rest])
    optimizer.save_param_groups(groups)
    schedule = WarmUpThenDecay(optimizer, 20, 60, 80)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return Life(model, optimizer, schedule, state)


def plain_sgd() -> Life:
    model, fused, rest = build(EVERY_WAY | {"t_dp": "t_rw"}, sgd, torch.optim.SGD)
    optimizer = CombinedOptimizer([fused, rest])
    return Life(model, optimizer, None, {"model": model, "optimizer": optimizer})


def counted(tables: dict[str, str] = EVERY_WAY) -> Life:
    """Rows decay by how often they, and all, were looked up."""
    how = CounterBasedRegularizationDefinition(
        counter_halflife=4, adjustment_iter=0, max_counter_update_freq=2
    )
    model, fused, rest = build(
        tables,
        adam,
        fused_params={
            "weight_decay": 0.1,
            "weight_decay_mode": WeightDecayMode.COUNTER,
            "counter_based_regularization": how,
        },
    )
    assert all(k._used_rowwise_adagrad_with_counter for k in kernels_of(model))
    optimizer = CombinedOptimizer([fused, rest])
    return Life(model, optimizer, None, {"model": model, "optimizer": optimizer})


STAGES = (
    WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=8, value=0.1),
    WarmupStage(policy=WarmupPolicy.POLY, max_iters=30, value=2.0, decay_iters=40),
)


def warm_around_dense() -> Life:
    model, fused, rest = build(EVERY_WAY, adam, dtensor=True)
    optimizer = CombinedOptimizer(
        [("fused", fused), ("dense", WarmupOptimizer(rest, list(STAGES), lr=0.02))]
    )
    return Life(model, optimizer, None, {"model": model, "optimizer": optimizer})


def warm_around_all() -> Life:
    model, fused, rest = build(EVERY_WAY, adam)
    warm = WarmupOptimizer(CombinedOptimizer([fused, rest]), list(STAGES), lr=0.1)
    optimizer = GradientClippingOptimizer(warm, GradientClipping.NORM, max_gradient=0.5)
    return Life(model, optimizer, None, {"model": model, "optimizer": optimizer})


def exact(make: Callable[[], Life], root: str, steps: int, kills: tuple[int, ...]) -> None:
    """Each life that begins at a save trains as the unbroken one went on, to the last bit."""
    rank = dist.get_rank()
    unbroken, losses, saves = make(), [], []
    for n, until in enumerate((*kills, steps)):
        losses += unbroken.train(rank, len(losses), until)
        if n < len(kills):
            with Checkpointer(f"{root}/{until}", CONFIG) as c:
                c.save(until, unbroken.state).committed.result(DEADLINE_S)
            saves.append((until, counts(unbroken.model)))
    end = entries(unbroken.state, rank)
    for until, count in saves:
        life = make()
        resume(life, f"{root}/{until}")
        assert counts(life.model) == count, (counts(life.model), count)
        again = life.train(rank, until, steps)
        assert again == losses[until:], first_difference(again, losses[until:])
        check_equal(entries(life.state, rank), end)


def counts_of_rows_move(root: str) -> None:
    """Counts of rows are the same at any sharding, whether the state has the fused optimizer or not."""
    rank = dist.get_rank()
    moved = {"t_tw0": "t_rw", "t_tw1": "t_cw", "t_rw": "t_tw1", "t_cw": "t_tw0"}
    life, again, sharded = counted(), counted(), counted(EVERY_WAY | moved)
    life.train(rank, 0, 6)
    with Checkpointer(root, CONFIG) as c:
        c.save(6, {"model": life.model}).committed.result(DEADLINE_S)
    for other in (again, sharded):
        with Checkpointer(root, CONFIG) as c:
            assert c.restore({"model": other.model}) is not None
        assert row_counts(other.model) == row_counts(life.model)
        assert set(counts(other.model)) == set(counts(life.model))
    with Checkpointer(f"{root}/whole", CONFIG) as c:
        c.save(6, life.state).committed.result(DEADLINE_S)
    other = counted(EVERY_WAY | moved)
    with Checkpointer(f"{root}/whole", CONFIG) as c:
        # One table has column shards now, whose momentum can only be that of the whole.
        assert c.restore(other.state, approximate=True) is not None
    assert row_counts(other.model) == row_counts(life.model)


def left_out(root: str) -> None:
    """Who leaves an optimizer out, or its options, has left out what its kernels have of them."""
    life = dlrm(adagrad)
    life.train(dist.get_rank(), 0, 6)
    with Checkpointer(root, CONFIG) as c:
        c.save(6, life.state).committed.result(DEADLINE_S)
    was, fresh = counts(life.model), counts(dlrm(adagrad).model)
    assert all(n == 6 for n, _, _ in was)
    for pattern in ("optimizer", "optimizer.groups"):
        other = dlrm(adagrad)
        with Checkpointer(root, CONFIG) as c:
            assert c.restore(other.state, exclude=[pattern]) is not None
        expected = [w if pattern != "optimizer" else f for w, f in zip(was, fresh, strict=True)]
        assert [n for n, _, _ in counts(other.model)] == [n for n, _, _ in expected]
        assert [lr for _, _, lr in counts(other.model)] == [lr for _, _, lr in fresh]


def row_counts(model: Any) -> dict[tuple[str, int], tuple[float, float]]:
    """On all ranks: by table and row, the last step and the count of its lookups."""
    mine = {}
    for lookup in model.module.model.sparse_arch.embedding_bag_collection._lookups:
        for group in getattr(lookup, "module", lookup)._emb_modules:
            state = getattr(group._emb_module, "get_optimizer_state", list)()
            for config, one in zip(group._config.embedding_tables, state, strict=False):
                first = config.local_metadata.shard_offsets[0]
                both = zip(one["prev_iter"].tolist(), one["row_counter"].tolist(), strict=True)
                mine.update({(config.name, first + i): v for i, v in enumerate(both)})
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine)
    assert any(count for _, count in mine.values())
    return {**found[0], **found[1]}


def resume(life: Life, root: str) -> None:
    with Checkpointer(root, CONFIG) as c:
        assert c.restore(life.state) is not None


def entries(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Copies of all that a state has, in the form in which it is stored."""
    from ckpt.canonical import Canonical

    flat = flatten(state, rank, Canonical(rank).look(state).taken)
    shards = {
        f"{k}{list(s.offsets)}": s.tensor.clone() for k, x in flat.leaves.items() for s in x.shards
    }
    return {**shards, "values": json.dumps(flat.values, default=repr, sort_keys=True)}


def check_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for k, v in a.items():
        assert v.equal(b[k]) if isinstance(v, torch.Tensor) else v == b[k], (k, v, b[k])


def kernels_of(model: Any) -> Iterator[Any]:
    for lookup in model.module.model.sparse_arch.embedding_bag_collection._lookups:
        for group in getattr(lookup, "module", lookup)._emb_modules:
            if hasattr(group._emb_module, "learning_rate_tensor"):
                yield group._emb_module


def counts(model: Any) -> list[tuple[int, int, float]]:
    return [
        (int(k.iter), int(k.iter_cpu), float(k.learning_rate_tensor)) for k in kernels_of(model)
    ]


def first_difference(a: list[float], b: list[float]) -> str:
    n = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    return f"step {n}: {a[n]} and {b[n]}; {sum(x != y for x, y in zip(a, b, strict=True))} differ"


def main() -> None:
    (root,) = sys.argv[1:]
    join()
    exact(partial(dlrm, adam), f"{root}/adam", STEPS, KILLED_AT)
    exact(partial(dlrm, adagrad, groups=True), f"{root}/groups", 30, (10,))
    exact(plain_sgd, f"{root}/sgd", 10, (4,))
    counts_of_rows_move(f"{root}/moved")
    left_out(f"{root}/left_out")
    exact(counted, f"{root}/counted", 20, (6,))
    exact(warm_around_dense, f"{root}/warm_dense", 20, (1, 12))
    exact(warm_around_all, f"{root}/warm_all", 20, (1, 12))
    leave()


if __name__ == "__main__":
    main()
