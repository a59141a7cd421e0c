"""Five recommendation models of different shape, each a TorchRec model under DistributedModelParallel.

| name | tables | MiB | dense part |
|---|---|---|---|
| tables | 4 of 2,000,000 x 32, split | 977 | DLRM: MLP, dot products of pairs, MLP |
| dense | 8 of 300,000 x 16 | 146 | DCN: 3 cross layers of full rank, MLP 512-256 |
| many | 64 of 130,000 x 8 | 254 | MLP 64 |
| sequence | 2,000,000 items, 1,000,000 users x 32, split, unpooled | 366 | attention over 20 items |
| multitask | MovieLens-100k's 8 features x 16, 2,781 rows in all | 0.2 | 4 experts, 2 gated towers |

Rows x dimensions, float32; RowWiseAdagrad adds 4 bytes a row. A rank holds half: of each row-wise split
table, or every other table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer.model import to_batch
from trainer.movielens import FEATURES, load_movielens

DENSE = 13  # dense features of the synthetic models
SEQUENCE = 20
_POOL = 64  # batches made beforehand; training reads them again and again
_GOLDEN = 64
_LARGE_ROWS = 1_000_000  # from here on a table is split by rows


@dataclass(frozen=True)
class Model:
    """tables: rows of each table, by feature. samples: of a global batch."""

    name: str
    tables: dict[str, int]
    dim: int
    dense: Callable[[int], nn.Module]
    samples: int
    pooled: bool = True
    movielens: bool = False


class Net(nn.Module):
    """Lookups, and the dense part behind them. Returns (loss, logits)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        meta = torch.device("meta")
        init = partial(nn.init.uniform_, a=-0.05, b=0.05)
        self.pooled = model.pooled
        config: Any = EmbeddingBagConfig if model.pooled else EmbeddingConfig
        collection: Any = EmbeddingBagCollection if model.pooled else EmbeddingCollection
        self.embeddings = collection(
            tables=[
                config(
                    name=f,
                    feature_names=[f],
                    num_embeddings=n,
                    embedding_dim=model.dim,
                    init_fn=init,
                )
                for f, n in model.tables.items()
            ],
            device=meta,
        )
        self.dense = model.dense(len(model.tables))

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """batch: torchrec Batch. loss is a scalar, logits (batch,)."""
        found = self.embeddings(batch.sparse_features)
        if self.pooled:
            logits = self.dense(batch.dense_features, found.values())
        else:
            items, users = found["item"], found["user"]
            padded = items.to_padded_dense(SEQUENCE)
            logits = self.dense(padded, items.lengths(), users.values())
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, logits.detach()


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dots(nn.Module):
    """DLRM."""

    def __init__(self, tables: int, dim: int = 32, dense: int = DENSE) -> None:
        super().__init__()
        self.dim = dim
        self.bottom = _mlp(dense, 64, dim)
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1))
        self.top = _mlp(dim + tables * (tables + 1) // 2, 64, 1)

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = torch.cat([first, values], 1).view(dense.shape[0], -1, self.dim)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([first, dots], 1)).squeeze(1)


class Cross(nn.Module):
    """Deep and cross."""

    def __init__(self, tables: int, dim: int = 16) -> None:
        super().__init__()
        width = DENSE + tables * dim
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = _mlp(width, 512, 256)
        self.out = nn.Linear(width + 256, 1)

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        x = first = torch.cat([dense, values], 1)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.out(torch.cat([x, torch.relu(self.deep(first))], 1)).squeeze(1)


class Flat(nn.Module):
    def __init__(self, tables: int, dim: int = 8) -> None:
        super().__init__()
        self.net = _mlp(DENSE + tables * dim, 64, 1)

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        return self.net(torch.cat([dense, values], 1)).squeeze(1)


class Attention(nn.Module):
    """A user asks its items."""

    def __init__(self, tables: int, dim: int = 32) -> None:
        super().__init__()
        self.ask = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.out = _mlp(2 * dim, 64, 1)

    def forward(self, items: Tensor, lengths: Tensor, users: Tensor) -> Tensor:
        scores = (self.key(items) * self.ask(users).unsqueeze(1)).sum(2)
        there = torch.arange(items.shape[1]).unsqueeze(0) < lengths.unsqueeze(1)
        weights = torch.softmax(scores.masked_fill(~there, -1e9), 1)
        pooled = (weights.unsqueeze(2) * items).sum(1)
        return self.out(torch.cat([pooled, users], 1)).squeeze(1)


