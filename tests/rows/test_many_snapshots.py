"""Tags of one byte, and snapshots that always overlap: the tags begin anew in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.errors import SaveError
from ckpt.rows import RowGuards
from tests.rows.test_snapshots import BUFFER, Copying, begin, make, pool, table

__all__ = ["pool"]


def guards_of(pool: str, **options: Any) -> tuple[RowGuards, Any]:
    guards = make(pool, **options)
    tables = [table("a", 900, 8, ())]
    group = guards.group(tables)
    guards.lay_out(BUFFER, 1 << 20)
    return guards, (tables, group)


def test_an_older_snapshot_is_open_whenever_one_opens(pool: str) -> None:
    open_ones: list[Copying] = []

    def go_on() -> None:
        """The copying side, as soon as training waits for it."""
        waits.append(1)
        first = open_ones[0]
        if not first.step(tables):
            first.check()
            first.snapshot.close()
            open_ones.pop(0)

    waits: list[int] = []
    guards, (tables, group) = guards_of(pool, hurry=go_on)
    for n in range(600):
        open_ones.append(begin(guards, tables))
        rows = torch.arange(n % 900, 900, 7)
        group.touch_rows(0, rows)
        for part in tables[0].components:
            part[rows] += 1
        if len(open_ones) == 2:
            first = open_ones.pop(0)
            while first.step(tables):
                pass
            first.check()
            first.snapshot.close()
    assert 3 <= len(waits) < 100
    assert len(open_ones) == 1


def test_snapshots_that_stand_still_are_given_up_and_the_next_one_is_copied(pool: str) -> None:
    guards, (tables, group) = guards_of(pool)
    guards._stall_limit_s = 0.05
    stuck = begin(guards, tables)
    opened = 0
    while (snapshot := guards.open()) is not None:
        snapshot.close()
        opened += 1
    assert 250 <= opened <= 254
    with pytest.raises(SaveError, match="stall_limit_s"):
        stuck.step(tables)
    stuck.snapshot.close()
    fresh = begin(guards, tables)
    group.touch_rows(0, torch.arange(900))
    for part in tables[0].components:
        part.add_(1)
    while fresh.step(tables):
        pass
    fresh.check()
    fresh.snapshot.close()
    assert not guards.busy
