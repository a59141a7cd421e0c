"""Buffers that ranks have different values of."""

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks


@pytest.mark.distributed
def test_rank_0s_buffers_count_where_ddp_broadcasts_them_and_others_are_refused(
    tmp_path: Path,
) -> None:
    run_ranks("tests.distributed.buffers_ranks", 2, tmp_path / "meet")
