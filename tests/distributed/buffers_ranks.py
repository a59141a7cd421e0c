"""Two ranks whose model has BatchNorm, under DDP that broadcasts buffers, and under one that doesn't."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer
from ckpt.errors import BadInputError
from tests.distributed.launch import join, leave


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Each rank on its own samples: statistics are its own afterwards."""
    samples = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    optimizer.zero_grad()
    ddp(samples).sum().backward()
    optimizer.step()


def saved_as_rank_0_has_them(rank: int) -> None:
    ddp = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, rank)
    of_rank_0 = ddp.module[1].running_mean.clone()
    mine = of_rank_0.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(mine, of_rank_0) == (rank == 0), "the ranks' statistics are alike"
    folder = os.environ["MEET"] + "-broadcast"
    with Checkpointer(folder) as c:
        for step in (1, 2):
            c.save(step, {"model": ddp}).committed.result()
        wanted = {n: t.clone() for n, t in ddp.state_dict().items()}
        train(ddp, optimizer, rank)
        c.save(3, {"model": ddp}).committed.result()
        refused_once_they_are_broadcast_no_more(c, ddp, rank)
    fresh = DistributedDataParallel(model())
    with Checkpointer(folder) as c:
        c.restore({"model": fresh}, step=2)
    for name, tensor in fresh.state_dict().items():
        rank_0s = wanted[name].clone()
        dist.broadcast(rank_0s, 0)
        assert torch.equal(tensor, rank_0s), name


def refused_once_they_are_broadcast_no_more(
    c: Checkpointer, ddp: DistributedDataParallel, rank: int
) -> None:
    """The same keys in the same memory, in a wrapper that leaves each rank its own."""
    again = DistributedDataParallel(ddp.module, broadcast_buffers=False)
    train(again, torch.optim.SGD(again.parameters(), lr=0.1), rank)
    error = c.save(4, {"model": again}).committed.exception()
    assert isinstance(error, BadInputError), error
    assert "model.module.1.running_mean: ranks 0 and 1 hold different values" in str(error)


def refused_where_nobody_broadcasts(rank: int) -> None:
    ddp = DistributedDataParallel(model(), broadcast_buffers=False)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank)
    with Checkpointer(os.environ["MEET"] + "-own") as c:
        try:
            c.save(1, {"model": ddp})
        except BadInputError as e:
            assert "model.module.1.running_mean" in str(e)
            assert "dist.broadcast(buffer, 0) before save()" in str(e)
        else:
            raise AssertionError("it wasn't refused")
        for buffer in ddp.buffers():
            dist.broadcast(buffer, 0)
        c.save(2, {"model": ddp}).committed.result()


def main() -> None:
    rank, _ = join()
    saved_as_rank_0_has_them(rank)
    refused_where_nobody_broadcasts(rank)
    leave()


if __name__ == "__main__":
    main()
