"""Makes an ordinary commit of a foreign checkpoint: one process, no process group."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckpt import layout
from ckpt.commit import claim_epoch, next_epoch, open_run
from ckpt.config import CheckpointConfig
from ckpt.digest import digest_of
from ckpt.errors import ConflictError, SidestageError
from ckpt.events import LogSink
from ckpt.finish import finish_newest
from ckpt.foreign import Foreign, Piece
from ckpt.index import TensorKind
from ckpt.lineage import Tree
from ckpt.manifest import AttemptRecord, canonical
from ckpt.receipts import (
    SaveTerms,
    Written,
    commit_parts,
    continued,
    seal_objects,
    store_part,
)
from ckpt.storage import Storage, check_place
from ckpt.tree import torch_dtype
from ckpt.types import Clock, CommitRef, SystemClock
from ckpt.values import encode_value
from ckpt.writer import ChunkWriter, Placement


@dataclass(frozen=True)
class Target:
    """Where an import goes: a root, the step it becomes, and the step that it continues (see `check`)."""

    storage: Storage
    step: int
    onto: int | None = None

    def check(self) -> CommitRef | None:
        """The commit to continue.

        Raises ConflictError if the root has commits and `onto` is None: an import begins a new
        attempt, and whatever it doesn't continue is abandoned. BadInputError where no run may begin.
        """
        check_place(self.storage)
        if self.onto is None and (steps := self._steps()):
            raise ConflictError(
                f"{self.storage.url} has checkpoints up to step {max(steps)}: import into a new root, "
                f"or pass --onto STEP to continue one; later ones become abandoned"
            )
        return continued(self.storage, self.step, self.onto)

    def _steps(self) -> set[int]:
        return {s for steps in Tree(self.storage, None).steps.values() for s in steps}


def import_checkpoint(
    foreign: Foreign,
    target: Target,
    *,
    config: CheckpointConfig | None = None,
    clock: Clock | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> CommitRef:
    """Commit `foreign` to `target`, piece by piece. `progress` gets the bytes of each piece.

    The run is made if the root has none. The attempt is claimed only once all of the source has
    been read; if that fails, what was written by then is deleted again.

    Raises what `Target.check` does, and the errors of reading the source.
    """
    config, clock = config or CheckpointConfig(), clock or SystemClock()
    finish_newest(target.storage, clock, LogSink())  # what it would supersede for good
    parent = target.check()
    saved_at_s = clock.time()
    storage, pieces = target.storage, _Pieces(foreign, progress)
    epoch = next_epoch(storage)
    # Drawn at random: an import that was killed before it claimed this epoch may have left files.
    save_id = f"{secrets.randbelow(10**12):012d}"
    prefix = layout.data_prefix(epoch, target.step, save_id)
    with _nothing_left(storage, prefix):
        writer = ChunkWriter(storage, Placement(prefix, 0, pieces.kinds), config)
        writer.write_data(pieces.plan, pieces)
        attempt = _claim(storage, epoch, parent, clock)
    terms = SaveTerms(
        epoch=epoch,
        attempt_token=attempt.token,
        step=target.step,
        save_id=save_id,
        rank=0,
        world_size=1,
        plan_id=pieces.plan_id(),
        parent=parent,
        saved_at_s=saved_at_s,
        annotations={"imported_from": foreign.format},
    )
    written = Written(tuple(writer.files), writer.tensor_bytes)
    objects = seal_objects(encode_value(foreign.values), {})
    part = store_part(storage, terms, written, objects, config.digest)
    return commit_parts(storage, attempt, [part], clock)


class _Pieces(DefaultSavePlanner):
    """A plan of one item a piece, each read when the writer asks for it."""

    def __init__(self, foreign: Foreign, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._progress = progress
        self._pieces: dict[MetadataIndex, Piece] = {}
        self.kinds: dict[str, TensorKind] = {
            key: "sharded" if len(t.pieces) > 1 else "replicated"
            for key, t in foreign.tensors.items()
        }
        items = []
        for key, tensor in foreign.tensors.items():
            kind = WriteItemType.SHARD if len(tensor.pieces) > 1 else WriteItemType.TENSOR
            for n, piece in enumerate(tensor.pieces):
                index = MetadataIndex(key, piece.offsets, n)
                chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                properties = TensorProperties(dtype=torch_dtype(tensor.dtype))
                data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
                items.append(WriteItem(index, kind, tensor_data=data))
                self._pieces[index] = piece
        self.plan = SavePlan(items)

    def plan_id(self) -> str:
        return digest_of(
            canonical([[i.fqn, list(p.offsets), list(p.sizes)] for i, p in self._pieces.items()])
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor = self._pieces[write_item.index].load()
        self._progress(tensor.nbytes)
        return tensor


def _claim(
    storage: Storage, expected: int, parent: CommitRef | None, clock: Clock
) -> AttemptRecord:
    """Claim the epoch that the data was written for, now that all of it is there."""
    attempt = claim_epoch(storage, open_run(storage, clock), 1, parent, clock, epoch=expected)
    if attempt.epoch != expected:
        raise ConflictError(
            f"{storage.url}: another job began attempt {attempt.epoch - 1} during the import; import "
            f"into a root that nobody else writes to"
        )
    return attempt


@contextmanager
def _nothing_left(storage: Storage, prefix: str) -> Iterator[None]:
    """Deletes what its block wrote under `prefix`, which is nobody else's, if the block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(SidestageError):
            for info in list(storage.list(prefix)):
                storage.delete(info.key)
        raise
