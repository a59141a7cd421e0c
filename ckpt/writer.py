"""Writes one rank's part of a checkpoint: a data file of aligned chunks, and their index.

Runs on the persist thread. A DCP `StorageWriter`: a planner offers `blocks`, or resolves each item
to a host tensor; a pump writes them in chunks of at most `chunk_bytes`, each with its digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt import layout
from ckpt.blocks import Block, Blocks
from ckpt.config import CheckpointConfig
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, SaveError
from ckpt.index import (
    ChunkEntry,
    ShardEntry,
    TensorEntry,
    TensorKind,
    encode_index,
    row_bytes,
    row_count,
)
from ckpt.pump import Pump, Pumped
from ckpt.ring import Ring
from ckpt.snapshot import tensor_blocks
from ckpt.storage import Storage
from ckpt.storage.protocol import ObjectWriter
from ckpt.tree import dtype_name
from ckpt.types import FileEntry


@dataclass(frozen=True)
class Placement:
    """Where one save of one rank goes, and the kinds of its tensors."""

    prefix: str
    rank: int
    kinds: Mapping[str, TensorKind]


class ChunkWriter(StorageWriter):
    """Stores the items of a plan under `placement.prefix`. `files` lists what it wrote.

    Nothing is overwritten, and without a commit that lists the files nothing exists: an
    error leaves at most strays.

    Args:
        pump: that writes, on the engine's threads. Without it the calling thread does it all,
            through a ring of its own.
    """

    def __init__(
        self,
        storage: Storage,
        placement: Placement,
        config: CheckpointConfig,
        pump: Pump | None = None,
    ) -> None:
        super().__init__()
        self._storage = storage
        self._placement = placement
        self._config = config
        self._pump = pump
        self.files: list[FileEntry] = []
        self.tensor_bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files, self.tensor_bytes = [], 0

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        data_key = layout.rank_data_key(self._placement.prefix, self._placement.rank)
        resolved = _Resolved(plan, planner)
        blocks: Blocks = getattr(planner, "blocks", resolved)
        with self._storage.writer(data_key) as out:
            pumped = self._run(blocks, out)
        chunks: list[list[ChunkEntry]] = [[] for _ in plan.items]
        for piece, chunk in pumped.chunks:
            chunks[piece.item].append(chunk)
        tensors: dict[str, TensorEntry] = {}
        results = []
        for n, item in enumerate(plan.items):
            entry = self._entry(item, resolved.dtypes[n], chunks[n])
            known = tensors.get(entry.fqn)
            tensors[entry.fqn] = entry if known is None else _joined(known, entry)
            sizes = entry.shards[0].sizes
            nbytes = row_count(sizes) * row_bytes(sizes, entry.dtype)
            self.tensor_bytes += nbytes
            results.append(WriteResult(item.index, nbytes, entry.shards[0]))
        index = encode_index(list(tensors.values()), self._config.digest)
        index_key = layout.rank_index_key(self._placement.prefix, self._placement.rank)
        self._storage.create(index_key, index)
        self.files += [
            FileEntry(data_key, pumped.size_bytes, pumped.digest),
            FileEntry(index_key, len(index), digest_of(index, self._config.digest)),
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: the commit record, not the writer, makes a checkpoint exist."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # made by hand with a storage and a placement, never from a path

    def _run(self, blocks: Blocks, out: ObjectWriter) -> Pumped:
        if self._pump is not None:
            return self._pump.run(blocks, out)
        ring = Ring(2, max(1, min(self._config.chunk_bytes, blocks.total_bytes)), pinned=False)
        try:
            return Pump(ring, self._config).run(blocks, out)
        finally:
            ring.close()

    def _entry(self, item: WriteItem, dtype: str, chunks: list[ChunkEntry]) -> TensorEntry:
        """The index entry of one item, whose chunks must hold each of its rows once."""
        data = item.tensor_data
        assert data is not None
        fqn, sizes = item.index.fqn, tuple(data.chunk.sizes)
        chunks = sorted(chunks, key=lambda c: c.row)
        row = 0
        for chunk in chunks:
            if chunk.row != row:
                break
            row += chunk.rows
        if row != row_count(sizes) or len(chunks) > row:
            raise SaveError(f"{fqn}: row {row} of {row_count(sizes)} wasn't written, or twice")
        shard = ShardEntry(tuple(data.chunk.offsets), sizes, tuple(chunks))
        return TensorEntry(fqn, self._placement.kinds[fqn], dtype, tuple(data.size), (shard,))


class _Resolved:
    """The tensors that a planner resolves, one after the other, as blocks of one chunk each."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._plan = plan
        self._planner = planner
        self.dtypes = [_dtype_of(item) for item in plan.items]
        """Of each item; once it's resolved, its tensor's."""

    @property
    def total_bytes(self) -> int:
        return sum(row_count(s) * w for s, w in self._rows())

    @property
    def largest_row_bytes(self) -> int:
        return max((w for s, w in self._rows() if row_count(s)), default=0)

    def pressure(self) -> float:
        return 0.0

    def blocks(self, chunk_bytes: int) -> Iterator[Block]:
        for n, item in enumerate(self._plan.items):
            tensor = self._planner.resolve_data(item)
            if not isinstance(tensor, torch.Tensor):
                raise BadInputError(f"{item.index.fqn}: only tensors go into data files")
            self.dtypes[n] = dtype_name(item.index.fqn, tensor.dtype)
            yield from tensor_blocks(n, tensor.contiguous(), chunk_bytes)
            del tensor  # the next one may take its place in memory

    def _rows(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Sizes and bytes per row of each item."""
        for item, dtype in zip(self._plan.items, self.dtypes, strict=True):
            assert item.tensor_data is not None
            sizes = tuple(item.tensor_data.chunk.sizes)
            yield sizes, row_bytes(sizes, dtype)


def _dtype_of(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return dtype_name(item.index.fqn, item.tensor_data.properties.dtype)


def _joined(a: TensorEntry, b: TensorEntry) -> TensorEntry:
    """The same tensor with the shards of both."""
    return TensorEntry(a.fqn, a.kind, a.dtype, a.shape, a.shards + b.shards)
