"""The one walk of a save, and what it keeps, against `flatten` and `encode_value`, which keep nothing."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import CheckpointConfig, Checkpointer, PerRank
from ckpt.canonical import Canonical
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError
from ckpt.events import ListSink
from ckpt.live import Layout, live_state
from ckpt.manifest import canonical, seal, seal_text
from ckpt.plan import schema_key
from ckpt.receipts import seal_object_texts, seal_objects
from ckpt.restore import CheckpointReader
from ckpt.storage import MemoryStorage
from ckpt.tree import flatten, identity
from ckpt.types import SystemClock
from ckpt.values import encode_value
from ckpt.walk import LARGE_CHARS, StateWalk

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Keeper:
    """An object that saves itself."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.asked = 0

    def state_dict(self) -> Any:
        self.asked += 1
        return self.inner

    def load_state_dict(self, state: Any) -> None:
        self.inner = state


class Counted(Mapping[str, Any]):
    """A mapping that counts how often it is gone through."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner
        self.walks = 0

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return iter(self.inner)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Point:
    x: Any
    y: Any


class Colour(enum.IntEnum):
    RED = 1


# Few of each kind, so that states of one sequence are often the same in all but one thing.
VALUES: list[Any] = [
    *(0, 1, -1, True, False, None, 1.0, 0.0, -0.0, 1 << 8191, -(1 << 300), 1e300, 5e-324),
    *(math.nan, math.inf, -math.inf, "", "a", "1", 'é"\\\n\x7f\u2028', b"", b"\x00\xff"),
    *((), [], {}, (1, True), [0.0, -0.0], [1, 1.0], {1: 1, "1": 1}, OrderedDict(a=math.nan)),
    *({True: 1}, {1.5: 1}, {None: 1}, {(1, "a"): [1]}, Counter(), Counter({(1,): 2}), {1}, 1j),
    *(np.float64(1.0), np.float32(1.0), np.arange(3), np.arange(3.0), torch.Size([2]), torch.int8),
    *(
        Colour.RED,
        deque([1], 3),
        deque([1]),
        Pair(1, 1.0),
        Pair(True, [1]),
        Point(1, {}),
        {1: Colour.RED},
    ),
]
REFUSED: list[Any] = [
    *(1 << 8192, "\ud800", {"\ud800": 1}, object(), {"k": object()}, lambda: 1, Pair(1, object())),
    *([1, object()], torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse()),
    *(
        {True: torch.zeros(1)},
        {None: PerRank(1)},
        {PerRank: 1},
        np.array([object()]),
        Point(1, object()),
    ),
    *(OrderedDict(a=object()), defaultdict(lambda: 1), {(1,): torch.nn.Linear(1, 1)}),
    *([1 << 9000], {1 << 9000: 1}, [1, "\ud800"], torch.nn.UninitializedParameter()),
]
FLAT = torch.arange(24.0)
TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(6.0),
    lambda: torch.arange(6),
    lambda: torch.arange(6.0).view(2, 3),
    lambda: torch.arange(6.0).view(2, 3).t(),
    lambda: torch.arange(6.0).to(torch.bfloat16),
    lambda: torch.nn.Parameter(torch.arange(6.0)),
    lambda: torch.arange(6.0, requires_grad=True),
    lambda: FLAT[3:9],
    lambda: FLAT[::4],
    lambda: FLAT[:1].expand(6),
    lambda: torch.tensor(2.0),
    lambda: torch.empty(0, 3),
    lambda: torch.empty(3, 0),
    lambda: torch.complex(torch.arange(3.0), torch.arange(3.0)).conj(),
    lambda: torch.complex(torch.arange(3.0), torch.arange(3.0)).conj().imag,
    lambda: torch.arange(6) > 2,
    lambda: torch.zeros(70_000, dtype=torch.uint8),  # too large to be copied at once
]

leaves = st.one_of(
    st.sampled_from(VALUES),
    st.sampled_from(TENSORS).map(lambda make: make()),
    st.sampled_from(TENSORS).map(lambda make: make()),
    st.integers() | st.floats() | st.text(max_size=3),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(st.sampled_from(["a", "b", "", 1, "1"]), inner, max_size=4)
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda d: defaultdict(int, d)),
        dicts.map(Counter),
        st.lists(inner, max_size=3).map(deque),
        st.builds(Pair, inner, inner),
        st.builds(Point, inner, inner),
        dicts.map(MappingProxyType),
        dicts.map(Keeper),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    )


trees = st.recursive(leaves, containers, max_leaves=8)
tensor_dicts = st.dictionaries(
    st.sampled_from(["a", "b", "", 1, "1", "a@0"]),
    st.sampled_from(TENSORS).map(lambda make: make()),
    min_size=1,
    max_size=4,
)
states = st.dictionaries(
    st.sampled_from(["m", "o", "x"]), trees | tensor_dicts, min_size=1, max_size=3
)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States that follow from each other by one edit, or none."""
    history = [draw(states)]
    for _ in range(draw(st.integers(1, 5))):
        history.append(edited(history[-1], draw))
    return history


