from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import BadInputError, CorruptError
from ckpt.manifest import seal, unseal
from ckpt.values import (
    PerRankRef,
    TensorRef,
    decode_value,
    encode_value,
    iter_leaves,
    map_leaves,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    text,
    st.binary(max_size=20),
    st.builds(TensorRef, text),
    st.builds(PerRankRef, text),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(text | st.integers(), inner, max_size=4),
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down: 1 is not 1.0, nor True, nor a list a tuple."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(
            type(x) is type(y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b)


def through_storage(value: Any) -> Any:
    data = seal("objects", {"values": encode_value(value)})
    return decode_value(unseal("objects", data, "k")["values"], "k")


@given(values)
def test_round_trip(value: Any) -> None:
    assert same(through_storage(value), value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(through_storage(math.nan))
    assert through_storage([math.inf, -math.inf]) == [math.inf, -math.inf]


def test_other_dicts_come_back_as_dict() -> None:
    for value in (OrderedDict(a=1), defaultdict(int, a=1)):
        assert same(through_storage(value), {"a": 1})


def test_keys_of_one_spelling_keep_apart() -> None:
    assert same(through_storage({1: "int", "1": "str"}), {1: "int", "1": "str"})


def test_keys_of_our_own_tags_are_only_data() -> None:
    value = {"$": "tensor", "v": "x", "nested": {"$": "dict", "v": []}}
    assert same(through_storage(value), value)


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, object()]}, r"a\.1: a builtins.object can't be stored without running code"),
        ({"a": {"b": {1, 2}}}, r"a\.b: a builtins.set"),
        ({"a": 1 + 2j}, "a: a builtins.complex"),
        ({"a": Colour.RED}, r"a: a tests.unit.test_values.Colour"),
        ({"a": Words("x")}, "Words"),
        ({"a": bytearray(b"x")}, "bytearray"),
        ({"a": len}, "builtin_function_or_method"),
        ({"a": {(1, 2): 3}}, r"a: key \(1, 2\) is a tuple"),
        ({"a": {True: 3}}, "key True is a bool"),
        ({"a": {None: 3}}, "key None is a NoneType"),
        ({"a": "half \ud800"}, "a: a string that isn't valid Unicode"),
        ({"a": {"half \ud800": 1}}, "a: key: a string that isn't valid Unicode"),
        ({"a": 1 << 20_000}, "a: an integer of 20001 bits"),
        (object(), "^value: a builtins.object"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        encode_value(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(BadInputError, match="nested more than 200 deep"):
        encode_value(value)


def test_the_deepest_allowed_value_can_be_stored() -> None:
    value: Any = "leaf"
    for _ in range(200):
        value = {"k": value}
    assert through_storage(value) == value


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"$": "float"},
        {"$": "float", "v": "1.5"},
        {"$": "float", "v": ["nan"]},
        {"$": "bytes", "v": "not base64!"},
        {"$": "bytes", "v": "é"},
        {"$": "bytes", "v": 5},
        {"$": "tensor", "v": 5},
        {"$": "per_rank", "v": None},
        {"$": "tuple", "v": "abc"},
        {"$": "tuple", "v": {"a": 1}},
        {"$": "tuple", "v": 5},
        {"$": "dict", "v": {}},
        {"$": "dict", "v": ["ab"]},
        {"$": "dict", "v": [["a"]]},
        {"$": "dict", "v": [["a", 1, 2]]},
        {"$": "dict", "v": [[1.5, 1]]},
        {"$": "dict", "v": [[True, 1]]},
        {"$": "dict", "v": [[["a"], 1]]},
        {"$": "dict", "v": [["a", 1], ["a", 2]]},
        {"$": "set", "v": []},
        {"$": ["dict"], "v": []},
        {"$": "pickle", "v": "gASVAAAA"},
        {"$": "dict", "v": [], "more": 1},
        {"plain": "object"},
        object(),
    ],
)
def test_what_is_no_node_is_corrupt(node: Any) -> None:
    for wrapped in (node, [node], {"$": "tuple", "v": [node]}, {"$": "dict", "v": [["k", node]]}):
        with pytest.raises(CorruptError, match=r"^some/key: "):
            decode_value(wrapped, "some/key")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "v", "x"]), inner, max_size=3),
        st.fixed_dictionaries(
            {"$": st.sampled_from(["dict", "tuple", "bytes", "float", "tensor"]), "v": inner}
        ),
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_json_decodes_or_is_corrupt(node: Any) -> None:
    try:
        value = decode_value(node, "k")
    except CorruptError:
        return
    # What decodes is a value of ours: it can be stored again and comes back the same.
    assert same(decode_value(encode_value(value), "k"), value)


@pytest.mark.parametrize("wrap", [lambda n: [n], lambda n: {"$": "tuple", "v": [n]}])
def test_nesting_bombs_are_corrupt(wrap: Any) -> None:
    node: Any = None
    for _ in range(400):
        node = wrap(node)
    with pytest.raises(CorruptError, match="nested more than 200 deep"):
        decode_value(node, "k")


def test_messages_stay_short_however_large_the_node() -> None:
    with pytest.raises(CorruptError) as caught:
        decode_value({"x": json.loads("[" * 500 + "]" * 500), "y": "z" * 10_000}, "k")
    assert len(str(caught.value)) < 300


def test_leaves() -> None:
    value = {"a": [1, (2, {"b": 3})], "e": {}, 5: [], "t": ()}
    assert list(iter_leaves(value)) == [
        ("a.0", 1),
        ("a.1.0", 2),
        ("a.1.1.b", 3),
        ("e", {}),
        ("5", []),
        ("t", ()),
    ]
    assert map_leaves(value, lambda path, leaf: f"{path}={leaf}") == {
        "a": ["a.0=1", ("a.1.0=2", {"b": "a.1.1.b=3"})],
        "e": {},
        5: [],
        "t": (),
    }
