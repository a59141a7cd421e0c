"""Row guards: snapshots of embedding tables that training never waits for.

Rows of a table change only where a step looked them up, and a step's rows are known before it
changes them. So a snapshot opens at once; a persist thread copies the tables chunk by chunk;
and whatever is about to change a row `touch`es it first, which keeps its old value as long as
some snapshot hasn't got it. See docs/design/0005-row-guards.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.errors import BadInputError, SaveError, UntrackedWriteError
from ckpt.native import SLOTS, load
from ckpt.rows.native_pool import NativePool
from ckpt.rows.pool import Pool, Stop, Table, nbytes
from ckpt.rows.pools import Pools
from ckpt.rows.torch_pool import TorchPool
from ckpt.rows.versions import Component, Versions, Watched
from ckpt.tree import foreign_memory, identity
from ckpt.types import Clock

_LAST_EPOCH = 255
_AGE_FROM = 200  # early, so that it seldom has to wait for open snapshots
_AGE_BY = 128
_ALIGN_BYTES = 4096
_SHOWN = 4  # tables named in a message
_LOOK_AGAIN_S = 0.02  # while training waits; it is woken at once where nothing goes wrong


_MOVED = (
    "its memory was moved or freed, as share_memory(), a multiprocessing queue and resize_() do"
)


@dataclass(frozen=True, eq=False)
class Place:
    """A component of a guarded table. `key` is the pool's."""

    group: Group
    table: Table
    key: Any
    component: int
    chunk_rows: int


class Group:
    """The tables of one lookup module: what touches them is one call."""

    def __init__(self, guards: RowGuards, tables: tuple[Table, ...], keys: tuple[Any, ...]) -> None:
        self.tables = tables
        self.keys = keys
        self.versions = Versions(tables, guards._note_edited)
        self.barred: str | None = None
        """Why snapshots don't leave these tables in place any more: what writes them isn't known."""
        self._guards = guards
        # One tensor of each storage: what moves a storage in place moves all that lies in it.
        parts = {c.untyped_storage()._cdata: c for t in tables for c in t.components if c.numel()}
        self._where = [(c, c.data_ptr(), c.untyped_storage()) for c in parts.values()]
        self._nbytes = [storage.nbytes() for _, _, storage in self._where]

    @property
    def moved(self) -> bool:
        """Is the memory of a table not where it was any more?"""
        return any(
            c.data_ptr() != at or storage.nbytes() != nbytes
            for (c, at, storage), nbytes in zip(self._where, self._nbytes, strict=True)
        )

    def bar(self, why: str) -> None:
        """Trust its guard no more: open snapshots fail by its name, and later ones don't have it."""
        if self.barred is None:
            self.barred = why
        self._guards._spoil(self, why)

    def touch(
        self, ids: torch.Tensor, bounds: Sequence[int] | torch.Tensor, tables: Sequence[int]
    ) -> None:
        """Rows are about to change: ids[bounds[i]:bounds[i + 1]] are rows of tables[i].

        ids: int32 or int64, 1-D, in any order; those out of range count as row 0, which is what
        lookups make of them. Where they are on a device give `bounds` as a tensor there, too,
        unless the host knows them. Call it before the change, on the thread and the stream that
        make it. Waits if the overlay is full.
        """
        if self.moved:
            self._guards._spoil(self, _MOVED)
            return
        keys = [self.keys[t] for t in tables]
        self._guards._touch(keys, ids.contiguous(), bounds)

    def given_away(self, pointers: Iterable[int]) -> None:
        """What announces these tables changes the memory at `pointers` now; others' may be there."""
        there = set(pointers)
        for other in self._guards._groups:
            if other is not self and any(at in there for _, at, _ in other._where):
                self._guards._spoil(other, "its memory was given to another lookup")

    def touch_rows(self, table: int, rows: torch.Tensor) -> None:
        """`touch` for one table."""
        self.touch(rows.reshape(-1), (0, rows.numel()), (table,))

    def touch_all(self, table: int) -> None:
        """Any row of a table may change now: waits until open snapshots have all of it."""
        if self.moved:
            self._guards._spoil(self, _MOVED)
            return
        self._guards._touch_all(self.keys[table])


