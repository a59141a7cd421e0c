"""Host memory that state is staged into: allocated once, touched once, reused for every save.

Fresh pages cost about a second of page faults a GiB; a warm arena costs none. On a
machine with CUDA the arena is pinned, so that device copies run at the link's speed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import torch

from ckpt.errors import SaveError
from ckpt.machine import available_bytes
from ckpt.native import pin, touched_memory, unpin
from ckpt.tree import Shard

_ALIGN = 4096
_NOTHING: tuple[list[tuple[int, ...]], list[torch.dtype]] = [], []


class Staged(Sequence[tuple[int, torch.Tensor]]):
    """Items of a plan with the host memory that each is staged in: pairs, made when they are asked for."""

    def __init__(self, items: Sequence[int], homes: Sequence[torch.Tensor]) -> None:
        self._items, self._homes = items, homes
        self.nbytes = sum(h.nbytes for h in homes)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, at: int) -> tuple[int, torch.Tensor]: ...
    @overload
    def __getitem__(self, at: slice) -> Staged: ...
    def __getitem__(self, at: int | slice) -> tuple[int, torch.Tensor] | Staged:
        if isinstance(at, slice):
            return Staged(self._items[at], self._homes[at])
        return self._items[at], self._homes[at]

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return zip(self._items, self._homes, strict=True)


class Arena:
    """One snapshot's worth of host memory. Not thread-safe: its owner hands it on whole."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._events: list[torch.cuda.Event] = []
        self._cut_for = _NOTHING
        self._homes: list[torch.Tensor] = []
        self._unpin: weakref.finalize[..., Arena] | None = None

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.numel()

    def homes(self, shards: Iterable[Shard]) -> list[torch.Tensor]:
        """Places for `shards`, in order: contiguous host tensors of their shapes and dtypes.

        They stay valid until the next call: the caller must be done with them before.

        Raises SaveError if there isn't so much memory.
        """
        shards = list(shards)
        wanted = [s.sizes for s in shards], [s.tensor.dtype for s in shards]
        if wanted == self._cut_for:
            return self._homes
        used = [math.prod(sizes) * dtype.itemsize for sizes, dtype in zip(*wanted, strict=True)]
        self._cut_for, self._homes = _NOTHING, []  # they hold the old buffer
        with torch.inference_mode(False):  # whatever the trainer is in: saves outside of it follow
            self._reserve(sum(-(-n // _ALIGN) * _ALIGN for n in used))
            homes, at = [], 0
            for sizes, dtype, nbytes in zip(*wanted, used, strict=True):
                homes.append(self._buffer[at : at + nbytes].view(dtype).view(sizes))
                at += -(-nbytes // _ALIGN) * _ALIGN
        self._cut_for, self._homes = wanted, homes
        return homes

    def stage(self, shards: Sequence[Shard], homes: Sequence[torch.Tensor]) -> None:
        """Copy `shards` to their `homes`, so that the shards may be changed when this returns.

        Copies from a device are only ordered before what it does next; the host doesn't wait
        for them: `settle` does.
        """
        self._events = []
        # Tensor.copy_ releases the GIL and uses all intra-op threads; the storage's own holds it.
        with torch.inference_mode(False), torch.no_grad():
            here = [s.tensor for s in shards if s.tensor.is_cpu]
            into = homes
            if len(here) < len(shards):
                for shard, home in zip(shards, homes, strict=True):
                    if not shard.tensor.is_cpu:
                        home.copy_(shard.tensor, non_blocking=True)
                into = [h for s, h in zip(shards, homes, strict=True) if s.tensor.is_cpu]
            if here:  # in one call: the copy of a small one takes less than Python's way to it
                torch._foreach_copy_(list(into), here)
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
            have = available_bytes()
            if have is not None and need_bytes - self._buffer.numel() > have:
                # Else the system would end the trainer, or another process, to make room.
                raise SaveError(
                    f"this save copies {need_bytes} bytes of this rank's state into host memory, of which "
                    f"{have} are free; the log's table_copied events say which tables aren't guarded and why"
                )
            # Free the old one first: both at once would be a second copy of the state.
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._buffer = touched_memory(need_bytes)
            if self._pinned and pin(self._buffer):
                self._unpin = weakref.finalize(self, unpin, self._buffer)
                self._unpin.atexit = False  # the driver is gone by then
