"""What the tests of guards on CUDA share: a small job with plain tables, and a watch for host waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckpt.tree import flatten

DEADLINE_S = 120.0


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Within it CUDA raises where the host, on any thread, would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Model(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            [nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(2)]
        )
        self.top = nn.Sequential(
            nn.Linear(2 * dim, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1536),
            nn.ReLU(),
            nn.Linear(1536, 1),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([bag(i) for bag, i in zip(self.bags, ids, strict=True)], 1))


class Job:
    """`sparse` is the optimizer of the tables, such as torch.optim.SGD."""

    def __init__(self, sparse: Callable[..., Any], rows: int = 200_000, dim: int = 32) -> None:
        torch.manual_seed(0)
        self.rows = rows
        self.model = Model(rows, dim).cuda()
        self.sparse = sparse(self.model.bags.parameters(), lr=0.1)
        self.dense = torch.optim.Adam(self.model.top.parameters(), lr=1e-3)
        self.state = {"model": self.model, "sparse": self.sparse, "dense": self.dense}
        self.random = torch.Generator("cuda").manual_seed(1)

    def backward(self) -> None:
        """Zipf-like ids, so that rows come again and again."""
        u = torch.rand((2, 512, 20), generator=self.random, device="cuda")
        ids = (u.pow(4) * self.rows).long().clamp_(max=self.rows - 1)
        self.model.zero_grad(set_to_none=True)
        self.model(ids).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.sparse.step()
        self.dense.step()

    def copy(self) -> dict[str, torch.Tensor]:
        """The whole state as it is now, on the device, without waiting for it."""
        leaves = flatten(self.state, 0).leaves
        return {name: leaf.shards[0].tensor.clone() for name, leaf in leaves.items()}


def until(done: Callable[[], bool], go_on: Callable[[], None]) -> int:
    """Go on until something is done; how often that was."""
    ends = time.monotonic() + DEADLINE_S
    times = 0
    while not done():
        assert time.monotonic() < ends, f"not done after {DEADLINE_S:g} s"
        go_on()
        times += 1
    return times
