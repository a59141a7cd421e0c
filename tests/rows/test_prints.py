"""Prints of rows: any change of a row's bytes shows, native and in torch."""

from __future__ import annotations

import pytest
import torch

from ckpt.rows import Table
from ckpt.rows import prints as module
from ckpt.rows.prints import Prints

ROWS = 40
WIDTHS = [(1,), (3,), (8,), (31,), (32,), (33,), (64, 4), (256, 8, 1), (260,)]


@pytest.fixture(params=["native", "torch"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(module, "load", lambda: None)
    elif module.load() is None:
        pytest.skip("the native part isn't built")
    return str(request.param)


def made(widths: tuple[int, ...]) -> tuple[Table, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (ROWS, w), dtype=torch.uint8, generator=g) for w in widths]
    return Table("t", tuple(parts)), [p.view(-1) for p in parts]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_a_change_of_any_byte_shows(widths: tuple[int, ...]) -> None:
    table, parts = made(widths)
    prints = Prints(table, ROWS)
    prints.take(0, ROWS, parts)
    assert prints.compare(0, parts) == []
    missed = 0
    for part, width in zip(parts, widths, strict=True):
        for byte in range(width):
            row = byte % ROWS
            part.view(ROWS, width)[row, byte] ^= 1
            missed += prints.compare(0, parts) != [row]
            assert prints.compare(0, parts) == []  # it was taken anew
    assert missed <= 1  # of one in 65,536


def test_rows_that_changed_places_show() -> None:
    table, parts = made((64,))
    prints = Prints(table, ROWS)
    prints.take(0, ROWS, parts)
    rows = parts[0].view(ROWS, 64)
    rows[[3, 9]] = rows[[9, 3]]
    assert prints.compare(0, parts) == [3, 9]


def test_only_rows_with_an_older_tag_are_compared() -> None:
    table, parts = made((16,))
    prints = Prints(table, ROWS)
    prints.take(0, ROWS, parts)
    parts[0] ^= 255
    tags = torch.tensor([0, 4, 5, 6] * (ROWS // 4), dtype=torch.uint8)
    found = prints.compare(0, parts, tags, 5)
    assert found == [n for n in range(ROWS) if n % 4 < 2]
    assert prints.compare(0, parts) == []


def test_a_part_of_the_rows_and_of_the_components() -> None:
    table, parts = made((8, 4))
    prints = Prints(table, ROWS)
    prints.take(0, ROWS, [parts[0], None])
    parts[1].add_(1)
    assert prints.compare(10, [parts[0][80:160], None]) == []
    parts[0][12 * 8] ^= 1
    assert prints.compare(10, [parts[0][80:160], None]) == [12]


def test_more_than_can_be_named() -> None:
    table, parts = made((8,))
    prints = Prints(table, ROWS)
    prints.take(0, ROWS, parts)
    parts[0] ^= 1
    assert prints.compare(0, parts)[:3] == [0, 1, 2]
