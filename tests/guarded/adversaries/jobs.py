"""Trainers for adversaries: small, with every kind of state that a snapshot treats in its own way.

Each names its dtypes and devices, since torch's defaults may have been changed. A `wide` one's dense
part with its state is more than 4 MiB, so that a save leaves it in place; others are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

CPU = torch.device("cpu")
F32 = torch.float32
HERE: dict[str, Any] = {"device": CPU, "dtype": F32}
WIDE, NARROW, HIDDEN = 1400, 8, 256
BATCH, BAG = 8, 3
USERS, ITEMS, WORDS = 3000, 2000, 600

SPARSE: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "sgd": lambda p: SGD(p, lr=0.1),
    "sparse_adam": lambda p: SparseAdam(p, lr=0.1),
}


class Job:
    """A trainer. `state` is what it saves, made anew each time; `guarded` what it shows beside that.

    table: weights that row guards take. row_state: optimizer state of its rows.
    dense, dense_state: a parameter that optimizer steps own, with state of its own.
    """

    model: Any
    optimizers: list[Optimizer]
    guarded: tuple[Any, ...] = ()
    seed = 0

    @property
    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def table(self) -> Tensor:
        raise NotImplementedError

    @property
    def row_state(self) -> Tensor:
        raise NotImplementedError

    @property
    def dense(self) -> Tensor:
        raise NotImplementedError

    @property
    def dense_state(self) -> Tensor:
        raise NotImplementedError

    def batch(self) -> Any:
        """Another one each time."""
        raise NotImplementedError

    def forward(self, batch: Any = None) -> Tensor:
        """The loss."""
        raise NotImplementedError

    def backward(self) -> None:
        self.forward().backward()

    def apply(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward()
            self.apply()

    def generator(self) -> torch.Generator:
        self.seed += 1
        return torch.Generator(device=CPU).manual_seed(self.seed)

    def ids(self, shape: tuple[int, ...], below: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator(), device=CPU)


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean() * 100


def top(width: int, *, wide: bool) -> nn.Sequential:
    last = nn.Linear(HIDDEN, WIDE if wide else NARROW, bias=False, **HERE)
    return nn.Sequential(nn.Linear(width, HIDDEN, bias=False, **HERE), nn.ReLU(), last)


class PlainModel(nn.Module):
    """Tables with sparse gradients, one with dense ones, and a dense part with buffers."""

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(USERS, 16, sparse=True, **HERE)
        self.items = nn.Embedding(ITEMS, 8, sparse=True, **HERE)
        self.words = nn.EmbeddingBag(WORDS, 8, **HERE)
        self.norm = nn.BatchNorm1d(32, affine=False, **HERE)
        self.top = top(32, wide=wide)

    def forward(self, ids: Tensor) -> Tensor:
        parts = [self.users(ids % USERS), self.items(ids[:, 0] % ITEMS), self.words(ids % WORDS)]
        out: Tensor = self.top(self.norm(torch.cat(parts, 1)))
        return out


class PlainJob(Job):
    """Without TorchRec.

    sparse: the optimizer of the tables, or what makes it of their weights. dense: that of all
    else. model: another one of the same parts.
    """

    def __init__(
        self,
        sparse: str | Callable[[list[Tensor]], Optimizer] = "adagrad",
        dense: Callable[[list[Tensor]], Optimizer] = Adam,
        model: Callable[..., Any] = PlainModel,
        *,
        wide: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = model(wide=wide)
        make = SPARSE[sparse] if isinstance(sparse, str) else sparse
        self.users = make([self.model.users.weight])
        self.items = make([self.model.items.weight])
        tables = {id(m.weight) for m in self.model.modules() if getattr(m, "sparse", False)}
        self.adam = dense([p for p in self.model.parameters() if id(p) not in tables])
        self.optimizers = [self.users, self.items, self.adam]
        self.more: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "users": self.users,
            "items": self.items,
            "adam": self.adam,
            **self.more,
        }

    @property
    def table(self) -> Tensor:
        weight: Tensor = self.model.users.weight
        return weight

    @property
    def row_state(self) -> Tensor:
        state = self.users.state[self.model.users.weight]
        return next(s for s in state.values() if s.shape == self.table.shape)

    @property
    def dense(self) -> Tensor:
        weight: Tensor = self.model.top[2].weight
        return weight

    @property
    def dense_state(self) -> Tensor:
        state: Tensor = self.adam.state[self.model.top[2].weight]["exp_avg"]
        return state

    def batch(self) -> Tensor:
        return self.ids((BATCH, BAG), 1 << 20)

    def forward(self, batch: Any = None) -> Tensor:
        return loss_of(self.model(self.batch() if batch is None else batch))


FUSED = ((2500, 16), (700, 16))
FUSED_NAMES = ("t0", "t1")


class FusedModel(nn.Module):
    """A dense part on a bare table-batched embedding."""

    def __init__(self, width: int, *, wide: bool = False) -> None:
        super().__init__()
        self.top = top(width, wide=wide)

    def forward(self, pooled: Tensor) -> Tensor:
        out: Tensor = self.top(pooled)
        return out


class FusedJob(Job):
    """A table-batched embedding of fbgemm without TorchRec.

    optimizer: EmbOptimType's name of a kind. options: of the embedding.
    """

    def __init__(
        self, optimizer: str = "EXACT_ROWWISE_ADAGRAD", *, wide: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.fused = batched(optimizer, **options)
        self.model = FusedModel(sum(d for _, d in FUSED), wide=wide)
        self.adam = Adam(self.model.parameters())
        self.optimizers = [self.adam]
        self.guarded = (self.fused,)
        self.more: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "fused": tables(self.fused), "adam": self.adam, **self.more}

    @property
    def table(self) -> Tensor:
        weight: Tensor = self.fused.split_embedding_weights()[0]
        return weight

    @property
    def row_state(self) -> Tensor:
        state: Tensor = self.fused.split_optimizer_states()[0][0]
        return state

    @property
    def dense(self) -> Tensor:
        weight: Tensor = self.model.top[2].weight
        return weight

    @property
    def dense_state(self) -> Tensor:
        state: Tensor = self.adam.state[self.model.top[2].weight]["exp_avg"]
        return state

    def batch(self) -> tuple[Tensor, Tensor]:
        """Ids of the features one after the other, and where each bag begins."""
        parts = [self.ids((BATCH * BAG,), rows) for rows, _ in FUSED]
        return torch.cat(parts), torch.arange(0, len(FUSED) * BATCH * BAG + 1, BAG, device=CPU)

    def forward(self, batch: Any = None) -> Tensor:
        return loss_of(self.model(self.fused(*(self.batch() if batch is None else batch))))


def batched(optimizer: str = "EXACT_ROWWISE_ADAGRAD", **options: Any) -> Any:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in FUSED],
        optimizer=EmbOptimType[optimizer],
        **{
            "learning_rate": 0.1,
            "table_names": list(FUSED_NAMES),
            **options,
        },
    )
    made.init_embedding_weights_uniform(-1, 1)
    return made


ROWS, DIM = 3000, 16
WAYS = ("row_wise", "table_wise", "column_wise")


@dataclass
class Batch:
    """What TorchRec's pipelines pass on: ids by feature, and something dense."""

    ids: Any
    dense: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.ids.to(device, non_blocking), self.dense.to(device))

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> Batch:
        return self


