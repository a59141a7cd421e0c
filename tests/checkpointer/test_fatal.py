"""What no later save can mend is raised, on all ranks, once it is known: the state, or another attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer, PerRank, checkpointer
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, ConflictError, SaveSkippedError, StorageError
from ckpt.layout import ATTEMPTS
from ckpt.storage import Storage
from ckpt.storage.memory import MemoryStorage
from ckpt.united import UnitedValues, without_tensors
from ckpt.values import PerRankRef, TensorRef
from tests.checkpointer.ranks import on_ranks, values
from tests.faults import FaultyStorage

QUICK = CheckpointConfig(commit_timeout_s=20.0)


def supersede(storage: Storage) -> None:
    with Checkpointer(storage) as other:
        other.restore({"a": 0}, partial=True)


def until(known: Callable[[], object]) -> None:
    """Another thread finds out; by the clock only where it never does."""
    for _ in range(2000):
        if known():
            return
        threading.Event().wait(0.01)
    pytest.fail("nobody found out")


# -- another attempt owns the root --------------------------------------------------------------


def test_case_e40_a_superseded_trainer_ends_at_its_next_save_and_for_ever() -> None:
    storage = MemoryStorage()
    old = Checkpointer(storage)
    old.save(1, {"a": 1}).committed.result()
    assert old.fatal is None
    supersede(storage)
    failed = old.save(2, {"a": 1}).committed.exception()
    assert isinstance(failed, ConflictError)
    for step in (3, 4):
        with pytest.raises(ConflictError, match="a newer attempt owns .* end this job") as e:
            old.save(step, {"a": 1})
        assert e.value.exit_code == 4
    assert isinstance(old.fatal, ConflictError)
    old.close()
    assert (old.stats.commits, old.stats.failed) == (1, 1)


def test_case_e40_a_policy_trains_on() -> None:
    storage = MemoryStorage()
    with Checkpointer(storage, CheckpointConfig(when_superseded="ignore")) as old:
        old.save(1, {"a": 1}).committed.result()
        supersede(storage)
        for step in (2, 3, 4):
            assert isinstance(old.save(step, {"a": 1}).committed.exception(), ConflictError)
        assert old.fatal is None
    with pytest.raises(BadInputError, match="when_superseded = 'wait': use one of end, ignore"):
        CheckpointConfig(when_superseded="wait")  # type: ignore[arg-type]


def test_case_e40_it_is_found_out_between_saves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a look of rank 0's idle persist thread. A store that fails then tells nothing."""
    monkeypatch.setattr(checkpointer, "_LOOK_S", 0.02)
    storage = FaultyStorage(MemoryStorage())
    with Checkpointer(storage) as old:
        old.save(1, {"a": 1}).committed.result()
        supersede(storage.inner)
        storage.on("list", f"{ATTEMPTS}*").times(2).fail(StorageError("no route"))
        until(lambda: old.fatal is not None)
        with pytest.raises(ConflictError, match="a newer attempt owns"):
            old.save(2, {"a": 1})
        assert (old.stats.commits, old.stats.failed) == (1, 0)


def test_case_e40_the_idle_look_is_left_out_by_the_policy_and_on_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointer, "_LOOK_S", 0.001)
    storage = FaultyStorage(MemoryStorage())
    config = CheckpointConfig(when_superseded="ignore")
    with Checkpointer(storage, config) as old:
        old.save(1, {"a": 1}).committed.result()
        supersede(storage.inner)
        old._look()
        assert old.fatal is None


@pytest.mark.parametrize("known_to", [0, 1])
def test_case_e40_a_rank_that_knows_tells_the_others(known_to: int) -> None:
    storage = MemoryStorage()
    passed = threading.Barrier(2)

    def body(rank: int, place: dict[str, Any]) -> list[str]:
        told = []
        with Checkpointer(storage, QUICK, **place) as c:
            c.save(1, {"a": 1}).committed.result()
            passed.wait(20)
            if rank == known_to:
                supersede(storage)
                c._look()
            passed.wait(20)
            for step in (2, 3):
                try:
                    error = c.save(step, {"a": 1}).committed.exception()
                    told.append(f"failed {type(error).__name__}")
                except ConflictError:
                    told.append("raised")
        return told

    told = values(on_ranks(2, body))
    assert told[known_to] == ["raised", "raised"]
    assert told[1 - known_to] == ["failed ConflictError", "raised"]
    assert [i.ref.step for i in Catalog(storage).commits()] == [1]


