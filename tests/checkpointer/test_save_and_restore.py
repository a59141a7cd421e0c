"""Saving and restoring in one process: the snapshot contract, what is stored, what is refused."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import UserDict
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer, PerRank, RngState
from ckpt.catalog import Catalog
from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    DeadlineError,
    NotFoundError,
    SaveError,
)
from ckpt.events import ListSink
from ckpt.layout import COMMITS, DATA
from ckpt.manifest import AttemptRecord, decode, encode
from ckpt.restore import CheckpointReader
from ckpt.storage import Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.memory import MemoryStorage
from ckpt.types import ITEMSIZE
from tests.faults import FaultyStorage


def saved(
    storage: Storage, *states: dict[str, Any], config: CheckpointConfig | None = None
) -> None:
    """Save each state at steps 1, 2, ... and wait for the commits."""
    with Checkpointer(storage, config) as c:
        for step, state in enumerate(states, 1):
            c.save(step, state).committed.result()


def restored(storage: Storage, state: dict[str, Any], **kwargs: Any) -> Any:
    with Checkpointer(storage) as c:
        return c.restore(state, **kwargs)


def reader(storage: Storage, step: int) -> CheckpointReader:
    record = Catalog(storage).find(step).record
    assert record is not None
    return CheckpointReader(storage, record)


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bag = torch.nn.EmbeddingBag(50, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.bag(ids))))


class Job:
    """A small training job with everything that a checkpoint must bring back."""

    def __init__(self, seed: int) -> None:
        self.model = Net(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.progress = {"step": 0}
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "progress": self.progress,
            "rng": RngState(),
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randint(0, 50, (16, 3))).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.progress["step"] += 1


def test_ten_steps_and_ten_after_a_restore_equal_twenty() -> None:
    storage = MemoryStorage()
    straight = Job(0)
    straight.train(20)

    first = Job(0)
    first.train(10)
    saved(storage, first.state)
    torch.manual_seed(999)
    second = Job(7)
    result = restored(storage, second.state)
    assert result.step == 1
    assert second.progress["step"] == 10
    second.train(10)

    for name, tensor in straight.model.state_dict().items():
        assert bits(tensor) == bits(second.model.state_dict()[name]), name
    assert second.schedule.state_dict() == straight.schedule.state_dict()
    for key, moments in straight.optimizer.state_dict()["state"].items():
        for name, tensor in moments.items():
            assert bits(tensor) == bits(second.optimizer.state_dict()["state"][key][name])


def test_generators_come_back_bit_for_bit() -> None:
    storage = MemoryStorage()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    np.random.standard_normal()  # leaves a cached gaussian behind
    saved(storage, {"rng": RngState()})
    expected = (torch.rand(5), random.random(), np.random.standard_normal(5))
    restored(storage, {"rng": RngState()})
    again = (torch.rand(5), random.random(), np.random.standard_normal(5))
    assert torch.equal(expected[0], again[0])
    assert expected[1] == again[1]
    assert (expected[2] == again[2]).all()


def test_d01_tensors_changed_right_after_save_are_stored_as_they_were() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("write", f"{DATA}*").block()
    state = {
        "f32": torch.arange(6.0).view(2, 3),
        "count": torch.tensor([5], dtype=torch.int64),
        "scalar": torch.tensor(1.5),
        "progress": {"step": 1, "names": ["a"]},
    }
    want = {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    with Checkpointer(faulty) as c:
        handle = c.save(1, state)
        assert handle.staged.done()
        for key in want:
            state[key].add_(100)
        state["progress"]["step"] = 99
        state["progress"]["names"].append("b")
        gate.open()
        handle.committed.result()
    r = reader(faulty, 1)
    for key, tensor in want.items():
        assert torch.equal(r.read(key), tensor), key
    assert r.values()["progress"] == {"step": 1, "names": ["a"]}


def test_d02_each_save_stores_the_tensors_that_the_state_has_then() -> None:
    storage = MemoryStorage()
    lin = torch.nn.Linear(3, 3)
    live = []
    with Checkpointer(storage) as c:
        for step in (1, 2, 3):
            lin.weight.data = torch.full((3, 3), float(step))  # new memory each time
            live.append(lin.weight.detach().clone())
            c.save(step, {"model": lin}).committed.result()
    for step, tensor in enumerate(live, 1):
        assert torch.equal(reader(storage, step).read("model.weight"), tensor)


class Halves(torch.nn.Module):
    """Its state dict holds fresh tensors, made by a hook at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(8.0))
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        whole = state.pop(f"{prefix}w")
        for i, half in enumerate(whole.chunk(2)):
            state[f"{prefix}w.{i}"] = half.clone()


