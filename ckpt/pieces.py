"""What a restore fills: tensors of a checkpoint, and the memory that their boxes go to."""

from __future__ import annotations

from typing import NamedTuple

from ckpt.tree import Shard


class Piece(NamedTuple):
    """A tensor to be filled: `stored` is its key in the checkpoint, `shards` its boxes and where they go.

    ours: the memory is the restore's own, so it may be filled before all is agreed on.
    """

    key: str
    stored: str
    shards: tuple[Shard, ...]
    ours: bool = False
