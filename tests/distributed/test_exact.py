"""Sharded TorchRec models saved in the middle of training: each commit is the state at save()."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

pytest.importorskip("fbgemm_gpu", reason="TorchRec isn't installed")

PIPELINES = ("base", "sparse_dist", "sparse_dist_lite", "sparse_dist+dtensor")


@pytest.mark.parametrize("world", [1, 2])
def test_saves_between_steps_of_pipelines_are_exact(world: int, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    run_ranks("tests.distributed.exact_ranks", world, tmp_path / "meet", root, *PIPELINES)