# -- the state ----------------------------------------------------------------------------------


def test_case_e28_values_that_differ_are_refused_before_training_begins() -> None:
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> str:
        state = {
            "w": torch.zeros(2),
            "mine": PerRank({"seed": rank}),
            "optimizer": {"param_groups": [{"lr": 0.1}, {"params": ["a", f"t{rank}.weight"]}]},
            **({"only": 1} if rank else {}),
        }
        with Checkpointer(storage, QUICK, **place) as c, pytest.raises(BadInputError) as e:
            c.restore(state)
        return str(e.value)

    for said in values(on_ranks(3, body)):
        assert said == (
            "optimizer.param_groups.1.params.1: ranks 0 and 1 hold different values ('t0.weight' and "
            "'t1.weight'); wrap it in PerRank if each rank has its own, else make them equal"
        )
    assert list(storage.list(ATTEMPTS)) == []


@pytest.mark.parametrize("restored", [False, True])
def test_ranks_may_have_different_keys(restored: bool) -> None:
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> int:
        state = {"each": {f"r{rank}": rank, "n": float("nan")}, "empty": {} if rank else {"a": 1}}
        with Checkpointer(storage, QUICK, **place) as c:
            if restored:
                c.restore(state)
            return c.save(1, state).committed.result().step

    assert values(on_ranks(3, body)) == [1, 1, 1]
    record = Catalog(storage).latest()
    assert record is not None


def test_values_that_differ_at_the_first_save_raise_there_on_all_ranks() -> None:
    def body(rank: int, place: dict[str, Any]) -> list[str]:
        said = []
        with Checkpointer(storage, QUICK, **place) as c:
            for step in (1, 2):
                with pytest.raises(BadInputError, match="n: ranks 0 and 1 hold different") as e:
                    c.save(step, {"n": rank})
                said.append(str(e.value))
            assert c.save(3, {"n": 7}).committed.result().step == 3
        return said

    storage = MemoryStorage()
    values(on_ranks(2, body))


def test_values_that_differ_later_raise_from_the_next_save_on_all_ranks() -> None:
    """Once: a trainer that goes on can save again, if they are equal by then."""
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> str:
        with Checkpointer(storage, QUICK, **place) as c:
            c.save(1, {"n": 1}).committed.result()
            error = c.save(2, {"n": [1, {"k": "x" * 100 + str(rank)}]}).committed.exception()
            assert isinstance(error, BadInputError)
            assert c.fatal is not None
            with pytest.raises(BadInputError) as e:
                c.save(3, {"n": 3})
            assert c.save(4, {"n": 4}).committed.result().step == 4
            assert (c.stats.commits, c.stats.failed) == (2, 1)
        return str(e.value)

    for said in values(on_ranks(2, body)):
        assert said.startswith("n.1.k: ranks 0 and 1 hold different values ('xxx")
        assert len(said) < 400


def test_values_too_long_to_be_sent_about_are_compared_by_receipts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpointer, "_MOST_TALK_BYTES", 10)
    storage = MemoryStorage()

    def body(rank: int, place: dict[str, Any]) -> str:
        with Checkpointer(storage, QUICK, **place) as c:
            assert c.restore({"n": [rank]}) is None
            error = c.save(1, {"n": [rank]}).committed.exception()
            with pytest.raises(BadInputError, match=r"n\.0: ranks 0 and 1 hold different"):
                c.save(2, {"n": [7]})
        return str(error)

    for said in values(on_ranks(2, body)):
        assert "n.0: ranks 0 and 1 hold different values (0 and 1)" in said


