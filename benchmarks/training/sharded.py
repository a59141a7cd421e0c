"""A TorchRec model under DistributedModelParallel: fused tables with rowwise Adagrad, and an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.training.workload import DIM, LOOKUPS, SAMPLES, TABLES, zipf_ids

FEATURES = [f"f{n}" for n in range(TABLES)]


@dataclass
class Batch(Pipelineable):
    """Ids of all features and a label for each sample."""

    ids: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.ids.to(device, non_blocking), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        self.ids.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


class Model(nn.Module):
    """Returns what TorchRec's pipelines ask for: the loss, and what else there is to see."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t{n}", embedding_dim=DIM, num_embeddings=rows, feature_names=[feature]
                )
                for n, feature in enumerate(FEATURES)
            ],
        )
        self.dense = nn.Sequential(
            nn.Linear(TABLES * DIM, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.dense(self.tables(batch.ids).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


@dataclass
class Sharded:
    """The model, and the optimizer of both its fused and its dense part. Collective."""

    model: Any
    optimizer: Any

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def sharded_model(rows: int, *, seed: int = 5) -> Sharded:
    """Tables of `rows` rows, every other one row-wise and table-wise. Collective."""
    torch.manual_seed(seed)
    world = dist.get_world_size()
    model = Model(rows)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05})
    plan = construct_module_sharding_plan(
        model.tables,
        per_param_sharding={
            f"t{n}": row_wise() if n % 2 == 0 else table_wise(n // 2 % world) for n in range(TABLES)
        },
        sharder=EmbeddingBagCollectionSharder(),
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    )
    return Sharded(dmp, CombinedOptimizer([dmp.fused_optimizer, dense]))


def batches(rows: int, count: int, seed: int) -> list[Batch]:
    """Random batches for one rank, Zipf-distributed over the whole tables."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.full((TABLES * SAMPLES,), LOOKUPS)
    return [
        Batch(
            KeyedJaggedTensor.from_lengths_sync(
                FEATURES, zipf_ids(rows, (TABLES * SAMPLES * LOOKUPS,), random), lengths
            ),
            torch.randint(0, 2, (SAMPLES,), generator=random).float(),
        )
        for _ in range(count)
    ]


def lookup_modules(model: Any) -> list[nn.Module]:
    """The table-batched embeddings of a sharded model: plain lists hold them, not submodules."""
    found = []
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            inner = getattr(lookup, "module", lookup)  # under DistributedDataParallel
            found += [e._emb_module for e in getattr(inner, "_emb_modules", ())]
    return found