def test_d03_state_dict_hooks_are_evaluated_at_every_save() -> None:
    storage = MemoryStorage()
    m = Halves()
    with Checkpointer(storage) as c:
        c.save(1, {"m": m}).committed.result()
        with torch.no_grad():
            m.w.add_(1)
        c.save(2, {"m": m}).committed.result()
    assert torch.equal(reader(storage, 2).read("m.w.1"), torch.arange(4.0, 8.0) + 1)


def test_d04_a_tensor_without_storage_is_refused_by_name() -> None:
    storage = MemoryStorage()
    saved(storage, {"t": torch.ones(8, 4)})
    empty = torch.ones(8, 4)
    empty.untyped_storage().resize_(0)
    with Checkpointer(storage) as c:
        c.restore({"t": torch.zeros(8, 4)})
        with pytest.raises(BadInputError, match=r"^t: shape \(8, 4\) needs 128 bytes"):
            c.save(2, {"t": empty})
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.ref.step == 1


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("compression", ["auto", "off"])
def test_d10_every_dtype_comes_back_bit_for_bit(compression: Any) -> None:
    storage = MemoryStorage()
    torch.manual_seed(0)
    state, empty = {}, {}
    for name in (n for n in ITEMSIZE if isinstance(getattr(torch, n, None), torch.dtype)):
        dtype = getattr(torch, name)
        for shape in ((), (0,), (3, 5), (700, 3)):
            n = int(np.prod(shape)) * dtype.itemsize
            raw = torch.randint(0, 2 if name == "bool" else 256, (n,), dtype=torch.uint8)
            raw[n // 2 :] = 1  # half of it compresses
            state[f"{name}{shape}"] = raw.view(dtype).view(shape)
            empty[f"{name}{shape}"] = torch.zeros(n, dtype=torch.uint8).view(dtype).view(shape)
    saved(storage, state, config=CheckpointConfig(compression=compression, chunk_bytes=4096))
    restored(storage, empty)
    for key, tensor in state.items():
        assert bits(tensor) == bits(empty[key]), key
        assert tensor.dtype == empty[key].dtype


def test_views_and_shared_memory_are_stored_by_value() -> None:
    storage = MemoryStorage()
    base = torch.arange(24.0).view(4, 6)
    conjugate = torch.complex(base, base + 1).conj()
    state = {
        "conjugate": conjugate,
        "negative": conjugate.imag,
        "t": base.t(),
        "col": base[:, 2],
        "same": base,
        "expanded": torch.ones(1, 3).expand(5, 3),
    }
    saved(storage, state)
    r = reader(storage, 1)
    for key, tensor in state.items():
        assert torch.equal(r.read(key), tensor), key


def test_nested_python_values_keep_their_types() -> None:
    storage = MemoryStorage()
    value = {
        "none": None,
        "flags": [True, False, 1, 1.0, float("inf"), -0.0, "é\u0000", b"\x00\xff", 2**80],
        "tuple": ((), (1, ("a",)), []),
        7: {"nested": {}},
        "$": {"v": 1},
    }
    saved(storage, {"value": value})
    state = {"value": {}}
    restored(storage, state, partial=True)
    assert repr(state["value"]) == repr(value)


def circle() -> list[Any]:
    """A list that holds itself."""
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.nn.UninitializedParameter(), "a.b: has no shape yet"),
        (circle(), "is nested too deep, or holds itself"),
        ({1, object()}, "a.b: a builtins.object can't be stored"),
        (object(), "a.b: a builtins.object can't be stored"),
        (torch.zeros(2, device="meta"), "a.b: is on the meta device"),
        (torch.zeros(2, 2).to_sparse(), "a.b: layout torch.sparse_coo can't be stored"),
        (
            {len: 3},
            r"a.b: key <built-in function len>: a builtins.builtin_function_or_method can't",
        ),
        (lambda: None, "a.b: a builtins.function can't be stored"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_before_training(bad: Any, message: str) -> None:
    with Checkpointer(MemoryStorage()) as c:
        with pytest.raises(BadInputError, match=message):
            c.restore({"a": {"b": bad}})
        with pytest.raises(BadInputError, match=message):
            c.save(1, {"a": {"b": bad}})


def test_two_tensors_under_one_key_are_refused() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    with Checkpointer(MemoryStorage()) as c, pytest.raises(BadInputError, match="a.b: two tensors"):
        c.save(1, state)


def test_two_per_rank_parts_under_one_key_are_refused() -> None:
    state = {"a.b": PerRank(1), "a": {"b": PerRank(2)}}
    with Checkpointer(MemoryStorage()) as c, pytest.raises(BadInputError, match="a.b: two PerRank"):
        c.save(1, state)


def test_steps_must_rise() -> None:
    with Checkpointer(MemoryStorage()) as c:
        c.save(5, {"x": 1})
        with pytest.raises(BadInputError, match="the last one was step 5"):
            c.save(5, {"x": 1})


def test_a_differing_state_is_refused_by_name_and_nothing_is_changed() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16), "n": {"x": 1}})
    state = {"a": torch.zeros(4), "b": torch.zeros(2), "c": torch.zeros(1), "n": {"y": 2}}
    with pytest.raises(BadInputError) as e:
        restored(storage, state)
    for part in (
        "a: the checkpoint has float32 [3], the state float32 [4]",
        "b: the checkpoint has bfloat16 [2], the state float32 [2]",
        "c: is in the state but not in the checkpoint",
        "n.y: is in the state but not in the checkpoint",
        "Nothing was changed",
    ):
        assert part in str(e.value)
    assert all(not state[k].any() for k in "abc")


