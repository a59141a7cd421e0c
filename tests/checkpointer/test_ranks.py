"""The protocol between ranks: agreement, failures that reach everybody, never a hang."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt import CheckpointConfig, Checkpointer, PerRank
from ckpt.catalog import Catalog
from ckpt.coordinator import Coordinator
from ckpt.errors import (
    BadInputError,
    CorruptError,
    DeadlineError,
    SaveError,
    SaveSkippedError,
    SidestageError,
    StorageError,
)
from ckpt.layout import DATA
from ckpt.replicas import ReplicaCheck, differing
from ckpt.restore import CheckpointReader
from ckpt.storage.memory import MemoryStorage
from ckpt.types import CommitRef
from tests.checkpointer.ranks import on_ranks, values
from tests.faults import DEADLINE_S, FaultyStorage


def save_one(storage: Any, state_of: Any, world: int = 2, **config: Any) -> list[Any]:
    """Each rank saves state_of(rank) as step 1; what `committed` gave, by rank."""

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, CheckpointConfig(**config), **place) as c:
            return c.save(1, state_of(rank)).committed.result()

    return on_ranks(world, body)


def test_replicated_state_is_written_once_and_per_rank_state_by_each() -> None:
    storage = MemoryStorage()
    refs = values(
        save_one(
            storage,
            lambda r: {
                "w": torch.ones(5),
                "n": {"lr": 0.1},
                "mine": PerRank({"r": r, "t": torch.tensor(r)}),
            },
            world=3,
        )
    )
    assert len(set(refs)) == 1
    record = Catalog(storage).read(refs[0])
    reader = CheckpointReader(storage, record)
    assert len(reader.info("w").boxes) == 1
    for rank in range(3):
        mine = reader.per_rank_values(rank)["mine"]
        assert mine["r"] == rank
        assert reader.read(mine["t"].fqn).item() == rank


def test_d16_replicas_that_differ_are_found_and_named() -> None:
    results = save_one(MemoryStorage(), lambda r: {"metric": {"sum": torch.tensor(float(r))}})
    for r in results:
        assert isinstance(r, BadInputError)
        assert "metric.sum: ranks 0 and 1 hold different values" in str(r)
        assert "PerRank" in str(r)


def test_replicas_that_drift_apart_are_found_in_a_later_save() -> None:
    """Of the second save: nothing was wrong with the first."""
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> list[Any]:
        tensors = {f"t{n}": torch.zeros(3, 4).t() for n in range(20)}
        ends: list[Any] = []
        with Checkpointer(storage, **place) as c:
            for step in (1, 2, 3):
                if step > 1:
                    tensors["t7"] += rank
                try:
                    ends.append(c.save(step, {"model": tensors}).committed.result(DEADLINE_S))
                except SidestageError as e:
                    ends.append(e)
        return ends

    for first, *later in values(on_ranks(2, body)):
        assert isinstance(first, CommitRef)
        for end in later:
            assert isinstance(end, BadInputError)
            assert "model.t7: ranks 0 and 1 hold different values" in str(end)
            assert "PerRank" in str(end)
    assert [c.ref.step for c in Catalog(storage).lineage()] == [1]


def test_all_of_large_replicas_has_its_turn() -> None:
    check = ReplicaCheck({"a": 5 << 20, "b": 100, "c": (3 << 20) + 1})
    tensors = {n: torch.zeros(s, dtype=torch.uint8) for n, s in (("a", 5 << 20), ("b", 100))}
    tensors["c"] = torch.zeros((3 << 20) + 1, dtype=torch.uint8)
    seen: set[str] = set()
    for number in range(9):
        digests = check.look(tensors.__getitem__, number).digests()
        assert len(digests) == 64
        assert differing([digests, dict(digests)]) is None
        seen |= set(digests)
    assert len(seen) == 320 + 1 + 193
    other = {n: t.clone() for n, t in tensors.items()}
    other["c"][-1] = 1
    found = [
        differing([check.look(x.__getitem__, n).digests() for x in (tensors, other)])
        for n in range(9)
    ]
    assert set(found) == {None, ("c", 1)}


def test_values_that_differ_between_ranks_are_found_and_named() -> None:
    for r in save_one(MemoryStorage(), lambda r: {"progress": {"step": r}}):
        assert isinstance(r, BadInputError)
        assert "progress.step: ranks 0 and 1 hold different values (0 and 1); wrap it in" in str(r)


def test_shapes_that_differ_between_ranks_are_found_and_named() -> None:
    for r in save_one(MemoryStorage(), lambda r: {"w": torch.zeros(2 + r)}):
        assert isinstance(r, BadInputError)
        assert "w: rank 0 has float32 [2] (replicated), rank 1 has float32 [3]" in str(r)


def test_d13_a_rank_that_cannot_write_fails_the_save_on_all_and_the_next_works() -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on("writer", "*000002/r00001.bin").fail(StorageError("no space left on rank 1"))

    def body(rank: int, place: dict[str, Any]) -> Any:
        out = []
        with Checkpointer(faulty, **place) as c:
            for step in (1, 2, 3):
                h = c.save(step, {"t": PerRank(torch.full((4,), float(step)))})
                out.append(h.committed.exception())
        return out, c.stats

    for (first, second, third), stats in values(on_ranks(2, body)):
        assert first is None
        assert third is None
        assert isinstance(second, StorageError)
        assert "rank 1: no space left on rank 1" in str(second)
        assert (stats.commits, stats.failed) == (2, 1)
    assert [i.ref.step for i in Catalog(faulty).lineage()] == [3, 1]


def test_a_rank_that_never_saves_is_a_deadline_on_the_others_not_a_hang() -> None:
    def body(rank: int, place: dict[str, Any]) -> Any:
        config = CheckpointConfig(commit_timeout_s=2.0)
        with Checkpointer(MemoryStorage("shared"), config, **place) as c:
            if rank == 0:
                return c.save(1, {"a": 1}).committed.result()
        return None

    lonely, absent = on_ranks(2, body)
    assert isinstance(lonely, DeadlineError)
    assert absent is None
    assert "/1" in str(lonely)


def test_a_skipped_save_is_skipped_by_all_ranks_at_once() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("writer", "*000001/r00001.bin").block()

    def body(rank: int, place: dict[str, Any]) -> Any:
        policy = "skip" if rank == 1 else "block"
        config = CheckpointConfig(when_busy=policy, max_pending=3 if rank == 0 else 1)  # type: ignore[arg-type]
        with Checkpointer(faulty, config, **place) as c:
            handles = [c.save(s, {"a": torch.ones(2)}) for s in (1, 2)]
            if rank == 1:
                gate.wait_reached()
                gate.open()
            return [h.committed.exception() for h in handles], c.stats

    for (first, second), stats in values(on_ranks(2, body)):
        assert first is None
        assert isinstance(second, SaveError)
        assert stats.skipped == 1
        assert stats.failed == 0


def test_ranks_out_of_step_are_found() -> None:
    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, **place) as c:
            return c.save(1 + rank, {"a": torch.ones(2)}).committed.exception()

    storage = MemoryStorage()
    for error in on_ranks(2, body):
        assert isinstance(error, BadInputError)
        assert "rank 1 saved step 2" in str(error)
    assert Catalog(storage).latest() is None


def test_a_checkpoint_damaged_for_one_rank_is_set_aside_by_all() -> None:
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, **place) as c:
            for step in (1, 2):
                c.save(step, {"t": PerRank(torch.full((9,), 10.0 * step + rank))})

    values(on_ranks(2, body))
    key = next(o.key for o in storage.list(DATA) if o.key.endswith("000002/r00001.bin"))
    storage.put(key, bytes(len(storage.read(key))))

    def again(rank: int, place: dict[str, Any]) -> Any:
        t = PerRank(torch.zeros(9))
        with Checkpointer(storage, **place) as c:
            result = c.restore({"t": t})
        return result, t.value

    for rank, (result, tensor) in enumerate(values(on_ranks(2, again))):
        assert result.step == 1
        assert tensor.tolist() == [10.0 + rank] * 9


def test_another_world_size_needs_elastic_and_names_what_stays() -> None:
    storage = MemoryStorage()
    values(save_one(storage, lambda r: {"w": torch.ones(3), "pos": PerRank({"next": r})}))

    def body(rank: int, place: dict[str, Any], *, elastic: bool) -> Any:
        w, pos = torch.zeros(3), PerRank({"next": -1})
        with Checkpointer(storage, **place) as c:
            result = c.restore({"w": w, "pos": pos}, elastic=elastic)
        return result, w, pos.value

    for r in on_ranks(3, lambda rank, place: body(rank, place, elastic=False)):
        assert isinstance(r, BadInputError)
        assert "saved by 2 ranks, this job has 3, and pos belong" in str(r)
    for result, w, pos in values(on_ranks(3, lambda rank, place: body(rank, place, elastic=True))):
        assert result.not_restored == ("pos",)
        assert result.world_size == 2
        assert torch.equal(w, torch.ones(3))
        assert pos == {"next": -1}


def test_another_world_size_adds_no_per_rank_parts_to_a_state_without_them() -> None:
    storage = MemoryStorage()
    values(save_one(storage, lambda r: {"w": torch.ones(3), "pos": PerRank({"next": r})}))

    def body(rank: int, place: dict[str, Any]) -> Any:
        state = {"w": torch.zeros(3)}
        with Checkpointer(storage, **place) as c:
            c.restore(state, elastic=True)
        return sorted(state)

    assert values(on_ranks(3, body)) == [["w"]] * 3


def test_a_state_that_fits_one_rank_only_is_refused_on_all_and_changes_nothing() -> None:
    storage = MemoryStorage()
    values(save_one(storage, lambda r: {"w": PerRank(torch.ones(3))}))

    def body(rank: int, place: dict[str, Any]) -> Any:
        w = PerRank(torch.zeros(3 + rank))
        with Checkpointer(storage, **place) as c:
            try:
                c.restore({"w": w})
            except BadInputError as e:
                return str(e), w.value
        return None

    for message, tensor in values(on_ranks(2, body)):
        assert "w@1: the checkpoint has float32 [3], the state float32 [4]" in message
        assert not tensor.any()


def test_more_than_one_rank_needs_a_store() -> None:
    with pytest.raises(BadInputError, match="there is no store"):
        Coordinator(0, 2, None, "")


def test_the_store_does_not_grow_with_saves() -> None:
    counts = []

    def body(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, **place) as c:
            for step in range(1, 30):
                c.save(step, {"a": torch.ones(2)}).committed.result()
                if rank == 0 and step in (5, 29):
                    counts.append(place["store"].num_keys())

    storage = MemoryStorage()
    values(on_ranks(2, body))
    assert counts[1] <= counts[0] + 1


def test_the_store_does_not_grow_with_saves_that_are_skipped() -> None:
    rounds, counts = 12, []
    storage = FaultyStorage(MemoryStorage())
    gates = [
        [storage.on("writer", f"*-{3 * n:012d}-*/r{r:05d}.bin").block() for r in range(2)]
        for n in range(rounds)
    ]

    def body(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, CheckpointConfig(when_busy="skip"), **place) as c:
            for n in range(rounds):
                first = c.save(3 * n, {"a": torch.ones(2 + n % 2)})
                gates[n][rank].wait_reached()
                for step in (3 * n + 1, 3 * n + 2):
                    assert c.save(step, {"a": torch.ones(2 + n % 2)}).committed.exception()
                gates[n][rank].open()
                first.committed.result()
                c.wait()
                if rank == 0:
                    counts.append(place["store"].num_keys())

    values(on_ranks(2, body))
    assert counts[-1] <= counts[1] + 1


class SlowToHear:
    """A store of one rank whose wait for some key is held until the test lets it go."""

    def __init__(self, inner: Any, key: str, go: threading.Event) -> None:
        self._inner, self._key, self._go = inner, key, go

    def clone(self) -> Any:
        return self

    def wait(self, keys: list[str], timeout: Any) -> None:
        if keys[0].endswith(self._key):
            self._go.wait(20)
        self._inner.wait(keys, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_end_of_a_save_is_kept_for_a_rank_that_gave_up_later_ones_meanwhile() -> None:
    go = threading.Event()

    def body(rank: int, place: dict[str, Any]) -> Any:
        config = CheckpointConfig(
            when_busy="skip", max_pending=3 if rank == 0 else 1, commit_timeout_s=2.0
        )
        if rank == 1:
            place = {**place, "store": SlowToHear(place["store"], "save/1/out", go)}
        with Checkpointer(storage, config, **place) as c:
            handles = [c.save(step, {"a": torch.ones(2)}) for step in (1, 2, 3)]
            if rank == 0:
                handles[2].committed.exception()
                go.set()
            return [h.committed.exception() for h in handles]

    storage = MemoryStorage()
    for first, second, third in values(on_ranks(2, body)):
        assert first is None
        assert isinstance(second, SaveError)
        assert isinstance(third, SaveError)


def test_corrupt_error_of_opening_reaches_all_ranks() -> None:
    storage = MemoryStorage()
    values(save_one(storage, lambda r: {"w": torch.ones(3)}))
    key = next(o.key for o in storage.list(DATA) if o.key.endswith("r00001.idx"))
    storage.put(key, b"rubbish")

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, **place) as c:
            return c.restore({"w": torch.zeros(3)})

    for r in on_ranks(2, body):
        assert isinstance(r, CorruptError)


def test_each_rank_gets_its_own_optimizer_back_before_its_first_step() -> None:
    def job(rank: int) -> torch.optim.Optimizer:
        w = torch.nn.Parameter(torch.full((2,), float(rank)))
        return torch.optim.Adam([w])

    def stepped(rank: int) -> torch.optim.Optimizer:
        optimizer = job(rank)
        optimizer.param_groups[0]["params"][0].grad = torch.full((2,), rank + 1.0)
        optimizer.step()
        return optimizer

    storage = MemoryStorage()
    values(save_one(storage, lambda r: {"o": PerRank(stepped(r))}))

    def body(rank: int, place: dict[str, Any]) -> Any:
        optimizer = job(rank)
        with Checkpointer(storage, **place) as c:
            c.restore({"o": PerRank(optimizer)})
        return optimizer.state_dict()["state"][0]["exp_avg"]

    for rank, moment in enumerate(values(on_ranks(2, body))):
        assert torch.equal(moment, stepped(rank).state_dict()["state"][0]["exp_avg"])


def test_any_error_of_one_rank_ends_the_restore_on_all() -> None:
    faulty = FaultyStorage(MemoryStorage())
    values(save_one(faulty, lambda r: {"w": PerRank(torch.ones(2, 3))}))
    faulty.on("read_into", "*/r00001.bin").fail(RuntimeError("out of something"))

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(faulty, CheckpointConfig(commit_timeout_s=5.0), **place) as c:
            return c.restore({"w": PerRank(torch.zeros(2, 3))})

    for r in on_ranks(2, body):
        assert isinstance(r, SidestageError)
        assert "rank 1: RuntimeError: out of something" in str(r)


class DyingStore:
    """The job's store, which can be cut off."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.dead = False

    def clone(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if self.dead:
            raise RuntimeError("Connection reset by peer")
        return getattr(self._inner, name)


@pytest.mark.parametrize("policy", ["skip", "coalesce"])
def test_giving_up_a_save_needs_no_store(policy: Any) -> None:
    storage = FaultyStorage(MemoryStorage())
    gate = storage.on("writer", "*000001/r00000.bin").block()

    def body(rank: int, place: dict[str, Any]) -> Any:
        store = DyingStore(place["store"])
        pending = 2 if policy == "coalesce" else 1
        config = CheckpointConfig(when_busy=policy, max_pending=pending, commit_timeout_s=2.0)
        with Checkpointer(storage, config, **{**place, "store": store}) as c:
            handles = [c.save(1, {"a": torch.ones(2)})]
            if rank == 0:
                gate.wait_reached()
                store.dead = True
                handles += [c.save(step, {"a": torch.ones(2)}) for step in (2, 3)]
                gate.open()
            return [h.committed.exception(20) for h in handles]

    (first, *given_up), other = values(on_ranks(2, body))
    assert all(isinstance(e, SaveError | StorageError) for e in given_up)
    assert [first, *other] == [None, None], "both find on storage that save 1 is complete"


@pytest.mark.parametrize("op", [("list", "attempts/*"), ("create", "attempts/*")])
def test_a_first_save_can_be_tried_again_after_the_store_failed(op: tuple[str, str]) -> None:
    storage = FaultyStorage(MemoryStorage())
    storage.on(*op).fail(StorageError("no route"))

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, CheckpointConfig(commit_timeout_s=5.0), **place) as c:
            with pytest.raises(StorageError, match="no route"):
                c.save(1, {"a": torch.ones(2)})
            return c.save(1, {"a": torch.ones(2)}).committed.result()

    assert [ref.step for ref in values(on_ranks(2, body))] == [1, 1]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("when", [1, 2])
