"""A rank of a stock DCP job on Sidestage's storage: `ranks.py ACTION ROOT [ACTION ROOT ...]`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf

from ckpt import CheckpointConfig, Checkpointer, DcpReader, DcpWriter
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, ConflictError, CorruptError, SidestageError, StorageError
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage
from tests.distributed.launch import join
from tests.faults import FaultyStorage

ROWS, COLS = 23, 10
OBJECTS = {
    "step": 7,
    "name": "é",
    "list": [1, 2.5, None, b"\x00\xff"],
    "tuple": (1, ("a",)),
    "groups": [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": []}],
    "nan": float("inf"),
}
LAYOUTS = {"rows": [ShardOf(0)], "columns": [ShardOf(1)], "whole": [Replicate()]}


def truth(name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(name))
    return torch.randn(ROWS, COLS, generator=g)


def sharded(name: str, rank: int, world: int, *, fill: bool) -> ShardedTensor:
    """Rows over all ranks, or, for "table", all of them on the last."""
    cut = [ROWS * r // world for r in range(world + 1)]
    if name == "table":
        cut = [0] * world + [ROWS]
    first, last = cut[rank], cut[rank + 1]
    data = truth(name)[first:last].clone() if fill else torch.full((last - first, COLS), torch.nan)
    shards = [Shard.from_tensor_and_offsets(data, [first, 0], rank)] if first < last else []
    return init_from_local_shards(shards, ROWS, COLS)


def state_of(rank: int, mesh: DeviceMesh, *, fill: bool) -> dict[str, object]:
    world = mesh.size()

    def source(name: str) -> torch.Tensor:
        return truth(name) if fill else torch.full((ROWS, COLS), torch.nan)

    return {
        "plain": torch.arange(6).view(2, 3) if fill else torch.zeros(2, 3, dtype=torch.int64),
        "scalar": torch.tensor(1.5 if fill else 0.0),
        "few": distribute_tensor(torch.full((1, 2), float(fill)), mesh, [ShardOf(0)]),
        "dtensor": {n: distribute_tensor(source(n), mesh, p) for n, p in LAYOUTS.items()},
        "tables": {n: sharded(n, rank, world, fill=fill) for n in ("rowwise", "table")},
        "objects": dict(OBJECTS)
        if fill
        else {k: None for k in OBJECTS if k != "groups"}
        | {"groups": [{"lr": 0, "params": 0}, {"lr": 0, "params": 0}]},
    }


def check(state: dict[str, object]) -> None:
    assert torch.equal(state["plain"], torch.arange(6).view(2, 3))  # type: ignore[arg-type]
    assert state["scalar"].item() == 1.5  # type: ignore[attr-defined]
    assert torch.equal(state["few"].full_tensor(), torch.ones(1, 2))  # type: ignore[attr-defined]
    for name, tensor in state["dtensor"].items():  # type: ignore[attr-defined]
        assert torch.equal(tensor.full_tensor(), truth(name)), name
    for name, table in state["tables"].items():  # type: ignore[attr-defined]
        for s in table.local_shards():
            first, rows = s.metadata.shard_offsets[0], s.metadata.shard_sizes[0]
            assert torch.equal(s.tensor, truth(name)[first : first + rows]), name
    assert state["objects"] == OBJECTS


class Fsdp:
    """A small FSDP2 job whose weights depend on `seed`, its optimizer stepped."""

    def __init__(self, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.train()

    def train(self) -> None:
        self.model(torch.ones(2, 5)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> list[torch.Tensor]:
        """Parameters and moments, gathered, in order."""
        found = []
        for p in self.model.parameters():
            found.append(p)
            found += [v for _, v in sorted(self.optimizer.state[p].items())]
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def same(a: Fsdp, b: Fsdp) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.whole(), b.whole(), strict=True))


@contextmanager
def refused(kind: type[SidestageError], message: str) -> Iterator[None]:
    """What DCP raises on every rank holds an error of this class that says so."""
    try:
        yield
    except dcp.CheckpointException as e:
        errors = [error for error, _ in e.failures.values()]
        assert any(isinstance(x, kind) and message in str(x) for x in errors), errors
    else:
        raise AssertionError(f"no {kind.__name__} with {message!r}")


def save(root: str, rank: int, mesh: DeviceMesh) -> None:
    writer = DcpWriter(root, 1, config=CheckpointConfig(chunk_bytes=4096))
    state = {**state_of(rank, mesh, fill=True), "fsdp": Fsdp(mesh, 1).state()}
    metadata = dcp.save(state, storage_writer=writer)
    assert metadata.storage_data["step"] == 1
    later = {"d": distribute_tensor(truth("rows") + 1, mesh, [ShardOf(0)]), "n": 2}
    future = dcp.async_save(later, storage_writer=writer, checkpoint_id="2")
    future.result()
    with refused(BadInputError, "step 2 isn't above step 2"):
        dcp.save(later, storage_writer=writer, checkpoint_id="2")


def stock(folder: str, rank: int, mesh: DeviceMesh) -> None:
    """What `save` saves as step 1, in DCP's own format."""
    state = {**state_of(rank, mesh, fill=True), "fsdp": Fsdp(mesh, 1).state()}
    dcp.save(state, checkpoint_id=folder)


