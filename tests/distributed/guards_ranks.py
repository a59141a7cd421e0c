"""A rank that trains sharded TorchRec collections: `guards_ranks.py PIPELINE... by_hand`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from ckpt.attach import Attachment
from ckpt.events import ListSink
from ckpt.rows import RowGuards
from ckpt.tree import flatten
from ckpt.types import SystemClock
from tests.distributed.launch import join, leave
from tests.unit.attach_recorder import Recorder

CPU = torch.device("cpu")
ROWS, DIM, BATCH = 50, 8, 6
BAGS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise")
LISTS = ("table_wise", "row_wise", "column_wise")
DENSE = "data_parallel"
PIPELINES = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "sparse_dist_lite": TrainPipelineSparseDistLite,
}


@dataclass
class Batch(Pipelineable):
    bags: KeyedJaggedTensor
    lists: KeyedJaggedTensor
    plain: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.bags.to(device, non_blocking),
            self.lists.to(device, non_blocking),
            self.plain.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> Batch:
        return self


class Model(nn.Module):
    """Tables named by how they're sharded; two features share the first of each collection."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"b_{way}",
                    embedding_dim=DIM,
                    num_embeddings=ROWS + i,
                    feature_names=features("b", i),
                )
                for i, way in enumerate((*BAGS, DENSE))
            ],
            device=meta,
        )
        self.ec = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=f"l_{way}",
                    embedding_dim=DIM,
                    num_embeddings=ROWS + i,
                    feature_names=features("l", i),
                )
                for i, way in enumerate(LISTS)
            ],
            device=meta,
        )
        self.plain = nn.EmbeddingBag(ROWS, 3, mode="sum", sparse=True)  # trained under DDP
        self.head = nn.Linear(DIM * (len(BAGS) + 2), 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(batch.bags)
        lists = self.ec(batch.lists)
        out = self.head(pooled.values()).sum() + weighted(self.plain(batch.plain))
        for i in range(len(LISTS)):  # names that are known, as the pipelines' tracing wants it
            for feature in features("l", i):
                out = out + weighted(lists[feature].values())
        return out, out


@torch.fx.wrap
def weighted(values: Tensor) -> Tensor:
    """A sum in which no gradient is zero."""
    return (values * torch.linspace(1, 2, values.numel()).view(values.shape)).sum()


def features(prefix: str, i: int) -> list[str]:
    return [f"{prefix}{i}"] if i else [f"{prefix}0", f"{prefix}again"]


def batches(rank: int) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(rank)

    def kjt(prefix: str, tables: int) -> KeyedJaggedTensor:
        keys = [f for i in range(tables) for f in features(prefix, i)]
        lengths = torch.randint(0, 4, (len(keys) * BATCH,), generator=g)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        return KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)

    while True:
        plain = torch.randint(0, ROWS, (3, 2), generator=g)
        yield Batch(kjt("b", len(BAGS) + 1), kjt("l", len(LISTS)), plain)


