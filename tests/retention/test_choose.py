"""The decision alone: which commits a policy keeps."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.config import CheckpointConfig, KeepBest, RetentionPolicy, dataclass_from
from ckpt.errors import BadInputError
from ckpt.retention import Candidate, Verdict, choose
from ckpt.types import CommitRef


def commit(step: int, status: Any = "ancestor", *, epoch: int = 1, **more: Any) -> Candidate:
    return Candidate(CommitRef(epoch, step, f"d{epoch}-{step}"), status, **more)


def lineage(*steps: int, metrics: dict[int, str] | None = None) -> list[Candidate]:
    """Ancestors, the last one being the latest."""
    named = {s: {"loss": m} for s, m in (metrics or {}).items()}
    return [
        commit(s, "latest" if s == steps[-1] else "ancestor", annotations=named.get(s, {}))
        for s in steps
    ]


def steps(verdicts: list[Verdict]) -> list[int]:
    return [v.commit.ref.step for v in verdicts]


def kept(commits: list[Candidate], policy: RetentionPolicy, pins: Any = None) -> list[int]:
    return steps(choose(commits, pins or {}, policy)[0])


def test_d35_numeric_order_not_text_order() -> None:
    commits = lineage(8, 9, 10, 11, 99, 100)
    assert kept(commits, RetentionPolicy(keep_last=3)) == [11, 99, 100]
    assert kept(commits, RetentionPolicy(keep_last=1)) == [100]
    assert kept(lineage(9000, 9900, 10000), RetentionPolicy(keep_last=1)) == [10000]
    assert kept(commits, RetentionPolicy()) == [8, 9, 10, 11, 99, 100]


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "3"])
def test_d35_nothing_keeps_nothing(n: Any) -> None:
    for name in ("keep_last", "keep_every"):
        with pytest.raises(BadInputError, match=f"{name} = "):
            RetentionPolicy(**{name: n})
        with pytest.raises(BadInputError, match=f"{name} = "):
            CheckpointConfig(**{name: n})
    with pytest.raises(BadInputError, match="count = "):
        KeepBest("loss", n)


def test_d36_abandoned_ones_hold_no_slot() -> None:
    commits = [
        *(commit(s) for s in (100, 200, 300)),
        *(commit(s, "abandoned") for s in (400, 500, 5000)),
        commit(400, "latest", epoch=2),
    ]
    keep, delete = choose(commits, {}, RetentionPolicy(keep_last=2))
    assert [v.commit.place for v in keep] == [(1, 300), (2, 400)]
    assert [v.reason for v in keep] == ["one of the last 2", "latest, one of the last 2"]
    assert {v.commit.place: v.reason for v in delete} == {
        (1, 100): "no rule keeps it",
        (1, 200): "no rule keeps it",
        (1, 400): "abandoned",
        (1, 500): "abandoned",
        (1, 5000): "abandoned",
    }


def test_d36_abandoned_ones_stay_until_the_lineage_has_enough_of_its_own() -> None:
    commits = [commit(s, "abandoned") for s in (100, 200)] + [commit(10, "latest", epoch=2)]
    keep, delete = choose(commits, {}, RetentionPolicy(keep_last=2))
    assert not delete
    assert keep[0].reason == "abandoned, until the lineage has 2 good ones"
    commits = [*commits[:2], commit(10, epoch=2), commit(20, "latest", epoch=2)]
    assert kept(commits, RetentionPolicy(keep_last=2)) == [10, 20]


def test_d37_the_latest_stays_beside_the_best_and_nan_is_worst() -> None:
    metrics = {1: "1", 2: "2", 3: "3", 4: "4", 5: "nan"}  # 6 has none
    commits = lineage(1, 2, 3, 4, 5, 6, metrics=metrics)
    assert kept(commits, RetentionPolicy(keep_best=KeepBest("loss", 2))) == [1, 2, 6]
    assert kept(commits, RetentionPolicy(keep_best=KeepBest("loss", 2, "max"))) == [3, 4, 6]
    for bad in ("", "low", "nan", "-nan", "0x1"):
        commits = lineage(1, 2, 3, metrics={1: "7", 2: bad})
        for mode in ("min", "max"):
            best = KeepBest("loss", 1, mode)  # type: ignore[arg-type]
            assert kept(commits, RetentionPolicy(keep_best=best)) == [1, 3]


def test_d37_infinities_are_numbers_and_of_equals_the_newer_is_better() -> None:
    commits = lineage(1, 2, 3, 4, metrics={1: "inf", 2: "5", 3: "5", 4: "9"})
    assert kept(commits, RetentionPolicy(keep_best=KeepBest("loss"))) == [3, 4]
    assert kept(commits, RetentionPolicy(keep_best=KeepBest("loss", 1, "max"))) == [1, 4]
    random.Random(7).shuffle(commits)
    assert kept(commits, RetentionPolicy(keep_best=KeepBest("loss"))) == [3, 4]


def test_rules_add_up() -> None:
    commits = lineage(10, 20, 25, 30, 35, metrics={25: "0.1"})
    policy = RetentionPolicy(keep_last=1, keep_every=20, keep_best=KeepBest("loss"))
    assert kept(commits, policy) == [20, 25, 35]


def test_a_pin_keeps_and_says_who_holds_it() -> None:
    keep, _ = choose(lineage(1, 2), {(1, 1): ["p1: export"]}, RetentionPolicy(keep_last=1))
    assert keep[0].reason == "pinned by p1: export"


def test_damaged_ones_stay_and_take_no_place() -> None:
    commits = [
        commit(1),
        commit(2),
        commit(3, "latest"),
        commit(4, "corrupt", problem="a file is gone"),
    ]
    keep, delete = choose(commits, {}, RetentionPolicy(keep_last=2))
    assert (steps(keep), steps(delete)) == ([2, 3, 4], [1])
    assert keep[2].reason == "set aside: a file is gone"


def test_nothing_goes_while_nothing_verifies() -> None:
    commits = [commit(1, "corrupt", problem="x"), commit(2, "abandoned"), commit(3)]
    assert kept(commits, RetentionPolicy(keep_last=1)) == [1, 2, 3]


def test_the_policy_in_a_settings_file() -> None:
    table = {"keep_last": 2, "keep_best": {"metric": "auc", "count": 3, "mode": "max"}}
    config = dataclass_from(CheckpointConfig, table, "[checkpoint]")
    assert config.retention == RetentionPolicy(2, None, KeepBest("auc", 3, "max"))
    with pytest.raises(BadInputError, match=r"\[checkpoint\]: keep_best: unknown setting 'most'"):
        dataclass_from(CheckpointConfig, {"keep_best": {"metric": "a", "most": 1}}, "[checkpoint]")
    with pytest.raises(BadInputError, match="keep_best = 'auc'"):
        dataclass_from(CheckpointConfig, {"keep_best": "auc"}, "[checkpoint]")


METRIC = st.sampled_from(["1", "2.5", "-3", "nan", "inf", "?", ""])
STATUS = st.sampled_from(["ancestor", "ancestor", "abandoned", "corrupt"])


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    places = draw(st.sets(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=12))
    commits = []
    for epoch, step in sorted(places):
        status = draw(STATUS)
        notes = {"loss": draw(METRIC)} if draw(st.booleans()) else {}
        problem = "damaged" if status == "corrupt" else None
        commits.append(commit(step, status, epoch=epoch, annotations=notes, problem=problem))
    good = [c for c in commits if c.status == "ancestor"]
    if good and draw(st.booleans()):
        newest = good[-1]
        commits[commits.index(newest)] = commit(
            newest.ref.step, "latest", epoch=newest.ref.epoch, annotations=newest.annotations
        )
    return commits


POLICY = st.builds(
    RetentionPolicy,
    st.none() | st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.none()
    | st.builds(KeepBest, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
)


@given(histories(), POLICY, st.data())
def test_what_must_stay_stays(
    commits: list[Candidate], policy: RetentionPolicy, data: st.DataObject
) -> None:
    places = [c.place for c in commits]
    pinned = data.draw(st.sets(st.sampled_from(places))) if places else set()
    pins = {p: ["somebody"] for p in pinned}
    keep, delete = choose(commits, pins, policy)
    gone = {v.commit.place for v in delete}
    assert sorted(v.commit.place for v in [*keep, *delete]) == sorted(places)
    assert all(v.reason for v in [*keep, *delete])
    assert not gone & pinned
    assert not any(v.commit.status in ("latest", "corrupt") for v in delete)
    assert not delete or any(c.status == "latest" for c in commits)
    good = [c for c in commits if c.status in ("latest", "ancestor")]
    if delete:
        assert sum(c.place not in gone for c in good) >= min(len(good), policy.keep_last or 1)
    # The order they come in says nothing, and what was kept is kept the next time.
    shuffled = list(commits)
    data.draw(st.randoms()).shuffle(shuffled)
    assert choose(shuffled, pins, policy) == (keep, delete)
    again, more = choose([v.commit for v in keep], pins, policy)
    assert not more
    assert len(again) == len(keep)