def load(root: str, rank: int, mesh: DeviceMesh) -> None:
    state = state_of(rank, mesh, fill=False)
    reader = DcpReader(root, 1)
    # Stock DCP takes a table without rows here for a missing key, unless it is told not to flatten.
    planner = dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    dcp.load(state, storage_reader=reader, planner=planner)
    assert reader.step == 1
    check(state)

    trained, job = Fsdp(mesh, 1), Fsdp(mesh, 2)
    assert not same(trained, job)
    loaded = {"fsdp": job.state()}
    dcp.load(loaded, storage_reader=DcpReader(root, 1))
    part = loaded["fsdp"]
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=part["model"],  # type: ignore[arg-type]
        optim_state_dict=part["optimizer"],  # type: ignore[arg-type]
    )
    assert same(trained, job)
    trained.train()
    job.train()
    assert same(trained, job)

    # The same commit, by Checkpointer.
    state = state_of(rank, mesh, fill=False)
    with Checkpointer(root) as c:
        result = c.restore(state, step=1, partial=True)
        assert result is not None
        assert all(k.startswith("fsdp.") for k in result.not_restored), result.not_restored
    check(state)

    wrong = {"plain": torch.zeros(2, 3)}
    with refused(BadInputError, "plain: stored as int64, the target is torch.float32"):
        dcp.load(wrong, storage_reader=DcpReader(root, 1))


def fail(root: str, rank: int, mesh: DeviceMesh) -> None:
    """What one rank meets is everybody's failure, and never half a checkpoint."""
    faulty = FaultyStorage(LocalStorage(root))
    if rank == dist.get_world_size() - 1:
        faulty.on("write", "data/*").fail(StorageError("no room"))
    writer = DcpWriter(faulty, 1)
    state = {"d": distribute_tensor(truth("rows"), mesh, [ShardOf(0)]), "n": 1}
    with refused(StorageError, "no room"):
        dcp.save(state, storage_writer=writer)
    dist.barrier()
    assert Catalog(faulty).commits() == []
    dcp.save(state, storage_writer=writer, checkpoint_id="2")

    with refused(BadInputError, "the ranks save different steps: 10, 11"):
        dcp.save(state, storage_writer=DcpWriter(root, 10 + rank))
    with refused(BadInputError, "bad: a builtins.object can't be stored"):
        dcp.save({**state, "bad": {object()}}, storage_writer=DcpWriter(root, 10))
    with refused(BadInputError, "enable_plan_caching"):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=DcpWriter(root, 10), planner=planner)
        dcp.save(state, storage_writer=DcpWriter(root, 11), planner=planner)
    dist.barrier()

    newer = DcpWriter(root, 20)
    dcp.save(state, storage_writer=newer)
    with refused(ConflictError, "a newer attempt owns"):
        dcp.save(state, storage_writer=writer, checkpoint_id="30")

    steps = [c.ref.step for c in Catalog(LocalStorage(root)).lineage()]
    assert steps == [20, 10, 2], steps
    dist.barrier()

    # Ranks that find different checkpoints must not mix them.
    with refused(ConflictError, "the ranks found different checkpoints"):
        dcp.load(state, storage_reader=DcpReader(root, 20 if rank else 10))
    if rank == 0:
        flip_a_byte(root, 20)
    dist.barrier()
    with refused(CorruptError, "bytes don't match their digest"):
        dcp.load(state, storage_reader=DcpReader(root, 20))


def flip_a_byte(root: str, step: int) -> None:
    storage = LocalStorage(root)
    record = Catalog(storage).find(step).record
    assert record is not None
    CheckpointReader(storage, record)
    key = next(f.key for f in record.files if f.key.endswith("r00000.bin"))
    data = bytearray(storage.read(key))
    data[0] ^= 1
    storage.put(key, data)


def main() -> None:
    warnings.simplefilter("error")
    # Of torch's own: DCP's planners and FSDP's state dicts use types that torch deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank, world = join()
    mesh = init_device_mesh("cpu", (world,))
    for action, root in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        {"save": save, "stock": stock, "load": load, "fail": fail}[action](root, rank, mesh)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
