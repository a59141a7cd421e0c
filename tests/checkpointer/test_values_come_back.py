"""Plain values, by type, through a checkpoint and back into the objects that are there (E06 and its like)."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import Checkpointer, PerRank
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError
from ckpt.events import ListSink
from ckpt.export import export_dcp, export_torch
from ckpt.restore import CheckpointReader
from ckpt.storage.memory import MemoryStorage
from tests.checkpointer.ranks import on_ranks
from tests.unit import kinds
from tests.unit.kinds import HASHABLE, OTHERS, Colour, Key, Point, Progress, same


class Hidden(NamedTuple):
    h: Any
    c: Any


@dataclasses.dataclass
class Averages:
    weights: Any
    decay: float = 0.9
    steps: int = 0


class Keeper:
    """Saves what it holds, and notes what it gets."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.got: Any = None

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.got = state


def saved(state: dict[str, Any]) -> MemoryStorage:
    storage = MemoryStorage()
    with Checkpointer(storage) as c:
        c.save(1, state).committed.result()
    return storage


def restored(storage: MemoryStorage, state: dict[str, Any], **terms: Any) -> dict[str, Any]:
    with Checkpointer(storage, sink=ListSink()) as c:
        assert c.restore(state, **terms) is not None
    return state


def test_a_metric_that_becomes_a_scalar_of_numpy_is_saved_and_comes_back() -> None:
    storage, state = MemoryStorage(), {"best": 0.0, "w": torch.ones(2)}
    with Checkpointer(storage) as c:
        c.save(1, state).committed.result()
        state["best"] = np.float64(0.125)
        c.save(2, state).committed.result()
    back = restored(storage, {"best": 0.0, "w": torch.zeros(2)})
    assert same(back["best"], np.float64(0.125))


def test_every_kind_comes_back_wherever_it_is() -> None:
    every = [*HASHABLE, *OTHERS]

    def state(of: Callable[[Any], Any]) -> dict[str, Any]:
        values = {f"v{n}": of(copy.deepcopy(v)) for n, v in enumerate(every)}
        return {
            "values": values,
            "list": list(values.values()),
            "own": PerRank(dict(values)),
            "object": Keeper({**values, "nested": [dict(values)]}),
            "w": torch.ones(2),
        }

    storage = saved(state(lambda v: v))
    for fresh in (lambda v: v, lambda _: None):
        back = restored(storage, state(fresh))
        for n, v in enumerate(every):
            got = (
                back["values"],
                back["own"].value,
                back["object"].got,
                *back["object"].got["nested"],
            )
            for place in got:
                assert same(place[f"v{n}"], v)
            assert same(back["list"][n], v)


def test_what_is_there_is_filled_and_stays_itself() -> None:
    def state() -> dict[str, Any]:
        return {
            "progress": Progress(0),
            "histogram": np.zeros(3),
            "seen": {0},
            "buffer": bytearray(b"zz"),
            "recent": deque([torch.zeros(2), 0], maxlen=2),
            "counts": Counter(x=1),
            "settings": OrderedDict(a=1),
            "groups": defaultdict(list),
            "averages": Averages({"w": torch.zeros(2)}),
            "fixed": MappingProxyType({"counts": Counter(), "averages": Averages(torch.zeros(1))}),
            "hidden": Hidden(torch.zeros(2), [torch.zeros(1)]),
            "keyed": {(1, 2): 0},
        }

    source = state()
    source["progress"].step, source["progress"].best = 7, np.float32(0.5)
    source["histogram"][1] = 5
    source["seen"] |= {1, "a"}
    source["buffer"] += b"y"
    source["recent"].extend([torch.ones(2), 3])
    source["counts"].update("abca")
    del source["counts"]["x"]
    source["settings"] = OrderedDict(b=2, a=np.int8(1))
    source["groups"]["k"].append(Colour.RED)
    source["averages"] = Averages({"w": torch.ones(2)}, 0.5, 4)
    source["fixed"] = {"counts": Counter("q"), "averages": Averages(torch.ones(1), steps=2)}
    source["hidden"] = Hidden(torch.ones(2), [torch.ones(1)])
    source["keyed"] = {(1, 2): 1, (3, 4): 2}
    target = state()
    before = dict(target)
    tensors = [target["averages"].weights["w"], target["recent"][0], target["hidden"].h]
    restored(saved(source), target)
    assert all(target[k] is v for k, v in before.items())
    assert same(target["progress"], source["progress"])
    for name in ("histogram", "seen", "buffer", "counts", "settings", "groups", "keyed"):
        assert same(target[name], source[name]), name
    assert target["averages"].weights["w"] is tensors[0]
    assert target["recent"][0] is tensors[1]
    assert target["hidden"].h is tensors[2]
    assert [t.tolist() for t in tensors] == [[1, 1]] * 3
    assert (target["averages"].decay, target["averages"].steps, target["recent"][1]) == (0.5, 4, 3)
    assert target["hidden"].c[0].tolist() == [1]
    assert target["fixed"]["counts"] == {"q": 1}
    assert (target["fixed"]["averages"].weights.item(), target["fixed"]["averages"].steps) == (1, 2)


