"""Shards models over the ranks, each table in another way."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType

from trainer.description.embeddings import Embeddings, embeddings_of

SHARDERS: list[Any] = [
    EmbeddingBagCollectionSharder(),
    EmbeddingCollectionSharder(),
    FeatureProcessedEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingBagCollectionSharder(),
    ManagedCollisionEmbeddingCollectionSharder(),
]


def shard(model: nn.Module, world_size: int, *, mix_means: bool = False) -> Any:
    """DistributedModelParallel of a model built on meta, by an explicit plan.

    Collections with MEAN are all row-wise: TorchRec 1.8 divides twice in mixed ones. Managed
    collision is always row-wise. Sequences are fused: fbgemm's dense kernel pools them on the CPU.
    """
    found: dict[str, Embeddings] = {}
    for path, module in model.named_modules():
        embeddings = embeddings_of(path, module)
        if embeddings is not None and not any(path.startswith(f"{p}.") for p in found):
            found[path] = embeddings
    plans = {p: _plan(e, world_size, mix_means=mix_means) for p, e in found.items()}
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=SHARDERS
    )


def _plan(embeddings: Embeddings, world_size: int, *, mix_means: bool) -> Any:
    last = world_size - 1
    fused = None if embeddings.pooled else "fused"
    by_row = partial(row_wise, compute_kernel=fused)
    ways = [by_row, partial(table_wise, last, compute_kernel=fused)]
    if embeddings.pooled:
        ways += [partial(column_wise, [0, last]), data_parallel]
    mean = any(c.pooling is PoolingType.MEAN for c in embeddings.configs if embeddings.pooled)
    if (mean and not mix_means) or embeddings.collisions is not None:
        ways = [by_row]
    sharder: ModuleSharder[Any] = next(
        s for s in SHARDERS if isinstance(embeddings.module, s.module_type)
    )
    return construct_module_sharding_plan(
        embeddings.module,
        per_param_sharding={
            c.name: ways[i % len(ways)]() for i, c in enumerate(embeddings.configs)
        },
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
