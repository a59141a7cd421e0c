"""Shards the models of served_models over the ranks, each table in another way."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection


def shard(model: nn.Module, world_size: int, *, mix_means: bool = False) -> Any:
    """DistributedModelParallel of a model built on meta, by an explicit plan.

    Collections with MEAN are all row-wise: TorchRec 1.8 divides twice in mixed ones.
    """
    last = world_size - 1
    ways = [row_wise, lambda: table_wise(last), lambda: _columns(last), data_parallel]
    plans = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            configs = module.embedding_bag_configs()
            mean = any(c.pooling is PoolingType.MEAN for c in configs)
            plans[path] = construct_module_sharding_plan(
                module,
                per_param_sharding={
                    c.name: row_wise() if mean and not mix_means else ways[i % len(ways)]()
                    for i, c in enumerate(configs)
                },
                sharder=EmbeddingBagCollectionSharder(),
                local_size=world_size,
                world_size=world_size,
                device_type="cpu",
            )
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan(plans),
        sharders=[EmbeddingBagCollectionSharder()],
    )


def _columns(last: int) -> Any:
    return column_wise(ranks=[0, last])
