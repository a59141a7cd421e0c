"""One save's state, part of it still in the trainer's own memory: what `save()` hands to a persist thread.

Each shard that this rank writes is in one of three places. Guarded rows stay where they are
and are copied chunk by chunk as they were at opening. Fenced tensors are copied beside the next
forward and backward. All else was copied before save() returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckpt.blocks import Block, Piece
from ckpt.errors import SaveError
from ckpt.fence import DenseCopy
from ckpt.index import row_bytes, row_count
from ckpt.native import move
from ckpt.proof import SnapshotProof
from ckpt.rows import Place, RowSnapshot
from ckpt.staging import Arena, Staged
from ckpt.tree import dtype_name


class SnapshotPlanner(DefaultSavePlanner):
    """Hands a `ChunkWriter` a snapshot instead of the tensors of a plan's items."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks = snapshot


@dataclass
class GuardedItems:
    """A table's components that are items of the plan: `items[k]` is that of component k, or None.

    key: of the first of them in the state.
    """

    key: str
    place: Place
    items: list[int | None]

    @property
    def nbytes(self) -> int:
        widths = self.place.table.widths
        kept = (w for w, i in zip(widths, self.items, strict=True) if i is not None)
        return self.place.table.rows * sum(kept)


@dataclass
class Snapshot:
    """See the module. A `Blocks` of a `writer`, on one persist thread.

    tables: guarded tables of this rank's plan; staged: (item, host tensor) of all else.
    """

    tables: Sequence[GuardedItems]
    staged: Staged
    arena: Arena
    rows: RowSnapshot | None = None
    dense: DenseCopy | None = None
    proof: SnapshotProof | None = None
    pressure_of: Callable[[], float] = lambda: 0.0
    fixed: Future[None] = field(default_factory=Future)

    @property
    def proof_s(self) -> float:
        """What the proof took in save()."""
        return self.proof.took_s if self.proof is not None else 0.0

    @property
    def guarded_bytes(self) -> int:
        return sum(t.nbytes for t in self.tables)

    @property
    def staged_bytes(self) -> int:
        return self.staged.nbytes

    @property
    def total_bytes(self) -> int:
        return self.guarded_bytes + self.staged_bytes

    @property
    def largest_row_bytes(self) -> int:
        return max((row_bytes(tuple(t.shape), _dtype(t)) for _, t in self.staged), default=0)

    def pressure(self) -> float:
        return self.pressure_of()

    def blocks(self, chunk_bytes: int) -> Iterator[Block]:
        """Dense copies first, since an optimizer may wait for them; then the tables; then the rest."""
        if self.dense is not None:
            self.dense.help()
        for table in self.tables:
            yield from self._table_blocks(table)
        if self.dense is not None:
            self.dense.settle()
        self.arena.settle()
        if self.rows is not None:
            self.rows.look()
            self.rows.check()
        if self.proof is not None:
            self.proof.check()
        self._fix()
        for item, tensor in self.staged:
            yield from tensor_blocks(item, tensor, chunk_bytes)

    def fix_if_copied(self) -> None:
        """Nothing was left in the trainer's memory: the snapshot is complete already."""
        if not self.tables and self.dense is None and not self.arena.pending:
            self._fix()

    def close(self) -> None:
        """It won't be written, or has been: nothing is kept for it any more. Idempotent."""
        if self.dense is not None:
            self.dense.abandon()
        self.arena.settle()  # its memory may be another save's next
        if self.rows is not None:
            self.rows.close()
        if not self.fixed.done():
            self.fixed.set_exception(SaveError("the snapshot was given up before it was complete"))

    def _fix(self) -> None:
        """From here on the snapshot needs nothing of the trainer's memory."""
        if self.rows is not None:
            self.rows.close()
        if not self.fixed.done():
            self.fixed.set_result(None)

    def _table_blocks(self, table: GuardedItems) -> Iterator[Block]:
        place, rows = table.place, table.place.table.rows
        for chunk in range(-(-rows // place.chunk_rows)):
            a = chunk * place.chunk_rows
            yield _TableBlock(self, table, chunk, a, min(place.chunk_rows, rows - a))


class _TableBlock:
    """A chunk of a guarded table with its state."""

    def __init__(
        self, snapshot: Snapshot, table: GuardedItems, chunk: int, row: int, rows: int
    ) -> None:
        self._snapshot = snapshot
        self._table = table
        self._chunk = chunk
        widths = table.place.table.widths
        self.pieces = [
            Piece(item, row, rows, rows * width)
            for item, width in zip(table.items, widths, strict=True)
            if item is not None
        ]

    def fill(self, views: Sequence[torch.Tensor]) -> None:
        snapshot, place = self._snapshot, self._table.place
        left = iter(views)
        out = [None if item is None else next(left) for item in self._table.items]
        assert snapshot.rows is not None
        snapshot.rows.copy(place, self._chunk, out)
        if snapshot.proof is not None:
            snapshot.proof.keep(place, self.pieces[0].row, self.pieces[0].rows, out)


class _TensorBlock:
    """A chunk of a staged tensor."""

    def __init__(self, piece: Piece, source: torch.Tensor) -> None:
        self.pieces = [piece]
        self._source = source

    def fill(self, views: Sequence[torch.Tensor]) -> None:
        move(views[0], self._source)


def tensor_blocks(item: int, tensor: torch.Tensor, chunk_bytes: int) -> Iterator[Block]:
    """Whole rows of a contiguous host tensor."""
    sizes = tuple(tensor.shape)
    rows, width = row_count(sizes), row_bytes(sizes, _dtype(tensor))
    if not rows:
        return
    flat = tensor.reshape(-1).view(torch.uint8)
    step = max(1, chunk_bytes // width)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        piece = Piece(item, row, count, count * width)
        yield _TensorBlock(piece, flat[row * width : (row + count) * width])


def _dtype(tensor: Any) -> str:
    return dtype_name("staged", tensor.dtype)
