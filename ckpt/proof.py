"""Snapshots prove themselves: what no guard saw change must not have changed.

Whatever is left in place in save() is written later, and a writer behind its guard would make the
snapshot a mixture. Three looks find one, see docs/design/0008-proof.md:

- *Stretches.* In save() a few megabytes of what is left in place are read: prints of rows, digests
  of dense state. What is written of them must be the same, whoever has announced what. The
  stretches rotate, so that each byte has had its turn after a known number of saves.
- *Prints.* Rows that nobody has announced since the last snapshot opened must be what was written
  then. This looks at all rows of all tables, on the persist thread, for the whole time between two saves.
- *Counters.* In-place operations of torch count up the version of their tensor (`rows.versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from ckpt.config import Proof
from ckpt.errors import UntrackedWriteError
from ckpt.rows import Component, Place, RowSnapshot, Table
from ckpt.rows.prints import Prints
from ckpt.stretches import Stretch, Turns, bytes_of, fetched
from ckpt.types import Clock

BLOCK_BYTES = 512 << 10
_FIRST_BLOCKS = 8  # what the first save reads; then by what that took
_LEAST_BLOCKS = 4
_MOST_BLOCKS = 64
DENSE_BLOCK_BYTES = 256 << 10
_DENSE_BLOCKS = (
    32  # dense state has no prints, and is read twice as fast: so many at each save, at least
)
_SPENT_S = 0.0012  # the aim in save(); a busy machine may take somewhat longer
_SHOWN = 8

_UNSEEN = (
    "by what torch doesn't count: `.data`, a view of another library, another process, or a lookup or "
    "a step whose hooks don't run"
)


_Spans = list[tuple[int, int, int]]


class Left(Protocol):
    """A guarded table that is left in place: `items[k]` is None where component k isn't written.

    key: of one of its tensors in the state.
    """

    @property
    def key(self) -> str: ...
    @property
    def place(self) -> Place: ...
    @property
    def items(self) -> Sequence[int | None]: ...


@dataclass(frozen=True)
class _RowStretch:
    """Rows [a, b) of a table, with their prints as they were in save().

    taken: host copies of rows on a device, until the prints are made of them; ready: when they are.
    """

    a: int
    b: int
    prints: Prints
    taken: tuple[torch.Tensor | None, ...] = ()
    ready: torch.cuda.Event | None = None


@dataclass(eq=False)
class _Written:
    """The prints of a table as its last snapshots wrote it, chunk by chunk.

    since: per chunk the count of snapshots, over all tables, at which its prints were taken.
    """

    prints: Prints
    chunk_rows: int
    parts: tuple[bool, ...]
    since: dict[int, int] = field(default_factory=dict)


class Prover:
    """What is known of a checkpointer's state from one save to the next. Makes the proof of each."""

    def __init__(
        self, how: Proof, clock: Clock, report: Callable[[int, str, Sequence[int]], None]
    ) -> None:
        self._how = how
        self._clock = clock
        self._report = report
        self._written: WeakKeyDictionary[Table, _Written] = WeakKeyDictionary()
        self._blocks = _FIRST_BLOCKS
        self._turn = [0, 0]
        self._totals = (0, 0)

    def open(
        self,
        step: int,
        rows: RowSnapshot | None,
        tables: Sequence[Left],
        dense: Sequence[torch.Tensor],
    ) -> SnapshotProof:
        """Read this save's stretches of tables and of dense tensors. On the training thread."""
        started = self._clock.monotonic()
        sizes = [t.place.table.rows * sum(t.place.table.widths) for t in tables]
        of_tables, of_dense = self._spans(sizes, [t.nbytes for t in dense])
        proof = SnapshotProof(self, step, rows)
        proof._keys = {t.place.table: t.key for t in tables}
        for n, a, b in of_tables:
            proof._know(tables[n], a, b)
        for n, a, b in of_dense:
            proof.dense.setdefault(n, []).append(Stretch.of(dense[n], a, b))
        proof.took_s = self._clock.monotonic() - started
        if proof.took_s > 0 and self._how == "sampled":
            fit = int(self._blocks * min(4.0, _SPENT_S / proof.took_s))
            # Half way at most: one save on a busy machine says little.
            self._blocks = min(_MOST_BLOCKS, max(_LEAST_BLOCKS, (self._blocks + fit) // 2))
        return proof

    def _spans(self, tables: Sequence[int], dense: Sequence[int]) -> tuple[_Spans, _Spans]:
        """Whose turn it is, of tables and of dense tensors of so many bytes each."""
        turns = Turns(tables, BLOCK_BYTES), Turns(dense, DENSE_BLOCK_BYTES)
        totals = turns[0].blocks, turns[1].blocks
        if totals != self._totals:
            self._totals, self._turn = totals, [0, 0]
        blocks = totals
        if self._how != "full":
            blocks = self._blocks, max(_DENSE_BLOCKS, self._blocks)
        found = [list(t.spans(n, at)) for t, n, at in zip(turns, blocks, self._turn, strict=True)]
        self._turn = [at + n for at, n in zip(self._turn, blocks, strict=True)]
        return found[0], found[1]


class SnapshotProof:
    """The proof of one snapshot. Made in save(); the rest runs on the persist thread."""

    def __init__(self, prover: Prover, step: int, rows: RowSnapshot | None) -> None:
        self._prover = prover
        self._step = step
        self._rows = rows
        self._stretches: dict[Table, list[_RowStretch]] = {}
        self._stored: dict[Table, set[int]] = {}
        self._found: dict[Table, list[int]] = {}
        self._keys: dict[Table, str] = {}
        self.dense: dict[int, list[Stretch]] = {}
        self.took_s = 0.0
        """What reading the stretches took in save()."""

    def keep(self, place: Place, row: int, rows: int, out: Sequence[torch.Tensor | None]) -> None:
        """Rows [row, row + rows) were copied into `out`, uint8 of each component or None.

        They must be what they were in save(), and those that nobody has announced since the snapshot
        before what that one has written. `check` tells of others, of all tables at once.
        """
        table = place.table
        self._stored[table] = {k for k, o in enumerate(out) if o is not None}
        found = self._compare_written(place, row, rows, out)
        for stretch in self._stretches.get(table, ()):
            found += _compare_stretch(stretch, table, row, rows, out)
        if found:
            self._found.setdefault(table, []).extend(found)

    def check(self) -> None:
        """Before the snapshot closes. Raises UntrackedWriteError naming the tables that were changed."""
        if self._rows is None:
            return
        edited = [(t, k) for t, k in self._rows.edited() if k in self._stored.get(t, ())]
        told = [self._changed_rows(t, edited) for t in self._found]
        # Tables in one memory share a counter: where rows are known, the others aren't meant.
        others = [] if told else edited
        counted = self._by_counter(others)
        for names in dict.fromkeys(names for names, _ in counted):
            self._prover._report(self._step, names, [])
        told += [
            f"{names}: {part} was changed in place outside of training" for names, part in counted
        ]
        for table in dict.fromkeys([*self._found, *(t for t, _ in others)]):
            self._rows.bar(table, "it was changed outside of training without a word")
        if told:
            raise UntrackedWriteError(
                f"{'; '.join(told[:_SHOWN])}{' ...' if len(told) > _SHOWN else ''}, while a snapshot "
                f"was open or since the last one; copied whole from now on. Call touched() before, or "
                f'save with snapshot = "copied"'
            )

    def _changed_rows(self, table: Table, edited: Sequence[Component]) -> str:
        rows = sorted(set(self._found[table]))
        self._prover._report(self._step, self._name(table), rows)
        counted = [_part(k) for t, k in edited if t is table]
        shown = f"rows {rows[:_SHOWN]}{' ...' if len(rows) > _SHOWN else ''}"
        if counted:
            return (
                f"{self._name(table)}: {', '.join(counted)}: {shown} were changed in place outside of "
                f"training"
            )
        return f"{self._name(table)}: {shown} were changed outside of training, {_UNSEEN}"

    def _name(self, table: Table) -> str:
        """Its own, or where that is a number only, the state's key."""
        numbered = not any(c.isalpha() for c in table.name)
        return self._keys.get(table, table.name) if numbered else table.name

    def _by_counter(self, edited: Sequence[Component]) -> list[tuple[str, str]]:
        """(tables, component) of each counter: tables in one memory share it, so it may be any."""
        tables: dict[tuple[int, int], list[str]] = {}
        for table, k in edited:
            memory = table.components[k].untyped_storage().data_ptr()
            tables.setdefault((memory, k), []).append(self._name(table))
        return [(" or ".join(names), _part(k)) for (_, k), names in tables.items()]

    def _know(self, left: Left, a: int, b: int) -> None:
        """Bytes [a, b) of a table's rows, of all components together, are a stretch."""
        table = left.place.table
        width = sum(table.widths)
        first, last = a // width, min(table.rows, -(-b // width))
        parts = [
            None if item is None else c.detach()[first:last]
            for c, item in zip(table.components, left.items, strict=True)
        ]
        prints = Prints(table, last - first)
        taken: tuple[torch.Tensor | None, ...] = ()
        ready = None
        if table.components[0].device.type == "cpu":
            prints.take(0, last - first, [None if p is None else bytes_of(p) for p in parts])
        else:
            taken, ready = fetched(parts)
        stretch = _RowStretch(first, last, prints, taken, ready)
        self._stretches.setdefault(table, []).append(stretch)

    def _compare_written(
        self, place: Place, row: int, rows: int, out: Sequence[torch.Tensor | None]
    ) -> list[int]:
        """Rows that differ from what the snapshot before has written, and that nobody announced."""
        assert self._rows is not None
        table, parts = place.table, tuple(o is not None for o in out)
        known = self._prover._written.get(table)
        if known is None or known.chunk_rows != place.chunk_rows or known.parts != parts:
            known = _Written(Prints(table, table.rows), place.chunk_rows, parts)
            self._prover._written[table] = known
        chunk = row // place.chunk_rows
        tags, since = self._rows.tags(place, row, row + rows, known.since.get(chunk))
        found = known.prints.compare(row, out, tags, since)
        known.since[chunk] = self._rows.number
        return found


def _compare_stretch(
    stretch: _RowStretch, table: Table, row: int, rows: int, out: Sequence[torch.Tensor | None]
) -> list[int]:
    a, b = max(row, stretch.a), min(row + rows, stretch.b)
    if a >= b:
        return []
    if stretch.taken:
        if stretch.ready is not None:
            stretch.ready.synchronize()
        cut = (None if t is None else t[a - stretch.a : b - stretch.a] for t in stretch.taken)
        stretch.prints.take(a - stretch.a, b - a, [None if t is None else bytes_of(t) for t in cut])
    given = [
        None if o is None else o[(a - row) * w : (b - row) * w]
        for o, w in zip(out, table.widths, strict=True)
    ]
    return [stretch.a + r for r in stretch.prints.compare(a - stretch.a, given)]


def _part(component: int) -> str:
    return f"optimizer state {component}" if component else "weight"
