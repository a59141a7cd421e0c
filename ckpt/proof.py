"""Snapshots prove themselves: what no guard saw change must not have changed.

Eviction, decay, hand edits: whatever writes a guarded table behind its guard makes a snapshot a
mixture. So random rows are kept from each block as it is copied and compared with the live
table before the snapshot closes, except for rows that training has announced since. With
"full", all rows are compared with a whole copy taken in save(). In-place operations of torch are
found without luck, by the tables' version counters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ckpt.config import Proof
from ckpt.errors import UntrackedWriteError
from ckpt.rows import Component, Place, RowSnapshot, Table

_KEPT_BYTES = 8 << 20  # of a snapshot at most: that is the proof's cost in memory and time
_LEAST_SHARE = 64  # and at most one row in so many
_SHOWN = 8


@dataclass(frozen=True)
class _Sample:
    place: Place
    row: int
    parts: tuple[torch.Tensor | None, ...]


class RowProof:
    """The proof of one snapshot. Made in save(); the rest runs on the persist thread.

    report: told the table and the rows of an untracked write, as far as they're known, before
    it's raised.
    """

    def __init__(
        self,
        snapshot: RowSnapshot,
        places: Sequence[Place],
        proof: Proof,
        report: Callable[[str, list[int]], None],
    ) -> None:
        self._snapshot = snapshot
        self._report = report
        total_bytes = sum(p.table.rows * sum(p.table.widths) for p in places)
        self._share = max(_LEAST_SHARE, -(-total_bytes // _KEPT_BYTES))
        self._samples: list[_Sample] = []
        self._stored: dict[Table, set[int]] = {}
        self._random = random.Random()
        self._whole: dict[int, tuple[torch.Tensor, ...]] = {}
        if proof == "full":
            for place in places:
                if id(place.table) not in self._whole:
                    self._whole[id(place.table)] = tuple(c.clone() for c in place.table.components)

    def keep(self, place: Place, row: int, rows: int, out: Sequence[torch.Tensor | None]) -> None:
        """Rows [row, row + rows) were copied into `out`, uint8 for each component or None.

        Raises UntrackedWriteError under "full", if they aren't what they were in save().
        """
        self._stored[place.table] = {k for k, o in enumerate(out) if o is not None}
        if whole := self._whole.get(id(place.table)):
            self._compare(place, row, rows, out, whole)
        count = min(rows, max(1, rows // self._share))
        first = self._random.randrange(rows - count + 1)
        parts = tuple(
            None if o is None else o.view(rows, -1)[first : first + count].clone() for o in out
        )
        self._samples.append(_Sample(place, row + first, parts))

    def check(self) -> None:
        """Compare what was kept with the live tables; raises UntrackedWriteError."""
        # The samples first: they know the table and rows.
        self._check_samples()
        self._check_versions()

    def _check_samples(self) -> None:
        for s in self._samples:
            live = s.place.table.components
            changed = _changed(s.parts, [c[s.row : s.row + _count(s)] for c in live])
            # After the rows themselves: a row that training has changed was announced before.
            changed &= self._snapshot.untouched(s.place, s.row, s.row + _count(s))
            if changed.any():
                found = (changed.nonzero().flatten() + s.row).tolist()
                self._fail(s.place.table.name, found)

    def _check_versions(self) -> None:
        edited = [(t, k) for t, k in self._snapshot.edited() if k in self._stored.get(t, ())]
        if not edited:
            return
        found = _by_counter(edited)
        for tables in dict.fromkeys(tables for tables, _ in found):
            self._report(tables, [])
        shown = "; ".join(f"{tables}: {part}" for tables, part in found[:_SHOWN])
        raise UntrackedWriteError(
            f"{shown}{' ...' if len(found) > _SHOWN else ''} was changed in place outside of training "
            f"while a snapshot was open; call touched() before, or save with "
            f'snapshot = "copied"'
        )

    def _compare(
        self,
        place: Place,
        row: int,
        rows: int,
        out: Sequence[torch.Tensor | None],
        whole: Sequence[torch.Tensor],
    ) -> None:
        parts = [None if o is None else o.view(rows, -1) for o in out]
        changed = _changed(parts, [w[row : row + rows] for w in whole])
        if changed.any():
            found = (changed.nonzero().flatten() + row).tolist()
            self._fail(place.table.name, found)

    def _fail(self, table: str, rows: list[int]) -> NoReturn:
        self._report(table, rows)
        raise UntrackedWriteError(
            f"{table}: rows {rows[:_SHOWN]}{' ...' if len(rows) > _SHOWN else ''} were changed "
            f"outside of training while a snapshot was open; call touched() before, or save with "
            f'snapshot = "copied"'
        )


def _count(sample: _Sample) -> int:
    return next(p.shape[0] for p in sample.parts if p is not None)


def _by_counter(edited: Sequence[Component]) -> list[tuple[str, str]]:
    """(tables, component) of each version counter: tables in one memory share it, so it may be any."""
    tables: dict[tuple[int, int], list[str]] = {}
    for table, k in edited:
        memory = table.components[k].untyped_storage().data_ptr()
        tables.setdefault((memory, k), []).append(table.name)
    return [
        (" or ".join(names), f"optimizer state {k}" if k else "weight")
        for (_, k), names in tables.items()
    ]


def _changed(kept: Sequence[torch.Tensor | None], live: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which rows differ in any byte: bool of shape (rows,)."""
    changed = torch.zeros(live[0].shape[0], dtype=torch.bool)
    for k, now in zip(kept, live, strict=True):
        if k is not None:
            rows = now.detach().reshape(now.shape[0], -1).view(torch.uint8)
            changed |= (k != rows.cpu()).any(1)
    return changed
