"""TorchRec's sharded collections under its pipelines: every row that changes was announced."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

RANKS = "tests.distributed.guards_ranks"

pytestmark = pytest.mark.distributed

pytest.importorskip("fbgemm_gpu", reason="TorchRec isn't installed")


@pytest.mark.parametrize("world", [1, 2])
def test_what_pipelines_and_hands_change_was_announced(world: int, tmp_path: Path) -> None:
    actions = ("base", "sparse_dist", "sparse_dist_lite", "by_hand")
    run_ranks(RANKS, world, tmp_path / "meet", *actions)


def test_tables_that_others_write_to_are_refused_by_name(tmp_path: Path) -> None:
    run_ranks("tests.distributed.guards_refused", 1, tmp_path / "meet")