class RowGuards:
    """All guarded tables of one checkpointer.

    Args:
        clock: measures waits.
        stall_limit_s: snapshots that made training wait longer than this are given up.
        hurry: called when training waits, to speed the copying up.
        waited: told how long training waited, in seconds.
    """

    def __init__(
        self,
        clock: Clock,
        stall_limit_s: float,
        hurry: Callable[[], None] = lambda: None,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._stall_limit_s = stall_limit_s
        self._hurry = hurry
        self._waited = waited
        native = load()
        self._pool: Pool = Pools(NativePool(native) if native else TorchPool())
        self._epoch = 1
        self._aged = 0  # epochs that tags have lost
        self._edited: dict[Table, int] = {}  # the snapshot after which its counters last told
        self._chunk_rows: dict[Any, int] = {}
        self._places: dict[tuple[Any, ...], Place] = {}
        self._groups: list[Group] = []
        self._open: dict[int, RowSnapshot] = {}
        # What the copying side is done with. The training side settles it, so that nothing that
        # `touch` uses is ever taken away under it.
        self._passed: deque[tuple[Any, int]] = deque()
        self._closed: deque[RowSnapshot] = deque()
        self._progress = threading.Condition()
        self._waiting = False
        self._laid_out = False
        self.peak_bytes = 0
        """The most that `pressure` has seen kept since this was last set."""

    @property
    def busy(self) -> bool:
        """Is a snapshot open? Groups may only be made and dropped while none is."""
        self._settle()
        return bool(self._open)

    @property
    def guarded_bytes(self) -> int:
        return sum(nbytes(t) for g in self._groups for t in g.tables)

    @property
    def guarded_rows(self) -> int:
        return sum(t.rows for g in self._groups for t in g.tables)

    @property
    def longest_row_bytes(self) -> int:
        """Bytes of ring buffer that one row of any table takes, components aligned."""
        rows = (_aligned(t, 1) for g in self._groups for t in g.tables)
        return max(rows, default=0)

    def pressure(self) -> float:
        """How full the overlay is, 0 to 1."""
        self.peak_bytes = max(self.peak_bytes, self._pool.used_bytes)
        return self._pool.fullness

    @property
    def capacity_bytes(self) -> int:
        return self._pool.capacity_bytes

    @property
    def overlay_bytes(self) -> int:
        return self._pool.used_bytes

    def takes(self, table: Table) -> bool:
        """Can it be guarded here? Rows must lie together, in memory that the pool reaches."""
        return self._pool.takes(table) and all(
            c.dim() >= 1 and c.shape[0] == table.rows and c.is_contiguous()
            for c in table.components
        )

    def group(self, tables: Sequence[Table]) -> Group:
        """Start guarding tables. Raises BadInputError if a snapshot is open, or one isn't fit."""
        self._refuse_if_busy("guarded")
        for table in tables:
            if not self.takes(table):
                raise BadInputError(
                    f"{table.name}: its memory can't be guarded; leave it unguarded"
                )
        made = Group(self, tuple(tables), tuple(self._pool.add(t) for t in tables))
        self._groups.append(made)
        self._laid_out = False
        return made

    def drop(self, group: Group) -> None:
        """Stop guarding a group's tables. Raises BadInputError if a snapshot is open."""
        self._refuse_if_busy("dropped")
        self._groups.remove(group)
        for table, key in zip(group.tables, group.keys, strict=True):
            self._pool.drop(key)
            self._edited.pop(table, None)
        self._laid_out = False

    def lay_out(self, buffer_bytes: int, overlay_bytes: int) -> None:
        """Set how large blocks and the overlay are. Raises BadInputError if a snapshot is open."""
        self._refuse_if_busy("laid out")
        self._chunk_rows = {
            key: _rows_that_fit(table, buffer_bytes)
            for g in self._groups
            for table, key in zip(g.tables, g.keys, strict=True)
        }
        self._pool.lay_out(self._chunk_rows, overlay_bytes)
        self._places = {}
        for g in self._groups:
            for table, key in zip(g.tables, g.keys, strict=True):
                for k, part in enumerate(table.components):
                    if part.numel():
                        place = Place(g, table, key, k, self._chunk_rows[key])
                        self._places.setdefault(identity(part), place)
        self._laid_out = True

    @property
    def laid_out(self) -> bool:
        return self._laid_out

    def open(self, *, without: Collection[Group] = ()) -> RowSnapshot | None:
        """Fix the rows of all tables as they are now. On the training thread; copies nothing.

        without: groups that this snapshot is to do without, as without those that were barred.

        None if SLOTS snapshots are open already. Once in a hundred saves it passes over all tags, a
        byte a row; if snapshots were never all closed in that time, it waits for them first.
        """
        self._settle()
        if self._epoch >= _LAST_EPOCH and self._open:
            self._wait(lambda: not self.busy)
        if self._epoch > _AGE_FROM and not self._open:
            self._pool.age(_AGE_BY)
            self._epoch -= _AGE_BY
            self._aged += _AGE_BY
        free = [s for s in range(SLOTS) if s not in self._open]
        if not free or self._epoch >= _LAST_EPOCH:
            return None
        for g in self._groups:
            g.versions.settle()  # what it tells came before this snapshot
        self._epoch += 1
        sound = {g for g in self._groups if g.barred is None and not g.moved and g not in without}
        places = {key: p for key, p in self._places.items() if p.group in sound}
        snapshot = RowSnapshot(self, free[0], self._epoch, places)
        self._open[free[0]] = snapshot
        self._pool.open(free[0], self._epoch)
        return snapshot

    def _touch(
        self, keys: Sequence[Any], ids: torch.Tensor, bounds: Sequence[int] | torch.Tensor
    ) -> None:
        if self._passed or self._closed:
            self._settle()
        stop = self._pool.touch(keys, ids, bounds, Stop(0, 0))
        while stop is not None:
            self._wait(self._has_room)
            stop = self._pool.touch(keys, ids, bounds, stop)

    def _touch_all(self, key: Any) -> None:
        self._settle()

        def has_it() -> bool:
            self._settle()
            return all(self._pool.passed(key, slot) >= key.table.rows for slot in tuple(self._open))

        if not has_it():
            self._wait(has_it)
        self._pool.touch_all(key)

    def _has_room(self) -> bool:
        return self._settle() > 0

    def _wait(self, done: Callable[[], bool]) -> None:
        """Training waits for the copying side; snapshots that take too long are given up."""
        started = self._clock.monotonic()
        self._waiting = True
        try:
            while True:
                self._hurry()
                with self._progress:
                    if done():
                        return
                    if self._clock.monotonic() - started >= self._stall_limit_s:
                        self._give_up()
                        return
                    self._progress.wait(_LOOK_AGAIN_S)
        finally:
            self._waiting = False
            self._waited(self._clock.monotonic() - started)

    def _give_up(self) -> None:
        for snapshot in tuple(self._open.values()):
            snapshot.give_up(
                f"training had waited {self._stall_limit_s:g} s (stall_limit_s) for it, with "
                f"{self._pool.used_bytes} bytes of old rows kept; is storage too slow, or "
                f"staging_bytes too small?"
            )
        # What is kept goes when they are closed: a copy of one may be reading it now.

    def _settle(self) -> int:
        """Take back what the copying side is done with; how many chunks' rows were freed."""
        freed = 0
        while self._passed:
            try:
                key, chunk = self._passed.popleft()
            except IndexError:  # another training thread took it
                break
            freed += self._release_passed(key, chunk)
        while self._closed:
            try:
                snapshot = self._closed.popleft()
            except IndexError:
                break
            self._pool.close(snapshot.slot)
            del self._open[snapshot.slot]
            for g in self._groups:
                for key in g.keys:
                    for chunk in self._pool.kept_chunks(key):
                        freed += self._release_passed(key, chunk)
        return freed

    def _release_passed(self, key: Any, chunk: int) -> bool:
        rows = self._chunk_rows[key]
        end = min(key.table.rows, (chunk + 1) * rows)
        if any(snapshot.has(key) < end for snapshot in tuple(self._open.values())):
            return False
        self._pool.release(key, chunk)
        return True

    def _note_edited(self, components: Sequence[Component]) -> None:
        for snapshot in tuple(self._open.values()):
            snapshot._edited += components
        for table, _ in components:
            self._edited[table] = self._epoch + self._aged

    def _spoil(self, group: Group, why: str) -> None:
        names = ", ".join(t.name for t in group.tables[:_SHOWN])
        for snapshot in tuple(self._open.values()):
            snapshot.spoil(f"{names}{' ...' if len(group.tables) > _SHOWN else ''}: {why}")

    def _note_passed(self, key: Any, chunk: int) -> None:
        """On the copying side: a snapshot has a chunk."""
        self._passed.append((key, chunk))
        self._wake()

    def _note_closed(self, snapshot: RowSnapshot) -> None:
        self._closed.append(snapshot)
        self._wake()

    def _wake(self) -> None:
        # A thread at idle priority should hold no lock that training may want, if it can do without.
        if self._waiting:
            with self._progress:
                self._progress.notify_all()

    def _refuse_if_busy(self, what: str) -> None:
        if self.busy:
            raise BadInputError(f"tables can't be {what} while a snapshot is open; wait for it")


class RowSnapshot:
    """The rows of all guarded tables at one moment. Opened while training waits, copied beside it."""

    def __init__(
        self, guards: RowGuards, slot: int, epoch: int, places: dict[tuple[Any, ...], Place]
    ) -> None:
        self.slot = slot
        self.epoch = epoch
        self.number = epoch + guards._aged
        """Rises from snapshot to snapshot."""
        self._guards = guards
        self._pool = guards._pool
        self._places = places
        # What a copier has published as passed it may still lay old rows over: that isn't "has".
        self._has: dict[Any, int] = {}
        self._edited: list[Component] = []
        self._given_up: str | None = None
        self._spoiled: str | None = None
        self._closed = False

    def has(self, key: Any) -> int:
        """How many rows of a table are copied for good: of them nothing kept is needed any more."""
        if self._closed or self._given_up is not None:
            return int(key.table.rows)
        return self._has.get(key, 0)

    def find(self, tensor: torch.Tensor) -> Place | None:
        """The guarded component that a live tensor is, by its memory; None if it isn't one."""
        return self._places.get(identity(tensor)) if tensor.numel() else None

    def copy(self, place: Place, chunk: int, out: Sequence[torch.Tensor | None]) -> int:
        """Copy a chunk of a table as it was at opening; returns how many of its rows were old ones.

        out: for each component uint8 of its bytes, or None. Each chunk once, in rising order.
        Runs on a persist thread. Raises SaveError if the snapshot has been given up, and
        UntrackedWriteError if it can't be exact.
        """
        a = chunk * place.chunk_rows
        b = min(place.table.rows, a + place.chunk_rows)
        # Before and after: memory that moves while it is read may hold anything.
        laid = -1 if place.group.moved else self._pool.copy(place.key, self.slot, a, b, out)
        if laid < 0 or place.group.moved:
            self.spoil(f"{place.table.name}: {_MOVED}")
        self.check()
        self._has[place.key] = b
        self._guards._note_passed(place.key, chunk)
        return laid

    def look(self) -> None:
        """Is somebody else known by now who may have written a table? On a persist thread, at the end."""
        for place in self._places.values():
            if why := foreign_memory(place.table.components[place.component]):
                place.group.bar(why)

    def check(self) -> None:
        """Raises SaveError if it was given up, UntrackedWriteError if it can't be exact any more."""
        if self._spoiled is not None:
            raise UntrackedWriteError(
                f"{self._spoiled}, while a snapshot was open; the next saves copy what isn't known to "
                f'be safe, and snapshot = "copied" copies everything'
            )
        if self._given_up is not None:
            raise SaveError(self._given_up)

    def tags(self, place: Place, a: int, b: int, number: int | None) -> tuple[torch.Tensor, int]:
        """Tags of rows [a, b) in host memory, and the least one of those changed since a snapshot.

        number: the earlier snapshot's. 0 as the least one: nothing is known of what has changed
        since, or torch's own counters tell that something has. On a persist thread.
        """
        guards, since = self._guards, 0
        if number is not None and guards._edited.get(place.table, -1) < number:
            since = max(0, number - guards._aged)
        return self._pool.tags(place.key, a, b), since

    def bar(self, table: Table, why: str) -> None:
        """Trust the guard of a table no more in later snapshots. On a persist thread."""
        for place in self._places.values():
            if place.table is table and place.group.barred is None:
                place.group.barred = why

    def watch(self, aliases: Iterable[tuple[Place, torch.Tensor]]) -> None:
        """Find edits through these tensors, too: those by which the state has the components.

        On the training thread, right after opening.
        """
        tensors: dict[Table, list[Watched]] = {}
        for place, alias in aliases:
            tensors.setdefault(place.table, []).append((place.table, place.component, alias))
        for g in self._guards._groups:
            g.versions.watch(w for t in g.tables for w in tensors.get(t, ()))

    def edited(self) -> list[Component]:
        """What was written to in place since opening, neither by a step nor announced.

        Runs on a persist thread.
        """
        # In this order: what a step that begins meanwhile takes away from `differing`, it has noted.
        found = [c for g in self._guards._groups for c in g.versions.differing()]
        return list(dict.fromkeys([*self._edited, *found]))

    def spoil(self, why: str) -> None:
        """It can't be exact any more: whoever copies it learns why. On any thread."""
        if self._spoiled is None:
            self._spoiled = why

    def give_up(self, why: str) -> None:
        """It keeps nothing from now on; whoever copies it learns why."""
        self._given_up = why
        self._pool.pass_all(self.slot)

    def close(self) -> None:
        """It needs nothing any more. On any thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._pool.pass_all(self.slot)
            self._guards._note_closed(self)


def _aligned(table: Table, rows: int) -> int:
    """Bytes of ring buffer for so many rows, each component from an aligned place on."""
    return sum(-(-w * rows // _ALIGN_BYTES) * _ALIGN_BYTES for w in table.widths)


def _rows_that_fit(table: Table, buffer_bytes: int) -> int:
    spare = buffer_bytes - _ALIGN_BYTES * len(table.components)
    rows = max(1, spare // max(sum(table.widths), 1))
    return min(rows, max(table.rows, 1))
