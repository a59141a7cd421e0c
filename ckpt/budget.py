"""How the staging memory of guarded snapshots is shared out."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.config import MIB, CheckpointConfig
from ckpt.errors import BadInputError
from ckpt.ring import aligned, buffer_bytes

BUFFERS = 4  # one being copied into, one on each of two writer threads, one between
_SHARE_OF_TABLES = 5
_LEAST_BYTES = 64 * MIB


@dataclass(frozen=True)
class StagingBudget:
    """Bytes of the parts that make up the staging memory; together at most `staging_bytes`.

    buffer_bytes: one of BUFFERS ring buffers. upload_bytes: what the store's client holds.
    overlay_bytes: old rows that snapshots still need.
    """

    staging_bytes: int
    buffer_bytes: int
    upload_bytes: int
    overlay_bytes: int


def share_out(
    config: CheckpointConfig,
    guarded_bytes: int,
    longest_row_bytes: int,
    upload_bytes: int,
    marks_bytes: int = 0,
) -> StagingBudget:
    """Split `config.staging_bytes`, or the default for so many bytes of guarded tables.

    longest_row_bytes: the most that one row of a table takes in a ring buffer.
    marks_bytes: what is kept of each row for good, to tell whether it changed. It comes off the overlay, of
        which it leaves half at least: rows may be short.

    Raises BadInputError if that leaves too little for old rows.
    """
    staging = config.staging_bytes
    if staging is None:
        staging = max(_LEAST_BYTES, guarded_bytes // _SHARE_OF_TABLES) + upload_bytes
    buffer = aligned(max(buffer_bytes(staging, config.chunk_bytes), longest_row_bytes))
    overlay = staging - BUFFERS * buffer - upload_bytes
    if guarded_bytes and overlay < staging // 8:
        raise BadInputError(
            f"staging_bytes = {staging}: {BUFFERS} ring buffers of {buffer} and {upload_bytes} for "
            f"uploads leave {max(overlay, 0)} for old rows; give more"
        )
    return StagingBudget(staging, buffer, upload_bytes, max(overlay - marks_bytes, overlay // 2, 0))