def test_partial_leaves_keys_of_one_side_alone_and_names_them() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(3), "gone": torch.ones(1)})
    state = {"a": torch.zeros(3), "new": torch.zeros(2)}
    result = restored(storage, state, partial=True)
    assert torch.equal(state["a"], torch.ones(3))
    assert not state["new"].any()
    assert result.not_restored == ("gone", "new")


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used() -> None:
    storage, sink = MemoryStorage(), ListSink()
    saved(storage, {"a": torch.ones(3000)}, {"a": torch.full((3000,), 2.0)})
    key = next(o.key for o in storage.list(DATA) if o.key.endswith("000002/r00000.bin"))
    data = bytearray(storage.read(key))
    data[len(data) // 2] ^= 1
    storage.put(key, data)
    state = {"a": torch.zeros(3000)}
    with Checkpointer(storage, sink=sink) as c:
        result = c.restore(state)
        assert result is not None
        assert result.step == 1
        assert torch.equal(state["a"], torch.ones(3000))
        assert [e["step"] for e in sink.named("checkpoint_set_aside")] == [2]
        # What follows continues step 1, so the damaged step 2 is no longer in the lineage.
        c.save(2, state).committed.result()
    assert [(i.ref.epoch, i.ref.step) for i in Catalog(storage).lineage()] == [(2, 2), (1, 1)]
    with pytest.raises(CorruptError, match="don't match their digest"):
        reader_of_epoch(storage, 1, 2).read("a")


def reader_of_epoch(storage: Storage, epoch: int, step: int) -> CheckpointReader:
    record = Catalog(storage).find(step, epoch=epoch).record
    assert record is not None
    return CheckpointReader(storage, record)


def test_if_nothing_verifies_restore_says_so_and_does_not_start_from_scratch() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(3)})
    for info in list(storage.list(DATA)):
        if info.key.endswith(".bin"):
            storage.delete(info.key)
    with pytest.raises(CorruptError, match="none of the 1 checkpoints"):
        restored(storage, {"a": torch.zeros(3)})
    assert restored(storage, {"a": torch.zeros(3)}, fresh=True) is None


