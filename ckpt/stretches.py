"""Parts of tensors that a save reads, so that what becomes of them can be compared with it later.

Which parts: blocks of all tensors together, some at each save, in an order that goes far from one
to the next and comes to each of them after a known number of saves.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from ckpt.native import memory_at


@dataclass(frozen=True)
class Stretch:
    """Bytes [a, b) of a contiguous tensor as they were in save(): their digest, or soon in host memory.

    ready: when a copy from a device is there.
    """

    a: int
    b: int
    _digest: int | None = None
    _taken: torch.Tensor | None = None
    _ready: torch.cuda.Event | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, a: int, b: int) -> Stretch:
        """Read bytes [a, b), in the order of the current stream. The host waits for no device."""
        if tensor.device.type == "cpu":
            return cls(a, b, _digest_of(tensor, a, b))
        [taken], ready = fetched([bytes_of(tensor)[a:b]])
        return cls(a, b, None, taken, ready)

    @property
    def digest(self) -> int:
        """XXH3 of the bytes. Waits for the device: on a persist thread."""
        if self._digest is not None:
            return self._digest
        assert self._taken is not None
        if self._ready is not None:
            self._ready.synchronize()
        return _digest_of(self._taken, 0, self.b - self.a)

    def same(self, copied: torch.Tensor) -> bool:
        """Has a copy of the tensor in host memory these bytes?"""
        return _digest_of(copied, self.a, self.b) == self.digest


class Turns:
    """Whose turn it is, of tensors of these sizes in bytes."""

    def __init__(self, sizes: Sequence[int], block_bytes: int) -> None:
        self._sizes = sizes
        self._block_bytes = block_bytes
        self._counts = [-(-size // block_bytes) for size in sizes]
        self._ends = list(itertools.accumulate(self._counts))
        self.blocks = self._ends[-1] if self._ends else 0
        self._stride = _stride(self.blocks)

    def spans(self, blocks: int, turn: int) -> Iterator[tuple[int, int, int]]:
        """(number, a, b): bytes [a, b) of the tensor of that number; so many blocks from `turn` on.

        Everything, in whole tensors, where it has no more blocks.
        """
        if self.blocks <= blocks:
            yield from ((n, 0, size) for n, size in enumerate(self._sizes) if size)
            return
        for number in range(turn, turn + blocks):
            block = number * self._stride % self.blocks
            n = bisect.bisect_right(self._ends, block)
            a = (block - (self._ends[n] - self._counts[n])) * self._block_bytes
            yield n, a, min(self._sizes[n], a + self._block_bytes)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def fetched(
    parts: Sequence[torch.Tensor | None],
) -> tuple[tuple[torch.Tensor | None, ...], torch.cuda.Event | None]:
    """Host copies in the order of the current stream, and when they're there. The host doesn't wait."""
    device = next(p.device for p in parts if p is not None)
    cuda = device.type == "cuda"
    taken: list[torch.Tensor | None] = []
    for part in parts:
        home = None
        if part is not None:
            home = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=cuda)
            home.copy_(part.detach(), non_blocking=True)
        taken.append(home)
    if not cuda:
        return tuple(taken), None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return tuple(taken), event


def _digest_of(tensor: torch.Tensor, a: int, b: int) -> int:
    """Of bytes [a, b) of contiguous host memory. `Tensor.numpy` would leave a mark on its storage."""
    return xxhash.xxh3_64_intdigest(memory_at(tensor.data_ptr() + a, b - a))


def _stride(total: int) -> int:
    """Steps that visit all of `total` blocks, far from one another: near the golden section."""
    stride = max(1, round(total * 0.618))
    while math.gcd(stride, total) != 1:
        stride += 1
    return stride