def build(world: int, *, dtensor: bool) -> tuple[Any, Any]:
    model = Model()
    dense = ("head", "plain", DENSE)
    tables = [n for n, _ in model.named_parameters() if not any(d in n for d in dense)]
    parameters = dict(model.named_parameters())
    apply_optimizer_in_backward(RowWiseAdagrad, [parameters[n] for n in tables], {"lr": 0.1})
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plan = {
        path: construct_module_sharding_plan(
            getattr(model, path),
            per_param_sharding={
                c.name: sharding(c.name.partition("_")[2], world)
                for c in configs(getattr(model, path))
            },
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        for path, sharder in zip(("ebc", "ec"), sharders, strict=True)
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    env.output_dtensor = dtensor
    dmp = DistributedModelParallel(
        model, env=env, device=CPU, plan=ShardingPlan(plan), sharders=sharders
    )
    rest = KeyedOptimizerWrapper(
        {n: p for n, p in dmp.named_parameters() if any(d in n for d in dense)},
        lambda p: torch.optim.SGD(p, lr=0.1),
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, rest])


def configs(collection: Any) -> Any:
    bags = isinstance(collection, EmbeddingBagCollection)
    return collection.embedding_bag_configs() if bags else collection.embedding_configs()


def sharding(way: str, world: int) -> Any:
    ranks = [0, world - 1]  # two column shards on one rank in a world of one
    if way == "table_column_wise":

        def in_a_host(*args: Any) -> Any:
            chosen = column_wise(ranks=ranks)(*args)
            chosen.sharding_type = way
            return chosen

        return in_a_host
    return {
        "table_wise": lambda: table_wise(world - 1),
        "row_wise": row_wise,
        "column_wise": lambda: column_wise(ranks=ranks),
        "table_row_wise": lambda: table_row_wise(host_index=0),
        DENSE: data_parallel,
    }[way]()


def train(name: str, rank: int, world: int) -> None:
    """Every row that a step of a pipeline changes was announced, and no other."""
    model, optimizer = build(world, dtensor=False)
    recorder, sink = Recorder(), ListSink()
    attachment = Attachment(recorder, sink)  # type: ignore[arg-type]
    attachment.add({"optimizer": optimizer, "model": model})
    check_names(attachment, recorder, sink, world)
    check_aliases(recorder, model, optimizer, rank)
    pipeline = PIPELINES[name](model, optimizer, CPU)
    source = batches(rank)
    some = 0
    for step in range(4):
        attachment.refresh()
        with recorder.watch() as changed:
            pipeline.progress(source)
            if name == "base":
                evaluate(model, source)
        assert changed == recorder.touched(), (name, step)
        assert all(g.calls <= 1 for g in recorder.groups)
        some += sum(map(len, changed.values()))
    assert some > 4 * 10
    assert recorder.made == len(recorder.groups), "nothing moved, so nothing is grouped again"
    attachment.detach()
    check_exact(pipeline, source, {"optimizer": optimizer, "model": model}, rank)


def check_exact(pipeline: Any, source: Iterator[Batch], state: dict[str, Any], rank: int) -> None:
    """A snapshot opened between two steps and copied after more of them is the state at opening."""
    guards = RowGuards(SystemClock(), 60.0)
    attachment = Attachment(guards, ListSink())
    attachment.add(state)
    guards.lay_out(1 << 14, 1 << 22)
    pipeline.progress(source)
    live = [s.tensor for x in flatten(state, rank).leaves.values() for s in x.shards]
    snapshot = guards.open()
    found = [(p, t, t.clone()) for t in live if (p := snapshot.find(t)) is not None]
    snapshot.watch((p, t) for p, t, _ in found)
    pipeline.progress(source)
    pipeline.progress(source)
    assert any(not torch.equal(t, before) for _, t, before in found)
    got = {}
    for place in {id(p.table): p for p, _, _ in found}.values():
        parts = [torch.zeros_like(c) for c in place.table.components]
        for chunk, a in enumerate(range(0, place.table.rows, place.chunk_rows)):
            rows = slice(a, a + place.chunk_rows)
            snapshot.copy(place, chunk, [g[rows].reshape(-1).view(torch.uint8) for g in parts])
        got[id(place.table)] = parts
    for place, _, before in found:
        assert torch.equal(got[id(place.table)][place.component], before), place.table.name
    assert not snapshot.edited()
    snapshot.close()
    attachment.detach()


def evaluate(model: nn.Module, source: Iterator[Batch]) -> None:
    model.eval()
    with torch.no_grad():
        model(next(source))
    model.train()


def check_names(attachment: Attachment, recorder: Recorder, sink: ListSink, world: int) -> None:
    """On all ranks together each table is guarded, its boxes tile it; the dense one is refused quietly."""
    assert attachment.refused == {
        f"model.ebc.embedding_bags.b_{DENSE}": (
            "data-parallel: every rank's ids change it; copied like dense state"
        )
    }
    assert not sink.events
    tables = recorder.tables()
    assert tables.pop("model.plain").components[0].shape == (ROWS, 3)
    mine = [(t.name, t.components[0].numel()) for t in tables.values()]
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, mine)
    sizes: dict[str, int] = {}
    for name, size in (x for part in gathered for x in part):
        sizes[name.split("[")[0]] = sizes.get(name.split("[")[0], 0) + size
    assert sizes == {
        f"model.{module}.{prefix}_{way}": (ROWS + i) * DIM
        for module, prefix, ways in (
            ("ebc.embedding_bags", "b", BAGS),
            ("ec.embeddings", "l", LISTS),
        )
        for i, way in enumerate(ways)
    }
    assert len({n for part in gathered for n, _ in part}) == sum(map(len, gathered))