def test_a_step_that_does_not_exist_is_named_with_those_that_do() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(3)})
    with pytest.raises(NotFoundError, match="7"):
        restored(storage, {"a": torch.zeros(3)}, step=7)


def test_going_back_to_an_older_step_abandons_the_later_ones() -> None:
    storage = MemoryStorage()
    saved(storage, *({"a": torch.full((2,), float(i))} for i in (1, 2, 3)))
    state = {"a": torch.zeros(2)}
    with Checkpointer(storage) as c:
        c.restore(state, step=1)
        assert state["a"].tolist() == [1, 1]
        c.save(2, {"a": torch.full((2,), 20.0)}).committed.result()
    status = {(i.ref.epoch, i.ref.step): i.status for i in Catalog(storage).commits()}
    assert status == {
        (1, 1): "ancestor",
        (1, 2): "abandoned",
        (1, 3): "abandoned",
        (2, 2): "latest",
    }


def test_saving_into_a_used_root_without_restore_is_refused() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(1)})
    with Checkpointer(storage) as c, pytest.raises(ConflictError, match="call restore"):
        c.save(2, {"a": torch.ones(1)})


def test_saving_into_a_root_with_a_damaged_commit_without_restore_is_refused() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(1)})
    for info in list(storage.list(COMMITS)):
        storage.put(info.key, b"cut")
    with Checkpointer(storage) as c, pytest.raises(ConflictError, match="up to step 1: call rest"):
        c.save(2, {"a": torch.ones(1)})


def test_an_older_attempt_can_no_longer_commit_once_a_newer_one_began() -> None:
    storage = MemoryStorage()
    old = Checkpointer(storage)
    old.save(1, {"a": torch.ones(1)}).committed.result()
    new = Checkpointer(storage)
    new.restore({"a": torch.zeros(1)})
    with pytest.raises(ConflictError, match="a newer attempt owns"):
        old.save(2, {"a": torch.ones(1)}).committed.result()
    old.close()
    new.close()
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.ref.step == 1


def test_an_epoch_whose_attempt_record_was_lost_is_not_used_again() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(1)})
    storage.delete("attempts/000001.json")
    with Checkpointer(storage) as c:
        c.restore({"a": torch.zeros(1)}, fresh=True)
        assert c.attempt is not None
        assert c.attempt.epoch == 2


class Unconditional(MemoryStorage):
    """A store that overwrites where it should refuse, as some S3 look-alikes do."""

    def probe(self) -> bool:
        return False

    def create(self, key: str, data: Any) -> Any:
        return self.put(key, data)


def test_of_two_writers_on_a_store_that_cannot_exclude_them_one_is_refused() -> None:
    storage, sink = Unconditional(), ListSink()
    with Checkpointer(storage, sink=sink) as alone:
        assert alone.save(1, {"a": 1}).committed.result().step == 1
        assert sink.named("single_writer_only")
        # Another job looked at the same moment and took the same epoch.
        record = decode(AttemptRecord, storage.read("attempts/000001.json"), "")
        storage.put("attempts/000001.json", encode(replace(record, token="another")))
        with pytest.raises(ConflictError, match="can't keep writers apart"):
            alone.save(2, {"a": 1}).committed.result()


@pytest.mark.parametrize("op", ["writer", "write", "finish"])
def test_d06_a_failed_save_is_counted_and_the_next_one_commits(op: str) -> None:
    faulty, sink = FaultyStorage(MemoryStorage()), ListSink()
    faulty.on(op, "*000001/r00000.bin").fail(OSError(28, "no space"))
    with Checkpointer(faulty, sink=sink) as c:
        first = c.save(1, {"a": torch.ones(1)})
        second = c.save(2, {"a": torch.ones(1)})
        with pytest.raises(SaveError, match="no space"):
            first.committed.result()
        assert second.committed.result().step == 2
        assert (c.stats.failed, c.stats.commits) == (1, 1)
    assert [e["step"] for e in sink.named("save_failed")] == [1]
    assert [i.ref.step for i in Catalog(faulty).commits()] == [2]


