"""The boxes of a DTensor are computed here without torch's list of all row numbers: the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.tree import leaf_of

PLACEMENTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((1,), (Shard(0),)),
    ((3,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((3,), (Replicate(),)),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 3), (Shard(1), Shard(0))),
    ((2, 3), (Shard(0), Shard(0))),
    ((2, 3), (Shard(1), Shard(1))),
    ((2, 3), (Replicate(), Shard(0))),
    ((2, 3), (Shard(1), Replicate())),
    ((2, 2, 2), (Shard(0), Shard(0), Shard(0))),
    ((2, 3), (_StridedShard(0, split_factor=3), Shard(0))),
]


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """As if this process were a rank of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(23, 10), (24, 12), (2, 10), (1, 1), (0, 4), (7, 2, 5)])
@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS)
def test_boxes_are_torchs(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    world = math.prod(mesh_shape)
    for rank in range(world):
        with rank_of(world, rank):
            mesh = init_device_mesh("cpu", mesh_shape)
            probe = DTensor.from_local(
                torch.empty(0), mesh, placements, run_check=False, shape=torch.Size(shape),
                stride=torch.empty(shape).stride(),
            )  # fmt: skip
            [want] = probe.__create_chunk_list__()
            value = DTensor.from_local(
                torch.rand(want.sizes), mesh, placements, run_check=False, shape=torch.Size(shape),
                stride=torch.empty(shape).stride(),
            )  # fmt: skip
            leaf = leaf_of("t", value, per_rank=False)
            [got] = leaf.shards
            assert (got.offsets, got.sizes) == (tuple(want.offsets), tuple(want.sizes))
            assert got.tensor.shape == want.sizes
            assert leaf.shape == shape


def test_describing_a_shard_of_many_rows_allocates_nothing_of_their_number() -> None:
    with rank_of(4, 1):
        mesh = init_device_mesh("cpu", (4,))
        rows = 1 << 40  # their numbers alone would take terabytes
        value = DTensor.from_local(
            torch.empty(1, 1).expand(rows // 4, 1), mesh, [Shard(0)], run_check=False,
            shape=torch.Size((rows, 1)), stride=(1, 1),
        )  # fmt: skip
        [shard] = leaf_of("t", value, per_rank=False).shards
        assert (shard.offsets, shard.sizes) == ((rows // 4, 0), (rows // 4, 1))
