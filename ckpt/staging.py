"""Host memory that state is staged into: allocated once, touched once, reused for every save.

Fresh pages cost about a second of page faults a GiB; a warm arena costs none. On a
machine with CUDA the arena is pinned, so that device copies run at the link's speed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence

import torch

from ckpt.native import pin, touched_memory, unpin
from ckpt.tree import Shard

_ALIGN = 4096


class Arena:
    """One snapshot's worth of host memory. Not thread-safe: its owner hands it on whole."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._events: list[torch.cuda.Event] = []
        self._unpin: weakref.finalize[..., Arena] | None = None

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    def homes(self, shards: Iterable[Shard]) -> list[torch.Tensor]:
        """Places for `shards`, in order: contiguous host tensors of their shapes and dtypes.

        They stay valid until the next call: the caller must be done with them before.
        """
        shards = list(shards)
        sizes = [-(-s.tensor.numel() * s.tensor.element_size() // _ALIGN) * _ALIGN for s in shards]
        self._reserve(sum(sizes))
        homes, at = [], 0
        for shard, size in zip(shards, sizes, strict=True):
            used = math.prod(shard.sizes) * shard.tensor.element_size()
            homes.append(self._buffer[at : at + used].view(shard.tensor.dtype).view(shard.sizes))
            at += size
        return homes

    def stage(self, shards: Sequence[Shard], homes: Sequence[torch.Tensor]) -> None:
        """Copy `shards` to their `homes`, so that the shards may be changed when this returns.

        Copies from a device are only ordered before what it does next; the host doesn't wait
        for them: `settle` does.
        """
        self._events = []
        for shard, home in zip(shards, homes, strict=True):
            # Tensor.copy_ releases the GIL and uses all intra-op threads; the storage's own holds it.
            home.copy_(shard.tensor, non_blocking=True)
        for device in {s.tensor.device for s in shards if s.tensor.is_cuda}:
            # Blocking: a persist thread that waits must not take a core from training.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    @property
    def pending(self) -> bool:
        """Are copies from a device still under way?"""
        return bool(self._events)

    def settle(self) -> None:
        """Wait until what was staged is there. On a persist thread, before it is read."""
        for event in self._events:
            event.synchronize()
        self._events = []

    def _reserve(self, need_bytes: int) -> None:
        if need_bytes > self._buffer.numel():
            # Free the old one first: both at once would be a second copy of the state.
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = touched_memory(need_bytes)
            if self._pinned and pin(self._buffer):
                self._unpin = weakref.finalize(self, unpin, self._buffer)
                self._unpin.atexit = False  # the driver is gone by then
