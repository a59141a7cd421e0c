from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import io
import json
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import datetime
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt.tree  # noqa: F401 - a class of it is named
from ckpt.errors import BadInputError, CorruptError
from ckpt.manifest import seal, unseal
from ckpt.values import (
    Instance,
    PerRankRef,
    TensorRef,
    decode_value,
    encode_value,
    iter_leaves,
    map_leaves,
    resolve,
)
from tests.unit import kinds
from tests.unit.kinds import HASHABLE, OTHERS, Access, Colour, Key, Point, Progress, Stage, same

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
    st.sampled_from([*HASHABLE, *OTHERS]),
    st.floats(width=64),
)
keys = text | st.integers() | st.sampled_from(HASHABLE)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(text | st.integers(), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(deque),
        st.sets(st.sampled_from(HASHABLE), max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Progress, inner, inner),
    ),
    max_leaves=20,
)


def through_storage(value: Any) -> Any:
    data = seal("objects", {"values": encode_value(value)})
    return decode_value(unseal("objects", data, "k")["values"], "k")


@given(values)
def test_round_trip(value: Any) -> None:
    decoded = through_storage(value)
    assert encode_value(decoded) == encode_value(value)
    assert same(resolve(decoded), value)


@pytest.mark.parametrize("value", [*HASHABLE, *OTHERS], ids=lambda v: type(v).__name__)
def test_each_kind_comes_back_equal_in_type_and_value(value: Any) -> None:
    for v in (
        value,
        [value],
        {"k": value},
        {1.5: (value,)},
        Point(value),
        Progress(value),
        deque([value]),
    ):
        assert same(resolve(through_storage(v)), v)


@pytest.mark.parametrize("value", HASHABLE, ids=lambda v: type(v).__name__)
def test_each_hashable_kind_is_a_key_and_an_item_of_a_set(value: Any) -> None:
    for v in (
        {value: 1},
        {value},
        frozenset({(value,)}),
        Counter([value]),
        defaultdict(int, {value: 2}),
    ):
        assert same(resolve(through_storage(v)), v)


def test_an_order_that_has_no_meaning_is_in_no_text() -> None:
    """Ranks compare texts, and the order of a set of strings is its process's own."""
    first, second = {0}, {8}
    first.add(8)
    second.add(0)
    assert list(first) != list(second)
    assert encode_value(first) == encode_value(second)
    one, other = (np.full(1, 7, np.longdouble) for _ in range(2))
    other.view(np.uint8)[10:16] = 255  # what is between the elements isn't theirs
    assert encode_value(one) == encode_value(other)
    assert encode_value(one[0]) == encode_value(other[0])
    one, other = (np.zeros(1, kinds.STRUCTURE) for _ in range(2))
    other.view(np.uint8)[[0, 1, 4, 5]] = 255
    assert encode_value(one) == encode_value(other)
    assert encode_value(one[0]) == encode_value(other[0])


def test_arrays_come_back_as_ones_that_can_be_written() -> None:
    value = np.arange(3)
    value.flags.writeable = False
    back = through_storage(value)
    back[0] = 5
    assert back.tolist() == [5, 1, 2]


def test_other_mappings_are_stored_by_their_items() -> None:
    class Config(dict[str, int]):
        pass

    for value in (MappingProxyType({"a": 1}), Config(a=1)):
        assert same(through_storage(value), {"a": 1})


def test_no_code_runs_when_an_object_is_made() -> None:
    assert resolve(through_storage(Progress(3))).made == 1


def test_keys_of_one_spelling_keep_apart() -> None:
    assert same(through_storage({1: "int", "1": "str"}), {1: "int", "1": "str"})


def test_keys_of_our_own_tags_are_only_data() -> None:
    value = {"$": "tensor", "v": "x", "nested": {"$": "dict", "v": []}}
    assert same(through_storage(value), value)


class Words(str):
    __slots__ = ()


def made_here() -> Any:
    @dataclasses.dataclass
    class Local:
        x: Any

    return Local


def closed() -> io.BytesIO:
    value = io.BytesIO(b"x")
    value.close()
    return value


def tagged() -> Progress:
    value = Progress(1)
    value.note = "beside"  # type: ignore[attr-defined]
    return value


