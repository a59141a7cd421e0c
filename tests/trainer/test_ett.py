import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, NotFoundError
from ckpt.layout import ledger_key
from tests.trainer.fake_clock import FakeClock
from trainer.ett import read_report, report
from trainer.ledger import Ledger


class Script:
    """Acts out attempts on a fake clock, each with a ledger of its own under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = FakeClock()

    def attempt(self, epoch: int, rank: int = 0) -> Ledger:
        ledger = Ledger(self.clock, age_s=0.0)
        ledger.open(self.root / ledger_key(epoch, rank))
        ledger.record("process", created_at_s=ledger.created_at_s)
        return ledger

    def steps(self, ledger: Ledger, first: int, last: int, seconds: float = 1.0) -> None:
        for n in range(first, last + 1):
            self.clock.advance(seconds)
            ledger.record("step", step=n, position=n)


def test_case_d48_repeated_steps_count_once(tmp_path: Path) -> None:
    """100 steps of 1 s, saved at 80, crash at 100, 60 s down, 20 s restore, 100 steps from 80 on."""
    run = Script(tmp_path)
    first = run.attempt(1)
    first.record("restored", step=0, position=0, epoch=None)
    run.steps(first, 1, 80)
    first.record("saved", step=80, blocked_s=0.0)
    run.steps(first, 81, 100)
    run.clock.advance(60)
    second = run.attempt(2)
    run.clock.advance(20)
    second.record("restored", step=80, position=80, epoch=1)
    run.steps(second, 81, 180)
    second.record("closed")

    found = read_report(tmp_path)
    assert found.wall_s == pytest.approx(280)
    assert found.ett_percent == pytest.approx(100 * 180 / 280)
    assert found.between_attempts_s == pytest.approx(60)
    assert [a.parts["training_new"] for a in found.attempts] == pytest.approx([100, 80])
    assert [a.parts["training_repeated"] for a in found.attempts] == pytest.approx([0, 20])
    assert found.attempts[1].parts["restore"] == pytest.approx(20)
    assert [a.batches_repeated for a in found.attempts] == [0, 20]
    assert [a.batches_new for a in found.attempts] == [100, 80]
    assert (found.batches_repeated, found.lost_batches) == (20, 0)
    assert found.attempts[1].resumed_step == 80
    assert_adds_up(found)


def assert_adds_up(found: Any) -> None:
    for attempt in found.attempts:
        assert sum(attempt.parts.values()) == pytest.approx(attempt.wall_s, abs=1e-6)
        assert min(attempt.parts.values()) >= 0
    total = sum(a.wall_s for a in found.attempts) + found.between_attempts_s
    assert total == pytest.approx(found.wall_s, abs=1e-6)
    assert 0 <= found.ett_percent <= 100


def test_each_second_has_its_part(tmp_path: Path) -> None:
    run = Script(tmp_path)
    ledger = Ledger(run.clock, age_s=4.0)
    ledger.record("process", created_at_s=ledger.created_at_s)
    for seconds, event, fields in (
        (1.0, "restored", {"step": 0, "position": 0, "epoch": None}),
        (0.5, "first_batch", {}),
        (2.0, "step", {"step": 1, "position": 1}),
        (0.125, "saved", {"step": 1, "blocked_s": 0.125}),
        (0.0, "save_committed", {"step": 1}),
        (0.25, "span_begin", {"name": "evaluation"}),
        (3.0, "span_end", {"name": "evaluation"}),
        (2.0, "step", {"step": 2, "position": 2}),
        (0.75, "closed", {}),
    ):
        run.clock.advance(seconds)
        ledger.record(event, **fields)
    ledger.open(tmp_path / ledger_key(3, 0))
    found = read_report(tmp_path)
    assert found.attempts[0].parts == pytest.approx(
        {
            "start_up": 4.0,
            "restore": 1.0,
            "first_batch": 0.5,
            "training_new": 4.0,
            "training_repeated": 0.0,
            "blocked_in_save": 0.125,
            "evaluation": 3.0,
            "shutdown": 0.75,
            "unaccounted": 0.25,
        }
    )
    assert (found.attempts[0].commits, found.attempts[0].max_blocked_s) == (1, 0.125)
    assert_adds_up(found)


def test_the_end_of_a_save_in_the_background_splits_no_step(tmp_path: Path) -> None:
    run = Script(tmp_path)
    ledger = run.attempt(1)
    ledger.record("restored", step=0, position=0, epoch=None)
    run.clock.advance(0.5)
    ledger.record("save_failed", step=1, error="no space")
    run.clock.advance(0.5)
    ledger.record("step", step=1, position=1)
    found = read_report(tmp_path)
    assert found.attempts[0].parts["training_new"] == pytest.approx(1.0)
    assert found.attempts[0].failed_saves == 1


def test_a_step_that_is_half_new_counts_half(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.attempt(1)
    first.record("restored", step=0, position=0, epoch=None)
    run.clock.advance(4)
    first.record("step", step=1, position=3)
    second = run.attempt(2)
    second.record("restored", step=0, position=0, epoch=None)
    run.clock.advance(4)
    second.record("step", step=1, position=4)
    found = read_report(tmp_path)
    assert found.attempts[1].parts["training_new"] == pytest.approx(1.0)
    assert found.attempts[1].parts["training_repeated"] == pytest.approx(3.0)


def test_batches_between_the_commit_and_the_new_start_are_lost(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.attempt(1)
    first.record("restored", step=0, position=0, epoch=None)
    run.steps(first, 1, 10)
    second = run.attempt(2)
    second.record("restored", step=8, position=10, epoch=1)
    run.steps(second, 11, 12)
    assert read_report(tmp_path).lost_batches == 2


def test_other_ranks_only_stretch_an_attempt(tmp_path: Path) -> None:
    run = Script(tmp_path)
    one = run.attempt(1, rank=1)
    run.clock.advance(1)
    zero = run.attempt(1, rank=0)
    zero.record("restored", step=0, position=0, epoch=None)
    run.steps(zero, 1, 2)
    run.clock.advance(5)
    one.record("closed")
    found = read_report(tmp_path)
    assert found.wall_s == pytest.approx(8)
    assert found.attempts[0].parts["start_up"] == pytest.approx(1)
    assert found.attempts[0].parts["shutdown"] == pytest.approx(5)
    assert_adds_up(found)


def test_a_wall_clock_set_back_makes_nothing_negative(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.attempt(1)
    first.record("restored", step=0, position=0, epoch=None)
    run.steps(first, 1, 10)
    run.clock.wall_offset_s -= 7
    second = run.attempt(2)
    second.record("restored", step=10, position=10, epoch=1)
    run.steps(second, 11, 20)
    found = read_report(tmp_path)
    assert found.wall_s == pytest.approx(13)
    assert_adds_up(found)


def test_strays_are_no_ledgers(tmp_path: Path) -> None:
    run = Script(tmp_path)
    run.steps(run.attempt(1), 1, 1)
    (tmp_path / "events" / "000001" / "notes.jsonl").write_text("hello")
    (tmp_path / "events" / "000001" / "r00001.jsonl").write_text("")
    assert len(read_report(tmp_path).attempts) == 1


def test_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no ledger under events/"):
        read_report(tmp_path)
    path = tmp_path / ledger_key(1, 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"event": "process", "t": 1}) + "\n")
    with pytest.raises(CorruptError, match=r"r00000\.jsonl:1: .*created_at_s"):
        read_report(tmp_path)
    path.write_text('{"event":"process","t":1,"created_at_s":1}\n{"event":"step","t":2}\n')
    with pytest.raises(CorruptError, match=r"r00000\.jsonl:2: .*step"):
        read_report(tmp_path)


_times = st.floats(0, 100, allow_nan=False)
_events = st.one_of(
    st.tuples(st.just("step"), st.integers(0, 50)),
    st.tuples(st.just("restored"), st.integers(0, 50)),
    st.tuples(
        st.sampled_from(["saved", "span_begin", "span_end", "closed", "first_batch"]), st.just(0)
    ),
)
_attempts = st.lists(
    st.tuples(st.floats(-200, 200), st.lists(st.tuples(_times, _events), max_size=12)),
    min_size=1,
    max_size=4,
)


@given(_attempts)
def test_parts_add_up_whatever_the_events(
    script: list[tuple[float, list[tuple[float, tuple[str, int]]]]],
) -> None:
    attempts = {}
    for epoch, (created, events) in enumerate(script):
        rows: list[dict[str, Any]] = [{"event": "process", "t": 0.0, "created_at_s": created}]
        for t, (name, n) in events:
            row = {"event": name, "t": t, "step": n, "position": n, "epoch": 0, "blocked_s": 0.0}
            rows.append(row)
        attempts[epoch] = {0: rows}
    assert_adds_up(report(attempts))