def check_aliases(recorder: Recorder, model: Any, optimizer: Any, rank: int) -> None:
    """State dict tensors are the guarded memory: same address, shape and stride."""
    guarded = {
        identity(c): (t.name, n)
        for t in recorder.tables().values()
        for n, c in enumerate(t.components)
    }
    flat = flatten({"model": model, "optimizer": optimizer}, rank)
    seen = set()
    for fqn, leaf in flat.leaves.items():
        for shard in leaf.shards:
            found = guarded.get(identity(shard.tensor))
            is_table = any(f"_{way}." in fqn for way in BAGS) or "plain.weight" in fqn
            assert (found is not None) == (is_table and shard.tensor.numel() > 0), fqn
            if found is None:
                continue
            seen.add(found)
            table, component = found
            whole = table.split("[")[0]
            assert component == int(fqn.startswith("optimizer"))
            assert whole.rsplit(".", 1)[1] in fqn
            if component == 0:
                assert fqn == f"{whole}.weight"
                if "[" in table:
                    (r, c), (h, w) = shard.offsets, shard.sizes
                    assert table == f"{whole}[{r}:{r + h}, {c}:{c + w}]"
    assert seen == set(guarded.values())


def identity(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), tuple(t.shape), t.stride(), t.dtype


def touch_by_hand(rank: int, world: int) -> None:
    """Rows of whole tables, as ShardedTensor and as DTensor: each rank announces its part."""
    for dtensor in (False, True):
        model, optimizer = build(world, dtensor=dtensor)
        recorder = Recorder()
        attachment = Attachment(recorder, ListSink())  # type: ignore[arg-type]
        attachment.add({"model": model, "optimizer": optimizer})
        check_aliases(recorder, model, optimizer, rank)
        for fqn, tensor in model.state_dict().items():
            if not any(f"_{way}." in fqn for way in BAGS):
                continue
            name = f"model.{fqn.removesuffix('.weight')}"
            held = [t for t in recorder.tables() if t.split("[")[0] == name]
            found = attachment.touched(tensor, torch.tensor([3, ROWS - 1]))
            assert found == bool(held), fqn
            rows = sorted(
                int(n.split("[")[1].split(":")[0]) + r if "[" in n else r
                for n in held
                for r in recorder.touched()[n]
            )
            everywhere: list[Any] = [None] * world
            dist.all_gather_object(everywhere, rows)
            assert {r for part in everywhere for r in part} == {3, ROWS - 1}, fqn
        for component, source in enumerate((model, optimizer)):
            check_unannounced(recorder, source, component, rank)


def check_unannounced(recorder: Recorder, source: Any, component: int, rank: int) -> None:
    """A write to any part of a state dict shows on the version counter of its table."""
    guarded = {
        identity(t.components[component]): (g, t)
        for g in recorder.groups
        for t in g.tables
        if len(t.components) > component
    }
    saved = [s.tensor for x in flatten({"": source}, rank).leaves.values() for s in x.shards]
    aliases = {identity(s): s for s in saved}
    for leaf in flatten({"": source.state_dict()}, rank).leaves.values():
        for part in local_parts(leaf.source):
            key = identity(part)
            if (found := guarded.pop(key, None)) is not None:
                group, table = found
                group.versions.watch([(table, component, aliases[key])])
                group.edited.clear()
                assert not group.edits()
                with torch.no_grad():
                    part[:1].mul_(2)
                assert (table.name, component) in group.edits()
    assert not guarded


def local_parts(value: Any) -> list[Tensor]:
    """The memory on this rank. What `to_local()` of a DTensor gives has counters that nobody else sees."""
    if isinstance(value, ShardedTensor):
        return [s.tensor for s in value.local_shards()]
    return value._local_tensor.local_shards() if isinstance(value, DTensor) else [value]


def main() -> None:
    rank, world = join()
    for action in sys.argv[1:]:
        if action == "by_hand":
            touch_by_hand(rank, world)
        else:
            train(action, rank, world)
    leave()


if __name__ == "__main__":
    main()
