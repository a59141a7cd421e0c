"""Writes one rank's part of a checkpoint: a data file of aligned chunks, and their index.

Runs on the persist thread. A DCP `StorageWriter`: a planner resolves each item to a host
tensor, rows go out in chunks of at most `chunk_bytes`, each with its digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import zstandard
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt import layout
from ckpt.config import CheckpointConfig
from ckpt.digest import digest_of, new_hasher
from ckpt.errors import BadInputError
from ckpt.index import (
    ChunkEntry,
    Codec,
    ShardEntry,
    TensorEntry,
    TensorKind,
    encode_index,
    row_bytes,
    row_count,
)
from ckpt.storage import Storage
from ckpt.storage.protocol import ObjectWriter
from ckpt.tree import dtype_name, host_bytes
from ckpt.types import FileEntry

ALIGN_BYTES = 4096
_SAMPLE_BYTES = 64 * 1024
_PAYS_BELOW = 0.8  # zstd costs more time than it saves unless a sample shrinks at least so far


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
    """

    def __init__(self, storage: Storage, placement: Placement, config: CheckpointConfig) -> None:
        super().__init__()
        self._storage = storage
        self._placement = placement
        self._config = config
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
        tensors: dict[str, TensorEntry] = {}
        results = []
        with self._storage.writer(data_key) as out:
            file = _DataFile(out, self._config)
            for item in plan.items:
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, torch.Tensor):
                    raise BadInputError(f"{item.index.fqn}: only tensors go into data files")
                entry = self._write_item(file, item, tensor)
                known = tensors.get(entry.fqn)
                tensors[entry.fqn] = entry if known is None else _joined(known, entry)
                self.tensor_bytes += tensor.numel() * tensor.element_size()
                results.append(WriteResult(item.index, tensor.nbytes, entry.shards[-1]))
        index = encode_index(list(tensors.values()), self._config.digest)
        index_key = layout.rank_index_key(self._placement.prefix, self._placement.rank)
        self._storage.create(index_key, index)
        self.files += [
            FileEntry(data_key, file.size_bytes, file.digest()),
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

    def _write_item(self, file: _DataFile, item: WriteItem, tensor: torch.Tensor) -> TensorEntry:
        data = item.tensor_data
        assert data is not None
        fqn = item.index.fqn
        dtype = dtype_name(fqn, tensor.dtype)
        sizes = tuple(tensor.shape)
        chunks = tuple(file.write_rows(host_bytes(tensor.contiguous()), sizes, dtype))
        shard = ShardEntry(tuple(data.chunk.offsets), sizes, chunks)
        return TensorEntry(fqn, self._placement.kinds[fqn], dtype, tuple(data.size), (shard,))


class _DataFile:
    """Appends chunks, each at an aligned offset, and keeps the file's digest."""

    def __init__(self, out: ObjectWriter, config: CheckpointConfig) -> None:
        self._out = out
        self._config = config
        self._hasher = new_hasher(config.digest)
        self._zstd = zstandard.ZstdCompressor(level=1)
        self.size_bytes = 0

    def write_rows(
        self, data: memoryview, sizes: tuple[int, ...], dtype: str
    ) -> Iterator[ChunkEntry]:
        """Write a shard's bytes as chunks of whole rows."""
        rows, width = row_count(sizes), row_bytes(sizes, dtype)
        if not rows:
            return
        step = max(1, self._config.chunk_bytes // width)
        for row in range(0, rows, step):
            count = min(step, rows - row)
            yield self._write_chunk(row, count, data[row * width : (row + count) * width])

    def digest(self) -> str:
        return f"{self._config.digest}:{self._hasher.hexdigest()}"

    def _write_chunk(self, row: int, rows: int, raw: memoryview) -> ChunkEntry:
        codec: Codec = "raw"
        stored: bytes | memoryview = raw
        if self._config.compression == "auto" and self._pays(raw):
            packed = self._zstd.compress(raw)
            if len(packed) < _PAYS_BELOW * len(raw):
                codec, stored = "zstd", packed
        self._pad()
        offset = self.size_bytes
        chunk_hasher = new_hasher(self._config.digest)
        chunk_hasher.update(stored)
        self._append(stored)
        digest = chunk_hasher.digest().ljust(32, b"\0")
        return ChunkEntry(row, rows, offset, len(stored), codec, digest)

    def _pays(self, raw: memoryview) -> bool:
        """Try a sample from the middle: heads of tables are often padding or special rows."""
        if len(raw) < 1024:
            return False
        start = max(0, (len(raw) - _SAMPLE_BYTES) // 2)
        sample = raw[start : start + _SAMPLE_BYTES]
        return len(self._zstd.compress(sample)) < _PAYS_BELOW * len(sample)

    def _pad(self) -> None:
        if tail := self.size_bytes % ALIGN_BYTES:
            self._append(bytes(ALIGN_BYTES - tail))

    def _append(self, data: bytes | memoryview) -> None:
        self._out.write(data)
        self._hasher.update(data)
        self.size_bytes += len(data)


def _joined(a: TensorEntry, b: TensorEntry) -> TensorEntry:
    """The same tensor with the shards of both."""
    return TensorEntry(a.fqn, a.kind, a.dtype, a.shape, a.shards + b.shards)
