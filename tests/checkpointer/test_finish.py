"""A save that all ranks have written is committed, whoever is left to do it, and no other is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ckpt import CheckpointConfig, Checkpointer, PerRank, layout, persist
from ckpt.catalog import Catalog
from ckpt.doctor import unfinished_save
from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    DeadlineError,
    SaveSkippedError,
    StorageError,
)
from ckpt.events import ListSink
from ckpt.finish import finish, finish_newest
from ckpt.manifest import AttemptRecord, decode, encode
from ckpt.storage import Storage
from ckpt.storage.memory import MemoryStorage
from ckpt.types import SystemClock
from ckpt.verify import verify_commit
from ckpt.written import uncommitted
from tests.checkpointer.ranks import on_ranks, values
from tests.faults import FaultyStorage, Gate


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience with a silent rank 0 that suits a test."""
    monkeypatch.setattr(persist, "_GRACE_S", 0.1)
    monkeypatch.setattr(persist, "_LOOK_EVERY_S", 0.05)


STEP_2 = layout.commit_key(1, 2)


def state(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((5,), float(step)), "mine": PerRank(torch.tensor(rank)), "step": step}


def two_steps(
    storage: Storage,
    state_of: Callable[[int, int], dict[str, Any]] = state,
    **config: Any,
) -> list[list[BaseException | None]]:
    """Two ranks save steps 1 and 2; what each rank's handles say."""

    def body(rank: int, place: dict[str, Any]) -> list[BaseException | None]:
        with Checkpointer(storage, CheckpointConfig(**config), **place) as c:
            return [c.save(step, state_of(rank, step)).committed.exception(60) for step in (1, 2)]

    return values(on_ranks(2, body))


def resumed(storage: Storage, sink: ListSink | None = None, world: int = 2) -> list[int]:
    """The step that each rank of a new attempt resumes from, with its state checked."""

    def body(rank: int, place: dict[str, Any]) -> int:
        mine = state(rank, 0)
        place = {**place, "sink": sink} if sink is not None and rank == 0 else place
        with Checkpointer(storage, **place) as c:
            result = c.restore(mine, elastic=True)
        assert result is not None
        assert mine["w"].tolist() == [float(result.step)] * 5
        return result.step

    return values(on_ranks(world, body))


def keep_data(faulty: FaultyStorage) -> None:
    """As if rank 0 had died at once: it sweeps what it refused."""
    faulty.on("delete", "data/*").always().fail(StorageError("the store is down"))


def without_its_commit(**config: Any) -> MemoryStorage:
    """A root whose step 2 lacks only the commit."""
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    faulty.on("create", STEP_2).always().fail(StorageError("the store is down"))
    keep_data(faulty)
    for first, second in two_steps(faulty, **config):
        assert first is None
        assert isinstance(second, StorageError)
    assert [i.ref.step for i in Catalog(storage).lineage()] == [1]
    return storage


@pytest.mark.parametrize("digest", ["xxh3-128", "sha256"])
def test_the_next_start_finishes_what_lacks_only_its_commit(digest: str) -> None:
    storage, sink = without_its_commit(digest=digest), ListSink()
    found = unfinished_save(storage)
    assert found.level == "warn"
    assert "all 2 ranks have written step 2 of epoch 1" in found.text
    assert resumed(storage, sink) == [2, 2]
    assert sink.named("save_finished") == [{"step": 2, "epoch": 1}]
    record = Catalog(storage).find(2).record
    assert record is not None
    assert record.parent is not None
    assert record.parent.step == 1
    assert all(f.digest.startswith(f"{digest}:") for f in record.receipts)
    assert verify_commit(storage, record, level="full").ok
    assert unfinished_save(storage).level == "ok"


def test_the_next_start_may_have_another_number_of_ranks() -> None:
    assert resumed(without_its_commit(), world=3) == [2, 2, 2]