def test_a_value_in_what_cannot_change_replaces_its_holder() -> None:
    target = {"h": Hidden(torch.zeros(2), 1), "key": Key("a", torch.zeros(1))}
    weights, key = target["h"].h, target["key"]  # type: ignore[union-attr]
    restored(saved({"h": Hidden(torch.ones(2), 2), "key": Key("b", torch.ones(1))}), target)
    assert type(target["h"]) is Hidden
    assert target["h"] == (weights, 2)
    assert target["h"].h is weights
    assert weights.tolist() == [1, 1]
    assert (target["key"].table, target["key"].row) == ("b", key.row)  # type: ignore[union-attr]
    assert (key.table, key.row.item()) == ("a", 1)  # type: ignore[union-attr]


def test_objects_and_own_parts_inside_dataclasses_are_theirs() -> None:
    def state(value: float) -> dict[str, Any]:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, value)
        return {"a": Averages(model, steps=PerRank(value)), "p": Point(Keeper({"x": value}), value)}  # type: ignore[arg-type]

    target = state(0)
    model = target["a"].weights
    restored(saved(state(3)), target)
    assert target["a"].weights is model
    assert (model.weight.item(), target["a"].steps.value, target["p"].y) == (3, 3, 3)
    assert target["p"].x.got == {"x": 3}


def test_a_scheduler_gets_the_counter_that_it_had() -> None:
    def state() -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        return {"s": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])}

    back = restored(saved(state()), state())["s"]
    assert same(back.milestones, Counter({2: 2, 5: 1}))
    assert sorted(back.milestones.elements()) == [2, 2, 5]


