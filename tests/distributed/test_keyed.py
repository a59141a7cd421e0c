"""TorchRec's keyed optimizers and fused kernels on two ranks: a resume is the unbroken run, bit for bit."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

pytest.importorskip("fbgemm_gpu", reason="TorchRec isn't installed")


def test_a_resume_trains_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The public DLRM trainer's shape, 200 of 200 losses; E26, E27, E28; warm-ups; what kernels count."""
    run_ranks("tests.distributed.keyed_ranks", 2, tmp_path / "meet", str(tmp_path / "run"))
