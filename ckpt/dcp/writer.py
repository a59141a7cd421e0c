"""The StorageWriter: what `dcp.save` hands over becomes a commit."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt import nesting
from ckpt.commit import check_not_superseded, claim_epoch, open_run
from ckpt.config import CheckpointConfig
from ckpt.dcp.naming import checked_step
from ckpt.digest import digest_of
from ckpt.errors import BadInputError
from ckpt.events import LogSink
from ckpt.finish import finish_newest
from ckpt.index import TensorKind
from ckpt.manifest import AttemptRecord, canonical
from ckpt.receipts import (
    Part,
    SaveTerms,
    Written,
    commit_parts,
    continued,
    seal_objects,
    store_part,
)
from ckpt.storage import Root, storage_of
from ckpt.tree import PerRank, dtype_name, leaf_of
from ckpt.types import Clock, CommitRef, Json, SystemClock
from ckpt.values import TensorRef, decode_value, encode_value, map_leaves
from ckpt.writer import ChunkWriter, Placement

_EMPTY = encode_value({})
_DROPPED = (
    "this planner drops the storage_data of plans, which must be kept; use DefaultSavePlanner"
)


@dataclass(frozen=True)
class _Report:
    """What one rank tells the coordinator: its files, its objects as JSON, elements by tensor.

    `part` is None on the coordinator, whose receipt waits for everybody's objects.
    """

    terms: SaveTerms
    written: Written
    values: dict[str, Json]
    elements: dict[str, int]
    part: Part | None


class DcpWriter(StorageWriter):
    """A StorageWriter whose saves are commits of a Sidestage root.

    One writer may save many times, given the step as `checkpoint_id` of `dcp.save`; all its saves
    are one attempt. Wait for an `async_save` before the next. `dcp.save` returns metadata
    whose `storage_data` is the commit's (epoch, step, digest) as a dict, on every rank.

    Args:
        root: the run's root: a path (text or a pathlib.Path), a URL, or a Storage. The run is
            made by its first save.
        step: of the next save. Above the step that it continues.
        onto: the step that the first save continues; later ones become abandoned. Without it,
            the latest.
        config: chunk size, digest and compression.
        annotations: strings that every commit carries.

    `dcp.save` raises DCP's CheckpointException; its `failures` hold the errors of this project:
    BadInputError naming the key of what can't be stored or of a step that doesn't rise,
    ConflictError if a newer attempt owns the root.
    """

    def __init__(  # noqa: PLR0913 - keyword-only, and all have defaults
        self,
        root: Root,
        step: int | None = None,
        *,
        onto: int | None = None,
        config: CheckpointConfig | None = None,
        annotations: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__()
        self._storage = storage_of(root)
        self._step = None if step is None else checked_step(step)
        self._onto = onto
        self._config = config or CheckpointConfig()
        self._annotations = dict(annotations or {})
        self._clock = clock or SystemClock()
        # The coordinator's alone:
        self._attempt: AttemptRecord | None = None
        self._parent: CommitRef | None = None
        self._saves = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = checked_step(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise BadInputError(
                "use_collectives=False saves each rank by itself, which is no checkpoint of a run; "
                "leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._step is None:
            raise BadInputError("DcpWriter: no step; give it here or as checkpoint_id of dcp.save")
        if not plan.usable:
            raise BadInputError(
                "the planner's enable_plan_caching hands over the plan of an earlier save; turn it off"
            )
        for item in plan.items:
            if item.tensor_data is not None:
                dtype_name(item.index.fqn, item.tensor_data.properties.dtype)
        items = [i for i in plan.items if not _is_empty_shard(i)]
        return replace(plan, items=items, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: claim this job's epoch at its first save, and say where to write."""
        steps = sorted({p.storage_data for p in plans if isinstance(p.storage_data, int)})
        if not steps:
            raise BadInputError(_DROPPED)
        if len(steps) > 1:
            raise BadInputError(f"the ranks save different steps: {', '.join(map(str, steps))}")
        attempt = self._begin(steps[0], len(plans))
        self._saves += 1
        terms = SaveTerms(
            epoch=attempt.epoch,
            attempt_token=attempt.token,
            step=steps[0],
            save_id=f"{self._saves:06d}",
            rank=0,
            world_size=len(plans),
            plan_id=digest_of(canonical([[_place(i) for i in p.items] for p in plans])),
            parent=self._parent,
            saved_at_s=self._clock.time(),
            annotations=self._annotations,
        )
        return [replace(p, storage_data=replace(terms, rank=n)) for n, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        terms = plan.storage_data
        if not isinstance(terms, SaveTerms):
            raise BadInputError(_DROPPED)
        objects = [i for i in plan.items if i.type == WriteItemType.BYTE_IO]
        tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
        values = {i.index.fqn: _encoded(planner, i) for i in objects}
        kinds: dict[str, TensorKind] = {
            i.index.fqn: "sharded" if i.type == WriteItemType.SHARD else "replicated"
            for i in tensors
        }
        placement = Placement(terms.prefix, terms.rank, kinds)
        writer = ChunkWriter(self._storage, placement, self._config)
        results = writer.write_data(SavePlan(tensors), _HostPlanner(planner)).wait()
        written = Written(tuple(writer.files), writer.tensor_bytes)
        elements: dict[str, int] = {}
        for item in tensors:
            assert item.tensor_data is not None
            count = math.prod(item.tensor_data.chunk.sizes)
            elements[item.index.fqn] = elements.get(item.index.fqn, 0) + count
        part = None
        if terms.rank != 0:
            part = store_part(
                self._storage, terms, written, seal_objects(_EMPTY, {}), self._config.digest
            )
        report = _Report(terms, written, values, elements, part)
        done: Future[list[WriteResult]] = Future()
        # The chunk entries stay here: the index has them, and gathering millions would take minutes.
        done.set_result(
            [
                *(replace(r, storage_data=None) for r in results),
                WriteResult(MetadataIndex(f"rank {terms.rank}"), 0, report),
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, with every rank's part on storage: commit, create-only."""
        reports = [rank[-1].storage_data for rank in results]
        mine: _Report = reports[0]
        values = {k: v for r in reports for k, v in r.values.items()}
        _check_complete(metadata, values, reports)
        attempt = self._attempt
        assert attempt is not None
        tree = _tree(metadata, values)
        objects = seal_objects(encode_value(tree), {})
        first = store_part(self._storage, mine.terms, mine.written, objects, self._config.digest)
        parts = [first, *(r.part for r in reports[1:] if r.part is not None)]
        self._parent = commit_parts(self._storage, attempt, parts, self._clock)
        metadata.storage_data = asdict(self._parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # never guessed from a path

    def _begin(self, step: int, world_size: int) -> AttemptRecord:
        """This writer's attempt; its first save claims it. Checks that the step rises."""
        if self._attempt is None:
            finish_newest(self._storage, self._clock, LogSink())
            self._parent = continued(self._storage, step, self._onto)
            run = open_run(self._storage, self._clock)
            self._attempt = claim_epoch(self._storage, run, world_size, self._parent, self._clock)
        elif self._parent is not None and step <= self._parent.step:
            raise BadInputError(
                f"step {step} isn't above step {self._parent.step}, which this writer saved last"
            )
        check_not_superseded(self._storage, self._attempt)
        return self._attempt


class _HostPlanner(DefaultSavePlanner):
    """Another planner's tensors as the chunk writer takes them: dense, detached, in host memory."""

    def __init__(self, planner: SavePlanner) -> None:
        super().__init__()
        self._planner = planner

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor = self._planner.resolve_data(write_item)
        if not isinstance(tensor, torch.Tensor):
            raise BadInputError(f"{write_item.index.fqn}: its planner gives no tensor")
        (shard,) = leaf_of(write_item.index.fqn, tensor, per_rank=False).shards
        return shard.tensor.cpu().resolve_conj().resolve_neg()


def _is_empty_shard(item: WriteItem) -> bool:
    """A shard without elements could share its offset with a real one and win the deduplication."""
    data = item.tensor_data
    return data is not None and not math.prod(data.chunk.sizes) and math.prod(data.size) > 0


def _place(item: WriteItem) -> list[Json]:
    data = item.tensor_data
    box = None if data is None else [list(data.chunk.offsets), list(data.chunk.sizes)]
    return [item.index.fqn, box]


def _encoded(planner: SavePlanner, item: WriteItem) -> Json:
    """The JSON node of an object, taken as it is and not as the pickle that DCP would make of it."""
    key = item.index.fqn
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise BadInputError(
            f"{key}: {type(planner).__name__} gives objects only as pickles; use DefaultSavePlanner or "
            f"one that derives from it"
        )

    def check(path: str, leaf: Any) -> None:
        if isinstance(leaf, PerRank):
            raise BadInputError(
                f"{path}: stock DCP keeps one rank's PerRank and drops the others; save it with "
                f"Checkpointer, or under a key of its own for each rank"
            )
        if isinstance(leaf, torch.Tensor):
            raise BadInputError(
                f"{path}: DCP takes a tensor in a tuple for a part of an object; put it into a dict or list"
            )

    value = look_up(item.index)
    map_leaves(value, check, key)
    return encode_value(value, key)


def _check_complete(metadata: Metadata, values: dict[str, Json], reports: list[_Report]) -> None:
    """Every element of every tensor and every object was written by somebody."""
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            if key not in values:
                raise BadInputError(f"{key}: no rank wrote this object")
            continue
        count = sum(r.elements.get(key, 0) for r in reports)
        if count != math.prod(entry.size):
            raise BadInputError(
                f"{key}: the ranks wrote {count} of the {math.prod(entry.size)} elements of "
                f"{list(entry.size)}; every shard must be in some rank's state"
            )


def _tree(metadata: Metadata, values: dict[str, Json]) -> dict[Any, Any]:
    """The state as it was nested, with a TensorRef for each tensor."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    flat = {
        key: (
            tuple(paths.get(key, (key,))),
            decode_value(values[key], key) if key in values else TensorRef(key),
        )
        for key in metadata.state_dict_metadata
    }
    return dict(nesting.number_optimizer_state(nesting.nested(flat)))
