"""Rank 0's decision about who writes what, from what the ranks say they have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import dedup_save_plans
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckpt.errors import BadInputError
from ckpt.plan import _global_plan

Boxes = list[tuple[list[int], list[int]]]


def payload(boxes: Boxes, shape: tuple[int, ...] = (4, 2), **more: Any) -> dict[str, Any]:
    """What a rank says that has these boxes of one tensor."""
    return {
        "leaves": {"t": ["sharded", "float32", *shape]},
        "replicas": {},
        "items": [["t", *offsets, *sizes] for offsets, sizes in boxes],
        "digest": str(boxes),
        **more,
    }


def refusal(*ranks: dict[str, Any]) -> str:
    with pytest.raises(BadInputError) as e:
        _global_plan(list(ranks))
    return str(e.value)


TOP, BOTTOM = ([0, 0], [2, 2]), ([2, 0], [2, 2])


def test_the_lowest_rank_that_has_a_shard_writes_it() -> None:
    plan = _global_plan([payload([BOTTOM]), payload([TOP, BOTTOM]), payload([TOP])])
    assert plan["keep"] == [[0], [0], []]


def test_scalars_and_empty_tensors_are_written_once() -> None:
    def rank() -> dict[str, Any]:
        leaves = {"s": ["replicated", "int64"], "e": ["replicated", "float32", 0, 3]}
        return {"leaves": leaves, "replicas": {}, "items": [["s"], ["e", 0, 0, 0, 3]], "digest": ""}

    assert _global_plan([rank(), rank()])["keep"] == [[0, 1], []]


def test_the_plan_is_named_by_what_each_rank_has_and_writes() -> None:
    def name(*ranks: Boxes) -> str:
        plan_id: str = _global_plan([payload(b) for b in ranks])["plan_id"]
        return plan_id

    assert name([TOP], [BOTTOM]) == name([TOP], [BOTTOM])
    assert len({name([TOP], [BOTTOM]), name([BOTTOM], [TOP]), name([TOP, BOTTOM], [])}) == 3


def test_shards_that_dont_make_a_whole_tensor_are_refused_by_name() -> None:
    assert "t: the ranks' shards hold 4 of 8 elements of (4, 2)" in refusal(payload([TOP]))
    assert "hold 0 of 8" in refusal(payload([]), payload([]))
    assert "t: a shard at (2, 0) of (3, 2) is outside shape (4, 2)" in refusal(
        payload([TOP]), payload([([2, 0], [3, 2])])
    )
    assert "t: the ranks' shards overlap: ((0, 0), (2, 2)) and ((1, 0), (3, 2))" in refusal(
        payload([TOP]), payload([([1, 0], [3, 2])])
    )


def test_ranks_that_see_a_tensor_differently_are_named() -> None:
    other = payload([BOTTOM], leaves={"t": ["sharded", "float16", 4, 2]})
    assert "t: rank 0 has float32 [4, 2] (sharded), rank 1 has float16 [4, 2] (sharded)" in refusal(
        payload([TOP]), other
    )
    a, b = (payload([TOP, BOTTOM], replicas={"t": digest}) for digest in "ab")
    assert "t: ranks 0 and 1 hold different values" in refusal(a, b)


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=5))
def test_duplicates_are_dropped_as_dcp_drops_them(owned: list[set[int]]) -> None:
    """Each of six rows is held by some ranks; those that nobody has go to rank 0."""
    owned[0] |= set(range(6)) - set().union(*owned)
    ranks = [sorted(rows) for rows in owned]
    boxes: list[Boxes] = [[([row, 0], [1, 2]) for row in rows] for rows in ranks]
    keep = _global_plan([payload(b, (6, 2)) for b in boxes])["keep"]
    plans = [
        SavePlan([WriteItem(MetadataIndex("t", o), WriteItemType.BYTE_IO) for o, _ in b])
        for b in boxes
    ]
    theirs = dedup_save_plans(plans, save_to_lowest_rank=True)
    assert [[rows[k] for k in kept] for rows, kept in zip(ranks, keep, strict=True)] == [
        [item.index.offset[0] for item in plan.items]  # type: ignore[index]
        for plan in theirs
    ]
    assert sum(len(kept) for kept in keep) == 6