class RankedModel(nn.Module):
    """A collection of one table for each way to shard it, and a dense part."""

    def __init__(
        self, ways: tuple[str, ...] = WAYS, *, unpooled: bool = False, wide: bool = False
    ) -> None:
        super().__init__()
        from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
        from torchrec.modules.embedding_modules import (
            EmbeddingBagCollection,
            EmbeddingCollection,
        )

        config = EmbeddingConfig if unpooled else EmbeddingBagConfig
        collection = EmbeddingCollection if unpooled else EmbeddingBagCollection
        self.unpooled = unpooled
        self.tables = collection(
            [
                config(name=way, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"f{n}"])
                for n, way in enumerate(ways)
            ],
            device=torch.device("meta"),
        )
        self.ways = ways
        self.top = top(DIM * len(ways) + 4, wide=wide)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.tables(batch.ids)
        if self.unpooled:
            pooled = torch.cat(
                [found[f"f{n}"].values().sum(0, keepdim=True) for n in range(len(self.ways))], 1
            ).expand(batch.dense.shape[0], -1)
        else:
            pooled = found.values()
        loss = loss_of(self.top(torch.cat([pooled, batch.dense], 1)))
        return loss, loss.detach()


class RankedJob(Job):
    """A sharded TorchRec model. Collective.

    optimizer: a class for the tables' backward pass, with `settings`; None: row-wise Adagrad.
    even: bags of one length, so that compilers see one shape.
    """

    def __init__(
        self,
        ways: tuple[str, ...] = WAYS,
        *,
        unpooled: bool = False,
        wide: bool = False,
        optimizer: Any = None,
        settings: Mapping[str, Any] | None = None,
        kernel: str | None = None,
        even: bool = False,
    ) -> None:
        import torch.distributed as dist
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan
        from torchrec.distributed.types import ShardingPlan
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        torch.manual_seed(0)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        bare = RankedModel(ways, unpooled=unpooled, wide=wide)
        apply_optimizer_in_backward(
            optimizer or RowWiseAdagrad, bare.tables.parameters(), dict(settings or {"lr": 0.1})
        )
        sharder: Any = EmbeddingCollectionSharder() if unpooled else EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            bare.tables,
            per_param_sharding={way: sharding(way, world, kernel) for way in ways},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            bare, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
        )
        self.adam = KeyedOptimizerWrapper(
            {n: p for n, p in self.model.named_parameters() if ".top." in f".{n}"},
            lambda p: Adam(p, lr=0.01),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, self.adam])
        self.optimizers = [self.optimizer]
        self.ways, self.even = ways, even
        self.more: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self.more}

    @property
    def kernels(self) -> list[Any]:
        """This rank's table-batched embeddings."""
        return list(lookups(self.model))

    @property
    def table(self) -> Tensor:
        weight: Tensor = self.kernels[0].split_embedding_weights()[0]
        return weight

    @property
    def row_state(self) -> Tensor:
        state: Tensor = self.kernels[0].split_optimizer_states()[0][0]
        return state

    @property
    def dense(self) -> Tensor:
        return next(p for n, p in self.model.named_parameters() if n.endswith("top.2.weight"))

    @property
    def dense_state(self) -> Tensor:
        state: Tensor = self.adam.state[self.dense]["exp_avg"]
        return state

    def batch(self) -> Batch:
        """Ids of this rank's own, as many on each so that shapes agree."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        g = self.generator()
        g.manual_seed(self.seed * 100 + self.rank)
        n = len(self.ways)
        lengths = torch.randint(0, 2 * BAG, (n * BATCH,), generator=g, device=CPU)
        if self.even:
            lengths.fill_(BAG)
        total = int(lengths.sum())
        values = torch.randint(0, ROWS, (total,), generator=g, device=CPU)
        ids = KeyedJaggedTensor.from_lengths_sync([f"f{i}" for i in range(n)], values, lengths)
        return Batch(ids, torch.randn((BATCH, 4), generator=g, **HERE))

    def batches(self) -> Iterator[Batch]:
        """For pipelines."""
        from torchrec.streamable import Pipelineable

        Pipelineable.register(Batch)
        while True:
            yield self.batch()

    def forward(self, batch: Any = None) -> Tensor:
        loss: Tensor = self.model(self.batch() if batch is None else batch)[0]
        return loss


def lookups(model: nn.Module) -> Iterator[Any]:
    """Table-batched embeddings inside sharded modules, which keep them in plain lists."""
    for module in model.modules():
        for name in ("_lookups",):
            for lookup in getattr(module, name, ()):
                for inner in lookup.modules():
                    if type(inner).__name__ == "SplitTableBatchedEmbeddingBagsCodegen":
                        yield inner


def sharding(way: str, world: int, kernel: str | None) -> Any:
    from torchrec.distributed.sharding_plan import (
        column_wise,
        data_parallel,
        row_wise,
        table_wise,
    )

    if way == "data_parallel":
        return data_parallel()
    if way == "row_wise":
        return row_wise(compute_kernel=kernel)
    if way == "table_wise":
        return table_wise(world - 1, compute_kernel=kernel)
    return column_wise(ranks=[0, world - 1], compute_kernel=kernel)


@dataclass
class Part:
    """Something that is trained for itself: its own optimizer, or None for a fused one's own."""

    module: Any
    optimizer: Optimizer | None
    loss: Callable[[Job], Tensor]


