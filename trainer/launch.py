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
    if launched_place() is None:
        dist.init_process_group(backend, store=_HASH_STORE(), rank=0, world_size=1)
    elif (address := agent_store_address()) is not None:
        store = _store_of_this_life(*address)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)
    try:
        yield Place(rank, world_size, torch.device("cuda", local_rank) if cuda else _CPU)
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


_CPU = torch.device("cpu")
# Exported by torch.distributed, but not for type checkers.
_HASH_STORE: Any = vars(dist)["HashStore"]
_TCP_STORE: Any = vars(dist)["TCPStore"]
_PREFIX_STORE: Any = vars(dist)["PrefixStore"]
