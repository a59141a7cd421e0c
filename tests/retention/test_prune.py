"""Carrying a decision out: order, strays, pins that come in between, and a store that refuses."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.config import KeepBest, RetentionPolicy
from ckpt.errors import CorruptError, StorageError, UnsupportedFormatError
from ckpt.manifest import encode
from ckpt.pins import Pin, add_pin, remove_pin
from ckpt.prune import Pruner, PruneResult
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.verify import verify_commit
from tests.fake_run import FakeRun
from tests.faults import FaultyStorage
from tests.retention.clock import FakeClock

LAST = RetentionPolicy(keep_last=1)


class Run(FakeRun):
    """A run of one attempt with some steps."""

    def __init__(self, storage: Storage, *steps: int) -> None:
        super().__init__(storage)
        self.attempt(1)
        self.refs = {s: self.commit(1, s) for s in steps}


def prune(storage: Storage, policy: RetentionPolicy = LAST, **kwargs: Any) -> PruneResult:
    pruner = Pruner(storage, policy, FakeClock(), **kwargs)
    return pruner.apply(pruner.plan())


def steps(storage: Storage) -> list[tuple[int, int]]:
    return [(c.ref.epoch, c.ref.step) for c in Catalog(storage).commits()]


def prefixes(storage: Storage) -> set[str]:
    return {o.key.split("/")[1] for o in storage.list(layout.DATA)}


def put_stray(storage: Storage, epoch: int, step: int, save_id: int) -> str:
    prefix = layout.data_prefix(epoch, step, f"{save_id:06d}")
    storage.put(f"{prefix}r00000.bin", b"left over")
    return prefix


def test_what_no_rule_keeps_goes_with_its_data_and_nothing_else(tmp_path: Any) -> None:
    storage = LocalStorage(tmp_path / "run")
    run = Run(storage, 8, 9, 10, 11, 99, 100)
    run.attempt(2, run.refs[100])
    storage.create("serving/versions/000001/manifest.json", b"x")
    result = prune(storage, RetentionPolicy(keep_last=3))
    assert [r.step for r in result.deleted] == [8, 9, 10]
    assert steps(storage) == [(1, 11), (1, 99), (1, 100)]
    assert len(list((tmp_path / "run" / "data").iterdir())) == 3, "no empty folders stay"
    assert storage.read("serving/versions/000001/manifest.json") == b"x"
    for info in Catalog(storage).commits():
        assert info.record is not None
        assert verify_commit(storage, info.record, level="full").ok
    assert prune(storage, RetentionPolicy(keep_last=3)) == PruneResult()


def test_the_record_goes_before_its_data() -> None:
    faulty = FaultyStorage(MemoryStorage())
    Run(faulty, 1, 2)
    faulty.calls.clear()
    prune(faulty)
    deleted = [key for op, key in faulty.calls if op == "delete"]
    assert deleted[0] == layout.commit_key(1, 1)
    assert len(deleted) == 9
    assert all(key.startswith(layout.DATA) for key in deleted[1:])


def test_a_crash_in_between_leaves_strays_that_the_next_prune_sweeps() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty, 1, 2)
    faulty.on("delete", f"{layout.DATA}*").nth(3).fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        prune(faulty)
    assert steps(faulty) == [(1, 2)]
    assert len(prefixes(faulty)) == 2
    run.attempt(2, run.refs[2])
    result = prune(faulty)
    assert result.swept == ["data/000001-000000000001-000001/"]
    assert prefixes(faulty) == {"000001-000000000002-000001"}


def test_d15_leftovers_of_older_attempts_go_and_what_may_be_in_flight_stays() -> None:
    storage = MemoryStorage()
    run = Run(storage, 5)
    run.attempt(2, run.refs[5])
    run.commit(2, 6, run.refs[5], save_id="000001")
    dead = put_stray(storage, 1, 6, 4)  # of an older attempt, that had three ranks
    lost = put_stray(storage, 2, 4, 0)  # of this one, before the save that is committed
    running = put_stray(storage, 2, 7, 2)  # of this one, after it
    newer = put_stray(storage, 3, 7, 1)  # nobody has claimed that epoch; whose is it?
    storage.put("data/notes.txt", b"mine")
    pruner = Pruner(storage, RetentionPolicy(), FakeClock())
    plan = pruner.plan()
    assert [s.prefix for s in plan.strays] == [dead, lost]
    assert [s.prefix for s in plan.unsettled] == [running]
    assert pruner.apply(plan).swept == [dead, lost]
    left = {o.key for o in storage.list(layout.DATA)}
    assert {f"{running}r00000.bin", f"{newer}r00000.bin", "data/notes.txt"} <= left
    assert not {k for k in left if k.startswith((dead, lost))}
    # Every rank has ended its second save: what it left isn't needed any more.
    assert pruner.apply(pruner.plan(2)).swept == [running]


def test_an_unreadable_commit_keeps_its_data() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1, 2, 3)
    storage.put(layout.commit_key(1, 2), b'{"format": 7, "kind": "commit"}')
    run.attempt(2, run.refs[3])
    assert [r.step for r in prune(storage).deleted] == [1]
    assert prefixes(storage) == {"000001-000000000002-000001", "000001-000000000003-000001"}


def test_a_damaged_newest_one_does_not_make_the_good_one_before_it_go() -> None:
    storage = MemoryStorage()
    Run(storage, 1, 2, 3)
    storage.delete("data/000001-000000000003-000001/r00001.bin")
    pruner = Pruner(storage, LAST, FakeClock())
    plan = pruner.plan()
    assert {v.commit.ref.step: v.reason for v in plan.keep} == {
        2: "latest, one of the last 1",
        3: "set aside: data/000001-000000000003-000001/r00001.bin: missing; the commit says 8448 bytes",
    }
    pruner.apply(plan)
    assert steps(storage) == [(1, 2), (1, 3)]
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.ref.step == 2


def test_where_an_attempt_has_no_record_and_no_commit_nobody_knows_what_is_abandoned() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1, 2)
    run.attempt(2, run.refs[2])
    second = run.commit(2, 3, run.refs[2])
    run.attempt(3, second)
    run.commit(3, 4, second)
    storage.delete(layout.attempt_key(2))
    plan = Pruner(storage, LAST, FakeClock()).plan()
    assert [v.commit.ref.step for v in plan.delete] == [1, 2, 3], (
        "its commit says what it continued"
    )
    storage.delete(layout.commit_key(2, 3))
    plan = Pruner(storage, LAST, FakeClock()).plan()
    assert plan.delete == []
    reasons = {v.commit.ref.step: v.reason for v in plan.keep}
    assert reasons[1].startswith("set aside: ")
    assert "attempts/000002.json" in reasons[1]


def test_only_the_newest_attempt_prunes() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1, 2, 3)
    run.attempt(2, run.refs[1])
    for epoch, deleted in ((1, []), (2, [2, 3])):
        pruner = Pruner(storage, LAST, FakeClock(), epoch=epoch)
        done = pruner.after_save(9, committed=True, uncommitted=0)
        assert [r.step for r in done.deleted] == deleted


def test_an_attempt_that_begins_meanwhile_gets_its_commits_back() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty, 1, 2)
    pruner = Pruner(faulty, LAST, FakeClock(), epoch=1)
    plan = pruner.plan(9)
    run.attempt(2, run.refs[1])  # restored step 1, and claims its epoch between plan and deletion
    assert pruner.apply(plan).deleted == []
    assert steps(faulty) == [(1, 1), (1, 2)]
    assert len(prefixes(faulty)) == 2
    assert [i.ref for i in Catalog(faulty).lineage()] == [run.refs[1]]


def test_a_pin_that_comes_between_plan_and_deletion_is_honoured() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1, 2, 3)
    pruner = Pruner(storage, LAST, FakeClock())
    plan = pruner.plan()
    with Pin(storage, run.refs[1], "reader"):
        assert [r.step for r in pruner.apply(plan).deleted] == [2]
        assert steps(storage) == [(1, 1), (1, 3)]
        assert verify_commit(storage, run.record(1, 1), level="full").ok
        assert pruner.apply(pruner.plan()).deleted == []
    assert [r.step for r in pruner.apply(pruner.plan()).deleted] == [1]


def test_a_record_that_could_not_be_put_back_is_put_back_next_time() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty, 1, 2)
    pruner = Pruner(faulty, LAST, FakeClock())
    plan = pruner.plan()
    add_pin(faulty, run.refs[1], "branch")
    faulty.on("create", layout.commit_key(1, 1)).fail(StorageError("down"))
    assert pruner.apply(plan).problems == ["down (the record must be put back)"]
    assert steps(faulty) == [(1, 2)]
    assert len(prefixes(faulty)) == 2, "pinned data stays, record or not"
    assert pruner.apply(pruner.plan()) == PruneResult()
    assert steps(faulty) == [(1, 1), (1, 2)]


def test_pins_that_cannot_be_listed_again_stop_the_deletion() -> None:
    faulty = FaultyStorage(MemoryStorage())
    Run(faulty, 1, 2)
    pruner = Pruner(faulty, LAST, FakeClock())
    plan = pruner.plan()
    faulty.on("list", layout.PINS).fail(StorageError("down"))
    assert pruner.apply(plan).problems == ["down"]
    assert steps(faulty) == [(1, 1), (1, 2)]
    assert len(prefixes(faulty)) == 2


def test_an_unreadable_pin_protects_everything_until_it_is_removed() -> None:
    storage = MemoryStorage()
    Run(storage, 1, 2)
    storage.create(layout.pin_key("p"), b"??")
    with pytest.raises(
        CorruptError, match=r"nothing is deleted; `ckpt pins memory://memory remove p`"
    ):
        prune(storage)
    remove_pin(storage, "p")
    assert [r.step for r in prune(storage).deleted] == [1]


def test_an_unknown_format_stops_it() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1, 2)
    record = encode(run.record(1, 2)).replace(b'"format":0', b'"format":9')
    storage.put(layout.attempt_key(2), record)
    with pytest.raises(UnsupportedFormatError):
        prune(storage)
    assert steps(storage) == [(1, 1), (1, 2)]


@pytest.mark.parametrize("refused", ["delete", "read"])
def test_d38_what_the_store_refuses_is_told_and_tried_again(refused: str) -> None:
    faulty = FaultyStorage(MemoryStorage())
    Run(faulty, 1, 2, 3)
    pruner = Pruner(faulty, LAST, FakeClock())
    plan = pruner.plan()
    faulty.on(refused, layout.commit_key(1, 1)).fail(StorageError("immutable folder"))
    first = pruner.apply(plan)
    assert ([r.step for r in first.deleted], first.problems) == ([2], ["immutable folder"])
    assert [r.step for r in pruner.apply(pruner.plan()).deleted] == [1]
    assert prefixes(faulty) == {"000001-000000000003-000001"}


def test_data_that_could_not_be_deleted_is_swept_by_the_next_prune() -> None:
    faulty = FaultyStorage(MemoryStorage())
    Run(faulty, 1, 2)
    faulty.on("delete", "data/*1-000001/r00001.bin").fail(StorageError("immutable"))
    pruner = Pruner(faulty, LAST, FakeClock(), epoch=1)
    first = pruner.after_save(2, committed=True, uncommitted=0)
    assert ([r.step for r in first.deleted], first.problems, first.swept) == (
        [1],
        ["immutable"],
        [],
    )
    assert len(prefixes(faulty)) == 2
    again = pruner.after_save(2, committed=True, uncommitted=0)
    assert again.swept == ["data/000001-000000000001-000001/"]
    assert len(prefixes(faulty)) == 1


def test_a_deletion_whose_reply_was_lost_counts_as_done() -> None:
    faulty = FaultyStorage(MemoryStorage())
    Run(faulty, 1, 2)
    faulty.on("delete", "*").times(3).lose_reply()
    result = prune(faulty)
    assert ([r.step for r in result.deleted], result.problems) == ([1], [])
    assert len(prefixes(faulty)) == 1


@pytest.mark.parametrize("removed", ["record", "data", "both"])
def test_d38_what_the_user_removed_already_is_no_trouble(removed: str) -> None:
    storage = MemoryStorage()
    Run(storage, 1, 2)
    pruner = Pruner(storage, LAST, FakeClock())
    plan = pruner.plan()
    if removed != "data":
        storage.delete(layout.commit_key(1, 1))
    if removed != "record":
        for o in storage.list("data/000001-000000000001-000001/"):
            storage.delete(o.key)
    assert pruner.apply(plan).problems == []
    assert pruner.apply(pruner.plan()).problems == []
    assert steps(storage) == [(1, 2)]
    assert len(prefixes(storage)) == 1


def test_another_commit_under_the_same_key_is_left_alone() -> None:
    storage = MemoryStorage()
    run = Run(storage, 1, 2)
    pruner = Pruner(storage, LAST, FakeClock())
    plan = pruner.plan()
    run.commit(1, 1, annotations={"from": "a backup"})
    assert "holds another commit" in pruner.apply(plan).problems[0]
    assert steps(storage) == [(1, 1), (1, 2)]


def test_records_are_read_and_verified_once() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty)
    for step in range(1, 9):
        run.commit(1, step, annotations={"loss": str(step)})
    policy = RetentionPolicy(keep_last=2, keep_every=2, keep_best=KeepBest("loss"))
    pruner = Pruner(faulty, policy, FakeClock(), epoch=1)
    pruner.after_save(8, committed=True, uncommitted=0)
    run.commit(1, 9)
    faulty.calls.clear()
    assert pruner.after_save(9, committed=True, uncommitted=0).problems == []
    read = {key for op, key in faulty.calls if op == "read" and key.startswith(layout.COMMITS)}
    assert read == {layout.commit_key(1, 9), layout.commit_key(1, 7)}, "the new one; the one to go"
    assert not [op for op, key in faulty.calls if op == "list" and key == layout.DATA]


def test_a_run_that_keeps_all_looks_for_leftovers_once_and_then_only_after_failures() -> None:
    faulty = FaultyStorage(MemoryStorage())
    run = Run(faulty, 1)
    pruner = Pruner(faulty, RetentionPolicy(), FakeClock(), epoch=1)
    pruner.after_save(1, committed=True, uncommitted=0)
    faulty.calls.clear()
    pruner.after_save(2, committed=True, uncommitted=0)
    assert faulty.calls == []
    stray = put_stray(run.storage, 1, 3, 3)
    assert pruner.after_save(2, committed=False, uncommitted=1).swept == [], "may be in flight"
    assert pruner.after_save(3, committed=False, uncommitted=1).swept == [stray]
    faulty.calls.clear()
    pruner.after_save(4, committed=True, uncommitted=1)
    assert faulty.calls == []


def test_case_e07_a_metric_that_never_comes_deletes_nothing_and_is_told() -> None:
    storage = MemoryStorage()
    run = Run(storage)
    pruner = Pruner(
        storage, RetentionPolicy(keep_last=1, keep_best=KeepBest("val_loss")), FakeClock(), epoch=1
    )
    told = []
    for step in range(1, 6):
        run.commit(1, step, annotations={"loss": "1"})
        done = pruner.after_save(step, committed=True, uncommitted=0)
        assert done.deleted == []
        told.append(done.no_metric)
    assert told[:2] == [None, None], "with a metric, as many could stay"
    assert told[-1] == {"metric": "val_loss", "checkpoints": 5, "annotations": ["loss"]}
    run.commit(1, 6, annotations={"val_loss": "0.5"})
    done = pruner.after_save(6, committed=True, uncommitted=0)
    assert ([r.step for r in done.deleted], done.no_metric) == ([1, 2, 3, 4, 5], None)
