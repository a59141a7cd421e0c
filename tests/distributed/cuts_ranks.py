"""Ranks that save tables in every way of sharding, or restore them into every other.

    cuts_ranks.py save FOLDER: a checkpoint of each optimizer, of ShardedTensor and of DTensor output
    cuts_ranks.py uneven ROOT: a save that is refused
    cuts_ranks.py own_save|own_check ROOT: an optimizer of each rank's own
    cuts_ranks.py check FOLDER WORLD...: those that so many ranks saved, into tables that are cut otherwise

Every element of a table says which it is, so that what a tensor of optimizer state belongs to is read off
the weights that its kernel has beside it, whatever a state dict says. Row-wise state is the mean, over the
columns of its shard, of what the elements would have.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor import distribute_tensor
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
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from ckpt import CheckpointConfig, Checkpointer, PerRank
from ckpt.errors import BadInputError
from ckpt.events import ListSink
from tests.distributed.launch import join, leave

warnings.simplefilter("ignore")

ROWS, COLUMNS = 5, 16
STEPS, LOOKUPS, RATE = 3, 5, 0.05
OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise": RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "plain_adam": torch.optim.Adam,
    "plain_adagrad": torch.optim.Adagrad,
}
OUTPUTS = ("sharded", "dtensor")
WAYS = ("tw", "rw", "cw", "cw4", "twrw", "twcw", "dp", "dense_tw", "dense_rw", "dense_cw")


def ways(optimizer: str) -> tuple[str, ...]:
    if optimizer not in ("sgd", "adagrad", "rowwise"):
        # Not TorchRec's, or one that fbgemm has on GPUs only.
        return tuple(w for w in WAYS if not is_fused(w))
    # TorchRec's RowWiseAdagrad fails over the empty parameter of a rank without a dense table.
    return tuple(w for w in WAYS if (optimizer, w) != ("rowwise", "dense_tw"))


def is_fused(way: str) -> bool:
    return way != "dp" and not way.startswith("dense")


def columns_of(way: str, world: int) -> list[tuple[int, int]]:
    """[first, stop) of the column shards of a table."""
    count = {"cw": 2, "cw4": 4, "twcw": 2, "dense_cw": world}.get(way, 1)
    edges = range(0, COLUMNS + 1, COLUMNS // count)
    return list(pairwise(edges))


def sharding(way: str, world: int) -> Callable[..., Any]:
    some = [i % world for i in range(4)]
    dense = {"compute_kernel": "dense"}
    made: dict[str, Callable[[], Any]] = {
        "tw": lambda: table_wise(world - 1),
        "rw": row_wise,
        "cw": lambda: column_wise(ranks=some[:2]),
        "cw4": lambda: column_wise(ranks=some),
        "twrw": lambda: table_row_wise(host_index=0),
        "twcw": lambda: column_wise(ranks=[world - 1] * 2),
        "dp": data_parallel,
        "dense_tw": lambda: table_wise(world - 1, **dense),
        "dense_rw": lambda: row_wise(**dense),
        "dense_cw": lambda: column_wise(ranks=list(range(world)), **dense),
        "dense_tw_first": lambda: table_wise(0, **dense),
        "narrow_wide": lambda: column_wise(size_per_rank=[4, 12]),
        "wide_narrow": lambda: column_wise(size_per_rank=[12, 4]),
    }
    found: Callable[..., Any] = made[way]()
    return found


class Trained(NamedTuple):
    model: Any
    optimizer: Any

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def build(optimizer: str, output: str, of: dict[str, str], rows: int = ROWS) -> Trained:
    """A model with tables by name, each sharded in its own way."""
    world = dist.get_world_size()
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=t, embedding_dim=COLUMNS, num_embeddings=rows, feature_names=[f"f_{t}"]
            )
            for t in of
        ],
        device=torch.device("meta"),
    )
    kind = OPTIMIZERS[optimizer]
    fused = [p for n, p in tables.named_parameters() if is_fused(of[n.split(".")[1]])]
    apply_optimizer_in_backward(kind, fused, {"lr": 0.1})
    sharder: Any = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        tables,
        per_param_sharding={t: sharding(way, world) for t, way in of.items()},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    if output == "dtensor":
        env.output_dtensor = True
        env.device_mesh = init_device_mesh("cpu", (world,))
    model = DistributedModelParallel(
        tables,
        env=env,
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    if optimizer.startswith("plain"):
        return Trained(model, kind(rest.values(), lr=0.1))
    parts: list[Any] = [model.fused_optimizer]
    if rest:
        parts.append(KeyedOptimizerWrapper(rest, lambda ps: kind(ps, lr=0.1)))
    return Trained(model, CombinedOptimizer(parts))


# -- what tensors are to hold ---------------------------------------------------------------------


def weights(table: int) -> torch.Tensor:
    """An element says where it is."""
    rows, columns = torch.arange(ROWS).view(-1, 1), torch.arange(COLUMNS)
    return (table * 10_000 + rows * 100 + columns).float()


def per_element(table: int, name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(table * 10 + len(name))
    return torch.rand(ROWS, COLUMNS, generator=g) + 0.1


def per_row(table: int, name: str, columns: tuple[int, int]) -> torch.Tensor:
    """What a column shard has for each of its rows (ROWS,)."""
    return per_element(table, name)[:, slice(*columns)].double().mean(1).float()


class Held(NamedTuple):
    """A part of a table on this rank, which its weights say, and what is kept for it."""

    table: int
    rows: slice
    columns: tuple[int, int]
    weights: torch.Tensor
    state: dict[str, torch.Tensor]
    kernel: Any


def held(trained: Trained) -> Iterator[Held]:
    for module in (m for lookup in trained.model.module._lookups for m in lookup.modules()):
        if type(module).__name__ == "SplitTableBatchedEmbeddingBagsCodegen":
            states = module.get_optimizer_state()
            weights_of = enumerate(module.split_embedding_weights())
            for n, w in ((n, w) for n, w in weights_of if w.numel()):
                yield _held(w, dict(states[n]) if states else {}, module)
    dense = _dense(trained)
    for p in (p for group in dense.param_groups for p in group["params"]):
        if type(p).__name__ in ("TableBatchedEmbeddingSlice", "Parameter") and p.numel():
            yield _held(p.detach(), dict(dense.state.get(p, {})), None)


def _dense(trained: Trained) -> Any:
    """The torch optimizer of all tables that fused kernels don't have."""
    if isinstance(trained.optimizer, torch.optim.Adam | torch.optim.Adagrad):
        return trained.optimizer
    return trained.optimizer._optims[-1][1]._optimizer


