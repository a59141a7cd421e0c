"""Host memory that snapshots are staged into: allocated once, touched once, reused for every save.

Fresh pages cost about a second of page faults a GiB; a warm arena costs none. On a
machine with CUDA the arena is pinned, so that device copies run at the link's speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ckpt.tree import Shard

_ALIGN = 4096


class Arena:
    """One snapshot's worth of host memory. Not thread-safe: its owner hands it on whole."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    def stage(self, shards: Iterable[Shard]) -> list[torch.Tensor]:
        """Copy `shards`, in order; returns contiguous host tensors of the same shapes and dtypes.

        When this returns, the copies are complete, device copies included. The tensors stay
        valid until the next call: the caller must be done with them before.
        """
        shards = list(shards)
        sizes = [-(-s.tensor.numel() * s.tensor.element_size() // _ALIGN) * _ALIGN for s in shards]
        self._reserve(sum(sizes))
        staged, at = [], 0
        devices = set()
        for shard, size in zip(shards, sizes, strict=True):
            used = math.prod(shard.sizes) * shard.tensor.element_size()
            home = self._buffer[at : at + used].view(shard.tensor.dtype).view(shard.sizes)
            # Tensor.copy_ releases the GIL and uses all intra-op threads; the storage's own holds it.
            home.copy_(shard.tensor, non_blocking=True)
            if shard.tensor.is_cuda:
                devices.add(shard.tensor.device)
            staged.append(home)
            at += size
        for device in devices:
            # The snapshot is a promise made when save() returns, so wait for the copies here.
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _reserve(self, need_bytes: int) -> None:
        if need_bytes > self._buffer.numel():
            # Free the old one first: both at once would be a second copy of the state.
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.zeros(need_bytes, dtype=torch.uint8, pin_memory=self._pinned)
