"""Random lives of a job on real gloo ranks, beside a model of what must come back."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.walk_ranks import WORLD

FUZZ = "SIDESTAGE_FUZZ" in os.environ


@pytest.mark.parametrize("n", range(20 if FUZZ else 2))
def test_every_restore_gives_back_what_the_newest_whole_commit_holds(
    n: int, tmp_path: Path
) -> None:
    root, seed = tmp_path / "root", random.randrange(1 << 30) if FUZZ else n
    root.mkdir()
    module = "tests.distributed.walk_ranks"
    out = run_ranks(module, WORLD, tmp_path / "meet", str(root), str(seed), "25")
    assert int(out[0]) > 5, "it saved something"