class MixedJob(Job):
    """Many parts in one trainer, each under an optimizer of its own."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        self.plain = {n: p for n, p in self.parts.items() if p.optimizer is not None}
        self.fused = {n: p for n, p in self.parts.items() if p.optimizer is None}
        self.model = nn.ModuleDict({n: p.module for n, p in self.plain.items()})
        self.optimizers = [p.optimizer for p in self.plain.values() if p.optimizer is not None]
        self.guarded = ({n: p.module for n, p in self.fused.items()},)
        self.more: dict[str, Any] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizers": {n: p.optimizer for n, p in self.plain.items()},
            "fused": {n: tables(p.module) for n, p in self.fused.items()},
            **self.more,
        }

    def backward(self) -> None:
        for part in self.parts.values():
            part.loss(self).backward()


def tables(fused: Any) -> dict[str, dict[str, Tensor]]:
    """Weights and optimizer state of a table-batched embedding by table."""
    weights = fused.split_embedding_weights()
    states = fused.split_optimizer_states() or [[] for _ in weights]
    return {
        f"t{n}": {"weight": w.detach(), **{f"m{k}": x for k, x in enumerate(s)}}
        for n, (w, s) in enumerate(zip(weights, states, strict=True))
    }


def blocks(makes: Mapping[str, Callable[[list[Tensor]], Optimizer]], numel: int) -> MixedJob:
    """A matrix for each optimizer, of so many values together."""
    side = int((numel / len(makes)) ** 0.5) + 1
    parts = {}
    for name, make in makes.items():
        layer = nn.Linear(side, side, bias=False, **HERE)

        def loss(job: Job, layer: nn.Linear = layer) -> Tensor:
            inputs = torch.randn((2, side), generator=job.generator(), **HERE)
            return loss_of(layer(inputs))

        parts[name] = Part(layer, make([*layer.parameters()]), loss)
    return MixedJob(parts)


def sparse_tables(makes: Mapping[str, Callable[[list[Tensor]], Optimizer]]) -> MixedJob:
    """A table with sparse gradients for each optimizer."""
    parts = {}
    for name, make in makes.items():
        table = nn.EmbeddingBag(2000, 8, sparse=True, **HERE)

        def loss(job: Job, table: nn.EmbeddingBag = table) -> Tensor:
            return loss_of(table(job.ids((BATCH, BAG), 2000)))

        parts[name] = Part(table, make([table.weight]), loss)
    return MixedJob(parts)


def fused_tables(makes: Mapping[str, Callable[[], Any]]) -> MixedJob:
    """A table-batched embedding of its own for each configuration."""
    parts = {}
    for name, make in makes.items():
        fused = make()

        def loss(job: Job, fused: Any = fused) -> Tensor:
            ids = [job.ids((BATCH * BAG,), rows) for rows, _ in FUSED]
            edges = torch.arange(0, len(FUSED) * BATCH * BAG + 1, BAG, device=CPU)
            return loss_of(fused(torch.cat(ids), edges).float())

        parts[name] = Part(fused, None, loss)
    return MixedJob(parts)
