"""How the staging memory is shared out."""

import pytest

from ckpt.budget import BUFFERS, share_out
from ckpt.config import MIB, CheckpointConfig
from ckpt.errors import BadInputError


def test_what_is_kept_of_each_row_comes_off_the_room_for_old_rows() -> None:
    config = CheckpointConfig(chunk_bytes=MIB)
    without = share_out(config, 1000 * MIB, 128, 0)
    marked = share_out(config, 1000 * MIB, 128, 0, 24 * MIB)
    assert without.staging_bytes == marked.staging_bytes == 200 * MIB
    assert without.overlay_bytes == 200 * MIB - BUFFERS * without.buffer_bytes
    assert marked.overlay_bytes == without.overlay_bytes - 24 * MIB
    # Short rows have as many marks, and never too little room.
    short = share_out(config, 1000 * MIB, 8, 0, 400 * MIB)
    assert short.overlay_bytes == without.overlay_bytes // 2


def test_too_little_for_old_rows_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadInputError, match=r"staging_bytes = 16777216: 4 ring buffers of \d+"):
        share_out(CheckpointConfig(staging_bytes=16 * MIB), 1000 * MIB, 8 * MIB, 0)