def edited(value: Any, draw: st.DrawFn) -> Any:
    """The same but for one place in it. What isn't changed is the same object, or one like it."""
    if isinstance(value, PerRank):
        return draw(st.sampled_from([value.value, PerRank(edited(value.value, draw))]))
    if isinstance(value, Keeper):
        return draw(st.sampled_from([value.inner, Keeper(edited(value.inner, draw))]))
    if isinstance(value, Mapping) and value:
        return edited_dict(dict(value), draw)
    if isinstance(value, Point):
        return draw(
            st.sampled_from([replace(value, x=edited(value.x, draw)), Pair(value.x, value.y)])
        )
    if isinstance(value, list | tuple) and value:
        n = draw(st.integers(0, len(value) - 1))
        changed = [edited(v, draw) if i == n else v for i, v in enumerate(value)]
        return draw(st.sampled_from([changed, tuple(changed), changed[:-1], [*changed, 1]]))
    return draw(leaves | st.just(value) | st.just(PerRank(value)) | st.sampled_from(REFUSED))


def edited_dict(value: dict[Any, Any], draw: st.DrawFn) -> Any:
    key = draw(st.sampled_from(list(value)))
    how = draw(st.sampled_from(["inner", "inner", "rename", "order", "drop", "add", "kind", "own"]))
    if how == "inner":
        return {k: edited(v, draw) if k == key else v for k, v in value.items()}
    if how == "rename":
        return {"renamed" if k == key else k: v for k, v in value.items()}
    if how == "order":
        return dict(reversed(value.items()))
    if how == "drop":
        return {k: v for k, v in value.items() if k != key or len(value) == 1}
    if how == "add":
        return {**value, "added": draw(leaves)}
    if how == "own":
        return {k: PerRank(v) if k == key else v for k, v in value.items()}
    return draw(st.sampled_from([OrderedDict(value), MappingProxyType(value), Keeper(value)]))


def sink() -> ListSink:
    return ListSink()


def new_walk(rank: int = 0) -> StateWalk:
    return StateWalk(rank, SystemClock(), sink())


def expected(state: Mapping[str, Any], rank: int) -> tuple[Any, ...]:
    """What one save needs of a state, made without anything kept."""
    known = Canonical().look(state) if isinstance(state, Mapping) else Canonical()
    flat = flatten(state, rank, known.taken)
    per_rank = {k: encode_value(v, k) for k, v in flat.per_rank.items()}
    objects = seal_objects(encode_value(flat.values), per_rank)
    kinds = {n: x.kind for n, x in flat.leaves.items()}
    boxes = [s for x in flat.leaves.values() for s in x.shards]
    shards = [(s.offsets, s.sizes, identity(s.tensor)) for s in boxes]
    return list(kinds), kinds, shards, schema_key(flat, 1), objects


def outcome(make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...] | None:
    try:
        return make()
    except BadInputError:
        return None


