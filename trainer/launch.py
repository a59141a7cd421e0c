"""This process's place among the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ckpt.errors import BadInputError
from trainer.config import launched_place


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
        dist.init_process_group(backend)
    else:
        store: Any = getattr(dist, "HashStore")()  # noqa: B009 - exported, but not for type checkers
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield Place(rank, world_size, torch.device("cuda", local_rank) if cuda else _CPU)
    finally:
        dist.destroy_process_group()


_CPU = torch.device("cpu")