def test_annotations_and_times_of_a_finished_commit_are_those_of_its_save() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    faulty.on("create", "commits/*").fail(StorageError("the store is down"))
    keep_data(faulty)
    with Checkpointer(faulty, annotations={"note": "kept"}) as c:
        assert c.save(7, {"a": 1}).committed.exception()
    before = SystemClock().time()
    ref = finish_newest(storage, SystemClock(), ListSink())
    assert ref is not None
    record = Catalog(storage).read(ref)
    assert record.annotations == {"note": "kept"}
    assert record.saved_at_s <= before <= record.committed_at_s


def test_a_first_save_without_restore_is_refused_where_one_can_be_finished() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    faulty.on("create", "commits/*").fail(StorageError("the store is down"))
    keep_data(faulty)
    with Checkpointer(faulty) as c:
        assert c.save(3, {"a": 1}).committed.exception()
    with Checkpointer(storage) as c, pytest.raises(ConflictError, match="up to step 3"):
        c.save(1, {"a": 1})


@pytest.mark.parametrize("step", [1, 2])
def test_an_explicit_step_is_restored_after_finishing(step: int) -> None:
    storage = without_its_commit()

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, **place) as c:
            return c.restore(state(rank, 0), step=step)

    assert [r.step for r in values(on_ranks(2, body))] == [step, step]


def test_what_rank_0_refused_for_its_values_is_refused_again() -> None:
    storage, sink = MemoryStorage(), ListSink()
    faulty = FaultyStorage(storage)
    keep_data(faulty)
    for _, error in two_steps(faulty, lambda r, s: {**state(r, s), "lr": r * (s - 1)}):
        assert isinstance(error, BadInputError)
    assert finish_newest(storage, SystemClock(), sink) is None
    (told,) = sink.named("save_not_finished")
    assert told["step"] == 2
    assert "lr: ranks 0 and 1 hold different values (0 and 1)" in told["error"]
    assert [i.ref.step for i in Catalog(storage).lineage()] == [1]


@pytest.mark.parametrize("op", ["writer", "create"])
def test_a_save_that_a_rank_failed_has_no_receipt_of_it_and_is_not_finished(op: str) -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    keep_data(faulty)
    faulty.on(op, "*000002/r00001.*").always().fail(StorageError("rank 1 is out of room"))
    for _, error in two_steps(faulty):
        assert "rank 1 is out of room" in str(error)
    assert unfinished_save(storage).level == "ok"
    assert resumed(storage) == [1, 1]


def test_a_save_that_a_rank_skipped_is_not_finished() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    keep_data(faulty)
    gate = faulty.on("writer", "*000001/r00001.bin").block()

    def body(rank: int, place: dict[str, Any]) -> Any:
        policy: Any = "skip" if rank == 1 else "block"
        config = CheckpointConfig(when_busy=policy, max_pending=3 if rank == 0 else 1)
        with Checkpointer(faulty, config, **place) as c:
            handles = [c.save(s, state(rank, s)) for s in (1, 2)]
            if rank == 1:
                gate.wait_reached()
                gate.open()
            return [h.committed.exception() for h in handles]

    for first, second in values(on_ranks(2, body)):
        assert first is None
        assert isinstance(second, SaveSkippedError)
    assert unfinished_save(storage).level == "ok"
    assert resumed(storage) == [1, 1]


def test_ranks_out_of_step_are_not_finished() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    keep_data(faulty)

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(faulty, **place) as c:
            return c.save(1 + rank, {"a": 1}).committed.exception()

    on_ranks(2, body)
    assert finish_newest(storage, SystemClock(), ListSink()) is None


@pytest.mark.parametrize("damage", ["missing", "cut", "receipt"])
def test_a_save_whose_files_are_not_as_its_receipts_say_is_not_finished(damage: str) -> None:
    storage, sink = without_its_commit(), ListSink()
    suffix = "receipt.json" if damage == "receipt" else "bin"
    key = next(o.key for o in storage.list("data/") if o.key.endswith(f"000002/r00001.{suffix}"))
    data = storage.read(key)
    storage.delete(key)
    if damage != "missing":
        storage.put(key, data[:-1])
    assert resumed(storage, sink) == [1, 1]
    assert len(sink.named("save_not_finished")) == 1