def test_ranks_out_of_step_raise_from_the_next_save() -> None:
    def body(rank: int, place: dict[str, Any]) -> None:
        with Checkpointer(storage, QUICK, **place) as c:
            error = c.save(1 + rank, {"a": torch.ones(2)}).committed.exception()
            assert isinstance(error, BadInputError)
            with pytest.raises(BadInputError, match="call save\\(\\) in step"):
                c.save(3, {"a": torch.ones(2)})

    storage = MemoryStorage()
    values(on_ranks(2, body))


@pytest.mark.parametrize("error", [StorageError("no room"), OSError(28, "no space")])
def test_what_is_the_stores_fault_is_never_raised(error: Exception) -> None:
    faulty = FaultyStorage(MemoryStorage())
    faulty.on("writer", "*000002/*").fail(error)
    with Checkpointer(faulty) as c:
        for step in (1, 2, 3):
            c.save(step, {"a": 1})
        c.wait()
        assert c.fatal is None
        assert (c.stats.commits, c.stats.failed) == (2, 1)


# -- trees of values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ({"x": 1}, {"x": True}, "x: ranks 3 and 5 hold different values (1 and True)"),
        ({"x": {"y": 1}}, {"x": 1}, "x: ranks 3 and 5 hold different values ({'y': 1} and 1)"),
        ({"x": 1}, {"x": {"y": 1}}, "x: ranks 3 and 5 hold different values (1 and {'y': 1})"),
        ({"x": [1, 2]}, {"x": [1, 2, 3]}, "x: ranks 3 and 5 hold different values ([1, 2] and [1, 2, 3])"),
        ({"x": [[1], (2, 3)]}, {"x": [[1], (2, 4)]}, "x.1.1: ranks 3 and 5 hold different values (3 and 4)"),
        ({1: {"a": 1}}, {1: {"a": 2}}, "1.a: ranks 3 and 5 hold"),
        (1, 2, "state: ranks 3 and 5 hold different values (1 and 2)"),
        (
            {"x": list(range(9))},
            {"x": list(range(8))},
            "(a list of 9: [0, 1, 2, 3, 4, 5, ...] and a list of 8: [0, 1, 2, 3, 4, 5, ...])",
        ),
    ],
)  # fmt: skip
def test_the_place_and_both_values_are_named(a: Any, b: Any, said: str) -> None:
    united = UnitedValues()
    united.add(3, a)
    united.add(4, {"other": {"z": 0}} if isinstance(a, dict) else a)
    with pytest.raises(BadInputError) as e:
        united.add(5, b)
    assert said in str(e.value)


def test_what_ranks_have_together() -> None:
    united = UnitedValues()
    united.add(0, {"a": {"x": 1}, "e": {}, "n": [float("nan")]})
    united.add(1, {"a": {"y": (1, 2)}, "e": {"z": None}, "n": [float("nan")], "b": b"1"})
    assert repr(united.tree) == repr(
        {"a": {"x": 1, "y": (1, 2)}, "e": {"z": None}, "n": [float("nan")], "b": b"1"}
    )
    tree = {"t": TensorRef("t"), "l": [PerRankRef("p"), 1], "n": (TensorRef("u"),)}
    assert without_tensors(tree) == {"t": None, "l": [None, 1], "n": (None,)}


def test_a_rank_whose_state_fails_does_not_end_the_others_for_ever() -> None:
    """Errors that are raised in the place of a save aren't taken for new ones by other ranks."""

    def body(rank: int, place: dict[str, Any]) -> list[str]:
        told = []
        with Checkpointer(storage, QUICK, **place) as c:
            for step in range(1, 7):
                bad = rank == 1 and step == 3
                try:
                    error = c.save(step, {"a": object() if bad else 1}).committed.exception()
                    told.append("saved" if error is None else type(error).__name__)
                except BadInputError:
                    told.append("raised")
        return told

    storage = MemoryStorage()
    first, second = values(on_ranks(2, body))
    assert first == ["saved", "saved", "BadInputError", "raised", "saved", "saved"]
    assert second == ["saved", "saved", "raised", SaveSkippedError.__name__, "saved", "saved"]
