"""Snapshots prove themselves: what no guard saw change must not have changed.

Eviction, decay, hand edits: whatever writes a guarded table behind its guard makes a snapshot a
mixture. So some rows of each table are kept in save() and compared with what is copied of them:
a change of the whole table is found whenever it comes. And random rows of each block are kept
as it is copied and compared with the live table before the snapshot closes, except for rows that
training has announced since. With "full", save() keeps all rows. In-place operations of torch
are found without luck, by the tables' version counters.
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

_KEPT_BYTES = 1 << 20  # of a snapshot at most: that is the proof's cost in memory and time
_LEAST_SHARE = 64  # and at most one row in so many
_KNOWN_ROWS = 16  # of each table, kept in save(): that takes microseconds
_SHOWN = 8


@dataclass(frozen=True)
class _Sample:
    place: Place
    row: int
    parts: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class _Known:
    """Rows first, first + step, ... of each component as they were in save()."""

    first: int
    step: int
    parts: tuple[torch.Tensor, ...]
    taken: tuple[torch.cuda.Event, ...]


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
        self._known = {id(p.table): self._know(p, proof) for p in places}

    def keep(self, place: Place, row: int, rows: int, out: Sequence[torch.Tensor | None]) -> None:
        """Rows [row, row + rows) were copied into `out`, uint8 for each component or None.

        Raises UntrackedWriteError if those known from save() aren't what they were.
        """
        self._stored[place.table] = {k for k, o in enumerate(out) if o is not None}
        self._compare(place, row, rows, out)
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
        self._samples = []
        self._check_versions()

    def _check_samples(self) -> None:
        kept: dict[Place, list[_Sample]] = {}
        for s in self._samples:
            kept.setdefault(s.place, []).append(s)
        for place, samples in kept.items():
            # All samples of a table at once: each call of torch holds Python's lock for a moment.
            rows = torch.cat([torch.arange(s.row, s.row + _count(s)) for s in samples])
            parts = [
                None if p[0] is None else torch.cat([x for x in p if x is not None])
                for p in zip(*(s.parts for s in samples), strict=True)
            ]
            live = self._live(place, samples, rows)
            changed = rows[_changed(parts, live)].tolist()
            # After the rows themselves: a row that training has changed was announced before.
            found = [r for r in changed if self._snapshot.untouched(place, r, r + 1).item()]
            if found:
                self._fail(place.table.name, found)

    def _live(self, place: Place, samples: list[_Sample], rows: torch.Tensor) -> list[torch.Tensor]:
        components = place.table.components
        if all(c.device.type == "cpu" for c in components):
            return [c.detach()[rows] for c in components]
        each = [self._snapshot.live(place, s.row, s.row + _count(s)) for s in samples]
        return [torch.cat(parts) for parts in zip(*each, strict=True)]

    def _know(self, place: Place, proof: Proof) -> _Known:
        rows, components = place.table.rows, place.table.components
        step = 1 if proof == "full" else max(1, rows // _KNOWN_ROWS)
        first = self._random.randrange(min(step, max(rows, 1)))
        # A whole copy in host memory: a device may not have the room.
        where = "cpu" if proof == "full" else None
        parts = tuple(c.detach()[first::step].to(where, copy=True) for c in components)
        events = []
        for device in {c.device for c in components if c.is_cuda}:
            events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            events[-1].record(torch.cuda.current_stream(device))
        return _Known(first, step, parts, tuple(events))

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
        self, place: Place, row: int, rows: int, out: Sequence[torch.Tensor | None]
    ) -> None:
        known = self._known[id(place.table)]
        begin = max(0, -(-(row - known.first) // known.step))
        end = max(0, -(-(row + rows - known.first) // known.step))
        if begin >= end:
            return
        for event in known.taken:
            event.synchronize()
        at = known.first + begin * known.step - row
        got = [None if o is None else o.view(rows, -1)[at :: known.step] for o in out]
        changed = _changed(got, [p[begin:end] for p in known.parts]).nonzero().flatten()
        if changed.numel():
            self._fail(place.table.name, (changed * known.step + row + at).tolist())

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
            changed |= (k != rows).any(1)
    return changed
