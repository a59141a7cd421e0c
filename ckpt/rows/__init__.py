"""Row guards: exact snapshots of embedding tables while training changes them."""

from ckpt.rows.guards import Group, Place, RowGuards, RowSnapshot
from ckpt.rows.pool import Table
from ckpt.rows.versions import Component

__all__ = [
    "Component",
    "Group",
    "Place",
    "RowGuards",
    "RowSnapshot",
    "Table",
]