def test_failures_raise_by_policy_only() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on("create", f"{COMMITS}*").always().fail(SaveError("store is down"))
    c = Checkpointer(faulty, CheckpointConfig(raise_after_failures=2))
    for step in (1, 2):
        c.save(step, {"a": 1}).committed.exception()
    with pytest.raises(SaveError, match="2 saves in a row failed, the last one at step 2"):
        c.save(3, {"a": 1})
    c.close()


def test_a_lost_reply_to_the_commit_is_recognised_as_success() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on("create", f"{COMMITS}*").lose_reply()
    faulty.on("create", "attempts/*").lose_reply()
    with Checkpointer(faulty) as c:
        assert c.save(1, {"a": 1}).committed.result().step == 1
        assert c.stats.failed == 0


@pytest.mark.parametrize("policy", ["block", "skip"])
def test_d07_each_commit_holds_the_step_that_it_says(policy: Any) -> None:
    storage = MemoryStorage()
    with Checkpointer(storage, CheckpointConfig(when_busy=policy)) as c:
        handles = [c.save(s, {"a": torch.full((5,), float(s)), "step": s}) for s in range(1, 51)]
        for h in handles:
            h.committed.exception()
        stats = c.stats
    assert stats.commits + stats.skipped + stats.failed == 50
    assert stats.failed == 0
    assert policy == "skip" or stats.commits == 50
    for info in Catalog(storage).commits():
        r = reader(storage, info.ref.step)
        assert r.values()["step"] == info.ref.step
        assert r.read("a").tolist() == [info.ref.step] * 5


def test_skip_and_coalesce_when_storage_is_slow() -> None:
    for policy, pending, lost in (("skip", 1, 2), ("coalesce", 2, 2)):
        faulty = FaultyStorage(MemoryStorage())
        gate = faulty.on("writer", "*000001/r00000.bin").block()
        config = CheckpointConfig(when_busy=policy, max_pending=pending)  # type: ignore[arg-type]
        with Checkpointer(faulty, config) as c:
            first = c.save(1, {"step": 1})
            gate.wait_reached()
            second, third = c.save(2, {"step": 2}), c.save(3, {"step": 3})
            gate.open()
            assert first.committed.result().step == 1
            dropped = second
            assert "skipped" in str(dropped.committed.exception())
            if policy == "coalesce":
                assert third.committed.result().step == 3
            assert c.stats.skipped == lost - (policy == "coalesce")


def test_d08_close_drains_what_is_pending() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("writer", f"{DATA}*").block()
    c = Checkpointer(faulty)
    handle = c.save(1, {"a": torch.ones(4)})
    gate.wait_reached()
    gate.open()
    c.close()
    assert handle.committed.done()
    assert handle.committed.result().step == 1
    c.close()  # again is no error
    with pytest.raises(BadInputError, match="closed"):
        c.save(2, {"a": 1})


def test_d11_short_writes_are_completed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:1_000_003], at))
    storage = LocalStorage(tmp_path / "run")
    tensor = torch.randn(2_000_000)
    saved(storage, {"t": tensor})
    assert torch.equal(reader(storage, 1).read("t"), tensor)


def test_staging_memory_is_reused() -> None:
    from ckpt.staging import Arena
    from ckpt.tree import Shard

    arena = Arena(pinned=False)
    big, small = torch.randn(1000, 7), torch.randn(3)
    shards = [Shard((0,) * t.dim(), tuple(t.shape), t) for t in (big, small)]
    first = arena.homes(shards)
    arena.stage(shards, first)
    where = first[0].data_ptr()
    capacity = arena.capacity_bytes
    again = arena.homes(shards)
    arena.stage(shards, again)
    assert again[0].data_ptr() == where
    assert arena.capacity_bytes == capacity
    assert torch.equal(again[0], big)
    assert torch.equal(again[1], small)


def test_per_rank_values_come_back_in_place() -> None:
    storage = MemoryStorage()
    saved(storage, {"pos": PerRank({"next": 5, "mask": torch.arange(3)})})
    pos = PerRank({"next": 0, "mask": torch.zeros(3, dtype=torch.int64)})
    restored(storage, {"pos": pos})
    assert pos.value["next"] == 5
    assert pos.value["mask"].tolist() == [0, 1, 2]


class RaisingSink:
    def emit(self, name: str, /, **fields: Any) -> None:
        raise RuntimeError("the logger is down")