class Saver:
    """The walk and the layout as a Checkpointer keeps them."""

    def __init__(self, rank: int) -> None:
        self.walk = new_walk(rank)
        self.layout: Layout | None = None
        self.key = ""
        self.reused = 0

    def take(self, state: Mapping[str, Any]) -> tuple[Any, ...]:
        parts = self.walk.take(state)
        live = live_state(parts, self.layout)
        if live.leaves is None:
            self.reused += 1
        else:
            self.key = schema_key(live.flat, 1)
        self.layout = live.layout
        shards = [(s.offsets, s.sizes, identity(s.tensor)) for s in live.layout.places]
        live.release()
        objects = seal_object_texts(parts.values, parts.per_rank)
        return live.layout.names, dict(live.layout.kinds), shards, self.key, objects


@given(histories(), st.integers(0, 1))
@settings(max_examples=400)
def test_what_is_kept_from_save_to_save_changes_nothing(
    history: list[dict[str, Any]], rank: int
) -> None:
    """Also where a structure comes back, twice in a row, or as another dtype, stride, order or container."""
    saver = Saver(rank)
    for state in [s for one in history for s in (one, one, history[0])]:
        want = outcome(lambda s=state: expected(s, rank))  # type: ignore[misc]
        assert outcome(lambda s=state: saver.take(s)) == want  # type: ignore[misc]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"a": 0}, {"b": 0}),
        ({"a": 0, "b": 2}, {"b": 0, "a": 2}),
        ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
        ({"a": 0}, {"a": 0, "b": 0}),
        ({1: 0}, {"1": 0}),
        ({"a": 0}, [0]),
        ([0, 2], (0, 2)),
        ({"a": 0}, PerRank({"a": 0})),
        ({"a@0": 0}, PerRank({"a": 0})),
        ({"0": 0}, PerRank([0])),
        ({"a": 0}, OrderedDict(a=0)),
        (OrderedDict(a=0), defaultdict(None, a=0)),
        (deque([0, 2]), [0, 2]),
        ({"first": 0, "second": 2}, Pair(0, 2)),
        ({"x": 0, "y": 2}, Point(0, 2)),
    ],
)
def test_one_container_becomes_another(first: Any, other: Any) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, PerRank):
            return PerRank(filled(value.value))
        if isinstance(value, dict):
            return type(value)(
                *([value.default_factory] if isinstance(value, defaultdict) else []),
                {k: TENSORS[v]() for k, v in value.items()},
            )
        if isinstance(value, Pair | Point):
            return type(value)(TENSORS[0](), TENSORS[2]())
        return type(value)(TENSORS[v]() for v in value)

    saver = Saver(0)
    for value in (first, first, other, other, first):
        state = {"m": filled(value), "n": torch.zeros(1)}
        assert saver.take(state) == expected(state, 0)


@pytest.mark.parametrize("other", range(len(TENSORS)))
@pytest.mark.parametrize("first", [0, 2, 7, 10, 16])
def test_one_tensor_becomes_another(first: int, other: int) -> None:
    saver = Saver(0)
    for make in (TENSORS[first], TENSORS[first], TENSORS[other], TENSORS[first]):
        state = {"m": {"a": torch.zeros(2), "b": make(), "c": torch.zeros(2)}}
        assert saver.take(state) == expected(state, 0)


def test_a_tensor_that_becomes_another_is_stored_as_what_it_is() -> None:
    """Its place in host memory is kept from save to save, and is one for its dtype and shape."""
    storage = MemoryStorage()
    makes = [m for other in TENSORS for m in (TENSORS[0], other)]
    with Checkpointer(storage, CheckpointConfig(persist_target_s=0, keep_last=1)) as checkpointer:
        for step, make in enumerate([*makes, lambda: torch.arange(6, dtype=torch.int32)], 1):
            tensor = make()
            checkpointer.save(step, {"a": torch.ones(3), "m": tensor}).committed.result(60)
            latest = Catalog(storage).latest()
            assert latest is not None
            assert latest.record is not None
            stored = CheckpointReader(storage, latest.record).read("m")
            assert stored.dtype == tensor.dtype
            assert torch.equal(_bits(stored), _bits(tensor.resolve_conj().resolve_neg()))


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("size", [1, 300])
def test_one_value_becomes_another(value: Any, size: int) -> None:
    """1, 1.0 and True are equal, and so are 0.0 and -0.0; nan isn't equal to itself."""
    saver = Saver(0)
    for one in (0, value, 1, value, True, 1.0, value, -0.0, 0.0, math.nan, value):
        for state in ({"m": {f"k{n}": one for n in range(size)}}, {"m": [one] * size}):
            assert saver.take(state) == expected(state, 0)


