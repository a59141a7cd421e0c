"""A rank that saves or checks tensors in many layouts: `layouts.py save|check|recut ROOT`."""

from __future__ import annotations

import sys

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardOf

from ckpt import CheckpointConfig, Checkpointer
from ckpt.errors import BadInputError
from tests.distributed.launch import join, leave

ROWS, COLS = 23, 10
TABLES = ("row", "column", "table", "few_rows", "blocks")


def truth(name: str) -> torch.Tensor:
    rows = 2 if name == "few_rows" else ROWS
    g = torch.Generator().manual_seed(len(name))
    return torch.randn(rows, COLS, generator=g)


def boxes(layout: str, rows: int, rank: int, world: int) -> list[tuple[list[int], list[int]]]:
    """(offsets, sizes) of this rank's shards of a (rows, COLS) tensor."""
    cut = lambda n, i: n * i // world  # noqa: E731
    r0, r1 = cut(rows, rank), cut(rows, rank + 1)
    c0, c1 = cut(COLS, rank), cut(COLS, rank + 1)
    if layout == "row":
        return [([r0, 0], [r1 - r0, COLS])]
    if layout == "column":
        return [([0, c0], [rows, c1 - c0])]
    if layout == "table":
        return [([0, 0], [rows, COLS])] if rank == world - 1 else []
    half = rows // 2  # several shards a rank: upper and lower halves of a column strip
    return [([0, c0], [half, c1 - c0]), ([half, c0], [rows - half, c1 - c0])]


def sharded(name: str, layout: str, rank: int, world: int, *, fill: bool) -> ShardedTensor:
    whole = truth(name)
    shards = []
    for offsets, sizes in boxes(layout, whole.shape[0], rank, world):
        part = whole[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]]
        data = part.clone().contiguous() if fill else torch.full(sizes, float("nan"))
        shards.append(Shard.from_tensor_and_offsets(data, offsets, rank))
    return init_from_local_shards(shards, *whole.shape)


def state(rank: int, world: int, turn: int, *, fill: bool) -> dict[str, object]:
    """Each table in one of the layouts; `turn` shifts which."""
    kinds = ["row", "column", "table", "row", "blocks"]
    tables = {
        name: sharded(name, kinds[(i + turn) % len(kinds)], rank, world, fill=fill)
        for i, name in enumerate(TABLES)
    }
    mesh = init_device_mesh("cpu", (world,))
    source = truth("dtensor") if fill else torch.full((ROWS, COLS), float("nan"))
    placements = [[ShardOf(0)], [ShardOf(1)], [Replicate()]][turn % 3]
    d = distribute_tensor(source, mesh, placements)
    return {"tables": tables, "d": d, "plain": torch.ones(3) if fill else torch.zeros(3)}


def main() -> None:
    action, root, turn = sys.argv[1], sys.argv[2], int(sys.argv[3])
    rank, world = join()
    with Checkpointer(root, CheckpointConfig(chunk_bytes=4096)) as c:
        if action == "save":
            c.restore({}, fresh=True)
            c.save(1, state(rank, world, turn, fill=True)).committed.result()
        elif action == "check":
            got = state(rank, world, turn, fill=False)
            result = c.restore(got)
            assert result is not None
            for name, t in got["tables"].items():  # type: ignore[attr-defined]
                for s in t.local_shards():
                    (r, k), (n, m) = s.metadata.shard_offsets, s.metadata.shard_sizes
                    assert torch.equal(s.tensor, truth(name)[r : r + n, k : k + m]), name
            assert torch.equal(got["d"].full_tensor(), truth("dtensor"))  # type: ignore[attr-defined]
            assert torch.equal(got["plain"], torch.ones(3))  # type: ignore[arg-type]
        else:
            recut(c, rank, world)
    leave()


def recut(c: Checkpointer, rank: int, world: int) -> None:
    """Rowwise optimizer state of a column-wise table means nothing once the columns are cut elsewhere."""

    def table(cut: int) -> dict[str, object]:
        edges = [0, cut, COLS]
        offsets, width = [0, edges[rank]], edges[rank + 1] - edges[rank]
        w = init_from_local_shards(
            [Shard.from_tensor_and_offsets(torch.ones(ROWS, width), offsets, rank)], ROWS, COLS
        )
        m = init_from_local_shards(
            [Shard.from_tensor_and_offsets(torch.ones(ROWS), [ROWS * rank], rank)], ROWS * world
        )
        return {"model": {"t.weight": w}, "optimizer": {"state": {"t.weight": {"t.momentum1": m}}}}

    c.save(1, table(5)).committed.result()
    with Checkpointer(c.storage) as other:
        try:
            other.restore(table(4))
        except BadInputError as e:
            assert "optimizer.state.t.weight.t.momentum1: rowwise state of model.t.weight" in str(e)
        else:
            raise AssertionError("state of other columns was accepted")


if __name__ == "__main__":
    main()
