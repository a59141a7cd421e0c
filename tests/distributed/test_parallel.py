"""FSDP2 and tensor parallel models with plain optimizers, on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import run_ranks
from tests.distributed.parallel_ranks import WAYS


def test_e71_sharded_models_restore_into_fresh_optimizers_in_any_way(tmp_path: Path) -> None:
    out = run_ranks(
        "tests.distributed.parallel_ranks", 2, tmp_path / "meet", str(tmp_path / "root")
    )
    for said in out:
        assert said.split("\n")[:-1] == [f"{a} {b}" for a in WAYS for b in WAYS]
