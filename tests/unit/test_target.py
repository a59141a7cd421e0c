"""Matching a checkpoint with a state, on layouts made by hand."""

from __future__ import annotations

import torch

from ckpt.index import TensorInfo
from ckpt.target import Source, check
from ckpt.tree import FlatState, Leaf, Shard
from ckpt.values import TensorRef


def sharded(fqn: str, *shape: int) -> Leaf:
    zeros, tensor = (0,) * len(shape), torch.zeros(shape)
    return Leaf(fqn, "sharded", "float32", shape, (Shard(zeros, shape, tensor),), tensor)


def test_sharded_state_with_another_number_of_dimensions_is_named_as_wrong() -> None:
    flat = FlatState({"m": sharded("m", 4, 8)}, {"m": TensorRef("m")})
    stored = TensorInfo("m", "sharded", "float32", (4,), (((0,), (4,)),))
    found = check(flat, Source({"m": stored}, {"m": TensorRef("m")}, {}, True), [])
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith("m: the checkpoint has float32 [4], the state float32 [4, 8]")