@pytest.mark.parametrize(
    "state",
    [
        {"m": {1: torch.zeros(1), "1": torch.zeros(1)}},
        {"m": PerRank(PerRank(1))},
        {"m": {1: PerRank(1), "1": PerRank(2)}},
        [("m", 1)],
    ],
)
def test_what_is_refused_is_refused_with_the_same_words(state: Any) -> None:
    with pytest.raises(BadInputError) as theirs:
        expected(state, 0)
    with pytest.raises(BadInputError) as ours:
        Saver(0).take(state)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("wrap", [lambda v: {"k": v}, lambda v: [v], lambda v: (v,)])
@pytest.mark.parametrize("leaf", [1, [], {}, b"", torch.zeros(1), [1] * 20])
def test_what_is_nested_too_deep_is_refused_where_reading_would_refuse_it(
    wrap: Callable[[Any], Any], leaf: Any
) -> None:
    for levels in range(195, 205):
        for own in (False, True):
            value = leaf
            for _ in range(levels):
                value = wrap(value)
            state = {"m": PerRank(value) if own else value}
            want = outcome(lambda s=state: expected(s, 0))  # type: ignore[misc]
            assert outcome(lambda s=state: Saver(0).take(s)) == want  # type: ignore[misc]


@pytest.mark.parametrize("bad", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_stored_is_named_among_many(bad: Any) -> None:
    for state in ({"m": {f"k{n}": n for n in range(100)} | {"x": bad}}, {"m": [*range(100), bad]}):
        with pytest.raises(BadInputError, match=r"^m\.(x|100)"):
            Saver(0).take(state)


def test_a_storage_that_shrank_is_refused_at_the_next_save() -> None:
    """The layout is the same, and the memory isn't there."""
    saver, tensor = Saver(0), torch.zeros(100)
    saver.take({"m": {"t": tensor}})
    tensor.untyped_storage().resize_(0)
    with pytest.raises(BadInputError, match=r"m\.t: shape \(100,\) needs 400 bytes"):
        saver.take({"m": {"t": tensor}})
    for make in (lambda t: t[50:], lambda t: t[::2]):
        saver, tensor = Saver(0), torch.zeros(100)
        saver.take({"m": {"t": make(tensor)}})
        view = make(tensor)
        tensor.untyped_storage().resize_(200)
        with pytest.raises(BadInputError, match="but its storage holds 200"):
            saver.take({"m": {"t": view}})


def test_an_unchanged_structure_is_described_once() -> None:
    saver = Saver(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1, "views": [FLAT[2:4], FLAT[::2]]}
    for _ in range(3):
        assert saver.take(state) == expected(state, 0)
    assert saver.reused == 2


def test_a_structure_is_walked_once() -> None:
    """Also by the search for tables: each `state_dict()` of a save is a call of the trainer's code."""
    keeper, counted = Keeper({"t": torch.zeros(2)}), Counted({"x": 1, "w": torch.zeros(3)})
    module = torch.nn.Linear(2, 2)
    calls: list[int] = []
    module.register_state_dict_pre_hook(lambda *_: calls.append(1))
    state = {"k": keeper, "c": counted, "m": module}
    with Checkpointer(MemoryStorage()) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step, state).committed.result(60)
            assert (keeper.asked, len(calls)) == (step, step)
            assert (
                counted.walks <= 2 * step
            )  # once more for the modules, whose parameters have names


def test_tables_are_found_by_the_walk_wherever_they_are() -> None:
    class Holder(Keeper):
        def __init__(self) -> None:
            self.table = torch.nn.EmbeddingBag(10, 4, sparse=True)
            self.optimizer = torch.optim.SGD(self.table.parameters(), lr=0.1)
            super().__init__({"w": self.table.weight})

    deep: Any = Holder()
    for n in range(12):
        deep = {"in": deep} if n % 2 else [deep]
    for state in ({"h": Holder()}, {"h": deep}, {"h": PerRank((Holder(),))}):
        seen = sink()
        with Checkpointer(MemoryStorage(), sink=seen) as checkpointer:
            checkpointer.save(1, state)
        assert [e["guarded_bytes"] for e in seen.named("save_staged")] == [160]