def test_d49_a_sink_that_raises_does_not_fail_a_save() -> None:
    with Checkpointer(MemoryStorage(), sink=RaisingSink()) as c:
        assert c.save(1, {"a": 1}).committed.result().step == 1
        assert c.save(2, {"a": 1}).committed.result().step == 2


class Versioned(torch.nn.Module):
    """A module that migrates the state of its older versions, as BatchNorm does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, *args: Any) -> None:
        if meta.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] * 1000
        super()._load_from_state_dict(state, prefix, meta, *args)


def test_modules_are_loaded_with_their_versions() -> None:
    storage = MemoryStorage()
    m = Versioned()
    saved(storage, {"m": m})
    restored(storage, {"m": m})
    assert m.scale.item() == 1


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_steps_are_whole_numbers_from_zero(step: Any) -> None:
    with Checkpointer(MemoryStorage()) as c, pytest.raises(BadInputError, match="whole number"):
        c.save(step, {"a": 1})


def test_an_optimizer_gets_its_state_back_before_its_first_step() -> None:
    storage = MemoryStorage()
    first = Job(0)
    first.train(1)
    saved(storage, first.state)
    second = Job(1)
    assert not second.optimizer.state_dict()["state"]
    restored(storage, second.state)
    moments = second.optimizer.state_dict()["state"]
    assert moments.keys() == first.optimizer.state_dict()["state"].keys()
    assert torch.equal(moments[0]["exp_avg"], first.optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("bad", [{"n": 3}, {1: "a"}, {"n": None}, {"n": "\ud800"}])
def test_annotations_that_a_commit_cannot_hold_are_refused(bad: Any) -> None:
    storage = MemoryStorage()
    with pytest.raises(BadInputError, match="annotations"):
        Checkpointer(storage, annotations=bad)
    with Checkpointer(storage) as c:
        with pytest.raises(BadInputError, match="annotations"):
            c.save(1, {"a": 1}, annotations=bad)
        c.save(1, {"a": 1}, annotations={"n": "3"}).committed.result()
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.record is not None
    assert latest.record.annotations == {"n": "3"}


def test_mappings_that_are_no_dicts_are_restored_too() -> None:
    storage, model = MemoryStorage(), torch.nn.Linear(2, 2)
    saved(storage, {"o": torch.optim.SGD(model.parameters(), lr=0.5), "p": {"step": 7}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress = UserDict(step=0)
    restored(storage, MappingProxyType({"o": optimizer, "p": progress}))  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert progress["step"] == 7
    frozen = MappingProxyType({"step": 0})
    with pytest.raises(BadInputError, match=r"^p.step: can't be put back into a mappingproxy"):
        restored(storage, {"o": optimizer, "p": frozen})


def test_a_part_that_was_per_rank_and_no_longer_is_is_refused() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": PerRank(5)})
    state = {"a": 0}
    with pytest.raises(
        BadInputError, match="a: the checkpoint has a PerRank part, the state a int"
    ):
        restored(storage, state)
    assert state == {"a": 0}


def test_an_empty_dict_takes_whatever_values_the_checkpoint_has() -> None:
    storage = MemoryStorage()
    saved(storage, {"a": 1, "b": 2, "pos": PerRank({"next": 3})})
    state: dict[str, Any] = {}
    restored(storage, state)
    assert state == {"a": 1, "b": 2, "pos": PerRank({"next": 3})}


@pytest.mark.parametrize("wrap", [list, tuple, PerRank], ids=lambda w: w.__name__)
def test_an_optimizer_in_a_container_gets_its_state_back_before_its_first_step(wrap: Any) -> None:
    storage = MemoryStorage()
    first, second = Job(0), Job(1)
    first.train(1)

    def state(job: Job) -> dict[str, Any]:
        return {"o": wrap(job.optimizer if wrap is PerRank else [job.optimizer])}

    saved(storage, state(first))
    restored(storage, state(second))
    moments = second.optimizer.state_dict()["state"]
    assert torch.equal(moments[0]["exp_avg"], first.optimizer.state_dict()["state"][0]["exp_avg"])


class Cache:
    """An object whose state has another shape once it has been used, as a data loader's has."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


