"""Filling targets of any kind from any sharding; damage is found before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptError
from ckpt.manifest import CommitRecord
from ckpt.placing import Target
from ckpt.restore import CheckpointReader
from ckpt.storage import MemoryStorage
from ckpt.storage.local import LocalStorage
from tests.unit.test_restore_rows import (
    COLUMN_SHARDS,
    COLUMNS,
    GRID,
    ROW_SHARDS,
    ROWS,
    TABLE,
    WHOLE,
    Boxes,
    reader_of,
)

spans = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(sorted)
columns = st.tuples(st.integers(0, COLUMNS), st.integers(0, COLUMNS)).map(sorted)
cuts = st.sampled_from([WHOLE, ROW_SHARDS, COLUMN_SHARDS, GRID])
LAYOUTS = ("whole", "strided", "transposed", "padded")


def memory(rows: int, cols: int, layout: str) -> torch.Tensor:
    if layout == "strided":
        return torch.full((rows * 2, cols), -1.0)[::2]
    if layout == "transposed":
        return torch.full((cols, rows), -1.0).t()
    if layout == "padded":
        return torch.full((rows, cols + 3), -1.0)[:, 1 : cols + 1]
    return torch.full((rows, cols), -1.0)


def on_disk(reader: CheckpointReader, folder: Path, flip: int | None) -> CheckpointReader:
    """The same checkpoint in files, with a byte of its data flipped."""
    source: Any = reader._storage
    assert isinstance(source, MemoryStorage)
    storage = LocalStorage(folder)
    for info in source.list():
        data = bytearray(source.read(info.key))
        if flip is not None and info.key == "r.bin":
            data[flip % len(data)] ^= 0x10
        storage.create(info.key, bytes(data))
    record: CommitRecord = reader.record
    return CheckpointReader(storage, record)


@settings(max_examples=40, deadline=None)
@given(
    cuts, st.booleans(), st.lists(st.tuples(spans, columns, st.sampled_from(LAYOUTS)), max_size=4)
)
def test_any_boxes_go_into_any_memory(
    tmp_path_factory: pytest.TempPathFactory, boxes: Boxes, packed: bool, wanted: list[Any]
) -> None:
    made = reader_of(TABLE, boxes, packed=packed)
    for reader in (made, on_disk(made, tmp_path_factory.mktemp("run"), None)):
        targets = [
            Target("t", memory(r1 - r0, c1 - c0, layout), (r0, c0))
            for (r0, r1), (c0, c1), layout in wanted
        ]
        reader.check(targets)
        assert all(bool((t.out == -1).all()) for t in targets), "check changes nothing"
        reader.fill(targets)
        for t, ((r0, r1), (c0, c1), _) in zip(targets, wanted, strict=True):
            assert torch.equal(t.out, TABLE[r0:r1, c0:c1])


@settings(max_examples=40, deadline=None)
@given(cuts, st.booleans(), st.integers(0, 1 << 20))
def test_a_flipped_byte_is_found_and_nothing_is_changed(
    tmp_path_factory: pytest.TempPathFactory, boxes: Boxes, packed: bool, flip: int
) -> None:
    made = reader_of(TABLE, boxes, packed=packed)
    reader = on_disk(made, tmp_path_factory.mktemp("run"), flip)
    out = memory(ROWS, COLUMNS, "whole")
    with pytest.raises(CorruptError, match=r"r\.bin"):
        reader.check([Target("t", out, (0, 0))])
    assert bool((out == -1).all())


@pytest.mark.parametrize("left", [0, 10])
def test_a_file_that_was_cut_or_is_gone_is_damage(tmp_path: Path, left: int) -> None:
    reader = on_disk(reader_of(TABLE, GRID), tmp_path, None)
    path = tmp_path / "r.bin"
    path.write_bytes(path.read_bytes()[:left])
    out = memory(ROWS, COLUMNS, "whole")
    with pytest.raises(CorruptError):
        reader.check([Target("t", out, (0, 0))])
    path.unlink()
    with pytest.raises(CorruptError):
        reader.check([Target("t", out, (0, 0))])
    assert bool((out == -1).all())
