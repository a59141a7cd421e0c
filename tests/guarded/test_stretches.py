"""What a save reads of what it leaves in place: every byte has its turn, and differences are found."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from ckpt.errors import UntrackedWriteError
from ckpt.proof import DENSE_BLOCK_BYTES, Prover, SnapshotProof
from ckpt.rows import Group, RowGuards, RowSnapshot, Table
from ckpt.snapshot import GuardedItems
from ckpt.types import SystemClock

AT_ONCE = 32  # dense blocks of a save at least


class Still:
    """A clock that stands still: the prover learns nothing of how fast this machine is."""

    def time(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0


class Told:
    def __init__(self) -> None:
        self.told: list[tuple[int, str, list[int]]] = []

    def __call__(self, step: int, table: str, rows: Sequence[int]) -> None:
        self.told.append((step, table, list(rows)))


def test_small_state_is_read_whole() -> None:
    dense = [torch.randn(1000), torch.randn(3, 7)]
    proof = Prover("sampled", Still(), Told()).open(1, None, [], dense)
    for n, tensor in enumerate(dense):
        [stretch] = proof.dense[n]
        assert (stretch.a, stretch.b) == (0, tensor.nbytes)
        assert stretch.same(tensor.clone())
        changed = tensor.clone()
        changed.view(-1)[-1] += 1
        assert not stretch.same(changed)


@pytest.mark.parametrize("blocks", [AT_ONCE + 1, 80, 200])
def test_each_byte_has_its_turn_after_a_known_number_of_saves(blocks: int) -> None:
    sizes = [blocks // 3, 1, blocks - blocks // 3 - 2]
    dense = [torch.zeros(n * DENSE_BLOCK_BYTES, dtype=torch.uint8) for n in sizes]
    dense.append(torch.zeros(5, dtype=torch.uint8))  # a block of its own
    prover = Prover("sampled", Still(), Told())
    seen = [torch.zeros(t.numel(), dtype=torch.int32) for t in dense]
    saves = -(-blocks // AT_ONCE)
    for _ in range(saves):
        read = 0
        for n, stretches in prover.open(1, None, [], dense).dense.items():
            for s in stretches:
                seen[n][s.a : s.b] += 1
                read += s.b - s.a
        assert read <= AT_ONCE * DENSE_BLOCK_BYTES
    assert all(bool((s >= 1).all()) for s in seen)


def test_full_reads_everything_at_each_save() -> None:
    dense = [torch.zeros(40 * DENSE_BLOCK_BYTES, dtype=torch.uint8)]
    prover = Prover("full", Still(), Told())
    for _ in range(2):
        [stretch] = prover.open(1, None, [], dense).dense[0]
        assert (stretch.a, stretch.b) == (0, 40 * DENSE_BLOCK_BYTES)


def test_dense_state_has_its_turns_beside_large_tables() -> None:
    tables = Tables(rows=200_000)
    dense = [torch.zeros(2 * AT_ONCE * DENSE_BLOCK_BYTES, dtype=torch.uint8)]
    turns: set[int] = set()
    for number in range(2):
        with tables.opened(dense) as proof:
            read = [s for stretches in proof.dense.values() for s in stretches]
        assert sum(s.b - s.a for s in read) == AT_ONCE * DENSE_BLOCK_BYTES
        turns |= {s.a for s in read}
        assert len(turns) == AT_ONCE * (number + 1)


class Tables:
    """Guarded tables, snapshots of them, and a proof of each."""

    def __init__(self, rows: int = 300, how: str = "sampled") -> None:
        g = torch.Generator().manual_seed(0)
        self.table = Table(
            "items", (torch.randn(rows, 8, generator=g), torch.randn(rows, generator=g))
        )
        self.guards = RowGuards(SystemClock(), 60.0)
        self.group: Group = self.guards.group([self.table])
        self.guards.lay_out(8192, 1 << 20)
        self.told = Told()
        self.prover = Prover("sampled", Still(), self.told)
        self.steps = itertools.count(1)

    def open(
        self, dense: Sequence[torch.Tensor] = ()
    ) -> tuple[RowSnapshot, SnapshotProof, GuardedItems]:
        snapshot = self.guards.open()
        assert snapshot is not None
        place = snapshot.find(self.table.components[0])
        assert place is not None
        items = GuardedItems("state.items", place, [0, 1])
        return snapshot, self.prover.open(next(self.steps), snapshot, [items], dense), items

    @contextlib.contextmanager
    def opened(self, dense: Sequence[torch.Tensor]) -> Iterator[SnapshotProof]:
        snapshot, proof, _ = self.open(dense)
        yield proof
        snapshot.close()

    def copy(self, snapshot: RowSnapshot, proof: SnapshotProof, items: GuardedItems) -> None:
        place, rows = items.place, self.table.rows
        for chunk in range(-(-rows // place.chunk_rows)):
            a = chunk * place.chunk_rows
            n = min(place.chunk_rows, rows - a)
            out = [torch.empty(n * w, dtype=torch.uint8) for w in self.table.widths]
            snapshot.copy(place, chunk, out)
            proof.keep(place, a, n, out)

    def save(self) -> None:
        snapshot, proof, items = self.open()
        try:
            self.copy(snapshot, proof, items)
            proof.check()
        finally:
            snapshot.close()

    def write(self, *rows: int) -> None:
        """Uncounted by torch."""
        for row in rows:
            self.table.components[0].data[row] += 1

    def train(self, *rows: int) -> None:
        self.group.touch_rows(0, torch.tensor(rows))
        self.write(*rows)


def test_a_write_between_save_and_copy_is_found_in_a_stretch_whoever_announced_the_row() -> None:
    tables = Tables()
    snapshot, proof, items = tables.open()
    tables.write(7)
    tables.train(7, 8)  # keeps what the write has left
    tables.copy(snapshot, proof, items)
    with pytest.raises(UntrackedWriteError, match=r"items: rows \[7\] were changed outside"):
        proof.check()
    assert tables.told.told == [(1, "items", [7])]
    assert tables.group.barred


def beyond_stretches(tables: Tables) -> None:
    """As if the table were too large for its rows to have had their turn."""
    tables.prover._spans = lambda *_: ([], [])  # type: ignore[method-assign]


def test_a_write_between_two_saves_is_found_by_the_prints_of_the_first() -> None:
    tables = Tables()
    beyond_stretches(tables)
    tables.save()
    tables.train(1, 2, 3)
    tables.write(2, 200)
    with pytest.raises(UntrackedWriteError, match=r"items: rows \[200\] were changed outside"):
        tables.save()


def test_prints_outlive_a_save_that_was_given_up_and_the_ageing_of_tags() -> None:
    tables = Tables()
    beyond_stretches(tables)
    for _ in range(230):  # tags age before that many
        snapshot = tables.guards.open()
        assert snapshot is not None
        snapshot.close()
        tables.train(5)
    tables.save()
    for _ in range(260):
        snapshot = tables.guards.open()
        assert snapshot is not None
        snapshot.close()
        tables.train(6)
    tables.save()  # nothing is told of rows that training has changed, however long ago
    tables.train(6)
    tables.write(9)
    with pytest.raises(UntrackedWriteError, match=r"rows \[9\]"):
        tables.save()


def test_edits_that_torch_counts_may_come_between_snapshots() -> None:
    tables = Tables()
    beyond_stretches(tables)
    tables.save()
    tables.table.components[0][40:50] = 0
    tables.save()
    tables.save()
    tables.write(41)
    with pytest.raises(UntrackedWriteError, match=r"rows \[41\]"):
        tables.save()


def test_announced_edits_are_nobodys_fault() -> None:
    tables = Tables()
    tables.save()
    snapshot, proof, items = tables.open()
    tables.train(11)
    tables.copy(snapshot, proof, items)
    tables.group.touch_all(0)
    tables.write(*range(300))
    proof.check()
    snapshot.close()
    tables.save()


def test_all_tables_that_were_written_are_named_at_once() -> None:
    tables = Tables()
    other = Table("users", (torch.randn(50, 4),))
    group = tables.guards.group([other])
    tables.guards.lay_out(8192, 1 << 20)
    snapshot = tables.guards.open()
    assert snapshot is not None
    found = [snapshot.find(t.components[0]) for t in (tables.table, other)]
    items = [
        GuardedItems(f"state.{p.table.name}", p, [0] * len(p.table.components))
        for p in found
        if p is not None
    ]
    proof = tables.prover.open(3, snapshot, items, [])
    tables.write(3)
    other.components[0].data[4] = 0
    for one in items:
        table = one.place.table
        for chunk in range(-(-table.rows // one.place.chunk_rows)):
            a = chunk * one.place.chunk_rows
            n = min(one.place.chunk_rows, table.rows - a)
            out = [torch.empty(n * w, dtype=torch.uint8) for w in table.widths]
            snapshot.copy(one.place, chunk, out)
            proof.keep(one.place, a, n, out)
    with pytest.raises(UntrackedWriteError, match=r"items: rows \[3\].*users: rows \[4\]"):
        proof.check()
    assert tables.group.barred
    assert group.barred
    snapshot.close()
