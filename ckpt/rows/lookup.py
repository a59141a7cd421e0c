"""Ids of a call on a device: which row each is, of which table, among the rows of all tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt.rows.bank import Bank, DeviceTable
from ckpt.rows.device import Device, upload


@dataclass(frozen=True, eq=False)
class Lookup:
    """What is constant of the tables of a call: per segment, and at the end for ids of none.

    A call of one table has numbers in place of tensors. starts: per bank and component.
    """

    keys: tuple[DeviceTable, ...]
    base: torch.Tensor | int
    rows: torch.Tensor | int
    bank: torch.Tensor | int
    banks: tuple[Bank, ...]
    starts: tuple[tuple[torch.Tensor | int | None, ...], ...]

    def keep(self, device: Device) -> None:
        """Its memory is used in the current stream, too."""
        for number in (self.base, self.rows, self.bank, *itertools.chain(*self.starts)):
            if isinstance(number, torch.Tensor):
                device.keep(number)


@dataclass(eq=False)
class Touched:
    """Ids of one call. rows: within their tables; flat: among those of all tables."""

    segment: torch.Tensor | None
    rows: torch.Tensor
    flat: torch.Tensor

    def sort(self) -> None:
        """Equal rows together: only the first of them is kept."""
        self.flat, order = self.flat.sort()
        self.rows = self.rows.index_select(0, order)
        if self.segment is not None:
            self.segment = self.segment.index_select(0, order)

    def each(self, per_segment: torch.Tensor | int) -> torch.Tensor | int:
        """The value of each id's segment."""
        if self.segment is None or isinstance(per_segment, int):
            return per_segment
        return per_segment.index_select(0, self.segment)


def lookup_of(device: Device, keys: tuple[DeviceTable, ...], nowhere: int) -> Lookup:
    """What calls of these tables have in common. nowhere: the row number for ids of none."""
    banks = tuple(dict.fromkeys(k.bank for k in keys if k.bank is not None))
    number = {bank: n for n, bank in enumerate(banks)}

    def per_segment(values: Sequence[int], last: int) -> torch.Tensor | int:
        return values[0] if len(keys) == 1 else upload(device, [*values, last])

    starts: list[tuple[torch.Tensor | int | None, ...]] = []
    for bank in banks:
        mine = [k.number if k.bank is bank else None for k in keys]
        starts.append(
            tuple(
                None
                if r is None
                else per_segment([0 if m is None else r.starts[m] for m in mine], 0)
                for r in bank.rows
            )
        )
    return Lookup(
        keys,
        base=per_segment([k.base if k.table.rows else nowhere for k in keys], nowhere),
        rows=per_segment([k.table.rows for k in keys], 0),
        bank=per_segment([-1 if k.bank is None else number[k.bank] for k in keys], -1),
        banks=banks,
        starts=tuple(starts),
    )


def touched_by(lookup: Lookup, ids: torch.Tensor, edges: torch.Tensor | None, at: int) -> Touched:
    """The ids of a call from its position `at` on. edges: int64, of its segments."""
    segment = None
    if edges is not None and len(lookup.keys) > 1:
        places = torch.arange(at, at + ids.numel(), device=edges.device)
        segment = torch.searchsorted(edges, places, right=True) - 1
        segment = segment.remainder_(len(lookup.keys) + 1)  # before the first: of none
    touched = Touched(segment, ids.long(), ids)
    good = (touched.rows >= 0) & (touched.rows < touched.each(lookup.rows))
    touched.rows = torch.where(good, touched.rows, 0)
    touched.flat = touched.rows + touched.each(lookup.base)
    return touched
