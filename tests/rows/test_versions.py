"""The version counters of a group's tensors: what counts as an edit, and what doesn't."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ckpt.rows import Component, RowGuards, RowSnapshot, Table, versions
from ckpt.rows.guards import Group
from ckpt.rows.versions import Versions
from ckpt.types import SystemClock


class Watched:
    """Two tables with state that share their memory, as those of a fused lookup do."""

    def __init__(self) -> None:
        self.memory = torch.zeros(20, 4)
        self.state = torch.zeros(20)
        self.tables = [
            Table(n, (self.memory[a:b], self.state[a:b]))
            for n, a, b in (("a", 0, 12), ("b", 12, 20))
        ]
        self.told: list[list[tuple[str, int]]] = []
        self.versions = Versions(self.tables, self.tell)

    def tell(self, components: Sequence[Component]) -> None:
        self.told.append(names(components))

    def differing(self) -> list[tuple[str, int]]:
        return names(self.versions.differing())

    def update(self, *, counts: bool = False) -> None:
        """A fused update, which by itself counts nothing."""
        self.versions.release()
        if counts:
            self.memory[3] += 1
        else:
            self.memory.data[3] += 1
        self.versions.settle()


def names(components: Sequence[Component]) -> list[tuple[str, int]]:
    return [(t.name, k) for t, k in components]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nothing_is_known_before_the_first_snapshot(watched: Watched) -> None:
    watched.memory[0] = 1
    assert watched.differing() == []
    watched.versions.settle()
    assert watched.differing() == []
    assert watched.told == []


def test_a_write_shows_on_every_table_of_the_memory(watched: Watched) -> None:
    watched.versions.settle()
    watched.tables[1].components[0][5] = 1
    assert watched.differing() == [("a", 0), ("b", 0)]
    watched.state.add_(1)
    assert watched.differing() == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_writes_of_a_step_are_its_own(watched: Watched) -> None:
    watched.versions.settle()
    watched.versions.release()
    watched.memory[0] = 1
    assert watched.differing() == []
    watched.versions.settle()
    assert watched.differing() == []
    assert watched.told == []


def test_a_step_tells_of_edits_before_it(watched: Watched) -> None:
    watched.versions.settle()
    watched.state[0] = 1
    watched.versions.release()
    watched.versions.settle()
    assert watched.told == [[("a", 1), ("b", 1)]]
    assert watched.differing() == []


def test_a_step_that_raised_stays_open_until_the_next(watched: Watched) -> None:
    watched.versions.settle()
    watched.versions.release()
    watched.memory[0] = 1  # as far as it came
    assert watched.differing() == []
    watched.versions.release()
    watched.versions.settle()
    assert watched.told == []
    watched.memory[0] = 1
    assert watched.differing() == [("a", 0), ("b", 0)]


def test_announced_edits_are_forgiven_until_the_next_step(watched: Watched) -> None:
    watched.versions.settle()
    watched.versions.forgive()
    watched.memory[0] = 1
    assert watched.differing() == []
    watched.versions.release()
    watched.versions.settle()
    watched.memory[0] = 1
    assert watched.differing() != []
    assert watched.told == []


def test_an_edit_between_updates_is_told_however_often_it_comes(watched: Watched) -> None:
    watched.versions.settle()
    for _ in range(3):
        watched.update()
        assert watched.differing() == []
        watched.memory[0] = 1
        assert watched.differing() == [("a", 0), ("b", 0)]
    watched.update()
    assert watched.told == [[("a", 0), ("b", 0)]] * 3


def test_announced_edits_are_forgiven_until_the_next_update(watched: Watched) -> None:
    watched.versions.settle()
    watched.versions.forgive()
    watched.memory[0] = 1
    watched.update()
    assert watched.differing() == []
    watched.memory[0] = 1
    assert watched.differing() != []
    assert watched.told == []


def test_updates_that_count_are_never_taken_for_edits(watched: Watched) -> None:
    watched.versions.settle()
    for _ in range(4):
        watched.update(counts=True)
        assert watched.differing() == []
    watched.versions.settle()
    assert watched.told == []
    watched.memory[0] = 1  # and between a snapshot and the next update edits are still found
    assert watched.differing() != []
    watched.update(counts=True)
    assert watched.told == [[("a", 0), ("b", 0)]]


def test_an_edit_before_the_first_update_is_told(watched: Watched) -> None:
    watched.versions.settle()
    watched.memory[0] = 1
    watched.update()
    assert watched.told == [[("a", 0), ("b", 0)]]


def test_a_step_that_begins_during_the_look_isnt_an_edit(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, begun = watched.versions.settle, []

    def read_late(tensors: Sequence[tuple[Table, int, torch.Tensor]]) -> tuple[int, ...]:
        """Before the first look goes on, a whole step; in the second, the beginning of one."""
        if threading.current_thread() is not main and len(begun) < 2:
            begun.append(None)
            on_training_thread.submit(step).result()
        return read(tensors)

    def step() -> None:
        watched.versions.release()
        watched.memory[0] += 1
        if len(begun) == 1:
            settle()

    settle()
    read, main = versions._read, threading.current_thread()
    monkeypatch.setattr(versions, "_read", read_late)
    with ThreadPoolExecutor(1) as on_training_thread, ThreadPoolExecutor(1) as persist_thread:
        main = on_training_thread.submit(threading.current_thread).result()
        assert persist_thread.submit(watched.differing).result() == []
    assert len(begun) == 2
    assert watched.told == []


def test_aliases_with_counters_of_their_own_are_watched(watched: Watched) -> None:
    alias = watched.memory.data
    watched.versions.settle()
    alias[0] = 1
    assert watched.differing() == []
    watched.versions.watch([(watched.tables[0], 0, alias)])
    assert watched.differing() == []
    alias[0] = 1
    assert watched.differing() == [("a", 0)]
    watched.memory[0] = 1
    assert watched.differing() == [("a", 0), ("b", 0)]
    watched.versions.watch(())
    assert watched.told == [[("a", 0), ("b", 0)]]
    alias[0] = 1
    assert watched.differing() == []


def test_tensors_without_a_counter_are_left_out() -> None:
    with torch.inference_mode():
        weight = torch.zeros(4, 2)
    versions = Versions([Table("a", (weight,))], lambda _: None)
    versions.settle()
    versions.release()
    assert versions.differing() == []


def opened() -> tuple[RowGuards, Group, RowSnapshot]:
    guards = RowGuards(SystemClock(), 60.0)
    group = guards.group([Table("a", (torch.zeros(50, 4), torch.zeros(50)))])
    guards.lay_out(1 << 16, 1 << 16)
    return guards, group, another(guards)


def another(guards: RowGuards) -> RowSnapshot:
    snapshot = guards.open()
    assert snapshot is not None
    return snapshot


def test_an_edit_belongs_to_the_snapshots_that_were_open() -> None:
    guards, group, first = opened()
    weight, state = group.tables[0].components
    weight[3] = 1
    second = another(guards)
    assert names(first.edited()) == [("a", 0)]
    assert second.edited() == []
    group.versions.release()
    weight[4] = 1
    state[4] = 1
    group.versions.settle()
    assert names(first.edited()) == [("a", 0)]
    assert second.edited() == []
    state[5] = 1
    assert names(first.edited()) == [("a", 0), ("a", 1)]
    assert names(second.edited()) == [("a", 1)]
    for snapshot in (first, second):
        snapshot.close()
    assert another(guards).edited() == []
