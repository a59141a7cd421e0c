"""Pins: placing them, heartbeats, and expiry by the observer's own clock."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.manifest import PinRecord, decode, encode
from ckpt.pins import DEFAULT_TTL_S, Pin, PinBoard, add_pin, pinned, remove_pin
from ckpt.prune import Pruner
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.types import CommitRef
from tests.fake_run import FakeRun
from tests.faults import FaultyStorage
from tests.retention.clock import FakeClock
from tests.retention.test_prune import LAST, Run, steps


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Any) -> Storage:
    return LocalStorage(tmp_path / "run") if request.param == "local" else MemoryStorage()


def record(storage: Storage, pin_id: str) -> PinRecord:
    key = layout.pin_key(pin_id)
    return decode(PinRecord, storage.read(key), key)


def test_a_pin_is_an_object_while_its_block_runs(storage: Storage) -> None:
    run = Run(storage, 1)
    with Pin(storage, run.refs[1], "export", ttl_s=60) as pin:
        found = record(storage, pin.pin_id)
        assert (found.commit, found.ttl_s, found.beats) == (run.refs[1], 60, 0)
        assert found.holder.startswith("export (")
        pin.beat()
        pin.beat()
        assert record(storage, pin.pin_id).beats == 2
        pin.check()
    assert list(storage.list(layout.PINS)) == []
    assert not [t for t in threading.enumerate() if t.name == "sidestage-pin"]


def test_an_error_in_the_block_removes_it_too() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1)
    with pytest.raises(KeyError), Pin(storage, run.refs[1], "export"):
        raise KeyError
    assert list(storage.list(layout.PINS)) == []


def test_a_commit_that_is_gone_cannot_be_pinned_and_no_pin_stays(storage: Storage) -> None:
    run = Run(storage, 1)
    ref = run.refs[1]
    storage.delete(layout.commit_key(1, 1))
    for attempt in (lambda: Pin(storage, ref, "x").__enter__(), lambda: add_pin(storage, ref, "x")):
        with pytest.raises(NotFoundError, match="step 1 of epoch 1 was deleted before it could"):
            attempt()
    run.commit(1, 1, annotations={"from": "a backup"})
    with pytest.raises(CorruptError, match="holds another commit"):
        add_pin(storage, ref, "x")
    assert list(storage.list(layout.PINS)) == []


def test_a_dead_holders_pin_expires_on_the_observers_clock() -> None:
    storage, clock = MemoryStorage(), FakeClock()
    run = Run(storage, 1, 2)
    pin = Pin(storage, run.refs[1], "export", ttl_s=60)
    pin.__enter__()  # and its holder dies: nobody beats, nobody leaves
    board = PinBoard(storage, clock)
    pruner = Pruner(storage, LAST, clock)
    assert [p.expired for p in board.look()] == [False]
    assert pruner.apply(pruner.plan()).deleted == []
    clock.advance(59)
    assert [(p.expired, p.still_s) for p in board.look()] == [(False, 59)]
    clock.advance(1)
    assert [p.expired for p in board.look()] == [True]
    # An observer that has only just come knows nothing.
    assert [p.expired for p in PinBoard(storage, clock).look()] == [False]
    plan = pruner.plan()
    assert plan.expired_pins == [pin.pin_id]
    assert pruner.apply(plan).deleted == [run.refs[1]]
    assert list(storage.list(layout.PINS)) == []
    # The holder was only slow: it learns that it has lost the pin, and doesn't bring it back.
    pin.beat()
    with pytest.raises(ConflictError, match="expired because no beat arrived"):
        pin.check()
    assert list(storage.list(layout.PINS)) == []
    pin.__exit__(None, None, None)


def test_a_living_holders_pin_does_not_expire_however_slow_the_observer() -> None:
    storage, clock = MemoryStorage(), FakeClock()
    run = Run(storage, 1, 2)
    board = PinBoard(storage, clock)
    with Pin(storage, run.refs[1], "export", ttl_s=60) as pin:
        for _ in range(3):
            assert [p.expired for p in board.look()] == [False]
            pin.beat()
            clock.advance(3600)
        assert [p.expired for p in board.look()] == [False]


def test_clocks_of_machines_are_never_compared() -> None:
    storage, clock = MemoryStorage(), FakeClock()
    run = Run(storage, 1)
    behind = FakeClock()
    behind.now = -(10.0**9)
    with Pin(storage, run.refs[1], "export", ttl_s=60, clock=behind):
        assert [p.expired for p in PinBoard(storage, clock).look()] == [False]


def test_a_permanent_pin_stays_until_it_is_removed() -> None:
    storage, clock = MemoryStorage(), FakeClock()
    run = Run(storage, 1, 2)
    add_pin(storage, run.refs[1], "golden", pin_id="golden")
    pruner = Pruner(storage, LAST, clock)
    for _ in range(3):
        plan = pruner.plan()
        assert pruner.apply(plan).deleted == []
        assert plan.keep[0].reason.startswith("pinned by golden: golden (")
        clock.advance(10**9)
    with pytest.raises(ConflictError):
        add_pin(storage, run.refs[2], "other", pin_id="golden")
    remove_pin(storage, "golden")
    with pytest.raises(NotFoundError):
        remove_pin(storage, "golden")
    assert pruner.apply(pruner.plan()).deleted == [run.refs[1]]


@pytest.mark.parametrize("bad", ["", "a/b", "../x", ".x", "x" * 101, "a b"])
def test_ids_that_are_no_names(bad: str) -> None:
    storage = MemoryStorage()
    run = Run(storage, 1)
    if bad:
        with pytest.raises(BadInputError, match="pin id"):
            add_pin(storage, run.refs[1], "x", pin_id=bad)
    with pytest.raises(BadInputError, match="pin id"):
        remove_pin(storage, bad)
    assert list(storage.list(layout.PINS)) == []


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
def test_a_time_to_live_is_seconds(ttl_s: float) -> None:
    with pytest.raises(BadInputError, match="ttl_s"):
        Pin(MemoryStorage(), CommitRef(1, 1, "d"), "x", ttl_s=ttl_s)


def test_a_beat_that_fails_or_loses_its_reply_is_no_loss() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty, 1)
    with Pin(faulty, run.refs[1], "export") as pin:
        faulty.on("replace_if", "pins/*").fail(StorageError("down"))
        pin.beat()
        faulty.on("replace_if", "pins/*").nth(1).lose_reply(StorageError("timed out"))
        pin.beat()  # done, but not known to be
        pin.beat()  # refused: the stored one is newer, and our own
        pin.beat()
        pin.check()
        assert record(faulty, pin.pin_id).beats == 2


def test_a_pin_that_somebody_removed_or_replaced_is_lost() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1)
    with Pin(storage, run.refs[1], "export") as pin:
        key = layout.pin_key(pin.pin_id)
        theirs = encode(PinRecord(pin.pin_id, "theirs", run.refs[1], "x", None, 0, 0.0))
        storage.put(key, theirs)
        pin.beat()
        with pytest.raises(ConflictError, match="another pin took its name"):
            pin.check()


def test_the_thread_beats(tmp_path: Any) -> None:
    faulty = FaultyStorage(LocalStorage(tmp_path / "run"))
    run = Run(faulty, 1)
    gate = faulty.on("replace_if", "pins/*").block()
    with Pin(faulty, run.refs[1], "export", ttl_s=1):
        gate.wait_reached()
        gate.open()


def test_reading_goes_on_where_the_root_cannot_be_written() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty, 1)
    faulty.on("create", "pins/*").fail(StorageError("read-only"))
    told: list[str] = []
    with pinned(faulty, run.refs[1], "export", refused=told.append):
        assert told == ["read-only"]
    with pinned(faulty, run.refs[1], "export", refused=told.append):
        assert len(list(faulty.list(layout.PINS))) == 1
    assert told == ["read-only"]


def test_strays_below_pins_mean_nothing() -> None:
    storage = MemoryStorage()
    Run(storage, 1)
    storage.put("pins/notes.txt", b"x")
    storage.put("pins/a/b.json", b"x")
    assert PinBoard(storage, FakeClock()).holders() == {}


def test_the_default_outlives_a_long_pause() -> None:
    assert DEFAULT_TTL_S >= 60


def test_a_restore_pins_what_it_reads_until_its_epoch_is_claimed() -> None:
    import torch

    from ckpt import Checkpointer

    faulty = FaultyStorage(MemoryStorage())
    with Checkpointer(faulty) as c:
        for step in (1, 2):
            c.save(step, {"a": torch.full((3,), float(step))}).committed.result()
    gate = faulty.on("create", layout.attempt_key(2)).block()
    state = {"a": torch.zeros(3)}
    with Checkpointer(faulty) as c:
        restoring = threading.Thread(target=lambda: c.restore(state, step=1))
        restoring.start()
        gate.wait_reached()
        # The old job, still alive, prunes at this moment.
        pruner = Pruner(faulty, LAST, FakeClock(), epoch=1)
        assert pruner.after_save(9, committed=True, uncommitted=0).deleted == []
        gate.open()
        restoring.join()
        assert list(faulty.list(layout.PINS)) == []
        assert pruner.after_save(9, committed=True, uncommitted=0).deleted == []
        assert [i.ref.step for i in Catalog(faulty).lineage()] == [1]
    assert steps(faulty) == [(1, 1), (1, 2)]
    assert state["a"].tolist() == [1.0] * 3


def test_fake_runs_have_what_pins_need() -> None:
    storage = MemoryStorage()
    run = FakeRun(storage)
    run.attempt(1)
    ref = run.commit(1, 1)
    with Pin(storage, ref, "x"):
        assert PinBoard(storage, FakeClock()).holders().keys() == {(1, 1)}