def test_of_several_complete_saves_the_newest_sound_one_is_finished() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    faulty.on("create", "commits/*").always().fail(StorageError("the store is down"))
    keep_data(faulty)
    two_steps(faulty)
    (key,) = (o.key for o in storage.list("data/") if o.key.endswith("000002/r00001.bin"))
    storage.delete(key)
    assert resumed(storage) == [1, 1]


def test_a_superseded_attempt_never_finishes() -> None:
    storage = without_its_commit()
    attempt, (save,) = uncommitted(storage, Catalog(storage).tree())
    assert attempt is not None
    with Checkpointer(storage) as c:
        c.restore({}, fresh=True)
    with pytest.raises(ConflictError, match="a newer attempt owns"):
        finish(storage, attempt, save, SystemClock())
    assert uncommitted(storage, Catalog(storage).tree())[1] == []


def test_of_two_that_finish_at_once_both_have_the_same_commit() -> None:
    storage = without_its_commit()
    attempt, (save,) = uncommitted(storage, Catalog(storage).tree())
    assert attempt is not None
    first = finish(storage, attempt, save, SystemClock())
    assert finish(storage, attempt, save, SystemClock()) == first


def test_a_commit_of_the_same_step_by_somebody_else_is_a_conflict() -> None:
    storage = without_its_commit()
    attempt, (save,) = uncommitted(storage, Catalog(storage).tree())
    assert attempt is not None
    storage.put(STEP_2, storage.read(layout.commit_key(1, 1)))
    with pytest.raises(ConflictError, match="step 2 is committed already"):
        finish(storage, attempt, save, SystemClock())


def test_a_slow_rank_0_is_content_with_what_the_next_attempt_finished() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    gate = faulty.on("read", "*000002/r00001.receipt.json").block()  # before rank 0 commits

    def rest() -> None:
        gate.wait_reached()
        try:
            assert resumed(storage) == [2, 2]
        finally:
            gate.open()

    other = threading.Thread(target=rest)
    other.start()
    assert two_steps(faulty) == [[None, None], [None, None]]
    other.join()


@pytest.mark.parametrize("name", ["receipt.json", "objects.json"])
def test_a_lost_reply_to_a_receipt_is_recognised_as_success(name: str) -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on("create", f"*/r00001.{name}").lose_reply()
    assert two_steps(faulty) == [[None, None], [None, None]]