def _held(w: torch.Tensor, state: dict[str, Any], kernel: Any) -> Held:
    first, last = int(w[0, 0]), int(w[-1, -1])
    table, row, column = first // 10_000, first // 100 % 100, first % 100
    rows, columns = slice(row, last // 100 % 100 + 1), (column, last % 100 + 1)
    assert w.shape == (rows.stop - rows.start, columns[1] - columns[0]), (first, last)
    assert torch.equal(w, weights(table)[rows, slice(*columns)]), table
    return Held(table, rows, columns, w, state, kernel)


def boxes(model: Any) -> Iterator[tuple[int, slice, slice, torch.Tensor]]:
    """What TorchRec says of the weights on this rank: table, rows, columns, memory."""
    for key, value in model.state_dict().items():
        table = int(key.split(".")[1].removeprefix("t"))
        shards: list[tuple[Any, torch.Tensor]]
        if hasattr(value, "local_shards"):
            shards = [(s.metadata.shard_offsets, s.tensor) for s in value.local_shards()]
        elif hasattr(value, "_local_tensor"):
            local = value._local_tensor
            shards = list(zip(local.local_offsets(), local.local_shards(), strict=False))
        else:
            shards = [((0, 0), value)]
        for (row, column), t in shards:
            if t.numel():
                yield (
                    table,
                    slice(row, row + t.shape[0]),
                    slice(column, column + t.shape[1]),
                    t.detach(),
                )


# -- save and check -------------------------------------------------------------------------------


def save(folder: Path, rank: int, world: int) -> None:
    for optimizer in OPTIMIZERS:
        for output in OUTPUTS:
            of = {f"t{n}": way for n, way in enumerate(ways(optimizer))}
            trained = build(optimizer, output, of)
            for table, rows, columns, t in boxes(trained.model):
                t.copy_(weights(table)[rows, columns])
            if optimizer.endswith("adam"):  # which makes its state at the first step
                dense = _dense(trained)
                for p in (p for group in dense.param_groups for p in group["params"]):
                    p.grad = torch.zeros_like(p) if p.numel() else None
                dense.step()  # by zeros: the weights stay
            for one in held(trained):
                fill(one)
            for group in trained.optimizer.param_groups:
                group["lr"] = RATE
            root = folder / f"{optimizer}-{output}-{world}"
            with Checkpointer(str(root), CheckpointConfig(chunk_bytes=4096)) as c:
                c.restore({}, fresh=True)
                c.save(1, trained.state).committed.result()


def fill(one: Held) -> None:
    """Give state the values that it is to have."""
    for name, t in one.state.items():
        if name == "step":
            t.fill_(STEPS)
        elif t.numel() == one.weights.numel():
            t.copy_(per_element(one.table, called(name))[one.rows, slice(*one.columns)].view_as(t))
        else:
            t.copy_(per_row(one.table, called(name), one.columns)[one.rows].view_as(t))
    if one.kernel is not None:
        one.kernel.set_learning_rate(RATE)
        one.kernel.iter.fill_(LOOKUPS)
        one.kernel.iter_cpu.fill_(LOOKUPS)


def called(name: str) -> str:
    return "sum" if name == "momentum1" else name


def check(folder: Path, worlds: list[int]) -> list[list[Any]]:
    """[optimizer, way of the save, way here, outcome for its state] of each pair that was tried."""
    world = dist.get_world_size()
    seen = []
    turn = 6 * world.bit_length()  # over the runs of all worlds, each way meets each other
    for optimizer in OPTIMIZERS:
        for saved in worlds:
            for was in OUTPUTS:
                root = str(folder / f"{optimizer}-{was}-{saved}")
                turn += 1
                output = OUTPUTS[turn % len(OUTPUTS)]
                seen += check_one(root, optimizer, output, saved, turn)
    return seen


def check_one(root: str, optimizer: str, output: str, saved: int, turn: int) -> Iterator[list[Any]]:
    world, names = dist.get_world_size(), ways(optimizer)
    were = dict(enumerate(names))
    of = {f"t{n}": names[(n + turn) % len(names)] for n in were}
    trained = build(optimizer, output, of)
    for _, _, _, t in boxes(trained.model):
        t.fill_(-1)
    split = {
        n
        for n, way in were.items()
        if optimizer == "rowwise"
        if not _merges(columns_of(way, saved), columns_of(of[f"t{n}"], world))
    }
    with Checkpointer(root) as c:
        if split:
            try:
                c.restore(trained.state)
            except BadInputError as e:
                said = {
                    n for n in were if f"row-wise state of model.embedding_bags.t{n}." in str(e)
                }
                assert said == split, (said, split, str(e))
                assert "approximate=True" in str(e)
                assert all((t == -1).all() for _, _, _, t in boxes(trained.model))
            else:
                raise AssertionError(f"{split}: a part of a column shard was accepted")
    events = ListSink()
    with Checkpointer(root, sink=events) as c:
        assert c.restore(trained.state, approximate=bool(split)) is not None
    notes = [str(e["note"]) for e in events.named("restored_with")]
    told = {n for n in were if any(f".t{n}.weight get the mean" in note for note in notes)}
    assert told == split, (told, split)
    for table, rows, columns, t in boxes(trained.model):
        assert torch.equal(t, weights(table)[rows, columns]), table
    for one in held(trained):
        check_state(one, were, saved, optimizer)
    for group in trained.optimizer.param_groups:
        assert abs(group["lr"] - RATE) < 1e-8, group
    for n, way in were.items():
        kept = optimizer != "rowwise" or _is_as_it_was(way, saved, of[f"t{n}"], world)
        yield [optimizer, way, of[f"t{n}"], "split" if n in split else "same" if kept else "merged"]


def check_state(one: Held, were: dict[int, str], saved: int, optimizer: str) -> None:
    way = were[one.table]
    if optimizer != "sgd":
        assert one.state, (one.table, way)
    for name, t in one.state.items():
        if name == "step":
            assert float(t) == (LOOKUPS if is_fused(way) else STEPS), (way, float(t))
        elif t.numel() == one.weights.numel():
            wanted = per_element(one.table, called(name))[one.rows, slice(*one.columns)]
            assert torch.equal(t.reshape(wanted.shape), wanted), (way, name)
        else:
            wanted = _merged(one, called(name), columns_of(way, saved))[one.rows]
            assert torch.equal(t.reshape(wanted.shape), wanted), (way, name)
    if one.kernel is not None:  # its next update may come before its group is looked at
        assert abs(float(one.kernel.learning_rate_tensor) - RATE) < 1e-8
    if one.kernel is not None and optimizer != "sgd":  # which counts no steps
        assert int(one.kernel.iter_cpu) in ((LOOKUPS,) if is_fused(way) else (STEPS, LOOKUPS))


def _merged(one: Held, name: str, stored: list[tuple[int, int]]) -> torch.Tensor:
    a, b = one.columns
    total = torch.zeros(ROWS, dtype=torch.float64)
    for first, stop in stored:
        share = min(b, stop) - max(a, first)
        if share > 0:
            total += per_row(one.table, name, (first, stop)).double() * share
    return (total / (b - a)).float()


def _is_as_it_was(way: str, saved: int, here: str, world: int) -> bool:
    """Is each column shard here one of the save?"""
    return set(columns_of(here, world)) <= set(columns_of(way, saved))


def _merges(stored: list[tuple[int, int]], here: list[tuple[int, int]]) -> bool:
    """Is each column shard here one of the save, or several together?"""
    return all(
        first >= a and stop <= b
        for a, b in here
        for first, stop in stored
        if first < b and stop > a
    )


def uneven(root: str) -> None:
    """A DTensor doesn't say which of several column shards of different widths a rank has."""
    world = dist.get_world_size()
    table = distribute_tensor(
        torch.ones(4, 2 * world - 1), init_device_mesh("cpu", (world,)), [ShardOf(1)]
    )
    optimizer = torch.optim.Adagrad([("table", torch.nn.Parameter(table.to_local()))])
    with Checkpointer(root) as c:
        try:
            c.save(1, {"table": table, "optimizer": optimizer})
        except BadInputError as e:
            assert "table: its column shards have different widths" in str(e)
        else:
            raise AssertionError("a part of a table went to an unknown place")


def own(root: str, action: str) -> None:
    """An optimizer over this rank's part of a table, as each rank's own: of the part alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    table = distribute_tensor(
        torch.ones(2 * world, 6), init_device_mesh("cpu", (world,)), [ShardOf(0)]
    )
    part = torch.nn.Parameter(table.to_local())
    optimizer = torch.optim.Adam([part])
    with Checkpointer(root) as c:
        if action == "own_save":
            part.grad = torch.full_like(part, rank + 1.0)
            optimizer.step()
            c.save(1, {"table": table, "optimizer": PerRank(optimizer)}).committed.result()
            return
        assert c.restore({"table": table, "optimizer": PerRank(optimizer)}) is not None
    moment = optimizer.state[part]["exp_avg"]
    assert moment.shape == part.shape
    assert torch.allclose(moment, torch.full_like(moment, 0.1 * (rank + 1)))


def main() -> None:
    action, folder, *worlds = sys.argv[1:]
    rank, world = join()
    if action == "save":
        save(Path(folder), rank, world)
    elif action == "uneven":
        uneven(folder)
    elif action.startswith("own"):
        own(folder, action)
    else:
        seen = check(Path(folder), list(map(int, worlds)))
        if rank == 0:
            print(json.dumps(seen))
    leave()


if __name__ == "__main__":
    main()
