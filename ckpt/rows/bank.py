"""The overlay of tables on a device: old rows of one width in a fixed area, filled without the host.

The host never knows how many rows an append keeps. It counts with the most that it can be, and the
device reports the true number now and then, beside training; only when the area may be full does
the host wait for it. So an append is enqueued only if it fits for sure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ckpt.native import SLOTS
from ckpt.rows.device import Device, Mark, fetch
from ckpt.rows.pool import Table

_SPILL = 1024  # places for what isn't kept: all in one would queue up in front of it
_MOVED = 1 << 16  # rows moved at a time when the area is cleared up
_KEY_BYTES = 10
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(eq=False)
class DeviceTable:
    """A table as the device's pool knows it. Holds on to its memory.

    base: its first row's number among the rows of all tables. upto: rows that the snapshot of each
    slot has copied, laid: those that got their old rows laid over, too.
    """

    table: Table
    base: int = 0
    chunk_rows: int = 1
    tag: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    bank: Bank | None = None
    number: int = 0
    upto: list[int] = field(init=False)
    laid: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.upto = [self.table.rows] * SLOTS
        self.laid = [self.table.rows] * SLOTS


class Rows:
    """One component of all tables of a bank, as one tensor of overlapping rows.

    Row r of table t is row starts[t] + r * step of `every`; units are integers of up to 8 bytes.
    """

    def __init__(self, parts: Sequence[torch.Tensor], width: int) -> None:
        places = [p.storage_offset() * p.element_size() for p in parts]
        size = next(s for s in _UNITS if not any(x % s for x in (width, *places)))
        self.width = width // size
        stride = math.gcd(self.width, *(x // size - places[0] // size for x in places))
        origin = min(places) // size
        last = max(x // size + p.shape[0] * self.width for x, p in zip(places, parts, strict=True))
        shape = ((last - origin - self.width) // stride + 1, self.width)
        memory = torch.empty(0, dtype=_UNITS[size], device=parts[0].device)
        storage = parts[0].untyped_storage()
        self.every = memory.set_(storage, origin, shape, (stride, 1))
        self.starts = [(x // size - origin) // stride for x in places]
        self.step = self.width // stride

    def copy(self, number: int, a: int, b: int) -> torch.Tensor:
        """Rows [a, b) of a table: shape (b - a, width)."""
        first = self.starts[number]
        return self.every[first + a * self.step : first + b * self.step : self.step].clone(
            memory_format=torch.contiguous_format
        )


def likeness(table: Table) -> tuple[object, ...]:
    """Tables of one likeness can share a bank: rows of the same bytes in the same memory."""
    parts = table.components
    if not table.rows or not all(table.widths):
        return (id(table),)
    return (table.widths, *(p.untyped_storage().data_ptr() for p in parts))


class Bank:
    """The area. Appending and clearing up are the training side's, `lay_over` the copying side's."""

    def __init__(self, device: Device, tables: Sequence[DeviceTable], capacity_bytes: int) -> None:
        self.tables = tuple(tables)
        first = tables[0].table
        self.record_bytes = _KEY_BYTES + sum(first.widths)
        self.capacity = max(1, capacity_bytes // self.record_bytes)
        self.bound = 0
        """At least as many rows as were kept: some of the first `bound` places may be garbage."""
        self._device = device
        self.rows = [
            Rows([t.table.components[k] for t in tables], width) if first.rows and width else None
            for k, width in enumerate(first.widths)
        ]
        size, place = self.capacity + _SPILL, device.device
        self._keys = torch.zeros(size, dtype=torch.int64, device=place)
        self._before = torch.zeros(size, dtype=torch.uint8, device=place)
        self._after = torch.zeros(size, dtype=torch.uint8, device=place)
        self._values = [
            None if r is None else torch.zeros((size, r.width), dtype=r.every.dtype, device=place)
            for r in self.rows
        ]
        # Each append makes a new one: those that were published never change under a reader.
        self._count = torch.zeros((), dtype=torch.int64, device=place)
        self._published: deque[tuple[torch.Tensor, int, Mark]] = deque()
        self._empty = False
        self._there = device.host((), torch.int64)
        self._report: Mark | None = None
        self._since = 0

    def areas(self) -> Iterator[torch.Tensor]:
        """All its memory."""
        yield from (self._keys, self._before, self._after, self._count)
        yield from (v for v in self._values if v is not None)

    def needed(self, slot: int) -> bool:
        """May the snapshot of a slot still read what is kept?"""
        return any(t.laid[slot] < t.table.rows for t in self.tables)

    def reset(self) -> None:
        """Nobody needs what is kept: the next append starts again at the front."""
        self.bound, self._report, self._empty = 0, None, True
        self._published.clear()

    def heed(self) -> None:
        """Count with the device's last report, if it's there."""
        if self._report is not None and self._report.done():
            self.bound = int(self._there) + self._since
            self._report = None

    def room_for(self, kept: torch.Tensor) -> int:
        """Rows that would be free after keeping those of a mask. The host waits."""
        self._begin()
        count, more = fetch(self._device, torch.stack([self._count, kept.sum()])).tolist()
        self.bound, self._report = count, None
        return int(self.capacity - count - more)

    def append(
        self,
        keys: torch.Tensor,
        before: torch.Tensor,
        epoch: int,
        kept: torch.Tensor,
        sources: Sequence[torch.Tensor | None],
    ) -> None:
        """Keep the rows of a mask, of whom there are at most `capacity - bound`.

        keys: their numbers among the rows of all tables; sources: for each component their rows
        in `rows[k].every`.
        """
        n = keys.numel()
        self._begin()
        self.bound += n
        spill = torch.arange(n, device=keys.device).remainder_(_SPILL).add_(self.capacity)
        places = torch.where(kept, kept.cumsum(0) + (self._count - 1), spill)
        self._keys.index_copy_(0, places, keys)
        self._before.index_copy_(0, places, before)
        self._after.index_fill_(0, places, epoch)
        for rows, values, source in zip(self.rows, self._values, sources, strict=True):
            if rows is not None and values is not None and source is not None:
                values.index_copy_(0, places, rows.every.index_select(0, source))
        self._count = self._count + kept.sum()
        self._ask(n)

    def publish(self, mark: Mark) -> None:
        """What was kept until now may be read once `mark` has passed."""
        if self.bound:
            self._published.append((self._count, min(self.bound, self.capacity), mark))
            while len(self._published) > 1 and self._published[1][2].done():
                self._published.popleft()

    def clear_up(self, epochs: Sequence[tuple[int, torch.Tensor]], bases: torch.Tensor) -> None:
        """Keep only what a snapshot hasn't got: (epoch, first row number that it lacks per table).

        bases: int64, the rising first row numbers of the tables of this bank.
        """
        n = self.bound
        keys, before, after = self._keys[:n], self._before[:n], self._after[:n]
        table = torch.searchsorted(bases, keys, right=True) - 1
        wanted = torch.zeros(n, dtype=torch.bool, device=keys.device)
        for epoch, lacks in epochs:
            wanted |= (before < epoch) & (after >= epoch) & (keys >= lacks[table.clamp(min=0)])
        wanted &= torch.arange(n, device=keys.device) < self._count
        spill = torch.arange(n, device=keys.device).remainder_(_SPILL).add_(self.capacity)
        places = torch.where(wanted, wanted.cumsum(0) - 1, spill)
        for area in (self._keys, self._before, self._after, *self._values):
            if area is None:
                continue
            # Rows only move to the front: what a block overwrites was moved with an earlier one.
            for a in range(0, n, _MOVED):
                b = min(n, a + _MOVED)
                area.index_copy_(0, places[a:b], area[a:b].clone())
        self._count = wanted.sum()
        self._report = None
        self._published.clear()

    def lay_over(
        self, first: int, rows: int, epoch: int, parts: Sequence[torch.Tensor | None]
    ) -> int:
        """Lay old rows of a snapshot over `parts`, copies of rows [first, first + rows); how many.

        On the copying side, on the side stream. `first` counts among the rows of all tables.
        """
        states = tuple(self._published)
        if not states:
            return 0
        # The newest that has passed holds all that matters; to wait for a newer one would be to wait
        # for all that training has enqueued. None: the area was cleared up just now.
        count, n, mark = next((s for s in reversed(states) if s[2].done()), states[0])
        mark.wait()
        # Numbers are taken once: a snapshot that was given up may read while the area is refilled.
        at = self._keys[:n] - first
        fits = (at >= 0) & (at < rows)
        fits &= (self._before[:n] < epoch) & (self._after[:n] >= epoch)
        every = torch.arange(n, device=at.device)
        fits &= every < count
        chosen = torch.empty(n + 1, dtype=torch.int64, device=at.device)
        chosen.index_copy_(0, torch.where(fits, fits.cumsum(0) - 1, n), every)
        found = int(fetch(self._device, fits.sum()))
        if found:
            chosen = chosen[:found]
            for part, values in zip(parts, self._values, strict=True):
                if part is not None and values is not None:
                    part.index_copy_(0, at[chosen], values.index_select(0, chosen))
            self._device.mark().synchronize()
        return found

    def _begin(self) -> None:
        if self._empty:
            self._count = torch.zeros_like(self._count)
            self._empty = False

    def _ask(self, appended: int) -> None:
        """Have the device report the count, unless a report is on its way."""
        if self._report is not None:
            self._since += appended
            return
        self._there.copy_(self._count, non_blocking=True)
        self._report, self._since = self._device.mark(), 0