def test_state_that_only_one_rank_cannot_store_raises_on_all_and_later_saves_work(
    bad: int, when: int
) -> None:
    """At the first save at once; at a later one the other rank learns of it, and raises in its next."""
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> Any:
        raised, failed = [], []
        with Checkpointer(storage, CheckpointConfig(commit_timeout_s=10.0), **place) as c:
            for step in (1, 2, 3, 4):
                extra = PerRank(object() if (rank, step) == (bad, when) else None)
                try:
                    handle = c.save(step, {"a": torch.ones(2), "x": extra})
                except BadInputError as e:
                    assert "x: a builtins.object can't be stored" in str(e)
                    raised.append(step)
                else:
                    if handle.committed.exception() is not None:
                        failed.append((step, type(handle.committed.exception())))
        return raised, failed

    told = values(on_ranks(2, body))
    if when == 1:
        assert told == [([1], [])] * 2
    else:
        assert told[bad] == ([2], [(3, SaveSkippedError)])
        assert told[1 - bad] == ([3], [(2, BadInputError)])
    expected = [4, 3, 2] if when == 1 else [4, 1]
    assert [i.ref.step for i in Catalog(storage).lineage()] == expected


@pytest.mark.parametrize("bad", [0, 1])
def test_state_that_only_one_rank_cannot_store_ends_the_restore_on_all(bad: int) -> None:
    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, CheckpointConfig(commit_timeout_s=10.0), **place) as c:
            with pytest.raises(BadInputError, match="x: a builtins.object can't be stored"):
                c.restore({"x": PerRank(object() if rank == bad else None)})
            return c.restore({"x": PerRank(None)})

    storage = MemoryStorage()
    assert values(on_ranks(2, body)) == [None, None]


