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


KEY = "m.t.weight"
STATE = "o.state.t.weight.t.momentum1"


def columns(rows: int, momentum: int, cut: bool) -> tuple[list[Leaf], list[TensorInfo]]:
    """A table of four columns, whole or in two halves, and its rowwise state."""
    zeros = torch.zeros
    boxes = (((0, 0), (rows, 2)), ((0, 2), (rows, 2))) if cut else (((0, 0), (rows, 4)),)
    shards = tuple(Shard(o, n, zeros(n)) for o, n in boxes)
    table = Leaf(KEY, "sharded", "float32", (rows, 4), shards, zeros(rows, 4))
    whole = Shard((0,), (momentum,), zeros(momentum))
    state = Leaf(STATE, "sharded", "float32", (momentum,), (whole,), zeros(momentum))
    infos = [
        TensorInfo(KEY, "sharded", "float32", (rows, 4), boxes),
        TensorInfo(STATE, "sharded", "float32", (momentum,), (((0,), (momentum,)),)),
    ]
    return [table, state], infos


def fitted(was: int, here: int, *, cut: bool, cut_here: bool, terms: RestoreTerms) -> list[str]:
    leaves, _ = columns(here, here * (2 if cut_here else 1), cut_here)
    _, infos = columns(was, was * (2 if cut else 1), cut)
    tree = {"m": {"t.weight": TensorRef(KEY)}, STATE: TensorRef(STATE)}
    flat = FlatState({x.fqn: x for x in leaves}, tree)
    source = Source({i.fqn: i for i in infos}, tree, {}, True)
    return plan_restore(flat, source, terms, Canonical()).wrong


def test_rowwise_state_of_column_shards_is_not_resized() -> None:
    """Its second half begins elsewhere: what is common by position belongs to other rows."""
    terms = RestoreTerms(rows=(KEY, STATE))
    assert fitted(4, 6, cut=False, cut_here=False, terms=terms) == []
    (said,) = fitted(4, 6, cut=True, cut_here=True, terms=terms)
    assert said.startswith(f"{STATE}: rowwise state of {KEY}")
    assert fitted(4, 4, cut=True, cut_here=True, terms=terms) == []


def test_what_a_refusal_of_another_cut_advises_can_be_done() -> None:
    again = RestoreTerms(exclude=(STATE,))
    assert len(fitted(4, 4, cut=False, cut_here=True, terms=RestoreTerms())) > 0
    assert fitted(4, 4, cut=False, cut_here=True, terms=again) == []


def test_a_managed_collision_is_not_resized() -> None:
    key = "m.mc.clicks._mch_sorted_raw_ids"
    flat = FlatState({key: sharded(key, 6)}, {key: TensorRef(key)})
    stored = TensorInfo(key, "sharded", "float32", (4,), (((0,), (4,)),))
    source = Source({key: stored}, {key: TensorRef(key)}, {}, True)
    (said,) = plan_restore(flat, source, RestoreTerms(rows=("*",)), Canonical()).wrong
    assert said == f"{key}: the checkpoint has float32 [4], the state float32 [6]"