class Experts(nn.Module):
    """Mixture of experts with a gate and a tower for each of two tasks; the first one's logits."""

    def __init__(self, tables: int, dim: int = 16) -> None:
        super().__init__()
        width = 3 + tables * dim
        self.experts = nn.ModuleList(_mlp(width, 64, 32) for _ in range(4))
        self.gates = nn.ModuleList(nn.Linear(width, 4) for _ in range(2))
        self.towers = nn.ModuleList(_mlp(32, 16, 1) for _ in range(2))

    def forward(self, dense: Tensor, values: Tensor) -> Tensor:
        x = torch.cat([dense, values], 1)
        found = torch.stack([e(x) for e in self.experts], 1)
        tasks = [
            t((torch.softmax(g(x), 1).unsqueeze(2) * found).sum(1)).squeeze(1)
            for g, t in zip(self.gates, self.towers, strict=True)
        ]
        return tasks[0] + 0.1 * tasks[1]


def _tables(count: int, rows: int) -> dict[str, int]:
    return {f"f{n}": rows for n in range(count)}


MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model("tables", _tables(4, 2_000_000), 32, Dots, 1024),
        Model("dense", _tables(8, 300_000), 16, Cross, 1024),
        Model("many", _tables(64, 130_000), 8, Flat, 512),
        Model("sequence", {"item": 2_000_000, "user": 1_000_000}, 32, Attention, 512, pooled=False),
        Model("multitask", dict.fromkeys(FEATURES, 0), 16, Experts, 1024, movielens=True),
    )
}


def rows_of(model: Model) -> Model:
    """The model with the tables' rows, which MovieLens knows."""
    if not model.movielens:
        return model
    return Model(
        model.name,
        {f: load_movielens(None).rows[f] for f in FEATURES},
        model.dim,
        model.dense,
        model.samples,
        movielens=True,
    )


class Batches:
    """A rank's batches, without end: the same data at the same position, whatever came before.

    golden: a small one, the same on every rank. example: one as large as those trained on.
    """

    def __init__(self, model: Model, rank: int, world_size: int) -> None:
        self.position = 0
        self.batch_size = model.samples
        part = model.samples // world_size
        if model.movielens:
            train = load_movielens(None).train
            whole = len(train) // model.samples
            self.golden = to_batch(train.take(torch.arange(_GOLDEN)))
            self._pool = [
                to_batch(train.take(torch.arange(part) + n * model.samples + rank * part))
                for n in range(min(whole, _POOL))
            ]
        else:
            self.golden = _synthetic(model, _GOLDEN, _POOL * world_size)
            self._pool = [_synthetic(model, part, n * world_size + rank) for n in range(_POOL)]

        self.example = self._pool[0]

    def seek(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = self._pool[self.position % len(self._pool)]
            self.position += 1
            yield batch


def _synthetic(model: Model, part: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    values, lengths = [], []
    for feature, rows in model.tables.items():
        long = not model.pooled and feature == "item"
        sizes = torch.randint(1, SEQUENCE + 1, (part,), generator=g) if long else torch.ones(part)
        lengths.append(sizes.long())
        # Zipf by inversion: popular ids are few.
        u = torch.rand(int(sizes.sum()), generator=g).clamp(min=1e-9)
        values.append((rows**u - 1).long().clamp(0, rows - 1))
    dense = torch.randn(part, DENSE, generator=g)
    return Batch(
        dense_features=dense,
        sparse_features=KeyedJaggedTensor(
            keys=list(model.tables), values=torch.cat(values), lengths=torch.cat(lengths)
        ),
        labels=(dense[:, 0] > 0).long(),
    )


def shard(net: Net, model: Model, world_size: int) -> tuple[Any, Any]:
    """(model, optimizer), on the CPU. Collective."""
    apply_optimizer_in_backward(RowWiseAdagrad, net.embeddings.parameters(), {"lr": 0.05})
    sharder: Any = EmbeddingBagCollectionSharder() if model.pooled else EmbeddingCollectionSharder()
    how = {
        f: row_wise() if n >= _LARGE_ROWS else table_wise(rank=i % world_size)
        for i, (f, n) in enumerate(model.tables.items())
    }
    plan = construct_module_sharding_plan(
        net.embeddings,
        per_param_sharding=how,
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        net,
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(
            find_unused_parameters=True, static_graph=False
        ),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), _adam
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def train_step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()


def _adam(params: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)
