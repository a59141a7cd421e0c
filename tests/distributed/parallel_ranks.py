"""Ranks with models that torch itself shards: `parallel_ranks.py ROOT`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ckpt import Checkpointer
from ckpt.events import ListSink
from tests.distributed.launch import join, leave

WAYS = ("fsdp", "tensor", "plain")


def built(way: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    # 6 and 10 don't divide evenly.
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 10), nn.Linear(10, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "fsdp":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way == "tensor":
        plan = {"1": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(n))
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    out = {n: whole(p) for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        out |= {f"{n}.{k}": whole(v) for k, v in optimizer.state[p].items()}
    return out


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def prove(root: str, saved: str, restored: str) -> None:
    """What was saved in one way comes back in another, into an optimizer that has taken no step."""
    model, optimizer = built(saved, 0)
    for n in range(3):
        step(model, optimizer, n)
    with Checkpointer(root, sink=ListSink()) as c:
        c.save(3, {"model": model, "optimizer": optimizer}).committed.result()
    other, fresh = built(restored, 1)
    with Checkpointer(root, sink=ListSink()) as c:
        c.restore({"model": other, "optimizer": fresh})
    assert equal(contents(other, fresh), contents(model, optimizer)), (saved, restored)
    if saved == restored:
        for n in range(3, 6):
            step(model, optimizer, n)
            step(other, fresh, n)
        assert equal(contents(other, fresh), contents(model, optimizer)), saved


def main() -> None:
    (root,) = sys.argv[1:]
    join()
    done: Callable[[str], None] = print
    for saved in WAYS:
        for restored in WAYS:
            prove(f"{root}/{saved}-{restored}", saved, restored)
            done(f"{saved} {restored}")
    leave()


if __name__ == "__main__":
    main()
