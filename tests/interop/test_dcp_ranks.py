"""Stock DCP jobs over real gloo ranks, on Sidestage's storage, at one rank and at two."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.catalog import Catalog
from ckpt.storage import LocalStorage
from ckpt.verify import verify_commit
from tests.distributed.launch import run_ranks

RANKS = "tests.interop.ranks"

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(("saver", "loader"), [(2, 1), (1, 2)])
def test_what_stock_dcp_saves_is_a_commit_that_it_loads_at_any_number_of_ranks(
    saver: int, loader: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    run_ranks(RANKS, saver, tmp_path / "save", "save", str(root))
    storage = LocalStorage(root)
    commits = Catalog(storage).commits()
    assert [(c.ref.step, c.status) for c in commits] == [(1, "ancestor"), (2, "latest")]
    for commit in commits:
        assert commit.record is not None
        assert commit.record.world_size == saver
        assert verify_commit(storage, commit.record, level="full").problems == []
    run_ranks(RANKS, loader, tmp_path / "load", "load", str(root))


def test_d13_what_one_rank_meets_fails_the_save_for_all(tmp_path: Path) -> None:
    run_ranks(RANKS, 2, tmp_path / "fail", "fail", str(tmp_path / "run"))
