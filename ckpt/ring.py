"""Buffers between a snapshot and its writers: made once, touched once, reused for every save.

Shared memory, so that another process could do the writing; aligned, so that O_DIRECT takes it;
on huge pages where the system gives them; pinned where there is CUDA.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

from ckpt.errors import BadInputError, SaveError
from ckpt.native import pin, unpin

ALIGN_BYTES = 4096
_MIB = 1 << 20
_HUGE_BYTES = 2 * _MIB
_SHARE = 16  # a buffer is at most this part of the staging memory


def buffer_bytes(staging_bytes: int, chunk_bytes: int) -> int:
    """How long a ring's buffers should be: small beside what the overlay needs, else a chunk."""
    return aligned(min(chunk_bytes, max(_MIB, staging_bytes // _SHARE)))


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to what direct writes and chunk offsets are aligned to."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class RingBuffer:
    """One buffer of a ring: the same bytes as a uint8 `tensor` and as a `view`."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.wanted_bytes = nbytes
        align = _HUGE_BYTES if nbytes >= _HUGE_BYTES else ALIGN_BYTES
        size = -(-nbytes // align) * align
        memory = mmap.mmap(-1, size + align - ALIGN_BYTES)  # shared and anonymous
        with contextlib.suppress(OSError):  # refused where the kernel has none: no harm
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        start = -whole.data_ptr() % align
        # The memory is unmapped with the last tensor or view of it.
        self.tensor = whole[start : start + size]
        self.view = memoryview(memory)[start : start + size]
        self.tensor.zero_()
        self._pinned = pinned and pin(self.tensor)

    def close(self) -> None:
        """Let the memory go. Not to be used again."""
        if self._pinned:
            unpin(self.tensor)
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.view = memoryview(b"")


class Ring:
    """At most `buffers` buffers, each made when it is first needed. Any thread may take and give.

    Args:
        buffer_bytes: of each; they grow only for a block that needs more.
        pinned: page-lock them for CUDA, where that is allowed.
    """

    def __init__(self, buffers: int, buffer_bytes: int, *, pinned: bool) -> None:
        if buffers < 2:  # a block and its compressed chunks are in two
            raise BadInputError(f"a ring of {buffers} buffers: give at least 2")
        self.buffers = buffers
        self._pinned = pinned
        self._wanted_bytes = aligned(buffer_bytes)
        self._free: list[RingBuffer] = []
        self._out = 0
        self._closed = False
        self._changed = threading.Condition()
        self.device: torch.device | None = None
        """The CUDA device whose threads make the buffers; a new thread would be at the first one."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes that one buffer holds at least."""
        return self._wanted_bytes

    @property
    def held_bytes(self) -> int:
        """The most memory that this ring takes."""
        return self.buffers * self._wanted_bytes

    def resize(self, buffer_bytes: int) -> None:
        """Make buffers of another length from now on; those in use go when they are given back."""
        with self._changed:
            self._wanted_bytes = aligned(buffer_bytes)
            for buffer in self._free:
                buffer.close()
            self._free = []

    def reserve(self, need_bytes: int) -> None:
        """Make the buffers longer, once all are back, if they are shorter than `need_bytes`."""
        with self._changed:
            if need_bytes > self._wanted_bytes:
                self._changed.wait_for(lambda: not self._out or self._closed)
                for buffer in self._free:
                    buffer.close()
                self._free, self._wanted_bytes = [], aligned(need_bytes)

    def take(self, need_bytes: int = 0) -> RingBuffer:
        """A buffer of at least `need_bytes`; waits until one is free. Raises SaveError if closed."""
        self.reserve(need_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._out < self.buffers or self._closed)
            if self._closed:
                raise SaveError("the ring of staging buffers is closed; make a new Checkpointer")
            buffer = self._free.pop() if self._free else self._made()
            self._out += 1
            return buffer

    def _made(self) -> RingBuffer:
        if self.device is not None:
            torch.cuda.set_device(self.device)
        return RingBuffer(self._wanted_bytes, pinned=self._pinned)

    def give(self, buffer: RingBuffer) -> None:
        """Give a buffer back. Nobody may use it, or a part of it, after that."""
        with self._changed:
            self._out -= 1
            if self._closed or buffer.wanted_bytes != self._wanted_bytes:
                buffer.close()
            else:
                self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Release the memory; what is still taken goes when it is given back. Idempotent."""
        with self._changed:
            self._closed = True
            for buffer in self._free:
                buffer.close()
            self._free = []
            self._changed.notify_all()
