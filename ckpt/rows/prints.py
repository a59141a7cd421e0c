"""Prints of rows: 16 bits of each row's bytes, by which a later snapshot sees that it changed.

A row that nobody announced since the last snapshot opened has the bytes that were written then.
So each snapshot compares the rows that it writes with the prints that the one before has left,
and whatever wrote a row behind its guard in between is found when the row is written next:
with the exception of rows that training itself has announced meanwhile, and of one change in 65,536.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ckpt.native import array_of, load
from ckpt.rows.pool import Table

_FOUND = 64  # rows of one comparison that are named at most
_ALL = 256  # above any tag: all rows are compared


class Prints:
    """The prints of `rows` rows. Not thread-safe."""

    def __init__(self, table: Table, rows: int) -> None:
        self._widths = table.widths
        self._values = torch.zeros(rows, dtype=torch.int16, device="cpu")
        self._native = load()

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def take(self, a: int, rows: int, parts: Sequence[torch.Tensor | None]) -> None:
        """Take the prints of rows [a, a + rows) from their bytes: uint8 of each component, or None."""
        self._print(a, rows, parts, None, 0)

    def compare(
        self,
        a: int,
        parts: Sequence[torch.Tensor | None],
        tags: torch.Tensor | None = None,
        since: int = _ALL,
    ) -> list[int]:
        """`take` them anew; the rows, the first of them at least, that differ from before.

        tags: uint8 of the rows in host memory: only those with a tag below `since` are compared.
        """
        rows = next(p.numel() // w for p, w in self._given(parts))
        return self._print(a, rows, parts, tags, since)

    def _given(self, parts: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, int]]:
        return [(p, w) for p, w in zip(parts, self._widths, strict=True) if p is not None]

    def _print(
        self,
        a: int,
        rows: int,
        parts: Sequence[torch.Tensor | None],
        tags: torch.Tensor | None,
        since: int,
    ) -> list[int]:
        if tags is None:
            tags = torch.zeros(rows, dtype=torch.uint8, device="cpu")
        values = self._values[a : a + rows]
        if self._native is not None:
            n = len(parts)
            places = [0 if p is None else p.data_ptr() for p in parts]
            pointers = array_of(ctypes.c_void_p, n)(*places)
            widths = array_of(ctypes.c_int64, n)(*self._widths)
            found = array_of(ctypes.c_int64, _FOUND)()
            differ = self._native.print(
                *(values.data_ptr(), tags.data_ptr(), since, rows, n, pointers, widths),
                *(found, _FOUND),
            )
            return [a + row for row in found[: min(differ, _FOUND)]]
        prints = _printed([(p.view(rows, w), w) for p, w in self._given(parts)], rows)
        changed = (prints != values) & (tags.to(torch.int16) < since)
        values.copy_(prints)
        return (changed.nonzero().flatten()[:_FOUND] + a).tolist()


def _printed(parts: Sequence[tuple[torch.Tensor, int]], rows: int) -> torch.Tensor:
    """What `rows_print` does, in torch, with other numbers."""
    total = torch.zeros(rows, dtype=torch.int64, device="cpu")
    for number, (part, width) in enumerate(parts):
        words = part.new_zeros(rows, -(-width // 4) * 4)
        words[:, :width] = part
        total += (
            words.view(torch.int32).to(torch.int64) * _factors(number, words.shape[1] // 4)
        ).sum(1)
    return (total >> 48).to(torch.int16)


def _factors(number: int, count: int) -> Any:
    """Odd numbers of 64 bits, the same at each call."""
    steps = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") + (number << 32)
    mixed = steps * -7046029254386353131  # 0x9E3779B97F4A7C15
    mixed ^= mixed >> 29
    return (mixed * -4658895280553007687) | 1
