"""Stock `dcp.save` and `dcp.load` in one process: what is stored, what comes back, what is refused."""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpt import Checkpointer, DcpReader, DcpWriter, PerRank, RngState
from ckpt.catalog import Catalog
from ckpt.errors import (
    BadInputError,
    CorruptError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from tests.faults import FaultyStorage
from tests.interop.states import NESTED, bits, contents, every_dtype, reader, saved
from tests.unit.kinds import Point, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


@contextmanager
def refused(kind: type[SidestageError], message: str) -> Iterator[None]:
    """DCP's exception holds an error of this class, whose text matches."""
    with pytest.raises(dcp.CheckpointException) as e:
        yield
    ((error, _),) = e.value.failures.values()
    assert type(error) is kind, error
    assert re.search(message, str(error)), error


def save(storage: Storage, step: int, state: dict[str, Any], **kwargs: Any) -> None:
    dcp.save(state, storage_writer=DcpWriter(storage, step, **kwargs))


def load(storage: Storage, state: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    dcp.load(state, storage_reader=DcpReader(storage, step))
    return state


def load_all(storage: Storage) -> dict[str, Any]:
    """Everything in the latest checkpoint, as DCP's own converters load it."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, DcpReader(storage), planner=planner, no_dist=True)
    return state


def job() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"step": 7, "tags": ("a", 1)}}


def test_a_commit_is_made_with_one_create_only_object_after_all_else() -> None:
    storage = MemoryStorage()
    save(storage, 5, {"w": torch.ones(3), "n": 1})
    (commit,) = Catalog(storage).commits()
    assert commit.status == "latest"
    assert commit.record is not None
    assert commit.record.parent is None
    assert {k: (t.kind, t.dtype) for k, t in reader(storage).tensors.items()} == {
        "w": ("replicated", "float32")
    }


def test_every_dtype_and_value_comes_back_bit_for_bit() -> None:
    storage = MemoryStorage()
    state = {"t": every_dtype(), "v": {k: v for k, v in NESTED.items() if k != 7}}
    save(storage, 1, state)
    zeros = {
        "t": {n: {k: torch.zeros_like(t) for k, t in d.items()} for n, d in state["t"].items()},
        "v": {k: {"v": 0} if k == "$" else None for k in state["v"]},
    }
    load(storage, zeros)
    for name, group in state["t"].items():
        for key, tensor in group.items():
            assert bits(zeros["t"][name][key]) == bits(tensor), (name, key)
    assert repr(zeros["v"]) == repr(state["v"])


def test_views_and_conjugates_are_stored_by_value() -> None:
    storage = MemoryStorage()
    base = torch.arange(12.0).view(3, 4)
    c = torch.complex(base, base + 1)
    state = {
        "t": base.t(),
        "column": base[:, 1],
        "conj": c.conj(),
        "grad": base.clone().requires_grad_(),
    }
    save(storage, 1, state)
    r = reader(storage)
    for key, tensor in state.items():
        assert torch.equal(r.read(key), tensor.detach()), key


def test_checkpointer_restores_what_dcp_saved_with_the_optimizers_own_state_dict() -> None:
    storage, trained, fresh = MemoryStorage(), job(), job()
    for p in fresh["model"].parameters():
        torch.nn.init.zeros_(p)
    fresh["optimizer"] = torch.optim.Adam(fresh["model"].parameters(), lr=1.0)  # no state yet
    fresh |= {"progress": {"step": 0, "tags": ()}, "rng": RngState()}
    dcp.save(dict(trained), storage_writer=DcpWriter(storage, 1))
    with Checkpointer(storage) as c:
        result = c.restore(fresh, partial=True)
        assert result is not None
        assert all(k.startswith("rng.generators") for k in result.not_restored)
    assert fresh["progress"] == trained["progress"]
    want, got = trained["optimizer"].state_dict(), fresh["optimizer"].state_dict()
    assert got["param_groups"] == want["param_groups"]
    assert got["state"].keys() == want["state"].keys()
    for n, moments in want["state"].items():
        for name, value in moments.items():
            assert torch.equal(got["state"][n][name], value)
    for key, value in trained["model"].state_dict().items():
        assert torch.equal(fresh["model"].state_dict()[key], value)


def test_dcp_loads_what_checkpointer_saved() -> None:
    storage, trained, fresh = MemoryStorage(), job(), job()
    with Checkpointer(storage) as c:
        pair = (torch.ones(2), 5)
        c.save(3, {**trained, "pair": pair, "rng": RngState()}).committed.result()
    for p in fresh["model"].parameters():
        torch.nn.init.zeros_(p)
    state = {
        "model": fresh["model"].state_dict(),
        "optimizer": fresh["optimizer"].state_dict(),
        "progress": {"step": 0, "tags": None},
        "pair": None,
        "rng": {
            "generators": {"0": {"python": None, "torch": torch.zeros_like(torch.get_rng_state())}}
        },
    }
    load(storage, state)
    for key, value in trained["model"].state_dict().items():
        assert torch.equal(state["model"][key], value), key
    assert state["progress"] == trained["progress"]
    assert torch.equal(state["pair"][0], pair[0])
    assert state["pair"][1] == 5
    assert len(state["rng"]["generators"]["0"]["python"]) == 3

    everything = load_all(storage)
    assert everything["progress"] == trained["progress"]
    assert torch.equal(everything["model"]["0.weight"], trained["model"].state_dict()["0.weight"])


def test_a_planner_that_does_not_flatten_stores_whole_objects() -> None:
    storage = MemoryStorage()
    state = {"w.x": torch.ones(2), "deep": {"a": [1, (2,)], 3: {}}}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(dict(state), storage_writer=DcpWriter(storage, 1), planner=planner)
    loaded = {"w.x": torch.zeros(2), "deep": None}
    dcp.load(
        loaded,
        storage_reader=DcpReader(storage),
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=True),
    )
    assert loaded["w.x"].tolist() == [1, 1]
    with Checkpointer(storage) as c:
        whole: dict[str, Any] = {"w.x": torch.zeros(2), "deep": {}}
        c.restore(whole)
    assert whole["deep"] == state["deep"]


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_d23_objects_are_stored_as_values_or_refused_by_name(tmp_path: Path) -> None:
    storage, marker = MemoryStorage(), tmp_path / "marker"
    for name, bad in {
        "a class": Evil(marker),
        "a set": {Evil(marker)},
        "a type": Evil,
        "a generator": torch.Generator(),
    }.items():
        with refused(BadInputError, f"job.{name}: a .* can't be stored without running code"):
            save(storage, 1, {"w": torch.ones(2), "job": {name: bad}})
    assert Catalog(storage).commits() == []
    assert not marker.exists()
    save(storage, 1, {"w": torch.ones(2), "job": {"bytes": b"\x80\x04."}})
    (objects,) = (o.key for o in storage.list() if o.key.endswith("objects.json"))
    assert b"torch" not in storage.read(objects)


def test_plain_values_come_back_by_type() -> None:
    storage = MemoryStorage()
    values = {
        "n": np.float64(1.5),
        "c": Counter("aab"),
        "s": {1, "a"},
        "d": torch.bfloat16,
        "p": Point(1),
    }
    save(storage, 1, {"w": torch.ones(2), "job": values, "o": OrderedDict(a=1)})
    state = {"w": torch.zeros(2), "job": dict.fromkeys(values), "o": OrderedDict(a=0)}
    state["job"]["c"] = Counter("ab")  # type: ignore[index]
    dcp.load(state, storage_reader=DcpReader(storage), no_dist=True)
    assert same(state["job"], values)
    assert same(state["o"], OrderedDict(a=1))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"p": PerRank(1)}}, "a.p: stock DCP keeps one rank's PerRank"),
        ({"a": {"t": (1, torch.ones(1))}}, r"a\.t\.1: DCP takes a tensor in a tuple"),
        ({"a": torch.zeros(2, device="meta")}, "a: is on the meta device"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "a: layout torch.sparse_coo can't be stored"),
        (
            {"a": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)},
            "a: dtype bits8 can't be stored",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_key(state: dict[str, Any], message: str) -> None:
    storage = MemoryStorage()
    with refused(BadInputError, message):
        save(storage, 1, state)
    assert Catalog(storage).commits() == []


def test_a_planner_without_objects_of_its_own_is_refused() -> None:
    class Pickling(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

    with refused(BadInputError, "n: Pickling gives objects only as pickles"):
        dcp.save({"n": 1}, storage_writer=DcpWriter(MemoryStorage(), 1), planner=Pickling())


def test_a_planner_that_drops_what_the_writer_put_into_plans_is_refused() -> None:
    class Dropping(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return super().create_global_plan([replace(p, storage_data=None) for p in all_plans])

    class DroppingLate(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return super().finish_plan(replace(new_plan, storage_data=None))

    for planner in (Dropping(), DroppingLate()):
        with refused(BadInputError, "this planner drops the storage_data of plans"):
            dcp.save({"n": 1}, storage_writer=DcpWriter(MemoryStorage(), 1), planner=planner)


@pytest.mark.parametrize(
    ("lost", "message"), [(0, "b: no rank wrote"), (1, "w: the ranks wrote 0 of the 4")]
)
def test_a_save_that_lost_an_item_on_the_way_is_not_committed(lost: int, message: str) -> None:
    class Losing(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            kept = [i for n, i in enumerate(new_plan.items) if n != lost]
            return super().finish_plan(replace(new_plan, items=kept))

    storage, state = MemoryStorage(), {"b": 1, "w": torch.ones(2, 2)}
    with refused(BadInputError, message):
        dcp.save(state, storage_writer=DcpWriter(storage, 1), planner=Losing())
    assert Catalog(storage).commits() == []


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".objects.json", "000000000001.json"])
def test_a_flipped_byte_anywhere_fails_the_load_as_corrupt(suffix: str) -> None:
    storage = MemoryStorage()
    state = {"w": torch.arange(9.0), "n": {"x": 1}}
    save(storage, 1, state)
    (key,) = (o.key for o in storage.list() if o.key.endswith(suffix))
    data = bytearray(storage.read(key))
    data[len(data) // 2 if suffix == ".bin" else len(data) // 3] ^= 1
    storage.put(key, data)
    before = {"w": torch.zeros(9), "n": {"x": 0}}
    with refused(CorruptError, "."):
        load(storage, before, 1)
    assert not before["w"].any()
    metadata = DcpReader(storage, 1).read_metadata()
    if suffix != ".bin":  # who looks at the metadata without loading is told as well
        with pytest.raises(CorruptError):
            _ = metadata.state_dict_metadata


def test_the_latest_that_verifies_is_loaded_and_continued() -> None:
    storage = MemoryStorage()
    for step in (1, 2):
        save(storage, step, {"n": step})
    key = next(o.key for o in storage.list("data/") if "000000000002" in o.key)
    storage.delete(key)
    state = {"n": 0}
    r = DcpReader(storage)
    dcp.load(state, storage_reader=r)
    assert (state["n"], r.step) == (1, 1)
    save(storage, 2, {"n": 20})
    assert [(c.ref.epoch, c.ref.step) for c in Catalog(storage).lineage()] == [(3, 2), (1, 1)]


def test_saves_continue_the_latest_and_their_steps_must_rise() -> None:
    storage = MemoryStorage()
    for step in (10, 20, 30):
        save(storage, step, {"n": step})
    with refused(BadInputError, "step 30 isn't above step 30"):
        save(storage, 30, {"n": 0})
    with refused(BadInputError, "step 25 isn't above step 30 .* an older one to go on from"):
        save(storage, 25, {"n": 0})
    save(storage, 25, {"n": 25}, onto=20)
    assert {(c.ref.step, c.status) for c in Catalog(storage).commits()} == {
        (10, "ancestor"),
        (20, "ancestor"),
        (30, "abandoned"),
        (25, "latest"),
    }
    with refused(NotFoundError, "no step 11"):
        save(storage, 40, {"n": 0}, onto=11)
    storage = MemoryStorage()
    save(storage, 1, {"n": 1})
    for info in list(storage.list("data/")):
        storage.delete(info.key)
    with refused(CorruptError, "none of its 1 checkpoints verifies"):
        save(storage, 2, {"n": 2})


def test_one_writer_is_one_attempt_and_takes_the_step_as_checkpoint_id() -> None:
    storage = MemoryStorage()
    writer = DcpWriter(storage, annotations={"by": "dcp"})
    with refused(BadInputError, "no step"):
        dcp.save({"n": 1}, storage_writer=writer)
    for step in (1, 2):
        metadata = dcp.save({"n": step}, storage_writer=writer, checkpoint_id=str(step))
        assert metadata.storage_data["step"] == step
    lineage = Catalog(storage).lineage()
    assert [(c.ref.epoch, c.ref.step) for c in lineage] == [(1, 2), (1, 1)]
    assert lineage[0].record is not None
    assert lineage[0].record.parent == lineage[1].ref
    assert lineage[0].record.annotations == {"by": "dcp"}
    state = {"n": 0}
    dcp.load(state, storage_reader=DcpReader(storage), checkpoint_id="1")
    assert state == {"n": 1}
    for bad in ("/checkpoints/step-1", "1.5", "-1"):
        with pytest.raises(BadInputError, match="named by its step"):
            dcp.save({"n": 1}, storage_writer=writer, checkpoint_id=bad)


def test_ranks_that_save_for_themselves_are_refused() -> None:
    with pytest.raises(BadInputError, match="use_collectives=False"):
        dcp.save({"n": 1}, storage_writer=DcpWriter(MemoryStorage(), 1), use_collectives=False)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with refused(NotFoundError, "no such folder"):
        load(tmp_path / "none", {"n": 1})  # type: ignore[arg-type]
    with refused(NotFoundError, "no Sidestage run"):
        load(MemoryStorage(), {"n": 1})
    storage = LocalStorage(tmp_path / "run")
    with Checkpointer(storage) as c:
        c.restore({}, fresh=True)
    with refused(NotFoundError, "no checkpoint exists yet"):
        load(storage, {"n": 1})
    save(storage, 4, {"n": 1})
    with refused(NotFoundError, "no step 3; the lineage has 4"):
        load(storage, {"n": 1}, 3)


def test_keys_that_dcp_cannot_tell_apart_are_refused() -> None:
    storage = MemoryStorage()
    saved(storage, {"v": {1: "a", "1": "b"}})
    with refused(BadInputError, r"v\.1: two parts of the state have this key in DCP"):
        load(storage, {"v": {"1": ""}})


def test_saving_what_was_loaded_gives_the_same_checkpoint() -> None:
    storage = MemoryStorage()
    state = {"w": torch.arange(5000.0).view(1000, 5), "v": {"a": [1, {"b": (2,)}], "c": b"\0"}}
    save(storage, 1, state)
    save(storage, 2, load_all(storage))
    assert contents(storage, 1) == contents(storage, 2)
    assert isinstance(reader(storage, 2), CheckpointReader)


def test_a_save_that_lacked_only_its_commit_is_what_the_next_one_continues() -> None:
    storage = MemoryStorage()
    save(storage, 1, {"n": 1})
    faulty = FaultyStorage(storage)
    faulty.on("create", "commits/*").fail(StorageError("no route"))
    with refused(StorageError, "no route"):
        save(faulty, 2, {"n": 2})
    with refused(BadInputError, "step 2 isn't above step 2"):
        save(storage, 2, {"n": 3})
    assert [i.ref.step for i in Catalog(storage).lineage()] == [2, 1]
    assert load(storage, {"n": 0}) == {"n": 2}
