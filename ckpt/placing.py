"""Where the bytes of stored chunks go: boxes of tensors, in place where memory has the same layout.

What can't be filled as it lies in a chunk (columns, other strides, another device) is staged in a scratch
buffer, some rows at a time, and copied from there while it is in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ckpt.errors import BadInputError
from ckpt.native import memory_to_fill, pin, touched_memory, unpin
from ckpt.tree import host_bytes

STAGED_BYTES = 1 << 20
"""Of rows on their way, at least one of them: a size that stays in a core's own cache."""


class Source(Protocol):
    """The uncompressed bytes of one chunk, from its first on."""

    def fill(self, memory: memoryview) -> None:
        """Fill memory with the next bytes."""
        ...

    def skip(self, nbytes: int) -> None:
        """Pass over the next bytes."""
        ...


class Target(NamedTuple):
    """Fill `out` with the box of a stored tensor that begins at `offsets` and has out's shape.

    out: any strided view on any device, of the stored dtype. Elements of an expanded view that share
    memory must be stored alike.
    """

    fqn: str
    out: torch.Tensor
    offsets: tuple[int, ...]


class Place(NamedTuple):
    """What one chunk gives to one target: rows [first, stop) of the chunk, of them `inner`, to `into`.

    address: of memory that takes these rows as they lie in the chunk; 0 where there is none.
    """

    into: torch.Tensor
    first: int
    stop: int
    inner: tuple[slice, ...]
    address: int


def memory_of(target: Target) -> Target:
    """The target without dimensions in which its elements share memory, once it is known to be there."""
    out = target.out.detach()
    if out.numel():
        last = sum((n - 1) * s for n, s in zip(out.shape, out.stride(), strict=True))
        needed = (out.storage_offset() + last + 1) * out.element_size()
        if not out.is_meta and out.untyped_storage().nbytes() < needed:
            raise BadInputError(
                f"{target.fqn}: its storage holds {out.untyped_storage().nbytes()} of {needed} bytes; "
                f"it was freed or offloaded, bring it back first"
            )
        for dim in shared_dims(out):
            out = out.narrow(dim, 0, 1)
    return Target(target.fqn, out, tuple(target.offsets))


def shared_dims(out: torch.Tensor) -> list[int]:
    """Dimensions along which all elements are the same memory."""
    return [
        d for d, (n, s) in enumerate(zip(out.shape, out.stride(), strict=True)) if n > 1 and not s
    ]


def place_of(
    out: torch.Tensor, offsets: Sequence[int], at: Sequence[int], shape: Sequence[int]
) -> Place:
    """What a chunk, a box of `shape` at `at`, gives to a tensor at `offsets`. Not apart."""
    if not shape:
        return Place(out, 0, 1, (), _address(out, whole=True))
    parts, inner, all_of_it = [], [], True
    for o, n, a, m in zip(offsets, out.shape, at, shape, strict=True):
        start, stop = max(o, a), min(o + n, a + m)
        parts.append(slice(start - o, stop - o))
        inner.append(slice(start - a, stop - a))
        all_of_it = all_of_it and stop - start == n
    into = out if all_of_it else out[tuple(parts)]
    whole_rows = all(s.stop - s.start == m for s, m in zip(inner[1:], shape[1:], strict=True))
    address = _address(into, whole=whole_rows)
    return Place(into, inner[0].start, inner[0].stop, tuple(inner[1:]), address)


def _address(into: torch.Tensor, *, whole: bool) -> int:
    plain = whole and into.is_cpu and not into.is_conj() and not into.is_neg()
    return into.data_ptr() if plain and into.is_contiguous() else 0


class Scratch:
    """One worker's buffers, each as large as the largest thing that it was asked for so far."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")
        self._staged: dict[torch.device, _Staged] = {}

    def bytes(self, nbytes: int) -> memoryview:
        """Memory whose content is anybody's until the next call."""
        if len(self._buffer) < nbytes:
            self._buffer = host_bytes(touched_memory(nbytes))
        return self._buffer[:nbytes]

    def place(self, places: Sequence[Place], shape: Sequence[int], source: Source) -> None:
        """Read a whole chunk of `shape`, and give to each place what is its.

        Copies to other devices may still be under way; see `close`.
        """
        rows, dtype = (shape[0] if shape else 1), places[0].into.dtype
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if len(places) == 1 and (address := places[0].address):
            first, stop = places[0].first * row_bytes, places[0].stop * row_bytes
            source.skip(first)
            source.fill(memory_to_fill(address, stop - first))
            source.skip(rows * row_bytes - stop)
            return
        device = next((p.into.device for p in places if not p.into.is_cpu), None)
        staged = self._of(device or torch.device("cpu"))
        step = max(1, STAGED_BYTES // row_bytes)
        for at in range(0, rows, step):
            count = min(step, rows - at)
            memory = staged.take(count * row_bytes)
            source.fill(host_bytes(memory))
            data = memory.view(dtype).reshape((count, *shape[1:]) if shape else ())
            staged.copy(
                [
                    _Part.of(p, data, at, count)
                    for p in places
                    if p.first < at + count and p.stop > at
                ]
            )

    def close(self) -> None:
        """Wait for copies that are under way, and free what is held."""
        for staged in self._staged.values():
            staged.close()
        self._staged.clear()
        self._buffer = memoryview(b"")

    def _of(self, device: torch.device) -> _Staged:
        if device not in self._staged:
            self._staged[device] = _Staged() if device.type == "cpu" else _OnItsWay(device)
        return self._staged[device]


class _Part(NamedTuple):
    into: torch.Tensor
    data: torch.Tensor

    @classmethod
    def of(cls, place: Place, data: torch.Tensor, at: int, count: int) -> _Part:
        """Of rows [at, at + count) of a chunk, which are `data`, what belongs to a place."""
        if not data.dim():
            return cls(place.into, data)
        first, stop = max(place.first, at), min(place.stop, at + count)
        rows = data[(slice(first - at, stop - at), *place.inner)]
        return cls(place.into[first - place.first : stop - place.first], rows)


class _Staged:
    """A buffer that is free again as soon as `copy` returns."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8, of shape (nbytes,)."""
        if self._memory.numel() < nbytes:
            self._memory = touched_memory(nbytes)
        return self._memory[:nbytes]

    def copy(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.into.copy_(part.data)

    def close(self) -> None:
        return


class _OnItsWay(_Staged):
    """Two pinned buffers in turn: one is filled while the other one is copied, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.Stream(device)
        # What the trainer has asked of this memory before comes first.
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        self._turns = [_Turn(), _Turn()]

    def take(self, nbytes: int) -> torch.Tensor:
        self._turns.reverse()
        return self._turns[0].take(nbytes)

    def copy(self, parts: Sequence[_Part]) -> None:
        with self._stream:
            for part in parts:
                part.into.copy_(part.data, non_blocking=True)
        self._turns[0].event = self._stream.record_event()

    def close(self) -> None:
        self._stream.synchronize()
        for turn in self._turns:
            turn.close()


class _Turn:
    """A pinned buffer, and the event after which it may be filled again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self.event: Any = None

    def take(self, nbytes: int) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        if self._memory.numel() < nbytes:
            self.close()
            self._memory = touched_memory(max(nbytes, STAGED_BYTES))
            self._pinned = pin(self._memory)
        return self._memory[:nbytes]

    def close(self) -> None:
        if self._pinned:
            unpin(self._memory)
            self._pinned = False
