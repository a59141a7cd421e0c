"""Old rows on the device of their tables: kept without the host ever waiting for the device.

The host only enqueues. What it has to know of the tables' state it knows by counting (`bank.py`), and
a persist thread hears of the device by events alone. Four streams of events are to be put in order:
the host's training thread T, its persist thread P, the device's training stream t (whichever
streams they are, `touch` chains them) and the side stream p.

Opening: T records `opened` in t; p waits for it before it first reads a table. So p reads no row
before the changes that were enqueued before save() are made.

Copying rows [a, b), P: p copies them to a buffer, C; P waits for C; P publishes upto = b; P takes the newest
state that the overlay's bank has published and the device has passed, a count and a mark in t; p lays
the rows below that count over the buffer; then the buffer goes to the host, and P waits for that, too.
Touching row r, T: T reads upto; unless r < upto, t keeps the row, K; T publishes the bank's count with a
mark behind K; `touch` returns, and T enqueues the change U in t, behind that mark.

- r wasn't kept: T read upto > r, so C had ended on the device before U was even enqueued. C has the old
  row.
- r was kept, and U began on the device before C ended: K and its mark had passed by then, and T had
  published them before it enqueued U. So P, which looks after C has ended, finds this state or a newer one.
  C may have the old row, the new one or a mixture: the old one is laid over it.
- r was kept, and U began after C ended: C has the old row, and so has the overlay, if P sees it yet.

The same order shows that `untouched` finds the touch of every change that `live` has seen.

What is kept twice holds the same old value, unless a snapshot was opened between: the tags before and
after a touch tell whose it is, as in `_rows.c`.

Room. Appending moves on, reading stays below a published count, so both may go on at once. What
moves or overwrites rows that were published happens only where nobody reads them: `reset` when
every open snapshot has laid over all of a bank's tables (`laid`, not `upto`: a chunk whose rows were
copied is still about to read); `clear_up` under the lock `_reading`, which P holds while it reads. T
only tries that lock: a thread at idle priority may be slow to give it back.

There's no reclaiming chunk by chunk as in host memory. Only when an area is full do the rows that
no snapshot needs any more go, in one pass; that is the only time when `touch` waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from ckpt.native import PARTS, SLOTS
from ckpt.rows.bank import Bank, DeviceTable, likeness
from ckpt.rows.device import Device, Mark, fetch, upload
from ckpt.rows.lookup import Lookup, Touched, lookup_of, touched_by
from ckpt.rows.pool import Stop, Table, nbytes

_NEVER = 1 << 62


class DevicePool:
    """See `Pool`. For the tables of one device; `bounds` of a touch may be a tensor there."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._epoch = 1
        self._open = [0] * SLOTS
        self._opened: dict[int, Mark] = {}
        self._tables: list[DeviceTable] = []
        self._tags = torch.zeros(1, dtype=torch.uint8, device=device.device)
        self._placed = True
        self._banks: list[Bank] = []
        self._lookups: dict[tuple[DeviceTable, ...], Lookup] = {}
        self._training = threading.RLock()
        self._reading = threading.Lock()
        self._stream: object = None
        self._last: Mark = device.mark()
        """Behind the newest work on tags or old rows, in whichever stream that was."""

    def takes(self, table: Table) -> bool:
        return len(table.components) <= PARTS and all(
            c.device == self._device.device and c.layout is torch.strided for c in table.components
        )

    @property
    def capacity_bytes(self) -> int:
        return sum(b.capacity * b.record_bytes for b in self._banks)

    @property
    def used_bytes(self) -> int:
        return sum(min(b.bound, b.capacity) * b.record_bytes for b in self._banks)

    @property
    def fullness(self) -> float:
        return max((min(b.bound / b.capacity, 1.0) for b in self._banks), default=0.0)

    def add(self, table: Table) -> DeviceTable:
        added = DeviceTable(table)
        added.tag = torch.zeros(table.rows, dtype=torch.uint8, device=self._device.device)
        self._tables.append(added)
        self._placed = False
        return added

    def drop(self, key: DeviceTable) -> None:
        self._tables.remove(key)
        if (bank := key.bank) is not None:
            self._banks.remove(bank)
            for other in bank.tables:
                other.bank = None
        self._placed = False

    def lay_out(self, chunk_rows: Mapping[DeviceTable, int], capacity_bytes: int) -> None:
        with self._training:
            self._follow()
            self._place()
            self._banks = []  # the old areas first: both at once would pass the budget
            alike: dict[object, list[DeviceTable]] = {}
            for key in self._tables:
                key.chunk_rows, key.bank = chunk_rows[key], None
                alike.setdefault(likeness(key.table), []).append(key)
            total = sum(nbytes(key.table) for key in self._tables)
            for keys in alike.values():
                share = capacity_bytes * sum(nbytes(k.table) for k in keys) // max(total, 1)
                bank = Bank(self._device, keys, share)
                self._banks.append(bank)
                for number, key in enumerate(keys):
                    key.bank, key.number = bank, number
            self._lookups = {}
            self._last = self._device.mark()

    def touch(
        self,
        keys: Sequence[DeviceTable],
        ids: torch.Tensor,
        bounds: Sequence[int] | torch.Tensor,
        start: Stop,
    ) -> Stop | None:
        with self._training:
            self._follow()
            self._place()
            lookup = self._lookup(tuple(keys))
            at, end, edges = 0, ids.numel(), None
            if isinstance(bounds, torch.Tensor):
                edges = bounds.to(self._device.device, torch.int64, non_blocking=True).contiguous()
            else:
                at, end = bounds[0], bounds[-1]
                if len(keys) > 1:
                    edges = upload(self._device, bounds)
            at = max(at, start.at)
            while at < end:
                wanting = self._wanting(lookup)
                # In pieces that fit an empty area, else a big batch would wait for ever.
                most = min((b.capacity for b in wanting), default=end - at)
                upto = min(end, at + most)
                touched = touched_by(lookup, ids[at:upto], edges, at)
                if wanting and not self._keep(lookup, wanting, touched):
                    self._publish(lookup)
                    return Stop(0, at)
                self._tags.index_fill_(0, touched.flat, self._epoch)
                at = upto
            self._publish(lookup)
        return None

    def touch_all(self, key: DeviceTable) -> None:
        with self._training:
            self._follow()
            self._place()
            key.tag.fill_(self._epoch)
            self._last = self._device.mark()

    def open(self, slot: int, epoch: int) -> None:
        with self._training:
            self._follow()
            for key in self._tables:
                if key.bank is not None:
                    key.upto[slot] = key.laid[slot] = 0
            self._epoch = epoch
            self._opened[slot] = self._last = self._device.mark()
            self._open[slot] = epoch

    def close(self, slot: int) -> None:
        with self._training:
            self._open[slot] = 0
            if not any(self._open):
                for bank in self._banks:
                    bank.reset()

    def passed(self, key: DeviceTable, slot: int) -> int:
        return key.upto[slot]

    def pass_all(self, slot: int) -> None:
        for key in tuple(self._tables):
            key.upto[slot] = key.laid[slot] = key.table.rows

    def copy(
        self, key: DeviceTable, slot: int, a: int, b: int, out: Sequence[torch.Tensor | None]
    ) -> int:
        bank = key.bank
        assert bank is not None
        self._device.bind()
        with self._device.beside():
            self._opened[slot].wait()
            parts = [
                None if o is None or r is None else r.copy(key.number, a, b)
                for o, r in zip(out, bank.rows, strict=True)
            ]
            self._device.mark().synchronize()
            # Never back: the snapshot may have been given up meanwhile.
            key.upto[slot] = max(key.upto[slot], b)
            with self._reading:
                laid = bank.lay_over(key.base + a, b - a, self._open[slot], parts)
            key.laid[slot] = max(key.laid[slot], b)
            for o, part in zip(out, parts, strict=True):
                if o is not None and part is not None:
                    o.copy_(part.view(torch.uint8).view(-1), non_blocking=True)
            self._device.mark().synchronize()
        return laid

    def release(self, key: DeviceTable, chunk: int) -> None:
        """Nothing by itself: what isn't needed goes when there is no room, see `_make_room`."""

    def kept_chunks(self, key: DeviceTable) -> list[int]:
        return [0] if key.bank is not None and key.bank.bound else []

    def tags(self, key: DeviceTable, a: int, b: int) -> torch.Tensor:
        self._device.bind()
        with self._device.beside():
            return fetch(self._device, key.tag[a:b])

    def age(self, by: int) -> None:
        with self._training:
            self._follow()
            self._place()
            self._epoch -= by
            self._tags.sub_(self._tags.clamp(max=by))
            self._last = self._device.mark()

    def _follow(self) -> None:
        """Training goes on in the current stream: what it did in another one comes before."""
        stream = self._device.stream()
        if stream == self._stream:
            return
        self._last.wait()
        self._stream = stream
        self._device.keep(self._tags)
        for bank in self._banks:
            for area in bank.areas():
                self._device.keep(area)
        for lookup in self._lookups.values():
            lookup.keep(self._device)

    def _place(self) -> None:
        """Put the tags of all tables in one tensor, with a place at its end for ids of no table."""
        if self._placed:
            return
        base = 0
        for key in self._tables:
            key.base = base
            base += key.table.rows
        place = self._device.device
        spare = torch.zeros(1, dtype=torch.uint8, device=place)
        self._tags = torch.cat([*(key.tag for key in self._tables), spare])
        for key in self._tables:
            key.tag = self._tags[key.base : key.base + key.table.rows]
        self._lookups = {}
        self._placed = True

    def _lookup(self, keys: tuple[DeviceTable, ...]) -> Lookup:
        known = self._lookups.get(keys)
        if known is None:
            known = self._lookups[keys] = lookup_of(self._device, keys, self._tags.numel() - 1)
        return known

    def _wanting(self, lookup: Lookup) -> list[Bank]:
        """The banks that some open snapshot wants rows in; those of the others are emptied."""
        wanting: list[Bank] = []
        slots = [s for s in range(SLOTS) if self._open[s]]
        if not slots:
            return wanting
        for bank in lookup.banks:
            if bank.bound and not any(bank.needed(s) for s in slots):
                bank.reset()
            bank.heed()
            mine = [k for k in lookup.keys if k.bank is bank]
            if any(k.upto[s] < k.table.rows for s in slots for k in mine):
                wanting.append(bank)
        return wanting

    def _keep(self, lookup: Lookup, wanting: Sequence[Bank], touched: Touched) -> bool:
        """Keep the old values that open snapshots lack; False, and nothing is, if there's no room."""
        touched.sort()
        flat = touched.flat
        before = self._tags.index_select(0, flat)
        lacked = torch.zeros_like(flat, dtype=torch.bool)
        for slot in range(SLOTS):
            if epoch := self._open[slot]:
                lacked |= (before < epoch) & (flat >= touched.each(self._frontier(lookup, slot)))
        lacked[1:] &= flat[1:] != flat[:-1]
        kept = [self._of(lookup, bank, lacked, touched) for bank in wanting]
        n = flat.numel()
        for bank, mask in zip(wanting, kept, strict=True):
            if bank.bound + n > bank.capacity and not self._make_room(bank, mask):
                return False
        for bank, mask in zip(wanting, kept, strict=True):
            starts = lookup.starts[lookup.banks.index(bank)]
            sources: list[torch.Tensor | None] = []
            for rows, start in zip(bank.rows, starts, strict=True):
                if rows is None or start is None:
                    sources.append(None)
                    continue
                source = touched.rows * rows.step + touched.each(start)
                sources.append(torch.where(mask, source, 0))
            bank.append(flat, before, self._epoch, mask, sources)
        return True

    def _frontier(self, lookup: Lookup, slot: int) -> torch.Tensor | int:
        """Per segment the first row, among those of all tables, that a snapshot lacks."""
        lacks = [k.base + k.upto[slot] for k in lookup.keys]
        return lacks[0] if len(lacks) == 1 else upload(self._device, [*lacks, _NEVER])

    @staticmethod
    def _of(lookup: Lookup, bank: Bank, lacked: torch.Tensor, touched: Touched) -> torch.Tensor:
        if len(lookup.banks) == 1 and touched.segment is None:
            return lacked
        return lacked & (touched.each(lookup.bank) == lookup.banks.index(bank))

    def _make_room(self, bank: Bank, mask: torch.Tensor) -> bool:
        """Is there room for the rows of a mask? Waits for the device, which alone knows."""
        if bank.room_for(mask) >= 0:
            return True
        if not self._reading.acquire(blocking=False):
            return False
        try:
            epochs = [
                (e, upload(self._device, [k.base + k.laid[s] for k in bank.tables]))
                for s, e in enumerate(self._open)
                if e
            ]
            bank.clear_up(epochs, upload(self._device, [k.base for k in bank.tables]))
            room = bank.room_for(mask)
            bank.publish(self._device.mark())
        finally:
            self._reading.release()
        return room >= 0

    def _publish(self, lookup: Lookup) -> None:
        """What was enqueued until now is to be waited for by whoever reads it."""
        self._last = self._device.mark()
        for bank in lookup.banks:
            bank.publish(self._last)
