"""Matching a checkpoint with a state, on layouts made by hand."""

from __future__ import annotations

import pytest
import torch

from ckpt.canonical import Canonical
from ckpt.errors import CorruptError
from ckpt.index import TensorInfo
from ckpt.restore_plan import Source, plan_restore
from ckpt.terms import RestoreTerms
from ckpt.tree import FlatState, Leaf, Shard
from ckpt.values import TensorRef


def sharded(fqn: str, *shape: int) -> Leaf:
    zeros, tensor = (0,) * len(shape), torch.zeros(shape)
    return Leaf(fqn, "sharded", "float32", shape, (Shard(zeros, shape, tensor),), tensor)


def test_sharded_state_with_another_number_of_dimensions_is_named_as_wrong() -> None:
    flat = FlatState({"m": sharded("m", 4, 8)}, {"m": TensorRef("m")})
    stored = TensorInfo("m", "sharded", "float32", (4,), (((0,), (4,)),))
    source = Source({"m": stored}, {"m": TensorRef("m")}, {}, True)
    found = plan_restore(flat, source, RestoreTerms(), Canonical())
    assert found.wrong == ["m: the checkpoint has float32 [4], the state float32 [4, 8]"]
    assert not found.pieces


def test_e30_values_that_name_a_tensor_which_no_index_has_are_corrupt() -> None:
    flat = FlatState({"m": sharded("m", 4)}, {"m": TensorRef("m")})
    source = Source({}, {"m": TensorRef("m")}, {}, True)
    with pytest.raises(CorruptError, match="m: its tensor m is in no index"):
        plan_restore(flat, source, RestoreTerms(), Canonical())


def test_e33_a_managed_collision_cut_elsewhere_is_refused_with_its_table() -> None:
    key = "m.mc.clicks._mch_sorted_raw_ids"
    tensor = torch.zeros(3)
    second = Leaf(key, "sharded", "float32", (6,), (Shard((3,), (3,), tensor),), tensor)

    def found(*boxes: tuple[tuple[int], tuple[int]]) -> list[str]:
        stored = TensorInfo(key, "sharded", "float32", (6,), boxes)
        tree = {"m": {"mc.clicks._mch_sorted_raw_ids": TensorRef(key)}}
        flat = FlatState({key: second}, tree)
        return plan_restore(
            flat, Source({key: stored}, tree, {}, True), RestoreTerms(), Canonical()
        ).wrong

    assert found(((0,), (3,)), ((3,), (3,))) == []
    (said,) = found(((0,), (6,)))
    assert "table clicks was cut into rows [0, 6), and is [3, 6) on this rank" in said