class CutOff:
    """A job's store that is gone once `gone` is set."""

    def __init__(self, inner: Any, gone: threading.Event) -> None:
        self._inner, self._gone = inner, gone

    def clone(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if self._gone.is_set():
            raise RuntimeError("Connection reset by peer")
        return getattr(self._inner, name)


def cut_off_at(storage: Storage, *gates: Gate) -> list[BaseException | None]:
    """Two ranks save step 1; the job's store is gone for both once they stand at the gates."""
    gone = threading.Event()

    def watch() -> None:
        for gate in gates:
            gate.wait_reached()
        gone.set()
        for gate in gates:
            gate.open()

    def body(rank: int, place: dict[str, Any]) -> list[BaseException | None]:
        store = CutOff(place["store"], gone)
        # Who waits for a word already isn't told that the store is gone.
        config = CheckpointConfig(commit_timeout_s=3.0)
        with Checkpointer(storage, config, **{**place, "store": store}) as c:
            return [c.save(1, state(rank, 1)).committed.exception(60)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    (first,), (second,) = values(on_ranks(2, body))
    watcher.join()
    return [first, second]


def test_without_the_jobs_store_all_ranks_find_on_storage_that_the_save_is_complete() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gates = [faulty.on("create", f"*/r{r:05d}.receipt.json").block() for r in range(2)]

    assert cut_off_at(faulty, *gates) == [None, None]
    assert [i.ref.step for i in Catalog(faulty).lineage()] == [1]


def test_a_rank_that_failed_says_so_without_the_jobs_store_and_nothing_is_committed() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("create", "*/r00000.receipt.json").block()
    faulty.on("writer", "*/r00001.bin").fail(StorageError("no room"))

    silent, failed = cut_off_at(faulty, gate)
    assert isinstance(silent, StorageError)
    assert "no room" in str(failed)
    assert Catalog(faulty).latest() is None


def test_a_rank_0_that_is_only_slow_finds_its_commit_made() -> None:
    faulty = FaultyStorage(MemoryStorage())
    gate = faulty.on("create", layout.commit_key(1, 1)).block()

    def body(rank: int, place: dict[str, Any]) -> Any:
        # Rank 0 hangs in the store with its commit, until rank 1 has lost patience.
        with Checkpointer(faulty, CheckpointConfig(commit_timeout_s=1.0), **place) as c:
            handle = c.save(1, state(rank, 1))
            if rank == 1:
                gate.wait_reached()
                ref = handle.committed.result(60)
                gate.open()
                return ref
            return handle.committed.result(60)

    first, second = values(on_ranks(2, body))
    assert first == second
    assert Catalog(faulty).find(1).ref == first


def test_a_rank_0_that_never_answers_leaves_an_incomplete_save_uncommitted() -> None:
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(storage, CheckpointConfig(commit_timeout_s=1.0), **place) as c:
            c.save(1, {"a": 1}).committed.result(60)
            if rank == 1:
                return [c.save(2, {"a": 2}).committed.exception(60)]
        return None

    _, (error,) = values(on_ranks(2, body))
    assert isinstance(error, DeadlineError)
    assert [i.ref.step for i in Catalog(storage).lineage()] == [1]


def test_only_the_data_above_the_last_commit_is_looked_at() -> None:
    storage = without_its_commit()
    faulty = FaultyStorage(storage)
    uncommitted(faulty, Catalog(faulty).tree())
    listed = [key for op, key in faulty.calls if op == "list" and key.startswith(layout.DATA)]
    assert listed
    assert not any("data/000001-000000000001".startswith(prefix) for prefix in listed)


steps = st.integers(0, 10**12 - 1)


@given(steps, steps)
def test_prefixes_above_a_step_cover_each_higher_step_once_and_no_other(n: int, step: int) -> None:
    key = layout.rank_data_key(layout.data_prefix(3, step, "000001"), 0)
    matching = [p for p in layout.data_prefixes_above(3, n) if key.startswith(p)]
    assert len(matching) == (step > n)


def test_a_root_without_attempts_has_nothing_to_finish() -> None:
    storage = MemoryStorage()
    assert finish_newest(storage, SystemClock(), ListSink()) is None
    with Checkpointer(storage, rank=0, world_size=2, store=dist.HashStore()):
        pass
    assert finish_newest(storage, SystemClock(), ListSink()) is None


def test_a_receipt_of_another_attempt_is_refused() -> None:
    storage, sink = without_its_commit(), ListSink()
    key = layout.attempt_key(1)
    storage.put(key, encode(replace(decode(AttemptRecord, storage.read(key), key), token="x")))
    storage.delete(layout.commit_key(1, 1))
    assert finish_newest(storage, SystemClock(), sink) is None
    assert "not written by attempt 1" in sink.named("save_not_finished")[0]["error"]


def test_a_store_that_fails_at_the_start_is_an_error_and_the_start_can_be_tried_again() -> None:
    storage = without_its_commit()
    faulty = FaultyStorage(storage)
    faulty.on("create", STEP_2).times(1).fail(StorageError("still down"))

    def body(rank: int, place: dict[str, Any]) -> Any:
        with Checkpointer(faulty, **place) as c:
            with pytest.raises(StorageError, match="still down"):
                c.restore(state(rank, 0))
            return c.restore(state(rank, 0))

    assert [r.step for r in values(on_ranks(2, body))] == [2, 2]


def test_corrupt_error_is_not_raised_for_a_damaged_receipt() -> None:
    storage = without_its_commit()
    (key,) = (o.key for o in storage.list("data/") if o.key.endswith("000002/r00000.receipt.json"))
    storage.put(key, b"rubbish")
    attempt, (save,) = uncommitted(storage, Catalog(storage).tree())
    assert attempt is not None
    with pytest.raises(CorruptError):
        finish(storage, attempt, save, SystemClock())
    assert resumed(storage) == [1, 1]
