"""Old rows as tensors by chunk, in plain torch: the reference, and where there is no native part."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt.native import HEAD_BYTES, SLOTS, read_live
from ckpt.rows.pool import Stop, Table


@dataclass(frozen=True, slots=True)
class OldRows:
    """Rows of one chunk as they were before a touch. `before`: their tags then, `after`: since."""

    rows: torch.Tensor
    before: torch.Tensor
    after: int
    values: tuple[torch.Tensor, ...]
    nbytes: int


@dataclass(eq=False)
class TorchTable:
    """A table, its tags, and what is kept of each of its chunks."""

    table: Table
    tag: torch.Tensor
    chunk_rows: int
    upto: list[int] = field(default_factory=list)
    kept: dict[int, list[OldRows]] = field(default_factory=dict)

    @property
    def record_bytes(self) -> int:
        return HEAD_BYTES + sum(self.table.widths)


class TorchPool:
    """See `Pool`."""

    def __init__(self) -> None:
        self._capacity = 0
        self._used = 0
        self._epoch = 1
        self._open = [0] * SLOTS
        self._tables: list[TorchTable] = []
        self._training = threading.RLock()

    @staticmethod
    def takes(table: Table) -> bool:
        return all(c.device.type == "cpu" for c in table.components)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def fullness(self) -> float:
        return self.used_bytes / max(self.capacity_bytes, 1)

    def add(self, table: Table) -> TorchTable:
        tag = torch.zeros(table.rows, dtype=torch.uint8, device="cpu")
        added = TorchTable(table, tag, max(table.rows, 1), [table.rows] * SLOTS)
        self._tables.append(added)
        return added

    def drop(self, key: TorchTable) -> None:
        for chunk in self.kept_chunks(key):
            self.release(key, chunk)
        self._tables.remove(key)

    def lay_out(self, chunk_rows: Mapping[TorchTable, int], capacity_bytes: int) -> None:
        for table in self._tables:
            table.chunk_rows = chunk_rows[table]
        self._capacity = capacity_bytes

    def touch(
        self,
        keys: Sequence[TorchTable],
        ids: torch.Tensor,
        bounds: Sequence[int] | torch.Tensor,
        start: Stop,
    ) -> Stop | None:
        with self._training:
            bounds = list(bounds)
            at = start.at
            for segment in range(start.segment, len(keys)):
                at = max(at, bounds[segment])
                at = self._touch_one(keys[segment], ids, at, bounds[segment + 1])
                if at < bounds[segment + 1]:
                    return Stop(segment, at)
        return None

    def touch_all(self, key: TorchTable) -> None:
        key.tag.fill_(self._epoch)

    def open(self, slot: int, epoch: int) -> None:
        for table in self._tables:
            table.upto[slot] = 0
        self._epoch = epoch
        self._open[slot] = epoch

    def close(self, slot: int) -> None:
        self._open[slot] = 0

    def passed(self, key: TorchTable, slot: int) -> int:
        return key.upto[slot]

    def pass_all(self, slot: int) -> None:
        for table in tuple(self._tables):
            table.upto[slot] = table.table.rows

    def copy(
        self, key: TorchTable, slot: int, a: int, b: int, out: Sequence[torch.Tensor | None]
    ) -> int:
        parts = key.table.components
        views = [
            None if o is None else o.view(p.dtype).view(b - a, *p.shape[1:])
            for o, p in zip(out, parts, strict=True)
        ]
        for o, part in zip(out, parts, strict=True):
            if o is not None and not read_live(o, part[a:b]):
                return -1
        key.upto[slot] = max(
            b, key.upto[slot]
        )  # never back: it may be given up; before what is kept is read: see _rows.c
        mine, laid = self._open[slot], 0
        for old in tuple(key.kept.get(a // key.chunk_rows, ())):
            if old.after < mine:
                continue
            fits = (old.before < mine) & (old.rows >= a) & (old.rows < b)
            rows = old.rows[fits] - a
            for view, values in zip(views, old.values, strict=True):
                if view is not None:
                    view.index_copy_(0, rows, values[fits])
            laid += rows.numel()
        return laid

    def release(self, key: TorchTable, chunk: int) -> None:
        with self._training:
            self._used -= sum(old.nbytes for old in key.kept.pop(chunk, ()))

    def kept_chunks(self, key: TorchTable) -> list[int]:
        return list(key.kept)

    def tags(self, key: TorchTable, a: int, b: int) -> torch.Tensor:
        return key.tag[a:b]

    def age(self, by: int) -> None:
        self._epoch -= by
        for table in self._tables:
            table.tag.sub_(table.tag.clamp(max=by))

    def _touch_one(self, key: TorchTable, ids: torch.Tensor, at: int, end: int) -> int:
        """Touch ids[at:end]; returns how far the room went."""
        if not key.table.rows:
            return end
        slots = [
            (self._open[s], key.upto[s])
            for s in range(SLOTS)
            if self._open[s] and key.upto[s] < key.table.rows
        ]
        while at < end:
            # In pieces that fit an empty overlay, else a big batch would wait for ever.
            piece = max(1, self._capacity // (2 * key.record_bytes)) if slots else end - at
            rows = ids[at : min(end, at + piece)].long()
            rows = torch.where((rows >= 0) & (rows < key.table.rows), rows, 0)
            if slots:
                before = key.tag[rows]
                needed = torch.zeros_like(rows, dtype=torch.bool)
                for epoch, upto in slots:
                    needed |= (before < epoch) & (rows >= upto)
                if not self._keep(key, rows[needed]):
                    return at
            key.tag.index_fill_(0, rows, self._epoch)
            at += rows.numel()
        return end

    def _keep(self, key: TorchTable, rows: torch.Tensor) -> bool:
        """Keep the old values of rows; False if there is no room."""
        rows = torch.unique(rows)
        if self._used + rows.numel() * key.record_bytes > self._capacity:
            return False
        before, chunks = key.tag[rows], rows // key.chunk_rows
        values = [c[rows] for c in key.table.components]
        found, counts = torch.unique_consecutive(chunks, return_counts=True)
        at = 0
        for chunk, n in zip(found.tolist(), counts.tolist(), strict=True):
            here = slice(at, at + n)
            old = OldRows(
                rows[here],
                before[here],
                self._epoch,
                tuple(v[here] for v in values),
                n * key.record_bytes,
            )
            self._used += old.nbytes
            key.kept.setdefault(chunk, []).append(old)
            at += n
        return True
