"""The reference model: a TorchRec DLRM under DistributedModelParallel.

Table optimizer: fused rowwise Adagrad, run inside the backward pass. Dense optimizer: Adam.
Some tables are split by rows over all ranks, the others lie whole on one rank each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

# apply_optimizer_in_backward would load it, for a third of a second; here it is part of the imports.
import torch.distributed.optim
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ckpt.errors import BadInputError
from trainer.config import ModelConfig
from trainer.movielens import DENSE_FEATURES, FEATURES, Samples

COLLECTION = "model.sparse_arch.embedding_bag_collection"
"""Where the embedding collection lies in DLRMTrain."""
DENSE_PARTS = ("model.dense_arch", "model.inter_arch", "model.over_arch")
"""What of DLRMTrain can be compiled."""


@dataclass(frozen=True)
class Training:
    """A sharded model with its optimizer and the pipeline that runs both."""

    model: Any
    optimizer: Any
    pipeline: Any


class Scorer(nn.Module):
    """What is served: the probability of a high rating.

    Its parameters have the names that they have in DLRMTrain, so a checkpoint of the one fills
    the other.
    """

    def __init__(self, dlrm: nn.Module) -> None:
        super().__init__()
        self.model = dlrm

    def forward(self, dense: Tensor, features: Any) -> dict[str, Tensor]:
        """dense: float32 (batch, 3). features: KeyedJaggedTensor of FEATURES. Returns (batch,)."""
        return {"probability": torch.sigmoid(self.model(dense, features).squeeze(-1))}


class KernelCounters:
    """How often the fused table kernels have run, to undo lookups that are no training.

    Every forward pass advances all of them together, so one number stands for all.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kernels = list(_kernels(model))
        if not self._kernels:
            raise BadInputError("this rank has no table kernel; split at least one table by rows")

    def state_dict(self) -> dict[str, int]:
        counts = {int(k.iter_cpu.item()) for k in self._kernels}
        if len(counts) > 1:
            raise BadInputError(f"table kernels have run {sorted(counts)} times, not equally often")
        return {"iter": counts.pop()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for kernel in self._kernels:
            kernel.iter_cpu.fill_(state["iter"])
            kernel.iter.fill_(state["iter"])


def build_training(
    config: ModelConfig, rows: Mapping[str, int], device: torch.device, world_size: int
) -> Training:
    """Build and shard the model. Collective: call on every rank, with the same random seed.

    Args:
        config: sizes, learning rates, and which tables are split.
        rows: rows of each feature's table.
        device: where this rank's parameters lie.
        world_size: number of ranks.
    """
    return shard_training(build_model(config, rows, device), config, device, world_size)


def build_model(config: ModelConfig, rows: Mapping[str, int], device: torch.device) -> DLRMTrain:
    """The model with its dense weights on `device`, drawn at random, and its tables on meta.

    Not collective, and before the process group where that helps. `trainer.pt2.prepare` compiles
    DENSE_PARTS of it.
    """
    unknown = sorted(set(config.row_wise) - set(rows))
    if unknown:
        raise BadInputError(
            f"[model] row_wise: no table {unknown[0]!r}; there are {', '.join(rows)}"
        )
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=feature,
                feature_names=[feature],
                num_embeddings=rows[feature],
                embedding_dim=config.embedding_dim,
                init_fn=partial(nn.init.uniform_, a=-0.05, b=0.05),
            )
            for feature in FEATURES
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": config.table_lr})
    dlrm = DLRM(
        embedding_bag_collection=collection,
        dense_in_features=len(DENSE_FEATURES),
        dense_arch_layer_sizes=[*config.dense_layers, config.embedding_dim],
        over_arch_layer_sizes=[*config.over_layers, 1],
        dense_device=device,
    )
    return DLRMTrain(dlrm)


def shard_training(
    built: DLRMTrain, config: ModelConfig, device: torch.device, world_size: int
) -> Training:
    """Shard what `build_model` has built. Collective: call on every rank, with the same random seed."""
    collection = built.model.sparse_arch.embedding_bag_collection
    model = DistributedModelParallel(
        built,
        device=device,
        plan=_plan(collection, config, device, world_size),
        sharders=[EmbeddingBagCollectionSharder()],
        # A static graph lets DDP rebuild its buckets after the first iteration of each process,
        # which changes the order of summation: four ranks would then not resume bit for bit.
        data_parallel_wrapper=DefaultDataParallelWrapper(
            find_unused_parameters=True, static_graph=False
        ),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        partial(_adam, lr=config.dense_lr),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    return Training(model, optimizer, TrainPipelineSparseDist(model, optimizer, device))


def to_batch(samples: Samples) -> Any:
    """A torchrec Batch of some samples. Features lie one after another: all users, all items, ..."""
    singles = samples.ids.t().reshape(-1)
    ones = torch.ones(len(singles), dtype=torch.int64)
    return Batch(
        dense_features=samples.dense,
        sparse_features=KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.cat([singles, samples.genres]),
            lengths=torch.cat([ones, samples.genre_lengths]),
        ),
        labels=samples.labels,
    )


def scorer_of(model: nn.Module) -> Scorer:
    """The served part of a sharded DLRMTrain; shares all parameters with it."""
    inner: Any = getattr(model, "module", model)
    return Scorer(inner.model).eval()


def _adam(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr)


def _plan(collection: Any, config: ModelConfig, device: torch.device, world_size: int) -> Any:
    """An explicit plan, equal on every rank: no planner, nothing to broadcast."""
    whole = [f for f in FEATURES if f not in config.row_wise]
    how = {f: row_wise() for f in config.row_wise} | {
        f: table_wise(rank=i % world_size) for i, f in enumerate(whole)
    }
    plan = construct_module_sharding_plan(
        collection,
        per_param_sharding=how,
        sharder=EmbeddingBagCollectionSharder(),
        local_size=world_size,
        world_size=world_size,
        device_type=device.type,
    )
    return ShardingPlan({COLLECTION: plan})


def _kernels(model: nn.Module) -> Iterator[Any]:
    """The table-batched embeddings, which are no registered submodules of the sharded ones."""
    for module in model.modules():
        for lookup in getattr(module, "_lookups", ()):
            for group in getattr(getattr(lookup, "module", lookup), "_emb_modules", ()):
                kernel = getattr(group, "_emb_module", group)
                if hasattr(kernel, "iter_cpu"):
                    yield kernel
