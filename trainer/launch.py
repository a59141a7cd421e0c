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

from ckpt.config import restart_count
from ckpt.errors import BadInputError, SidestageError
from trainer.config import agent_store_address, launched_place


@dataclass(frozen=True)
class Place:
    """Rank and device of this process."""

    rank: int
    world_size: int
    device: torch.device


def take_device(device: str) -> torch.device:
    """This rank's device, made the current one of this thread, with its context created.

    Args:
        device: "cpu", "cuda" (one device a rank), or "auto" for CUDA where it is.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("[run] device = 'cuda': this process sees no CUDA device; use 'cpu'")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    _, _, local_rank = launched_place() or (0, 1, 0)
    torch.cuda.set_device(local_rank)
    torch.zeros(1, device="cuda")  # the context takes seconds, and is made by the first use
    return torch.device("cuda", local_rank)


@contextmanager
def joined(device: str) -> Iterator[Place]:
    """Join the process group that torchrun prepared, or make one of a single process.

    Args:
        device: "cpu", "cuda" (with NCCL, one device a rank), or "auto" for CUDA where it is.
    """
    mine = take_device(device)
    rank, world_size, _ = launched_place() or (0, 1, 0)
    backend = "nccl" if mine.type == "cuda" else "gloo"
    if launched_place() is None:
        dist.init_process_group(backend, store=_HASH_STORE(), rank=0, world_size=1)
    elif (address := agent_store_address()) is not None:
        store = _store_of_this_life(*address)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)
    try:
        yield Place(rank, world_size, mine)
    except RuntimeError as e:
        if not lost_a_peer(e):
            raise
        raise SidestageError(
            f"rank {rank} lost its connection to another rank, which has probably ended; look for the "
            f"first error among the ranks ({str(e).splitlines()[0][:160]})"
        ) from e
    finally:
        dist.destroy_process_group()


def lost_a_peer(error: RuntimeError) -> bool:
    """Did a collective fail because another rank went away? Gloo says so only in words."""
    if isinstance(error, dist.DistError):
        return True
    said = str(error).lower()
    return "gloo" in said and any(w in said for w in ("connection", "timed out", "read error"))


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy, equally on every rank."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _store_of_this_life(host: str, port: int) -> Any:
    """The agent's store, with the keys of this restart apart from those of earlier ones.

    torchrun keeps one store over all restarts and torch 2.13 puts every life's keys in the same
    place: a rank that starts first then reads the addresses of dead peers, and the job fails or
    hangs (pytorch#135712). Where several nodes restart at different counts, start torchrun with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead: each life then has a store of its own.
    """
    return _PREFIX_STORE(f"restart-{restart_count()}", _TCP_STORE(host, port, is_master=False))


# Exported by torch.distributed, but not for type checkers.
_HASH_STORE: Any = vars(dist)["HashStore"]
_TCP_STORE: Any = vars(dist)["TCPStore"]
_PREFIX_STORE: Any = vars(dist)["PrefixStore"]
