"""Weights come back bit for bit at any world size and sharding, over real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

LAYOUTS = "tests.distributed.layouts"

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("saver", "loaders"), [(2, (1, 3)), (1, (2,)), (3, (2,))])
def test_any_layout_restores_any_other(
    saver: int, loaders: tuple[int, ...], tmp_path: Path
) -> None:
    root = str(tmp_path / "run")
    run_ranks(LAYOUTS, saver, tmp_path / "save", "save", root, "0")
    for n, world in enumerate((saver, *loaders)):
        run_ranks(LAYOUTS, world, tmp_path / f"check{n}", "check", root, str(n))


def test_rowwise_state_of_other_columns_is_refused(tmp_path: Path) -> None:
    run_ranks(LAYOUTS, 2, tmp_path / "meet", "recut", str(tmp_path / "run"), "0")
