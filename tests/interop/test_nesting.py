"""DCP's flat keys against nested trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt import nesting
from ckpt.errors import BadInputError, CorruptError
from ckpt.values import PerRankRef, TensorRef

names = st.text(alphabet="ab", max_size=2)
leaves = st.one_of(st.none(), st.integers(), names, st.builds(TensorRef, names))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(names, inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, trees, max_size=4))
def test_flattening_is_that_of_dcp(tree: dict[str, Any]) -> None:
    live = _with_tensors(tree)
    try:
        theirs = flatten_state_dict(live)[1]
    except ValueError:
        with pytest.raises(BadInputError, match="two parts of the state have this key"):
            nesting.flattened(tree)
        return
    ours = nesting.flattened(tree)
    assert {k: path for k, (path, _) in ours.items()} == theirs
    tree = nesting.nested(ours) if ours else {}
    for path, leaf in ours.values():
        place: Any = tree
        for part in path:
            place = place[part]
        assert place == leaf


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _with_tensors(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(v) for v in value)
    return torch.zeros(1) if isinstance(value, TensorRef) else value


def test_numbers_in_a_path_are_places_in_a_list() -> None:
    flat = {"a.0.x": (("a", 0, "x"), 1), "a.2": (("a", 2), 3), "b.0": (("b", "0"), 4)}
    assert nesting.nested(flat) == {"a": [{"x": 1}, None, 3], "b": {"0": 4}}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([("a",), ("a", "b")], "runs into that of another key"),
        ([("a", "b"), ("a",)], "runs into that of another key"),
        ([("a",), ("a",)], "runs into that of another key"),
        ([("a", 0), ("a", "b")], "neither a dict's nor a list's"),
        ([("a", 10**9)], "neither a dict's nor a list's"),
        ([(0,)], "the state is a list"),
        ([()], "no path"),
        ([("a", -1)], "no path"),
        ([("a", True)], "no path"),
        ([("a", ("b",))], "no path"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths: list[Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        nesting.nested({f"k{n}": (p, n) for n, p in enumerate(paths)})


def test_only_the_numbers_of_an_optimizers_parameters_become_integers() -> None:
    groups = [{"params": [0, 1], "lr": 0.1}, {"params": [12]}]
    tree = {
        "o": {"state": {"0": 1, "12": 2, "7": 3, "w": 4}, "param_groups": groups},
        "named": {"state": {"0": 1}, "param_groups": [{"params": ["0"]}]},
        "else": {"state": {"0": 1}},
    }
    numbered = nesting.number_optimizer_state(tree)
    assert numbered["o"]["state"] == {0: 1, 12: 2, "7": 3, "w": 4}
    assert numbered["named"] == tree["named"]
    assert numbered["else"] == tree["else"]


def test_a_state_tree_has_every_tensor_in_it_once() -> None:
    values = {"m": {"w": TensorRef("m.w")}, "rng": PerRankRef("rng")}
    per_rank = [{"rng": {"g": TensorRef("rng.g@0")}}, {"rng": 5}]
    tree = nesting.state_tree(values, per_rank, ["m.w", "rng.g@0", "loose.w"])
    assert tree == {
        "m": {"w": TensorRef("m.w")},
        "rng": {0: {"g": TensorRef("rng.g@0")}, 1: 5},
        "loose.w": TensorRef("loose.w"),
    }
    with pytest.raises(CorruptError, match=r"m\.w: the values name this tensor"):
        nesting.state_tree(values, per_rank, ["rng.g@0"])


def test_pruning_keeps_places_in_lists_and_drops_what_is_empty_by_it() -> None:
    ref = TensorRef
    tree = {
        "a": {"x": ref("1"), "y": ref("2")},
        "b": {"z": ref("2")},
        "c": [ref("2"), ref("1")],
        1: {},
    }
    assert nesting.pruned(tree, {"1"}) == {"a": {"x": ref("1")}, "c": [None, ref("1")], 1: {}}