def unset() -> Progress:
    value = Progress(1)
    del value.step
    return value


Local = made_here()


@dataclasses.dataclass
class Fleeting:
    x: Any

    def __del__(self) -> None:
        RUN.append("__del__")


@dataclasses.dataclass
class Derived(list[Any]):
    x: Any = 1


@dataclasses.dataclass
class Watched:
    x: Any

    @property
    def x(self) -> Any:  # type: ignore[no-redef]
        return 1

    @x.setter
    def x(self, value: Any) -> None:
        RUN.append("setter")


@dataclasses.dataclass
class Saving:
    x: Any

    def state_dict(self) -> Any:
        return {"x": self.x}


RUN: list[str] = []
"""What code of a class has run."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, object()]}, r"a\.1: a builtins.object can't be stored without running code"),
        ({"a": {"b": {1, Words("x")}}}, r"a\.b: a .*Words can't be stored .*str\(value\)"),
        ({"a": Words("x")}, r"a: a .*Words can't .*store the str that it is"),
        ({"a": len}, "builtin_function_or_method .*store its name"),
        ({"a": lambda: 1}, "a: a builtins.function"),
        ({"a": (n for n in ())}, "a: a builtins.generator"),
        ({"a": threading.Lock()}, "a: a _thread.lock"),
        ({"a": sys.stdout.buffer}, r"a: a .*io\."),
        ({"a": memoryview(b"x")}, "a: a builtins.memoryview"),
        ({"a": int}, "a: a builtins.type"),
        ({"a": SimpleNamespace(x=1)}, "a: a types.SimpleNamespace"),
        ({"a": np.array([object()])}, r"a: numpy objects \(object\)"),
        ({"a": np.array([1, None])}, "a: numpy objects"),
        ({"a": np.zeros(1, [("x", "O")])}, "a: numpy objects"),
        ({"a": np.ma.masked_array([1])}, "a: a numpy.*MaskedArray"),
        ({"a": np.random.default_rng(0)}, "a: a numpy.random.*Generator"),
        ({"a": np.float64}, "a: a builtins.type"),
        ({"a": np.zeros(1, "V0")[:1].repeat(70_000)}, "a: an array of 70000 empty elements"),
        ({"a": np.zeros(1, [(("title", "x"), "i4")])}, "a: a numpy dtype with titles"),
        ({"a": torch.zeros(1)}, r"a: a torch\.Tensor can't .* and of tensors only dense ones"),
        ({"a": {1.5: torch.zeros(1)}}, r"a\.1\.5: a torch\.Tensor can't"),
        ({"a": {torch.zeros(1)}}, r"a: a torch\.Tensor can't"),
        ({"a": torch.Generator()}, "a: a torch.*Generator"),
        ({"a": torch.zeros(1, 2).max(0)}, "a: a torch.return_types.max can't .*tuple that it is"),
        ({"a": closed()}, "a: a closed BytesIO"),
        (
            {"a": tagged()},
            "a: a .*Progress can't be stored: it has attributes beside its fields .note",
        ),
        ({"a": unset()}, "a: a .*Progress can't be stored: its field step has no value"),
        ({"a": Local(1)}, "Local can't be stored: its class is made in a function"),
        ({"a": Fleeting(1)}, "Fleeting can't be stored: its class has a __del__"),
        ({"a": Derived()}, "Derived can't be stored: it derives from list"),
        ({"a": Watched(1)}, "Watched can't be stored: its field x is a property"),
        ({"a": {1.5: Saving(1)}}, r"a\.1\.5: a .*Saving can't be stored: it saves itself"),
        ({"a": defaultdict(lambda: 1)}, "a: a defaultdict that makes its values with"),
        ({"a": datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))}, "a: a time with a zoneinfo.ZoneInfo"),
        ({"a": functools.partial(int)}, "a: a functools.partial"),
        ({"a": Progress({"x": [object()]})}, r"a\.step\.x\.0: a builtins.object"),
        ({"a": Point(object())}, r"a\.x: a builtins.object"),
        ({"a": {(object(),): 3}}, r"a: key \(.*\.0: a builtins.object"),
        ({"a": "half \ud800"}, "a: a string that isn't valid Unicode"),
        ({"a": {"half \ud800": 1}}, "a: key: a string that isn't valid Unicode"),
        ({"a": 1 << 20_000}, "a: an integer of 20001 bits"),
        ({"a": range(1 << 20_000)}, "a: an integer of 20001 bits"),
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


def structure(**other: Any) -> Any:
    return {
        "names": ["a"],
        "formats": ["<i8"],
        "offsets": [0],
        "itemsize": 8,
        "align": False,
        **other,
    }


def nested_dtype(depth: int) -> Any:
    node: Any = "<i8"
    for _ in range(depth):
        node = [node, [1]]
    return node


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
        {"$": "dict", "v": [[["a"], 1]]},
        {"$": "dict", "v": [[{"$": "dict", "v": []}, 1]]},
        {"$": "dict", "v": [["a", 1], ["a", 2]]},
        {"$": "dict", "v": [[1, 1], [True, 2]]},
        {"$": "set", "v": [[]]},
        {"$": "set", "v": [1, 1.0]},
        {"$": "set", "v": {"a": 1}},
        {"$": "frozenset", "v": [{"$": "bytearray", "v": ""}]},
        {"$": "set", "v": [{"$": "Decimal", "v": "sNaN"}]},
        {"$": ["dict"], "v": []},
        {"$": "float", "v": "nan:7ff8000000000000"},
        {"$": "float", "v": "nan:3ff0000000000000"},
        {"$": "float", "v": "nan:zz"},
        {"$": "complex", "v": [1, 2]},
        {"$": "complex", "v": [1.0]},
        {"$": "range", "v": [0, 1, 0]},
        {"$": "range", "v": [0, 1, True]},
        {"$": "slice", "v": [1, 2]},
        {"$": "Ellipsis", "v": 1},
        {"$": "Decimal", "v": "1_0"},
        {"$": "Decimal", "v": "one"},
        {"$": "Decimal", "v": "1e99999999999999999999"},
        {"$": "Fraction", "v": [1, 0]},
        {"$": "Fraction", "v": [1, 2.0]},
        {"$": "date", "v": "2023-02-29"},
        {"$": "date", "v": 5},
        {"$": "datetime", "v": ["2024-01-01T00:00:00+01:00", 0, None]},
        {"$": "datetime", "v": ["2024-01-01T00:00:00", 2, None]},
        {"$": "datetime", "v": ["2024-01-01T00:00:00", 0, [[9, 0, 0]]]},
        {"$": "time", "v": ["25:00:00", 0, None]},
        {"$": "timedelta", "v": [0, 0, 10**7]},
        {"$": "timedelta", "v": [10**12, 0, 0]},
        {"$": "timezone", "v": None},
        {"$": "timezone", "v": []},
        {"$": "timezone", "v": [[0, 0, 0], "a", "b"]},
        {"$": "UUID", "v": "5"},
        {"$": "path", "v": ["Path", "a"]},
        {"$": "path", "v": ["PosixPath", "a//b"]},
        {"$": "path", "v": ["PosixPath", 5]},
        {"$": "BytesIO", "v": ["", -1]},
        {"$": "BytesIO", "v": ["", 1 << 64]},
        {"$": "StringIO", "v": ["", "x", 0]},
        {"$": "StringIO", "v": ["", "\n", None]},
        {"$": "np.array", "v": ["|O", [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["O", [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [["|O", [1]], [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [structure(formats=["|O"]), [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [structure(offsets=[4]), [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [structure(offsets=[-1]), [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [structure(names=["a", "b"]), [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [structure(names=5), [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": [structure(itemsize=1 << 70), [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [1 << 40], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [0, 1 << 70], "C", ""]},
        {"$": "np.array", "v": ["<f8", [-1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [-1, -1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [True], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [1] * 100, "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [1], "A", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f8", [2], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["|V0", [1 << 40], "C", ""]},
        {"$": "np.array", "v": ["<U0", [1 << 40], "C", ""]},
        {"$": "np.array", "v": ["<i8,<i8", [1], "C", ""]},
        {"$": "np.array", "v": ["float64", [1], "C", "AAAAAAAAAAA="]},
        {"$": "np.array", "v": ["<f3", [1], "C", "AAAA"]},
        {"$": "np.scalar", "v": ["<U999999999", ""]},
        {"$": "np.scalar", "v": ["<f8", "AAAA"]},
        {"$": "np.scalar", "v": [["<f4", [2]], "AAAAAAAAAAA="]},
        {"$": "np.dtype", "v": nested_dtype(500)},
        {"$": "np.dtype", "v": ["<f8", [1 << 62]]},
        {"$": "np.str", "v": 5},
        {"$": "np.bytes", "v": 5},
        {"$": "dataclass", "v": []},
        {"$": "dataclass", "v": [5]},
        {"$": "dataclass", "v": ["no colon"]},
        {"$": "dataclass", "v": ["m:C", [1, 2]]},
        {"$": "dataclass", "v": ["m:C", ["a", 1], ["a", 2]]},
        {"$": "namedtuple", "v": ["m:C", ["a"]]},
        {"$": "enum", "v": ["m:C"]},
        {"$": "enum", "v": ["m:C", ["name", 5]]},
        {"$": "enum", "v": ["m:C", ["name", {"$": "tuple", "v": [5]}]]},
        {"$": "enum", "v": ["m:C", ["value", "a"]]},
        {"$": "torch", "v": ["load", ["v", "x"]]},
        {"$": "torch", "v": ["Size", ["v", [1]]]},
        {"$": "torch", "v": ["dtype", ["v", 5]]},
        {"$": "deque", "v": ["1", [0, 1], [1, 2]]},
        {"$": "deque", "v": ["-1"]},
        {"$": "deque", "v": ["1" * 30]},
        {"$": "deque", "v": ["", [1, 1]]},
        {"$": "deque", "v": ["", [False, 1]]},
        {"$": "OrderedDict", "v": ["x"]},
        {"$": "OrderedDict", "v": []},
        {"$": "defaultdict", "v": ["eval"]},
        {"$": "Counter", "v": ["", ["a", 1], ["a", 2]]},
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


TAGS = [
    *("dict", "tuple", "bytes", "float", "tensor", "set", "frozenset", "complex", "slice", "range"),
    *("Decimal", "Fraction", "datetime", "timezone", "timedelta", "path", "BytesIO", "StringIO"),
    *("np.array", "np.scalar", "np.dtype", "np.str", "np.bytes", "deque", "OrderedDict", "Counter"),
    *("defaultdict", "dataclass", "namedtuple", "enum", "torch"),
]
WORDS = [
    *(
        "",
        "C",
        "<f8",
        "|O",
        "|V0",
        "int",
        "1",
        "Size",
        "m:C",
        "tests.unit.kinds:Point",
        "PosixPath",
    ),
    *([0, 0, 0], ["v", "cpu"], ["name", "RED"], [0, 1], [1], [], 0, 8, structure()),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "v", "x"]), inner, max_size=3),
        st.fixed_dictionaries(
            {"$": st.sampled_from(TAGS), "v": inner | st.lists(inner | st.sampled_from(WORDS))}
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
    again = decode_value(encode_value(value), "k")
    assert same(again, value)
    with contextlib.suppress(BadInputError, CorruptError):  # no such class here
        resolve(value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: [n],
        lambda n: {"$": "tuple", "v": [n]},
        lambda n: {"$": "frozenset", "v": [n]},
        lambda n: {"$": "slice", "v": [n, None, None]},
        lambda n: {"$": "deque", "v": ["", [0, n]]},
        lambda n: {"$": "dict", "v": [[n, 1]]},
        lambda n: {"$": "Counter", "v": ["", [n, 1]]},
    ],
)
def test_nesting_bombs_are_corrupt(wrap: Any) -> None:
    node: Any = None
    for _ in range(400):
        node = wrap(node)
    with pytest.raises(CorruptError, match="nested more than 200 deep"):
        decode_value(node, "k")


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (("dataclass", "not.imported:C"), "no module not.imported is imported; import it"),
        (("dataclass", "json:Nothing"), "json has no class Nothing"),
        (("dataclass", "json:loads"), "json has no class loads"),
        (("dataclass", "subprocess:Popen"), "is no dataclass here"),
        (("dataclass", "builtins:object.__class__"), "builtins has no class"),
        (("dataclass", "tests.unit.kinds:Point", ["x", 1], ["y", 2]), "is no dataclass here"),
        (
            ("dataclass", "tests.unit.kinds:Progress", ["step", 1]),
            r"other fields here \(best, made",
        ),
        (("dataclass", "tests.unit.test_values:Fleeting", ["x", 1]), "has a __del__"),
        (("dataclass", "tests.unit.test_values:Watched", ["x", 1]), "its field x is a property"),
        (("dataclass", "tests.unit.test_values:Derived", ["x", 1]), "derives from list"),
        (("dataclass", "ckpt.tree:PerRank", ["value", 1]), "it belongs into dicts"),
        (("namedtuple", "builtins:tuple"), "is no named tuple here"),
        (("namedtuple", "tests.unit.kinds:Point", ["x", 1]), r"other fields here \(y on one side"),
        (("enum", "tests.unit.kinds:Point", ["name", "x"]), "is no enum here"),
        (("enum", "tests.unit.kinds:Colour", ["name", "BLUE"]), "has no member BLUE"),
        (("enum", "tests.unit.kinds:Colour", ["name", "__class__"]), "has no member __class__"),
        (("enum", "tests.unit.kinds:Colour", ["name", {"$": "tuple", "v": ["RED"]}]), "combine"),
        (("torch", "dtype", ["v", "load"]), "no dtype load"),
        (("torch", "layout", ["v", "float32"]), "no layout float32"),
        (("torch", "device", ["v", "eval"]), "no device eval"),
    ],
)
def test_what_no_object_is_made_of_is_refused_by_path_and_class(
    node: tuple[Any, ...], words: str
) -> None:
    value = decode_value({"$": node[0], "v": list(node[1:])}, "k")
    RUN.clear()
    with pytest.raises(
        BadInputError, match=rf"^a\.0: the checkpoint has a .*{words}.*exclude=\['a.0'\]"
    ):
        resolve({"a": [value]})
    assert not RUN
    assert encode_value(value)  # it can be shown, compared and stored again
    assert repr(value)


def test_a_module_that_makes_its_names_up_is_not_asked() -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            RUN.append(name)
            return Progress

    RUN.clear()
    sys.modules["lazy_for_test"] = Lazy("lazy_for_test")
    try:
        value = decode_value({"$": "dataclass", "v": ["lazy_for_test:Progress"]}, "k")
        with pytest.raises(BadInputError, match="lazy_for_test has no class Progress"):
            resolve(value)
    finally:
        del sys.modules["lazy_for_test"]
    assert not RUN


def test_members_of_an_enum_go_by_name_and_fields_by_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The class may have another order, other values, and the same names."""
    stored = [encode_value(v) for v in (Stage.TRAIN, Point(1, 2), Access.READ | Access.WRITE)]
    stage = enum.Enum("Stage", {"EVAL": "train", "TRAIN": "fit"}, module=kinds.__name__)  # type: ignore[misc]
    point: Any = namedtuple("Point", ["y", "x"], module=kinds.__name__)
    monkeypatch.setattr(kinds, "Stage", stage)
    monkeypatch.setattr(kinds, "Point", point)
    assert resolve(decode_value(stored[0], "k")) is stage["TRAIN"]
    assert resolve(decode_value(stored[1], "k")) == point(y=2, x=1)
    assert resolve(decode_value(stored[2], "k")) is Access.READ | Access.WRITE
    with pytest.raises(BadInputError, match="Stage is another class by now"):
        encode_value(Stage.TRAIN)


def test_decoding_looks_no_class_up() -> None:
    assert decode_value(encode_value(Key("t", 1)), "k") == Instance(
        "dataclass", "tests.unit.kinds:Key", (("table", "t"), ("row", 1))
    )
    assert decode_value(encode_value(torch.int8), "k") == Instance(
        "torch", "dtype", (("v", "int8"),)
    )
    assert decode_value(encode_value(Colour.CRIMSON), "k").fields == (("name", "RED"),)


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