def test_values_of_another_type_differ_even_inside_lists() -> None:
    for r in save_one(MemoryStorage(), lambda r: {"progress": {"flags": [1 if r else True]}}):
        assert isinstance(r, BadInputError)
        assert "progress.flags" in str(r)


def test_parts_that_only_some_rank_has_for_itself_need_elastic_too() -> None:
    storage = MemoryStorage()
    values(save_one(storage, lambda r: {"a": 1, **({"mine": PerRank(7)} if r else {})}))
    with Checkpointer(storage) as c, pytest.raises(BadInputError, match="mine belong"):
        c.restore({"a": 0})


def test_case_e42_a_launched_rank_that_has_joined_nobody_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two such ranks would take turns in superseding each other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInputError) as e:
        Checkpointer(MemoryStorage())
    assert "WORLD_SIZE is 2 and this process is in no process group: call torch.dist" in str(
        e.value
    )
    assert "\n" not in str(e.value)
    with Checkpointer(MemoryStorage(), rank=0, world_size=1) as alone:
        assert alone.save(1, {"a": 1}).committed.result().step == 1


def test_case_e42_a_checkpointer_that_was_made_before_joining_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    with Checkpointer(storage) as early:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        for act in (lambda: early.restore({"a": 1}), lambda: early.save(1, {"a": 1})):
            with pytest.raises(BadInputError, match="made before the process group of 2 ranks"):
                act()
    assert list(storage.list()) == []
