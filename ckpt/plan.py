"""Which rank writes which shard: DCP's planner, run once per schema on the main thread.

DCP's own plan cache is keyed by class name and ignores dtypes. This one is keyed by names,
dtypes, shapes, shards and world size, and it caches layout only, never tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

from ckpt.digest import digest_of
from ckpt.errors import BadInputError
from ckpt.manifest import canonical
from ckpt.tree import FlatState, Shard, host_bytes, torch_dtype

Payload = dict[str, Any]
Decide = Callable[[Payload, Callable[[list[Payload]], Any]], Any]
"""decide(mine, rule): on every rank, rank 0's rule over all ranks' payloads."""


@dataclass(frozen=True)
class RankPlan:
    """What this rank writes of a state with schema `key`. `plan_id` is the same on all ranks."""

    key: str
    plan_id: str
    plan: SavePlan

    def shards(self, flat: FlatState) -> list[Shard]:
        """The live shards of the plan's items, in their order."""
        return [_shard_of(flat, item) for item in self.plan.items]


def schema_key(flat: FlatState, world_size: int) -> str:
    """Digest of everything that a plan depends on on this rank."""
    leaves: list[Any] = [[n, *_leaf_schema(flat, n)] for n in sorted(flat.leaves)]
    return digest_of(canonical([world_size, leaves]))


def make_plan(flat: FlatState, rank: int, world_size: int, decide: Decide) -> RankPlan:
    """Plan a save. Collective over the job's store: every rank calls it for the same save.

    Replicated tensors are written by the lowest rank that has them. Raises BadInputError on
    every rank, naming the key, where ranks disagree on a tensor's shape or dtype, hold different
    values of what should be replicated, or leave a part of a tensor to nobody.
    """
    planner = _planner()
    planner.set_up_planner({n: leaf.source for n, leaf in flat.leaves.items()}, None, False)
    items = [i for i in planner.create_local_plan().items if not _is_empty_shard(i)]
    mine: Payload = {
        "leaves": {n: _leaf_schema(flat, n) for n in flat.leaves},
        "replicas": {
            n: _content(flat, n) for n, x in flat.leaves.items() if x.kind == "replicated"
        },
        "items": [_item_to_json(i) for i in items],
    }
    answer = decide(mine, _global_plan)
    kept = [items[k] for k in answer["keep"][rank]]
    return RankPlan(schema_key(flat, world_size), answer["plan_id"], SavePlan(kept))


def _global_plan(payloads: list[Payload]) -> Payload:
    """Rank 0's part: check that the ranks agree, then let DCP's planner drop the duplicates."""
    _check_agreement(payloads)
    plans = [SavePlan([_item_from_json(i) for i in p["items"]]) for p in payloads]
    positions = [{item.index: k for k, item in enumerate(plan.items)} for plan in plans]
    planner = _planner()
    planner.set_up_planner({}, None, True)
    try:
        global_plans, _ = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as e:
        raise BadInputError(f"the ranks' shards don't make whole tensors: {e}") from e
    keep = [
        [where[item.index] for item in plan.items]
        for plan, where in zip(global_plans, positions, strict=True)
    ]
    return {"keep": keep, "plan_id": digest_of(canonical([[p["items"] for p in payloads], keep]))}


def _check_agreement(payloads: list[Payload]) -> None:
    seen: dict[str, tuple[int, Any, str | None]] = {}
    for rank, p in enumerate(payloads):
        for fqn, (kind, dtype, shape, _) in p["leaves"].items():
            replica = p["replicas"].get(fqn)
            first, known, content = seen.setdefault(fqn, (rank, [kind, dtype, shape], replica))
            if known != [kind, dtype, shape]:
                raise BadInputError(
                    f"{fqn}: rank {first} has {known[1]} {known[2]} ({known[0]}), rank {rank} has "
                    f"{dtype} {shape} ({kind}); wrap it in PerRank if each rank has its own"
                )
            if content != replica:
                raise BadInputError(
                    f"{fqn}: ranks {first} and {rank} hold different values of this plain tensor; "
                    f"wrap it in PerRank if each rank has its own, else make them equal"
                )


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )


def _leaf_schema(flat: FlatState, fqn: str) -> list[Any]:
    leaf = flat.leaves[fqn]
    boxes = [[list(s.offsets), list(s.sizes)] for s in leaf.shards]
    return [leaf.kind, leaf.dtype, list(leaf.shape), boxes]


def _content(flat: FlatState, fqn: str) -> str:
    """Digest of a replicated tensor's values: done once per schema, not at every save."""
    tensor = flat.leaves[fqn].shards[0].tensor.resolve_conj().resolve_neg()
    return digest_of(host_bytes(tensor.contiguous().cpu()))


def _is_empty_shard(item: WriteItem) -> bool:
    """A shard without elements could share its offset with a real one and win the deduplication."""
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0


def _shard_of(flat: FlatState, item: WriteItem) -> Shard:
    offsets = tuple(item.index.offset or ())
    for shard in flat.leaves[item.index.fqn].shards:
        if shard.offsets == offsets and math.prod(shard.sizes) == math.prod(_sizes(item)):
            return shard
    raise BadInputError(f"{item.index.fqn}: no local shard at {offsets}; did its layout change?")


def _sizes(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.sizes)


def _item_to_json(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None
    dtype = str(data.properties.dtype).removeprefix("torch.")
    chunk = data.chunk
    return [
        item.index.fqn,
        item.type.name,
        list(chunk.offsets),
        list(chunk.sizes),
        list(data.size),
        dtype,
    ]


def _item_from_json(row: list[Any]) -> WriteItem:
    fqn, kind, offsets, sizes, size, dtype = row
    return WriteItem(
        index=MetadataIndex(fqn, offsets),
        type=WriteItemType[kind],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            properties=TensorProperties(dtype=torch_dtype(dtype)),
            size=torch.Size(size),
        ),
    )