def test_sealed_texts_are_what_sealing_makes() -> None:
    for body in ({"values": [1, "é", {"b": 1, "a": 0.5}], "per_rank": {}}, {"x": None}):
        assert seal_text("objects", canonical(body)) == seal("objects", body)


class TestLargeValues:
    def told(self, *states: dict[str, Any]) -> list[dict[str, Any]]:
        seen = sink()
        walk = StateWalk(0, SystemClock(), seen)
        for state in states:
            walk.take(state)
        return [{k: e[k] for k in ("key", "values")} for e in seen.named("large_value")]

    def test_it_is_told_once_with_its_key(self) -> None:
        vocabulary = {f"id{n}": n for n in range(100_000)}
        state = {"reader": {"vocabulary": vocabulary, "at": 3}, "w": torch.zeros(3)}
        assert self.told(state, state) == [{"key": "reader.vocabulary", "values": 100_000}]
        assert self.told({"l": [0.5] * 400_000}) == [{"key": "l", "values": 400_000}]
        for state in ({"s": "x" * LARGE_CHARS, "n": 1}, {"s": "x" * LARGE_CHARS, "n": [[]]}):
            assert self.told(state) == [{"key": "s", "values": 1}]
        assert self.told({f"id{n}": n for n in range(100_000)}) == [
            {"key": "state", "values": 100_000}
        ]
        assert self.told({"b": bytes(LARGE_CHARS)}) == [{"key": "b", "values": 1}]
        assert self.told({"a": [np.zeros(LARGE_CHARS, np.int8)]}) == [{"key": "a.0", "values": 1}]
        assert self.told({"c": Counter(range(150_000))}) == [{"key": "c", "values": 150_000}]

    def test_many_small_ones_are_large_together(self) -> None:
        rows = {f"id{n}": {"row": n, "seen": [1, 2]} for n in range(30_000)}
        assert self.told({"r": {"ids": rows}, "n": 1}) == [{"key": "r.ids", "values": 30_000}]

    def test_tensors_are_not(self) -> None:
        assert not self.told({"m": {f"t{n}": torch.zeros(1) for n in range(30_000)}, "n": [1] * 99})
        assert not self.told({f"t{n}": torch.zeros(1) for n in range(30_000)} | {"n": [1]})

    def test_what_it_costs_is_told(self) -> None:
        seen = sink()
        with Checkpointer(MemoryStorage(), sink=seen) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"v": {f"id{n}": n for n in range(100_000)}})
                checkpointer.wait()
        (event,) = seen.named("large_value")
        assert event["key"] == "v"
        assert event["bytes"] > LARGE_CHARS
        assert 0 < event["encode_s"] < 60


@given(histories())
@settings(max_examples=40)
def test_each_save_of_a_changing_structure_stores_what_it_was_given(
    history: list[dict[str, Any]],
) -> None:
    storage = MemoryStorage()
    with Checkpointer(storage, CheckpointConfig(persist_target_s=0)) as checkpointer:
        for step, state in enumerate([s for one in history for s in (one, one)], 1):
            try:
                flat = flatten(state, 0)
                values = encode_value(flat.values)
                per_rank = {k: canonical(encode_value(v)) for k, v in flat.per_rank.items()}
            except BadInputError:
                with pytest.raises(BadInputError):
                    checkpointer.save(step, state)
                continue
            checkpointer.save(step, state).committed.result(60)
            latest = Catalog(storage).latest()
            assert latest is not None
            assert latest.record is not None
            assert latest.ref.step == step
            reader = CheckpointReader(storage, latest.record)
            assert set(reader.tensors) == set(flat.leaves)
            for name, leaf in flat.leaves.items():
                want = leaf.shards[0].tensor.resolve_conj().resolve_neg()
                assert torch.equal(_bits(reader.read(name)), _bits(want)), name
            assert canonical(encode_value(reader.values())) == canonical(values)
            stored = reader.per_rank_values(0)
            assert {k: canonical(encode_value(v)) for k, v in stored.items()} == per_rank


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
