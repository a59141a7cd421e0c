"""Guards that only record, and the oracle: a row that changed was touched, and before it changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ckpt.rows import Component, Table
from ckpt.rows.versions import Versions


@dataclass(eq=False)
class RecordedGroup:
    """Stands for `ckpt.rows.Group`: notes touched rows with their values at that time."""

    tables: tuple[Table, ...]
    touches: list[tuple[int, Tensor, tuple[Tensor, ...]]] = field(default_factory=list)
    calls: int = 0
    edited: list[Component] = field(default_factory=list)
    barred: str | None = None
    versions: Versions = field(init=False)

    def __post_init__(self) -> None:
        self.versions = Versions(self.tables, self.edited.extend)

    def bar(self, why: str) -> None:
        self.barred = why

    def edits(self) -> set[tuple[str, int]]:
        """Components that were written to in place, neither by a step nor announced, since settled."""
        return {(t.name, k) for t, k in (*self.edited, *self.versions.differing())}

    def touch(self, ids: Tensor, bounds: Sequence[int], tables: Sequence[int]) -> None:
        assert ids.dtype in (torch.int32, torch.int64)
        assert ids.dim() == 1
        assert len(bounds) == len(tables) + 1
        assert bounds[-1] <= ids.numel()
        self.calls += 1
        for n, table in enumerate(tables):
            self._note(table, ids[bounds[n] : bounds[n + 1]])

    def touch_rows(self, table: int, rows: Tensor) -> None:
        self.calls += 1
        self._note(table, rows)

    def touch_all(self, table: int) -> None:
        self.calls += 1
        self._note(table, torch.arange(self.tables[table].rows))

    def rows(self, table: int) -> set[int]:
        return {int(r) for t, rows, _ in self.touches if t == table for r in rows}

    def _note(self, table: int, ids: Tensor) -> None:
        rows = ids.long()
        rows = torch.where((rows >= 0) & (rows < self.tables[table].rows), rows, 0)
        values = tuple(c[rows].clone() for c in self.tables[table].components)
        self.touches.append((table, rows.clone(), values))


@dataclass(eq=False)
class Recorder:
    """Stands for `ckpt.rows.RowGuards`. `made` counts the groups ever made."""

    groups: list[RecordedGroup] = field(default_factory=list)
    made: int = 0

    def takes(self, table: Table) -> bool:
        return all(
            c.device.type == "cpu" and c.shape[0] == table.rows and c.is_contiguous()
            for c in table.components
        )

    def group(self, tables: Sequence[Table]) -> RecordedGroup:
        group = RecordedGroup(tuple(tables))
        self.groups.append(group)
        self.made += 1
        return group

    def drop(self, group: RecordedGroup) -> None:
        self.groups.remove(group)

    def tables(self) -> dict[str, Table]:
        return {t.name: t for g in self.groups for t in g.tables}

    def touched(self) -> dict[str, set[int]]:
        return {t.name: g.rows(n) for g in self.groups for n, t in enumerate(g.tables)}

    @contextmanager
    def watch(self) -> Iterator[dict[str, set[int]]]:
        """A stretch of training, checked; fills in the rows that changed, by table."""
        before = {}
        for g in self.groups:
            g.touches.clear()
            g.calls = 0
            g.versions.settle()
            g.edited.clear()
            before |= {t.name: [c.clone() for c in t.components] for t in g.tables}
        changed: dict[str, set[int]] = {}
        yield changed
        for g in self.groups:
            assert not g.edits()
            for n, t in enumerate(g.tables):
                changed[t.name] = changed_rows(before[t.name], t.components)
                missed = changed[t.name] - g.rows(n)
                assert not missed, f"{t.name}: rows {sorted(missed)[:8]} changed untouched"
                check_in_time(t.name, before[t.name], [x for x in g.touches if x[0] == n])


def changed_rows(before: Sequence[Tensor], after: Sequence[Tensor]) -> set[int]:
    changed: set[int] = set()
    for b, a in zip(before, after, strict=True):
        rows = (a != b).reshape(a.shape[0], -1).any(1) if a.numel() else a.new_zeros(0)
        changed.update(rows.nonzero().flatten().tolist())
    return changed


def check_in_time(name: str, before: Sequence[Tensor], touches: Any) -> None:
    """The first touch of a row must have come before its first change."""
    seen: set[int] = set()
    for _, rows, values in touches:
        for at, row in enumerate(rows.tolist()):
            if row not in seen:
                seen.add(row)
                for old, value in zip(before, values, strict=True):
                    assert torch.equal(old[row], value[at]), f"{name}: row {row} touched too late"


def train(module: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A lookup and its backward; the gradient is never zero."""
    out = module(*args, **kwargs)
    (out.float() * torch.linspace(1, 2, out.numel()).view(out.shape)).sum().backward()
    return out
