"""Row guards: exact snapshots of embedding tables while training changes them."""

from ckpt.rows.budget import BUFFERS, StagingBudget, share_out
from ckpt.rows.guards import Group, Place, RowGuards, RowSnapshot
from ckpt.rows.pool import Table

__all__ = [
    "BUFFERS",
    "Group",
    "Place",
    "RowGuards",
    "RowSnapshot",
    "StagingBudget",
    "Table",
    "share_out",
]
