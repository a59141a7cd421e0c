"""Old rows in slabs of one area, kept by chunk; the loops are in _rows.c.

A chunk's slabs are free again as soon as every open snapshot has the chunk: the overlay holds
what is ahead of the copying, not all that training has touched meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from ckpt.native import (
    HEAD_BYTES,
    PARTS,
    SLOTS,
    Native,
    PoolStruct,
    TableStruct,
    array_of,
    touched_memory,
)
from ckpt.rows.pool import Stop, Table

_SLABS = 4096
_MIN_SLAB_BYTES = 16 << 10
_MAX_SLAB_BYTES = 256 << 10
_LEAST_RECORDS = 4


class NativeTable:
    """A table's memory as _rows.c sees it. Holds on to all of it."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.tag = touched_memory(table.rows)
        self.first = torch.empty(0, dtype=torch.int32, device="cpu")
        self.struct = TableStruct(
            tag=self.tag.data_ptr(),
            rows=table.rows,
            record_bytes=record_bytes(table),
            parts=len(table.components),
        )
        for k, (part, width) in enumerate(zip(table.components, table.widths, strict=True)):
            self.struct.part[k] = part.data_ptr()
            self.struct.width[k] = width
        for slot in range(SLOTS):
            self.struct.upto[slot] = table.rows
        self.lay_out(max(table.rows, 1))
        self.address = ctypes.addressof(self.struct)

    def lay_out(self, chunk_rows: int) -> None:
        rows = self.table.rows
        chunks = max(-(-rows // chunk_rows), 1)
        self.first = torch.full((chunks,), -1, dtype=torch.int32, device="cpu")
        self.struct.first = self.first.data_ptr()
        self.struct.chunk_rows = chunk_rows
        # A multiplication in place of each division: exact for 32-bit numbers.
        exact = chunk_rows > 1 and max(rows, chunk_rows) < 1 << 32
        self.struct.magic = -(-(1 << 64) // chunk_rows) if exact else 0


class NativePool:
    """See `Pool`. For tables in host memory. The slabs are allocated and touched by `lay_out`."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._struct = PoolStruct(epoch=1)
        self._address = ctypes.addressof(self._struct)
        self._slabs = 0
        self._memory: list[torch.Tensor] = []
        self._tables: list[NativeTable] = []

    @staticmethod
    def takes(table: Table) -> bool:
        return len(table.components) <= PARTS and all(
            c.device.type == "cpu" for c in table.components
        )

    @property
    def capacity_bytes(self) -> int:
        return self._slabs * int(self._struct.slab_bytes)

    @property
    def used_bytes(self) -> int:
        return (self._slabs - int(self._struct.n_free)) * int(self._struct.slab_bytes)

    @property
    def fullness(self) -> float:
        return self.used_bytes / max(self.capacity_bytes, 1)

    def add(self, table: Table) -> NativeTable:
        added = NativeTable(table)
        self._tables.append(added)
        return added

    def drop(self, key: NativeTable) -> None:
        for chunk in self.kept_chunks(key):
            self.release(key, chunk)
        self._tables.remove(key)

    def lay_out(self, chunk_rows: Mapping[NativeTable, int], capacity_bytes: int) -> None:
        for table in self._tables:
            table.lay_out(chunk_rows[table])
        longest = max((record_bytes(t.table) for t in self._tables), default=HEAD_BYTES)
        slab = min(max(capacity_bytes // _SLABS, _MIN_SLAB_BYTES), _MAX_SLAB_BYTES)
        slab = -(-max(slab, _LEAST_RECORDS * longest) // 4096) * 4096
        count = max(1, capacity_bytes // slab)
        if (count, slab) == (self._slabs, int(self._struct.slab_bytes)):
            return
        self._memory = []  # the old area first: both at once would pass the budget
        slabs = touched_memory(count * slab)
        older = torch.full((count,), -1, dtype=torch.int32, device="cpu")
        records = torch.zeros(count, dtype=torch.int32, device="cpu")
        free = torch.arange(count - 1, -1, -1, dtype=torch.int32, device="cpu")
        self._memory = [slabs, older, records, free]
        self._slabs = count
        s = self._struct
        s.slabs, s.next, s.count = slabs.data_ptr(), older.data_ptr(), records.data_ptr()
        s.free_slabs, s.n_free, s.slab_bytes = free.data_ptr(), count, slab

    def touch(
        self,
        keys: Sequence[NativeTable],
        ids: torch.Tensor,
        bounds: Sequence[int] | torch.Tensor,
        start: Stop,
    ) -> Stop | None:
        n = len(keys)
        tables = array_of(ctypes.c_void_p, n)(*[k.address for k in keys])
        limits = array_of(ctypes.c_int64, n + 1)(*bounds)
        wide = ids.element_size() == 8
        place = ids.data_ptr()
        if self._native.touch(
            self._address, tables, limits, n, place, wide, start.segment, start.at
        ):
            return None
        return Stop(int(self._struct.stop_segment), int(self._struct.stop_at))

    def touch_all(self, key: NativeTable) -> None:
        key.tag.fill_(int(self._struct.epoch))

    def open(self, slot: int, epoch: int) -> None:
        for table in self._tables:
            table.struct.upto[slot] = 0
        self._struct.epoch = epoch
        self._struct.open[slot] = epoch

    def close(self, slot: int) -> None:
        self._struct.open[slot] = 0

    def passed(self, key: NativeTable, slot: int) -> int:
        return int(key.struct.upto[slot])

    def pass_all(self, slot: int) -> None:
        for table in tuple(self._tables):
            table.struct.upto[slot] = table.struct.rows

    def copy(
        self, key: NativeTable, slot: int, a: int, b: int, out: Sequence[torch.Tensor | None]
    ) -> int:
        pointers = [o.data_ptr() if o is not None else 0 for o in out]
        places = array_of(ctypes.c_void_p, len(out))(*pointers)
        return self._native.copy(self._address, key.address, slot, a, b, places)

    def release(self, key: NativeTable, chunk: int) -> None:
        self._native.release(self._address, key.address, chunk)

    def kept_chunks(self, key: NativeTable) -> list[int]:
        kept: list[int] = (key.first >= 0).nonzero().flatten().tolist()
        return kept

    def tags(self, key: NativeTable, a: int, b: int) -> torch.Tensor:
        return key.tag[a:b]

    def age(self, by: int) -> None:
        self._struct.epoch -= by
        for table in self._tables:
            self._native.age(table.tag.data_ptr(), table.table.rows, by)


def record_bytes(table: Table) -> int:
    """Bytes that one old row takes."""
    return HEAD_BYTES + -(-sum(table.widths) // 8) * 8
