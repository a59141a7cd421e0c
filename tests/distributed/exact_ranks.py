"""A rank that saves in the middle of training: `exact_ranks.py ROOT PIPELINE... [dtensor]`.

Its oracle is a clone of all its shards at save(); steps run before the persist thread may copy.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from ckpt import CheckpointConfig, Checkpointer
from ckpt.catalog import Catalog
from ckpt.events import ListSink
from ckpt.layout import DATA
from ckpt.manifest import Receipt, decode
from ckpt.restore import CheckpointReader
from ckpt.storage import open_storage
from ckpt.tree import flatten
from tests.distributed.guards_ranks import BAGS, CPU, DENSE, LISTS, PIPELINES, batches, build
from tests.distributed.launch import join, leave
from tests.faults import DEADLINE_S
from tests.guarded.oracle import Oracle
from tests.guarded.turnstile import SteppedCheckpointer

SAVES = 3


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "progress": {"step": 0}}


def train(name: str, root: str, rank: int, world: int, *, dtensor: bool) -> None:
    model, optimizer = build(world, dtensor=dtensor)
    assert isinstance(model, DistributedModelParallel)
    pipeline, source = PIPELINES[name](model, optimizer, CPU), batches(rank)
    state, sink = state_of(model, optimizer), ListSink()
    config = CheckpointConfig(
        chunk_bytes=16384,
        staging_bytes=16 << 20,
        compression="off",
        persist_target_s=0,
        persist_priority="normal",
        commit_timeout_s=DEADLINE_S,
        proof="full",
    )
    oracles: dict[int, Oracle] = {}
    with SteppedCheckpointer(root, config, sink=sink) as c:
        c.restore({}, fresh=True)
        for step in range(1, SAVES + 1):
            pipeline.progress(source)
            oracles[step] = Oracle(state, rank)
            handle = c.save(step, state)
            c.turnstile.wait_standing()
            for blocks in (0, 3, 2):
                pipeline.progress(source)
                c.turnstile.go(blocks)
            check_changed(oracles[step], state, rank)
            c.turnstile.open()
            handle.committed.result(DEADLINE_S)
            c.turnstile.close()
        assert c.stats.untracked_writes == 0
    dist.barrier()
    storage = open_storage(root)
    for step, oracle in oracles.items():
        oracle.check(storage, step, alone=world == 1)
    if rank == 0:
        check_receipts(root)
    check_restored(root, oracles[SAVES], rank, world, dtensor=dtensor)


def check_changed(oracle: Oracle, state: dict[str, Any], rank: int) -> None:
    """The steps since have changed tables and their state: else nothing is proved."""
    now = Oracle(state, rank)
    changed = {
        fqn
        for fqn, boxes in oracle.boxes.items()
        for (_, old), (_, new) in zip(boxes, now.boxes[fqn], strict=True)
        if not old.equal(new)
    }
    tables = {f for f in oracle.boxes if any(f"_{way}" in f for way in (*BAGS, *LISTS, DENSE))}
    full = {f for f in tables if any(t.numel() for _, t in oracle.boxes[f])}
    assert full <= changed, full - changed


def check_receipts(root: str) -> None:
    """All tables but the data-parallel one were guarded, weights and optimizer state."""
    storage = open_storage(root)
    record = Catalog(storage).find(SAVES).record
    assert record is not None
    keys = [o.key for o in storage.list(DATA) if o.key.endswith(".receipt.json")]
    receipts = [decode(Receipt, storage.read(key), key) for key in keys]
    receipts = [r for r in receipts if r.step == SAVES]
    for receipt in receipts:
        assert all(DENSE in name for name in receipt.copied_tables), receipt.copied_tables
        assert receipt.guarded_bytes > 0
    tensors = CheckpointReader(storage, record).tensors
    ways = tuple(f"_{way}." for way in {*BAGS, *LISTS})
    want = sum(
        _nbytes(info)
        for fqn, info in tensors.items()
        if any(way in fqn for way in ways) or "plain.weight" in fqn
    )
    assert sum(r.guarded_bytes for r in receipts) == want


def _nbytes(info: Any) -> int:
    n = {"float32": 4, "float64": 8, "int64": 8}[info.dtype]
    for size in info.shape:
        n *= size
    return n


def check_restored(root: str, oracle: Oracle, rank: int, world: int, *, dtensor: bool) -> None:
    """Another process's model takes up what was saved."""
    model, optimizer = build(world, dtensor=dtensor)
    state = state_of(model, optimizer)
    with Checkpointer(root) as c:
        result = c.restore(state)
        assert result is not None
        assert result.step == SAVES
    for fqn, leaf in flatten(state, rank).leaves.items():
        for shard, (_, want) in zip(leaf.shards, oracle.boxes[fqn], strict=True):
            assert shard.tensor.equal(want), fqn


def main() -> None:
    root, *names = sys.argv[1:]
    rank, world = join()
    for name in names:
        dtensor = name.endswith("+dtensor")
        train(name.removesuffix("+dtensor"), f"{root}/{name}", rank, world, dtensor=dtensor)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
