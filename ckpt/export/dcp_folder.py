"""Writes a checkpoint as a stock DCP folder, a piece of a tensor at a time."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt import nesting
from ckpt.errors import SidestageError, StorageError
from ckpt.export.selection import selected_tree
from ckpt.export.targets import new_folder, sync_file
from ckpt.formats import DCP_SIDECAR, DCP_SIDECAR_KIND
from ckpt.index import TensorInfo, row_bytes, row_count
from ckpt.manifest import seal
from ckpt.restore import CheckpointReader
from ckpt.tree import torch_dtype
from ckpt.values import TensorRef, common, encode_value, map_leaves, resolve

_PIECE_BYTES = 64 << 20  # DCP's reader loads a whole piece for any row of it

_Box = tuple[tuple[int, ...], tuple[int, ...]]


def export_dcp(
    reader: CheckpointReader,
    target: Path,
    keys: Sequence[str],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the values and the tensors `keys` as the DCP folder `target`; returns its size in bytes.

    `dcp.load` and `dcp_to_torch_save` read it. Beside DCP's files lies `sidestage.json`, with
    which `ckpt import` gives back what DCP's flat keys lose. Memory is about one piece of 64 MiB.
    `progress` gets the bytes of each piece.

    Raises ConflictError if `target` exists; CorruptError if a chunk doesn't match its digest.
    """
    tree = selected_tree(reader, keys)
    with new_folder(target) as partial:
        sidecar = partial / DCP_SIDECAR
        sidecar.write_bytes(
            seal(
                DCP_SIDECAR_KIND,
                {
                    "run_id": reader.record.run_id,
                    "step": reader.record.step,
                    "values": encode_value(tree),
                },
            )
        )
        sync_file(sidecar)
        planner = _PiecePlanner(reader, nesting.flattened(tree), progress)
        try:
            with warnings.catch_warnings():
                # That there is no process group: there needs to be none.
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                save(
                    {}, storage_writer=_FolderWriter(partial, target), planner=planner, no_dist=True
                )
        except CheckpointException as e:
            raise _cause(e, target) from e
        return sum(p.stat().st_size for p in partial.iterdir())


class _FolderWriter(FileSystemWriter):
    """DCP's own writer, one file, one piece in memory; its metadata names the final folder."""

    def __init__(self, partial: Path, target: Path) -> None:
        # Copying ahead would resolve a piece before the one in front of it is written.
        super().__init__(partial, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
        self._target = target

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._target), save_id=self.save_id)


class _PiecePlanner(DefaultSavePlanner):
    """Plans pieces of at most 64 MiB, and reads each from the checkpoint as it is written.

    The writer keeps the tensors that it has written until its file is done, so each one's memory is
    taken away when the next is asked for.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        flat: dict[str, tuple[nesting.Path, Any]],
        progress: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._reader = reader
        self._flat = flat
        self._progress = progress
        self._held: torch.Tensor | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = [i for key, (_, leaf) in self._flat.items() for i in self._items(key, leaf)]
        self.plan = SavePlan(items, planner_data={k: path for k, (path, _) in self._flat.items()})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        leaf = self._flat[write_item.index.fqn][1]
        if not isinstance(leaf, TensorRef):
            stream = io.BytesIO()
            torch.save(resolve(common(map_leaves(leaf, self._whole))), stream)
            return stream
        if self._held is not None:
            self._held.untyped_storage().resize_(0)
        data = write_item.tensor_data
        assert data is not None
        piece = torch.empty(data.chunk.sizes, dtype=data.properties.dtype, device="cpu")
        self._reader.read_into(leaf.fqn, piece, tuple(data.chunk.offsets))
        self._progress(piece.nbytes)
        self._held = piece
        return piece

    def _whole(self, _: str, leaf: Any) -> Any:
        return self._reader.read(leaf.fqn) if isinstance(leaf, TensorRef) else leaf

    def _items(self, key: str, leaf: Any) -> Iterator[WriteItem]:
        if not isinstance(leaf, TensorRef):
            yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
            return
        info = self._reader.info(leaf.fqn)
        boxes = list(_pieces(info))
        kind = WriteItemType.TENSOR if len(boxes) == 1 else WriteItemType.SHARD
        for offsets, sizes in boxes:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            properties = TensorProperties(dtype=torch_dtype(info.dtype))
            data = TensorWriteData(chunk, properties, torch.Size(info.shape))
            yield WriteItem(MetadataIndex(key, offsets), kind, tensor_data=data)


def _pieces(info: TensorInfo) -> Iterator[_Box]:
    """The boxes in which a tensor was saved, cut into blocks of rows."""
    if not math.prod(info.shape):
        yield (0,) * len(info.shape), info.shape
        return
    for offsets, sizes in info.boxes:
        if not sizes:
            yield offsets, sizes
            continue
        step = max(1, _PIECE_BYTES // max(1, row_bytes(sizes, info.dtype)))
        for row in range(0, row_count(sizes), step):
            rows = min(step, sizes[0] - row)
            yield (offsets[0] + row, *offsets[1:]), (rows, *sizes[1:])


def _cause(error: CheckpointException, target: Path) -> SidestageError:
    """What went wrong inside of DCP, as an error of ours."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, SidestageError):
        return cause
    return StorageError(f"{target}: can't be written ({type(cause).__name__}: {cause})")