@pytest.mark.parametrize(
    ("then", "now"), [({"n": 1}, None), (None, {"n": 1}), (torch.ones(2), None), ([1], ())]
)
@pytest.mark.parametrize("wrap", [lambda x: x, PerRank])
def test_an_object_takes_back_whatever_it_saved(then: Any, now: Any, wrap: Any) -> None:
    storage, cache = MemoryStorage(), Cache(now)
    saved(storage, {"c": wrap(Cache(then))})
    restored(storage, {"c": wrap(cache)})
    assert repr(cache.held) == repr(then)


@pytest.mark.parametrize(("offsets", "shape"), [((0, 0), (5, 2)), ((-1, 0), (1, 2)), ((0,), (4,))])
def test_a_box_outside_a_tensor_is_refused_and_not_filled_in_part(offsets: Any, shape: Any) -> None:
    storage = MemoryStorage()
    saved(storage, {"a": torch.ones(4, 2)})
    with pytest.raises(BadInputError, match="a: no box at"):
        reader(storage, 1).read_into("a", torch.zeros(shape), offsets)


def test_cancelling_a_future_stops_neither_the_save_nor_those_after_it() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("writer", "*000001/r00000.bin").block()
    with Checkpointer(faulty, CheckpointConfig(close_timeout_s=5.0)) as c:
        first = c.save(1, {"a": 1})
        gate.wait_reached()
        assert not first.committed.cancel()
        gate.open()
        assert first.committed.result(5).step == 1
        assert c.save(2, {"a": 1}).committed.result(5).step == 2


def test_a_save_that_never_ends_is_told_by_wait_and_by_close() -> None:
    faulty, sink = FaultyStorage(MemoryStorage()), ListSink()
    gate = faulty.on("writer", f"{DATA}*").block()
    c = Checkpointer(faulty, CheckpointConfig(close_timeout_s=0.2), sink=sink)
    handle = c.save(1, {"a": 1})
    gate.wait_reached()
    with pytest.raises(DeadlineError, match="1 saves are still pending after 0.2 s"):
        c.wait()
    c.close()
    assert [e["error"] for e in sink.named("save_failed")] == ["close() gave up waiting"]
    gate.open()
    assert handle.committed.result(10).step == 1


class Extra(torch.nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


@pytest.mark.parametrize("then", [5, None, {"n": 1}, torch.ones(2)], ids=str)
def test_a_module_takes_back_whatever_extra_state_it_saved(then: Any) -> None:
    storage = MemoryStorage()
    saved(storage, {"m": torch.nn.Sequential(Extra(then))})
    model = torch.nn.Sequential(Extra(None))
    restored(storage, {"m": model})
    assert repr(model[0].extra) == repr(then)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_neither_saves_nor_waits_for_its_parents_saves() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("writer", f"{DATA}*").block()
    with Checkpointer(faulty) as c:
        handle = c.save(1, {"a": 1})
        gate.wait_reached()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    c.save(2, {"a": 1})
                except BadInputError:
                    c.close()
                    code = 0
            os._exit(code)
        gate.open()
        deadline = time.monotonic() + 20
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        assert ended == (child, 0)
        assert handle.committed.result(10).step == 1


def test_values_that_only_the_checkpoint_has_are_refused_by_name() -> None:
    storage = MemoryStorage()
    saved(storage, {"progress": {"step": 1, "seen": [1, 2]}, "note": "x"})
    state = {"progress": {"step": 0}}
    with pytest.raises(BadInputError) as e:
        restored(storage, state)
    assert "progress.seen.0: is in the checkpoint but not in the state" in str(e.value)
    assert "note: is in the checkpoint but not in the state" in str(e.value)
    assert state == {"progress": {"step": 0}}


def test_steps_go_on_from_the_restored_one() -> None:
    storage = MemoryStorage()
    with Checkpointer(storage) as c:
        c.save(10, {"a": 1}).committed.result()
    with Checkpointer(storage) as c:
        c.restore({"a": 0})
        with pytest.raises(BadInputError, match="the last one was step 10"):
            c.save(10, {"a": 1})
        c.save(11, {"a": 1}).committed.result()