def test_dicts_and_ordered_dicts_of_tensors_are_each_others_places() -> None:
    """As they were stored before types were, and where a model stands for its state dict."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    stored = saved({"m": dict(model.state_dict()), "d": {"a": 1}, "e": {}})
    back = restored(stored, {"m": other.state_dict(), "d": OrderedDict(a=0), "e": OrderedDict()})
    assert torch.equal(other.weight, model.weight)
    assert [type(back[k]) for k in "mde"] == [OrderedDict] * 3
    assert back["d"] == {"a": 1}
    for first in (model, model.state_dict(), dict(model.state_dict())):
        for second in (nn.Linear(2, 1), nn.Linear(2, 1).state_dict()):
            got = restored(saved({"m": first}), {"m": second})["m"]
            got = got.state_dict() if isinstance(got, nn.Module) else got
            assert torch.equal(got["weight"], model.weight)
    renamed = restored(
        saved({"m": model.state_dict()}), {"n": other.state_dict()}, rename={"m": "n"}
    )
    assert torch.equal(renamed["n"]["bias"], model.bias)


def test_generators_of_numpy_continue() -> None:
    state = {"legacy": np.random.get_state(), "new": np.random.default_rng(3).bit_generator.state}
    back = restored(saved(state), {"legacy": None, "new": None})
    assert same(back["legacy"], state["legacy"])
    np.random.set_state(back["legacy"])
    generator = np.random.default_rng()
    generator.bit_generator.state = back["new"]
    assert generator.integers(1 << 40) == np.random.default_rng(3).integers(1 << 40)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: lambda: 1, "bad.x: a builtins.function can't be stored"),
        (lambda: (n for n in ()), "bad.x: a builtins.generator can't"),
        (lambda: np.array([object()]), "bad.x: numpy objects"),
        (lambda: {torch.ones(1)}, "bad.x: a torch.Tensor can't"),
        (lambda: {(1,): torch.ones(1)}, r"bad.x.\(1,\): a torch.Tensor can't"),
        (lambda: {(1,): PerRank(1)}, r"bad.x.\(1,\): a ckpt.tree.PerRank can't"),
        (lambda: Progress(io), "bad.x.step: a builtins.module can't"),
        (lambda: Counter({"a": object()}), "bad.x.a: a builtins.object can't"),
    ],
)
def test_what_cannot_be_stored_is_refused_at_restore_and_save_by_key(
    value: Callable[[], Any], words: str
) -> None:
    state = {"bad": {"x": value()}, "w": torch.ones(1)}
    with Checkpointer(MemoryStorage(), sink=ListSink()) as c:
        with pytest.raises(BadInputError, match=words):
            c.restore(state)
        with pytest.raises(BadInputError, match=words):
            c.save(1, state)
    with Checkpointer(MemoryStorage()) as c, pytest.raises(BadInputError, match="state: key True"):
        c.restore({True: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "inside", [lambda v: v, lambda v: Keeper({"k": [v]}), PerRank, lambda v: {(1,): v}]
)
def test_a_class_that_is_gone_is_refused_before_anything_changes(
    inside: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = saved({"a": inside(Progress(3)), "w": torch.ones(1)})
    monkeypatch.delattr(kinds, "Progress")
    state = {"a": inside(None), "w": torch.zeros(1)}
    with pytest.raises(BadInputError, match=r"^a.*kinds:Progress here, and .* no class Progress"):
        restored(storage, state)
    assert state["w"].item() == 0
    restored(storage, state, exclude=["a*"])
    assert state["w"].item() == 1


def test_ranks_have_one_text_and_what_differs_is_named() -> None:
    """Also where arrays differ only where repr() shows nothing of them."""
    many = np.zeros(5000)
    other = many.copy()
    other[2500] = 1
    cases: list[tuple[Any, Any, str | None]] = [
        ({"a", "b"}, {"b", "a"}, None),
        (Counter("ab"), Counter("ba"), None),
        (Point(1, many), Point(1, many.copy()), None),
        (OrderedDict(a=1), OrderedDict(b=2), None),  # as dicts, ranks may have different keys
        (many, other, r"v: ranks 0 and 1 hold different values"),
        (Point(1, many), Point(1, other), r"v\.y: ranks 0 and 1 hold different values"),
        (Counter("ab"), Counter("aab"), r"v\.a: ranks 0 and 1 hold different values \(1 and 2\)"),
        (Colour.RED, 1, r"v: ranks 0 and 1 hold different values"),
        (deque([1], 3), deque([1], 4), "v: ranks 0 and 1 hold different values"),
        (OrderedDict(a=1), {"a": 1}, "v: ranks 0 and 1 hold different values"),
        (np.float64(1), 1.0, "v: ranks 0 and 1 hold different values"),
    ]
    for first, second, words in cases:
        storage = MemoryStorage()

        def save(rank: int, kw: dict[str, Any], v: Any = (first, second), s: Any = storage) -> None:
            with Checkpointer(s, sink=ListSink(), **kw) as c:
                c.save(1, {"v": v[rank], "w": torch.ones(1)}).committed.result(60)

        results = on_ranks(2, save)
        if words is None:
            assert results == [None, None]
        for error in results if words else ():
            assert isinstance(error, BadInputError)
            assert re.search(words or "", str(error)), error


def test_exports_hold_what_other_programs_know(tmp_path: Any) -> None:
    storage = saved(
        {
            "model": OrderedDict(w=torch.ones(2)),
            "n": np.float64(1.5),
            "counts": Counter("aab"),
            "stage": Colour.RED,
            "progress": Progress(1, torch.ones(1)),
            "size": torch.Size([2]),
        }
    )
    found = Catalog(storage).latest()
    assert found is not None
    assert found.record is not None
    reader = CheckpointReader(storage, found.record)
    keys = sorted(reader.tensors)
    assert keys == ["model.w", "progress.best"]
    export_torch(reader, tmp_path / "x.pt", keys)
    back = torch.load(tmp_path / "x.pt", weights_only=True)
    assert back["progress"].pop("best").item() == 1
    assert back.pop("model")["w"].tolist() == [1, 1]
    assert back == {
        "n": 1.5,
        "counts": {"a": 2, "b": 1},
        "stage": "RED",
        "progress": {"step": 1, "made": 1},
        "size": torch.Size([2]),
    }
    export_dcp(reader, tmp_path / "dcp", keys)
