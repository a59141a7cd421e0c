"""Sharding plans as JSON, and when a stored one is taken."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import BoundsCheckMode, CacheParams, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType

from ckpt.coordinator import Coordinator
from ckpt.errors import CorruptError
from ckpt.storage import MemoryStorage
from trainer.plain import UnprovableError
from trainer.plans import PlanRequest, decode_plan, encode_plan, key_of, plan_for

SHARDERS: list[Any] = [EmbeddingBagCollectionSharder()]


def tables(*, rows: int = 64, dim: int = 16) -> nn.Module:
    return nn.Sequential(
        EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"t{n}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{n}"]
                )
                for n in range(5)
            ],
            device=torch.device("meta"),
        )
    )


def plan_of(model: Any) -> ShardingPlan:
    """One table of each kind, over 2 hosts with 2 ranks each."""
    ways = [
        table_wise(3),
        row_wise(),
        column_wise([1, 2]),
        table_row_wise(1),
        data_parallel(),
    ]
    plan = construct_module_sharding_plan(
        model[0],
        {f"t{n}": way for n, way in enumerate(ways)},
        local_size=2,
        world_size=4,
        device_type="cuda",
    )
    plan["t0"].bounds_check_mode = BoundsCheckMode.WARNING
    plan["t0"].output_dtype = DataType.FP16
    plan["t1"].stochastic_rounding = False
    return ShardingPlan({"0": plan})


def test_every_kind_of_sharding_comes_back_as_it_was() -> None:
    plan = plan_of(tables())
    again = decode_plan(json.loads(json.dumps(encode_plan(plan))), "plans/x")
    assert again == plan
    assert {p.sharding_type for p in again.plan["0"].values()} == {
        ShardingType.TABLE_WISE.value,
        ShardingType.ROW_WISE.value,
        ShardingType.COLUMN_WISE.value,
        ShardingType.TABLE_ROW_WISE.value,
        ShardingType.DATA_PARALLEL.value,
    }
    assert type(again.plan["0"]["t3"].sharding_spec) is type(plan.plan["0"]["t3"].sharding_spec)
    placements = [s.placement for s in again.plan["0"]["t2"].sharding_spec.shards]
    assert [(p.rank(), str(p.device())) for p in placements] == [(1, "cuda:1"), (2, "cuda:0")]
    plan.plan["0"]["t0"].cache_params = CacheParams(load_factor=0.2)
    with pytest.raises(UnprovableError, match=r"0\.t0 has cache_params"):
        encode_plan(plan)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: b["0"]["t0"].pop("ranks"), r"plans/x: 0\.t0.*ranks"),
        (lambda b: b["0"]["t0"].update(output_dtype="FP17"), r"0\.t0: KeyError: 'FP17'"),
        (lambda b: b["0"]["t1"]["shards"][0].update(placement="rank:x"), r"0\.t1: ValueError"),
        (lambda b: b.update({"1": []}), "plans/x: not a plan"),
    ],
)
def test_a_damaged_plan_is_refused(spoil: Callable[[Any], Any], message: str) -> None:
    body = encode_plan(plan_of(tables()))
    spoil(body)
    with pytest.raises(CorruptError, match=message):
        decode_plan(body, "plans/x")


def test_the_key_covers_what_a_planner_looks_at() -> None:
    def key(model: nn.Module | None = None, ranks: int = 2, batch: int = 8, **more: Any) -> str:
        topology = Topology(ranks, "cpu", **more)
        return key_of(PlanRequest(model or tables(), SHARDERS, topology, batch))

    def limited(kind: ShardingType) -> str:
        only = {"t0": ParameterConstraints(sharding_types=[kind.value])}
        return key_of(PlanRequest(tables(), SHARDERS, Topology(2, "cpu"), 8, only))

    keys = [
        key(),
        key(tables(rows=65)),
        key(tables(dim=32)),
        key(ranks=4),
        key(batch=16),
        key(intra_host_bw=1.0),
        limited(ShardingType.ROW_WISE),
        limited(ShardingType.TABLE_WISE),
        key_of(PlanRequest(tables(), SHARDERS, Topology(2, "cpu"), 8, settings="greedy")),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert limited(ShardingType.ROW_WISE) == keys[6]


class Ranks:
    """Two ranks as threads: plans are counted, and each may see a root of its own."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.rounds = 0
        self.made = 0

    def start(self, *roots: MemoryStorage) -> list[bool]:
        self.rounds += 1

        def make() -> ShardingPlan:
            self.made += 1
            return plan_of(tables())

        def rank(n: int) -> bool:
            coordinator = Coordinator(n, len(roots), self.store, f"{self.rounds}/")
            request = PlanRequest(tables(), SHARDERS, Topology(len(roots), "cpu"), 8)
            done = plan_for(request, roots[n], make=make, coordinator=coordinator)
            assert done.plan == plan_of(tables())
            return done.reused

        with ThreadPoolExecutor(len(roots)) as pool:
            return list(pool.map(rank, range(len(roots))))


def test_a_plan_is_made_once_and_again_where_ranks_disagree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks, root = Ranks(), MemoryStorage()
    assert ranks.start(root, root) == [False, False]
    assert ranks.start(root, root) == [True, True]
    assert ranks.made == 2  # once on each rank, by this test's `make`

    # A rank that doesn't see the entry: nobody takes it.
    assert ranks.start(root, MemoryStorage()) == [False, False]
    assert "have read different sharding plans" in caplog.text

    caplog.clear()
    (entry,) = list(root.list("plans/"))
    root.put(entry.key, root.read(entry.key).replace(b"table_wise", b"table_wide"))
    assert ranks.start(root, root) == [False, False]
    assert f"made anew: {entry.key}: " in caplog.text
    assert "delete it to skip planning again" in caplog.text
    root.delete(entry.key)
    assert ranks.start(root, root) == [False, False]
    assert ranks.start(root, root) == [True, True]


def test_torchrecs_planner_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sidestage")
    root, only = MemoryStorage(), {"t0": ParameterConstraints(sharding_types=["table_wise"])}

    def start(**more: Any) -> Any:
        return plan_for(PlanRequest(tables(), SHARDERS, Topology(1, "cpu"), 8, **more), root)

    first, second = start(constraints=only), start(constraints=only)
    assert (first.reused, second.reused) == (False, True)
    assert second.plan == first.plan
    assert second.plan.plan["0"]["t0"].sharding_type == "table_wise"
    assert start().reused is False  # other constraints
