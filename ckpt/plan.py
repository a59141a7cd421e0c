"""Which rank writes which shard: planned once per schema on the main thread.

DCP's planner lists what a rank has. Who writes what several have is decided here, by DCP's rule:
its own code for that makes many objects of each shard, and a large job has a million shards.
DCP's own plan cache is keyed by class name and ignores dtypes. This one is keyed by names,
dtypes, shapes, shards and world size, and it caches layout only, never tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
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
from ckpt.index import Box, find_overlap
from ckpt.manifest import canonical
from ckpt.replicas import UNLIKE, content_digest
from ckpt.tree import FlatState, Leaf, Shard

Payload = dict[str, Any]
Decide = Callable[[Payload, Callable[[list[Payload]], Any]], Any]
"""decide(mine, rule): on every rank, rank 0's rule over all ranks' payloads."""


@dataclass(frozen=True)
class RankPlan:
    """What this rank writes of a state with schema `key`. `plan_id` is the same on all ranks."""

    key: str
    plan_id: str
    plan: SavePlan


def schema_key(flat: FlatState, world_size: int) -> str:
    """Digest of everything that a plan depends on on this rank."""
    leaves: list[Any] = [[n, *_leaf_schema(flat, n)] for n in sorted(flat.leaves)]
    return digest_of(canonical([world_size, leaves]))


def make_plan(
    flat: FlatState, rank: int, world_size: int, decide: Decide, led: Collection[str] = ()
) -> RankPlan:
    """Plan a save. Collective over the job's store: every rank calls it for the same save.

    led: keys of replicated tensors that may differ, since rank 0's count.

    Replicated tensors are written by the lowest rank that has them. Raises BadInputError on
    every rank, naming the key, where ranks disagree on a tensor's shape or dtype, hold different
    values of what should be replicated, or leave a part of a tensor to nobody.
    """
    items = [i for i in _local_items(flat) if not _is_empty_shard(i)]
    leaves: Payload = {n: [x.kind, x.dtype, *x.shape] for n, x in flat.leaves.items()}
    listed = [_listed(i) for i in items]
    mine: Payload = {
        "leaves": leaves,
        "replicas": {
            n: content_digest(x.shards[0].tensor)  # once per schema, not at every save
            for n, x in flat.leaves.items()
            if x.kind == "replicated" and n not in led
        },
        "items": listed,
        "digest": digest_of(canonical([leaves, listed])),
    }
    answer = decide(mine, _global_plan)
    kept = [items[k] for k in answer["keep"][rank]]
    return RankPlan(schema_key(flat, world_size), answer["plan_id"], SavePlan(kept))


def _global_plan(payloads: list[Payload]) -> Payload:
    """Rank 0's part: check that the ranks agree; the lowest rank that has a shard writes it.

    `keep` are the positions of its items that each rank writes.
    """
    shapes = _check_agreement(payloads)
    boxes: dict[str, list[Box]] = {fqn: [] for fqn in shapes}
    taken: set[tuple[Any, ...]] = set()
    keep = []
    for p in payloads:
        mine = []
        for k, (fqn, *numbers) in enumerate(p["items"]):
            ndim = len(numbers) // 2
            offsets = tuple(numbers[:ndim])
            if (fqn, offsets) in taken:
                continue
            taken.add((fqn, offsets))
            boxes[fqn].append((offsets, tuple(numbers[ndim:])))
            mine.append(k)
        keep.append(mine)
    for fqn, of_tensor in boxes.items():
        _check_whole(fqn, shapes[fqn], of_tensor)
    return {"keep": keep, "plan_id": digest_of(canonical([[p["digest"] for p in payloads], keep]))}


def _check_agreement(payloads: list[Payload]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors; BadInputError where two ranks see a tensor differently."""
    seen: dict[str, tuple[int, list[Any], str | None]] = {}
    for rank, p in enumerate(payloads):
        for fqn, leaf in p["leaves"].items():
            replica = p["replicas"].get(fqn)
            first, known, content = seen.setdefault(fqn, (rank, leaf, replica))
            if known != leaf:
                raise BadInputError(
                    f"{fqn}: rank {first} has {_described(known)}, rank {rank} has "
                    f"{_described(leaf)}; wrap it in PerRank if each rank has its own"
                )
            if content != replica:
                raise BadInputError(
                    f"{fqn}: ranks {first} and {rank} hold different values of this plain tensor; {UNLIKE}"
                )
    return {fqn: tuple(leaf[2:]) for fqn, (_, leaf, _) in seen.items()}


def _check_whole(fqn: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """The ranks' shards of a tensor hold each of its elements once."""
    for offsets, sizes in boxes:
        if any(o < 0 or o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)):
            raise BadInputError(f"{fqn}: a shard at {offsets} of {sizes} is outside shape {shape}")
    if pair := find_overlap(boxes):
        raise BadInputError(f"{fqn}: the ranks' shards overlap: {pair[0]} and {pair[1]}")
    held, total = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held != total:
        raise BadInputError(
            f"{fqn}: the ranks' shards hold {held} of {total} elements of {shape}; "
            f"does each rank give its own shards?"
        )


def _described(leaf: list[Any]) -> str:
    kind, dtype, *shape = leaf
    return f"{dtype} {shape} ({kind})"


def _local_items(flat: FlatState) -> list[WriteItem]:
    """What DCP's planner lists for this rank's tensors.

    Of DTensors it would make the same from the shards that are known here, after allocating as
    many numbers as each has rows. Of parts of a whole it knows nothing.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    ours = {
        n
        for n, x in flat.leaves.items()
        if x.kind == "sharded" and not isinstance(x.source, ShardedTensor)
    }
    plain = {n: x.source for n, x in flat.leaves.items() if n not in ours}
    planner.set_up_planner(plain, None, False)
    items = list(planner.create_local_plan().items)
    for fqn, leaf in flat.leaves.items():
        if fqn in ours:
            items += [_item_of(fqn, leaf, shard) for shard in leaf.shards]
    return items


def _item_of(fqn: str, leaf: Leaf, shard: Shard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
    properties = TensorProperties(dtype=shard.tensor.dtype)
    return WriteItem(
        index=MetadataIndex(fqn, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(leaf.shape)),
    )


def _leaf_schema(flat: FlatState, fqn: str) -> list[Any]:
    leaf = flat.leaves[fqn]
    boxes = [[list(s.offsets), list(s.sizes)] for s in leaf.shards]
    return [leaf.kind, leaf.dtype, list(leaf.shape), boxes]


def _is_empty_shard(item: WriteItem) -> bool:
    """A shard without elements could share its offset with a real one and win the deduplication."""
    data = item.tensor_data
    assert data is not None
    return math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0


def _listed(item: WriteItem) -> list[Any]:
    """An item for rank 0: name, offsets, sizes. Flat, since there may be a million."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return [item.index.fqn, *chunk.offsets, *chunk.sizes]
