"""The unit in which a snapshot is copied and written: a block of chunks that become final together.

A table's rows and its row-aligned optimizer state are one block, so that one frontier says
what a snapshot has already; everything else is a block of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk-to-be: rows [row, row + rows) of the shard that is item number `item` of the plan."""

    item: int
    row: int
    rows: int
    nbytes: int


class Block(Protocol):
    """Some pieces and the way to their bytes."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    def fill(self, views: Sequence[torch.Tensor]) -> None:
        """Copy the snapshot's bytes into `views`, one per piece: uint8 of shape (nbytes,).

        Runs once, on a persist thread. Raises SaveError if the snapshot has been given up.
        """
        ...


class Blocks(Protocol):
    """A snapshot as the writer sees it."""

    def blocks(self, chunk_bytes: int) -> Iterator[Block]:
        """All blocks, in the order to write them; no piece is larger than `chunk_bytes`.

        A row that is longer than that is a piece of its own.
        """
        ...

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        ...

    @property
    def largest_row_bytes(self) -> int:
        """The longest row of all shards: what a ring buffer has to hold at least."""
        ...

    def pressure(self) -> float:
        """How full the overlay is, 0 to 1. The nearer to 1, the faster the writing must go."""
        ...
