"""This process's place among the ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckpt.errors import BadInputError
from trainer.config import launched_place, restart_count


@dataclass(frozen=True)
class Place:
    """Rank and device of this process."""

    rank: int
    world_size: int
    device: torch.device


@contextmanager
def joined(device: str) -> Iterator[Place]:
    """Join the process group that torchrun prepared, or make one of a single process.

    Args:
        device: "cpu", "cuda" (with NCCL, one device a rank), or "auto" for CUDA where it is.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("[run] device = 'cuda': this process sees no CUDA device; use 'cpu'")
    cuda = device != "cpu" and torch.cuda.is_available()
    rank, world_size, local_rank = launched_place() or (0, 1, 0)
    if cuda:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if cuda else "gloo"
    if launched_place():
        store = PrefixStore(f"restart-{restart_count()}", next(rendezvous("env://"))[0])
        # torchrun keeps one store for all restarts, so the addresses that the ranks of the last
        # attempt left there are still found, and connecting to them fails or hangs, now and then
        # (pytorch#135712). Keys of this attempt's own avoid it.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    else:
        alone: Any = getattr(dist, "HashStore")()  # noqa: B009 - public, but untyped
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    try:
        yield Place(rank, world_size, torch.device("cuda", local_rank) if cuda else _CPU)
    finally:
        dist.destroy_process_group()


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy, equally on every rank."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


_CPU = torch.device("cpu")
