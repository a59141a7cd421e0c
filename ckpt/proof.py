"""Snapshots prove themselves: what no guard saw change must not have changed.

Eviction, decay, hand edits: whatever writes a guarded table behind its guard makes a snapshot a
mixture. So random rows are kept from each block as it is copied and compared with the live
table before the snapshot closes, except for rows that training has announced since. With
"full", all rows are compared with a whole copy taken in save().
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ckpt.config import Proof
from ckpt.errors import UntrackedWriteError
from ckpt.rows import Place, RowSnapshot

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

    report: told the table and the rows of an untracked write, before it's raised.
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
        self._random = random.Random()
        self._whole: dict[int, tuple[torch.Tensor, ...]] = {}
        if proof == "full":
            for place in places:
                if id(place.table) not in self._whole:
                    self._whole[id(place.table)] = tuple(
                        torch.empty_like(c, device="cpu").copy_(c.detach())
                        for c in place.table.components
                    )

    def keep(self, place: Place, row: int, rows: int, out: Sequence[torch.Tensor | None]) -> None:
        """Rows [row, row + rows) were copied into `out`, uint8 for each component or None.

        Raises UntrackedWriteError under "full", if they aren't what they were in save().
        """
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
        for s in self._samples:
            live = self._snapshot.live(s.place, s.row, s.row + _count(s))
            changed = _changed(s.parts, live)
            # After the rows themselves: a row that training has changed was announced before.
            changed &= self._snapshot.untouched(s.place, s.row, s.row + _count(s))
            if changed.any():
                found = (changed.nonzero().flatten() + s.row).tolist()
                self._fail(s.place.table.name, found)

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


def _changed(kept: Sequence[torch.Tensor | None], live: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which rows differ in any byte: bool of shape (rows,)."""
    changed = torch.zeros(live[0].shape[0], dtype=torch.bool)
    for k, now in zip(kept, live, strict=True):
        if k is not None:
            rows = now.detach().reshape(now.shape[0], -1).view(torch.uint8)
            changed |= (k != rows).any(1)
    return changed
