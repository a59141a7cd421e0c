"""A rank with sharded modules whose tables can't be guarded: each says why, by the table's name."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ckpt.attach import Attachment
from ckpt.attach.finding import _BARRED
from ckpt.events import ListSink
from tests.distributed.launch import join, leave
from tests.unit.attach_recorder import Recorder

MODULES = (
    "torchrec.modules.mc_embedding_modules",
    "torchrec.modules.itep_embedding_modules",
    "torchrec.distributed.mc_embedding_modules",
    "torchrec.distributed.itep_embeddingbag",
    "torchrec.distributed.model_parallel",
)
CPU = torch.device("cpu")
ROWS = 32


def bags() -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=ROWS, feature_names=["f"])
    return EmbeddingBagCollection([table], device=torch.device("meta"))


def managed() -> nn.Module:
    inner = bags()
    module = MCHManagedCollisionModule(
        zch_size=ROWS, device=CPU, eviction_interval=2, eviction_policy=DistanceLFU_EvictionPolicy()
    )
    collection = ManagedCollisionCollection({"t": module}, inner.embedding_bag_configs())
    return ManagedCollisionEmbeddingBagCollection(inner, collection)


def sharded(module: nn.Module, sharder: ModuleSharder[Any], kernel: str) -> nn.Module:
    model = nn.ModuleDict({"m": module})
    if kernel == "fused":
        apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    plan = construct_module_sharding_plan(
        module,
        per_param_sharding={"t": row_wise(compute_kernel=kernel)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"m": plan}), sharders=[sharder]
    )


def refused(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """The refusals, and the tables that were spoken of."""
    recorder, sink = Recorder(), ListSink()
    attachment = Attachment(recorder, sink)  # type: ignore[arg-type]
    attachment.add(model)
    assert not recorder.groups
    return dict(attachment.refused), [e["table"] for e in sink.named("table_copied")]


def main() -> None:
    join()
    sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    why, said = refused(sharded(managed(), sharder, "fused"))
    name = "m._embedding_module.embedding_bags.t"
    assert set(why) == {name} == set(said), why
    assert "eviction" in why[name]
    why, said = refused(sharded(bags(), EmbeddingBagCollectionSharder(), "dense"))
    assert "dense kernel" in why["m.embedding_bags.t"]
    assert not said
    # In-training pruning and 2D parallelism need a GPU; their class names must at least be right.
    known = {name for module in MODULES for name in vars(importlib.import_module(module))}
    missing = set(_BARRED) - known
    assert not missing, missing
    leave()


if __name__ == "__main__":
    main()
