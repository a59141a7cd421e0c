"""The StorageReader: any commit, as `dcp.load` wants to see it."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt import nesting
from ckpt.catalog import Catalog
from ckpt.dcp.naming import checked_step
from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
)
from ckpt.index import TensorInfo
from ckpt.restore import CheckpointReader
from ckpt.storage import Root, storage_of
from ckpt.tree import torch_dtype
from ckpt.types import CommitRef
from ckpt.values import TensorRef, map_leaves, resolve


class DcpReader(StorageReader):
    """A StorageReader over a commit of a Sidestage root, whatever saved it.

    Tensors are read chunk by chunk, straight into place at any sharding, every byte checked. A
    dtype that differs is an error, not a cast. Per-rank parts (`PerRank`) are found under their
    key and the rank that saved them: "rng.generators.0.torch".

    Args:
        root: the run's root: a path (text or a pathlib.Path), a URL, or a Storage.
        step: which checkpoint; by default the latest. Also `checkpoint_id` of `dcp.load`. On
            several ranks name it if another job may commit at the same time: ranks that find
            different ones refuse.

    `dcp.load` raises DCP's CheckpointException; its `failures` hold the errors of this project:
    NotFoundError for a step, CorruptError for damage, BadInputError for a dtype.
    """

    def __init__(self, root: Root, step: int | None = None) -> None:
        super().__init__()
        self._root = root
        self._wanted = None if step is None else checked_step(step)
        self._open: _Opened | None = None
        self._problem: SidestageError | None = None

    @property
    def step(self) -> int | None:
        """The step that is being read, once `dcp.load` has begun."""
        return self._open.reader.record.step if self._open else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._open = None
        if checkpoint_id is not None:
            self._wanted = checked_step(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """DCP's description of the checkpoint. One that can't be read raises at its first use.

        DCP takes an error here for a sign to look for another kind of metadata, and loses its class.
        """
        try:
            self._problem = None
            self._open = _Opened(self._root, self._wanted)
        except SidestageError as e:
            self._problem = e
            return _Unreadable(e)
        return self._open.metadata()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._opened().ref)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        refs = {p.storage_data for p in plans if isinstance(p.storage_data, CommitRef)}
        if len(refs) > 1:
            steps = sorted({f"{r.epoch}/{r.step}" for r in refs})
            raise ConflictError(
                f"the ranks found different checkpoints ({', '.join(steps)}): one was committed in "
                f"between; pass step= to DcpReader"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        opened = self._opened()
        opened.asked([item.storage_index.fqn for item in plan.items])
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, opened.stream(item.storage_index.fqn))
                continue
            target = planner.resolve_tensor(item).detach()
            opened.fill(item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never guessed from a path

    def _opened(self) -> _Opened:
        if self._open is None:
            raise BadInputError("DcpReader: read_metadata() comes first, as in dcp.load")
        return self._open


class _Opened:
    """A commit open for reading under DCP's keys."""

    def __init__(self, root: Root, step: int | None) -> None:
        storage = storage_of(root, must_exist=True)
        catalog = Catalog(storage)
        found = catalog.latest() if step is None else catalog.find(step)
        if found is None:
            catalog.run()
            raise NotFoundError(
                f"{storage.url}: no checkpoint exists yet or verifies; see `ckpt ls`"
            )
        if found.record is None:
            raise CorruptError(f"step {found.ref.step}: {found.problem}")
        self.ref = found.ref
        self.reader = reader = CheckpointReader(storage, found.record)
        per_rank = [reader.per_rank_values(rank) for rank in range(found.record.world_size)]
        tree = nesting.state_tree(reader.values(), per_rank, reader.tensors)
        self._named = nesting.flattened(tree)
        self._numbered = nesting.flattened(nesting.numbered_optimizers(tree))
        self._flat = {**self._numbered, **self._named}

    def metadata(self) -> Metadata:
        entries = {key: self._entry(leaf) for key, (_, leaf) in self._named.items()}
        by_number = {
            key: self._entry(leaf)
            for key, (_, leaf) in self._numbered.items()
            if key not in entries
        }
        paths = {key: path for key, (path, _) in self._named.items()}
        return Metadata(_Entries(entries, by_number), paths)

    def _entry(self, leaf: Any) -> STORAGE_TYPES:
        if isinstance(leaf, TensorRef):
            return _tensor_metadata(self.reader.info(leaf.fqn))
        return BytesStorageMetadata()

    def asked(self, keys: Collection[str]) -> None:
        """What a plan reads: whoever asks for an optimizer's state by number gets numbers in its groups."""
        if any(key not in self._named for key in keys):
            self._flat = {**self._named, **self._numbered}

    def stream(self, key: str) -> io.BytesIO:
        """What DCP unpickles for an object: made here of plain values, and tensors that were checked."""

        def load(_: str, leaf: Any) -> Any:
            return self.reader.read(leaf.fqn) if isinstance(leaf, TensorRef) else leaf

        out = io.BytesIO()
        torch.save(resolve(map_leaves(self._flat[key][1], load), key), out)
        out.seek(0)
        return out

    def fill(self, item: ReadItem, target: torch.Tensor) -> None:
        leaf = self._flat[item.storage_index.fqn][1]
        corner = item.storage_index.offset or torch.Size([0] * len(item.lengths))
        offsets = [a + b for a, b in zip(corner, item.storage_offsets, strict=True)]
        if tuple(target.shape) != tuple(item.lengths):
            raise BadInputError(
                f"{item.dest_index.fqn}: the target is {list(target.shape)}, to read are "
                f"{list(item.lengths)}"
            )
        self.reader.read_into(leaf.fqn, target, offsets)


class _Entries(dict[str, STORAGE_TYPES]):
    """What a checkpoint has by name. The state of optimizers is found by number too, as torch has it."""

    def __init__(
        self, entries: Mapping[str, STORAGE_TYPES], by_number: Mapping[str, STORAGE_TYPES]
    ) -> None:
        super().__init__(entries)
        self._by_number = by_number

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._by_number

    def __missing__(self, key: str) -> STORAGE_TYPES:
        return self._by_number[key]


class _Unreadable(Metadata):
    """Metadata of a checkpoint that couldn't be opened: looking into it raises why."""

    def __init__(self, problem: SidestageError) -> None:
        self._problem = problem

    @property
    def state_dict_metadata(self) -> dict[str, STORAGE_TYPES]:  # type: ignore[override]
        raise self._problem


def _tensor_metadata(info: TensorInfo) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in info.boxes]
    properties = TensorProperties(dtype=torch_dtype(info.dtype))
    return TensorStorageMetadata(properties, torch.Size(info.shape), chunks)
