"""The account of runs that are acted out on a fake clock."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, NotFoundError
from ckpt.layout import ledger_key
from tests.trainer.fake_clock import FakeClock
from tests.trainer.scripted_run import Script, check_sums, spent
from trainer.ett import fleet, losses, read_report, report
from trainer.ett.exports import prometheus_registry
from trainer.ett.positions import Trained
from trainer.ett.table import show
from trainer.ett.written import as_dict
from trainer.ledger import Ledger, SaveEvents, read_ledger


def test_case_d48_repeated_steps_count_once(tmp_path: Path) -> None:
    """100 steps of 1 s, saved at 80, crash at 100, 60 s down, 20 s restore, 100 steps from 80 on."""
    run = Script(tmp_path)
    first = run.begin(1)
    run.steps(first, 1, 80)
    run.save(first, 80, 0.0)
    run.steps(first, 81, 100)
    run.clock.advance(60)
    second = run.attempt(2)
    run.spend(second, "restore", 20)
    second.record("restored", step=80, position=80, epoch=1)
    run.steps(second, 81, 180)
    run.close(second)

    found = read_report(tmp_path)
    check_sums(found)
    assert found.wall_s == pytest.approx(280)
    assert found.ett_percent == pytest.approx(100 * 180 / 280)
    assert [spent(a.areas) for a in found.attempts] == [
        {"training_new": 100},
        {"restore": 20, "training_new": 80, "training_repeated": 20},
    ]
    assert found.areas["between_attempts"] == pytest.approx(60)
    assert [(a.batches_new, a.batches_repeated) for a in found.attempts] == [(100, 0), (80, 20)]
    assert (found.batches_repeated, found.lost_batches) == (20, 0)
    assert [a.ended for a in found.attempts] == ["failed", "closed"]
    assert (found.failures, found.preemptions) == (1, 0)
    assert found.attempts[1].resumed_step == 80
    assert found.time_to_recover_s == pytest.approx(60 + 20 + 20 + 1)
    assert found.measured.recover_s == pytest.approx(60 + 20 + 1)


def test_every_area_once(tmp_path: Path) -> None:
    run = Script(tmp_path)
    born_s = run.clock.time()
    ledger = Ledger(run.clock, age_s=0.0)
    run.clock.advance(2)
    for seconds, name in (
        *((1.0, "device_init"), (1.5, "process_group_init"), (0.25, "preproc_creation")),
        *((3.0, "train_module_creation"), (0.125, "init_plugins"), (5.0, "restore")),
    ):
        run.spend(ledger, name, seconds)
    run.clock.advance(0.5)
    ledger.record(
        "process",
        created_at_s=ledger.created_at_s,
        batch_size=32,
        submitted_at_s=born_s - 100,
        allocated_at_s=born_s - 60,
        launcher_created_at_s=born_s - 4,
    )
    ledger.open(tmp_path / ledger_key(7, 0))
    ledger.record("restored", step=0, position=0, epoch=None)
    run.spend(ledger, "pre_train", 0.75)
    run.spend(ledger, "get_first_batch_data", 2.5)
    run.clock.advance(0.5)
    run.spend(ledger, "pt2_compilation", 6.0)
    run.clock.advance(0.5)
    ledger.stepped(1, 1)
    for n in range(2, 12):
        ledger.waited("data", 0.25)
        ledger.waited("fence" if n % 2 else "overlay", 0.125)
        run.steps(ledger, n, n)
    with ledger.span("blocked_in_save"):
        ledger.waited("slot", 1.5)
        run.clock.advance(2.0)
    ledger.record("saved", step=11, blocked_s=2.0)
    run.steps(ledger, 12, 13)
    run.spend(ledger, "evaluation", 4.0)
    run.spend(ledger, "publishing", 1.0)
    ledger.record("save_committed", step=11)
    run.steps(ledger, 14, 14)
    run.clock.advance(0.375)
    with ledger.span("shutdown"):  # finish()
        run.clock.advance(0.125)
        run.save(ledger, 14, 0.25)
        run.clock.advance(0.125)
    run.close(ledger, 1.25)
    run.clock.advance(0.5)
    ledger.record("exited")

    found = read_report(tmp_path)
    check_sums(found)
    assert spent(found.areas) == {
        "scheduling": 40,
        "hardware_setup": 56,
        "launcher_init": 4,
        "imports": 2,
        "device_init": 1,
        "process_group_init": 1.5,
        "preproc_creation": 0.25,
        "train_module_creation": 3,
        "init_plugins": 0.125,
        "restore": 5,
        "pre_train": 0.75,
        "get_first_batch_data": 2.5,
        "start_up_other": 0.5,
        "pt2_compilation": 6,
        "training_new": 1 + 10 * 0.625 + 3,
        "blocked_in_save": 0.75,
        "overlay_pressure": 1.25 + 1.5,
        "data_wait": 2.5,
        "evaluation": 4,
        "publishing": 1,
        "shutdown": 2.0,
        "unaccounted": 0.375,
    }
    (attempt,) = found.attempts
    assert attempt.time_to_start_s == pytest.approx(found.wall_s - 40 - 10 - 2 - 2 - 5 - 1 - 2.625)
    assert [s.name for s in attempt.stages][:4] == [
        *("scheduling", "hardware_setup", "launcher_init", "device_init")
    ]
    save, last = attempt.saves
    assert (save.outcome, save.blocked_s) == ("committed", 2.0)
    assert (last.outcome, last.committed_at_s) == ("lost", None)
    assert save.committed_at_s == pytest.approx(save.at_s + 2 + 2 + 4 + 1)


def test_a_crash_in_the_start_and_one_in_a_save(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.attempt(1)
    run.clock.advance(3)
    number = first.begin_span("train_module_creation")
    run.clock.advance(2)
    first.record("save_failed", step=0, error="the last sign")  # the span never ends
    run.clock.advance(10)
    second = run.begin(2)
    run.steps(second, 1, 4)
    second.begin_span("blocked_in_save")
    run.clock.advance(0.5)
    second.record("save_skipped", step=4, error="the last sign")
    run.clock.advance(10)
    third = run.begin(3)
    run.steps(third, 1, 2)
    found = read_report(tmp_path)
    check_sums(found)
    assert number == 1
    assert [spent(a.areas) for a in found.attempts] == [
        {"imports": 3, "train_module_creation": 2},
        {"training_new": 4, "blocked_in_save": 0.5},
        {"training_repeated": 2},
    ]
    assert [a.ended for a in found.attempts] == ["failed", "failed", "unknown"]
    assert found.attempts[0].time_to_start_s is None
    assert found.attempts[2].time_to_recover_s is None


def test_stages_at_the_same_time_wait_for_the_last_one(tmp_path: Path) -> None:
    """The one that ends last is what the start waited for; the training thread's own come first."""
    run = Script(tmp_path)
    ledger = run.attempt(1)

    def elsewhere(act: Any) -> None:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    numbers: dict[str, int] = {}

    def begin(*names: str) -> None:
        for name in names:
            numbers[name] = ledger.begin_span(name)

    with ledger.span("start"):  # a name of no area: what the other threads do tells
        elsewhere(lambda: begin("train_module_creation", "restore"))
        run.clock.advance(1)
        run.spend(ledger, "process_group_init", 2)
        run.clock.advance(1)
        elsewhere(
            lambda: ledger.end_span("train_module_creation", numbers["train_module_creation"])
        )
        run.clock.advance(3)
        elsewhere(lambda: ledger.end_span("restore", numbers["restore"]))
    ledger.record("restored", step=0, position=0, epoch=None)
    elsewhere(lambda: begin("publishing"))
    run.steps(ledger, 1, 3)
    elsewhere(lambda: ledger.end_span("publishing", numbers["publishing"]))
    run.close(ledger)
    found = read_report(tmp_path)
    check_sums(found)
    assert spent(found.areas) == {"process_group_init": 2, "restore": 5, "training_new": 3}
    assert sorted(s.name for s in found.attempts[0].stages) == [
        *("process_group_init", "publishing", "restore", "start", "train_module_creation")
    ]


def test_a_step_that_is_half_new_counts_half(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.begin(1)
    run.clock.advance(4)
    first.stepped(1, 3)
    second = run.begin(2)
    run.clock.advance(4)
    second.stepped(1, 4)
    assert spent(read_report(tmp_path).attempts[1].areas) == {
        "training_new": 1.0,
        "training_repeated": 3.0,
    }


def test_batches_that_an_attempt_skipped_are_lost_until_another_trains_on_them(
    tmp_path: Path,
) -> None:
    run = Script(tmp_path)
    first = run.begin(1)
    run.steps(first, 1, 8)
    run.save(first, 8, 0.0)
    run.steps(first, 9, 10)
    second = run.attempt(2)
    second.record("restored", step=8, position=12, epoch=1)
    run.steps(second, 13, 14)
    run.steps(run.begin(3, at=9, of=1), 10, 15)
    found = read_report(tmp_path)
    assert [a.lost_batches for a in found.attempts] == [0, 4, 0]
    # 11 and 12 were skipped, so they are new although later ones have been trained on.
    assert [(a.batches_new, a.batches_repeated) for a in found.attempts] == [
        (10, 0),
        (2, 0),
        (3, 3),
    ]


def test_other_ranks_stretch_an_attempt_and_their_clocks_are_set_right(tmp_path: Path) -> None:
    run = Script(tmp_path)
    one = run.attempt(1, rank=1)
    run.clock.advance(1)
    run.clock.wall_offset_s -= 50
    zero = run.begin(1, world_size=3)
    run.clock.wall_offset_s += 50
    one.record("restored", step=0, position=0, epoch=None)
    run.steps(zero, 1, 2)
    run.close(zero)
    run.clock.advance(5)
    run.close(one)
    found = read_report(tmp_path)
    check_sums(found)
    assert spent(found.areas) == {"imports": 1, "training_new": 2, "shutdown": 5}
    assert [n.partition(",")[0] for n in found.notes] == [
        "attempt 1: the clock of rank 1 is 50.0 s ahead of that of rank 0",
        "attempt 1: 1 of 3 ranks left no ledger",
    ]


def test_a_wall_clock_set_back_loses_no_time(tmp_path: Path) -> None:
    run = Script(tmp_path)
    run.steps(run.begin(1), 1, 10)
    run.clock.wall_offset_s -= 7
    run.steps(run.begin(2, at=10, of=1), 11, 20)
    found = read_report(tmp_path)
    check_sums(found)
    assert (found.wall_s, found.ett_percent) == (pytest.approx(20), pytest.approx(100))
    assert "attempt 2 begins 7.0 s before attempt 1 ends" in found.notes[0]


def test_two_sessions_of_one_process_share_its_time(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.begin(1)
    run.steps(first, 1, 10)
    run.close(first)
    run.clock.advance(5)
    second = Ledger(run.clock, age_s=15.0)
    second.record("process", created_at_s=second.created_at_s)
    second.open(tmp_path / ledger_key(2, 0))
    second.record("restored", step=10, position=10, epoch=1)
    run.steps(second, 11, 15)
    run.close(second)
    for ledger in (first, second):
        ledger.record("exited")
    found = read_report(tmp_path)
    check_sums(found)
    assert found.wall_s == pytest.approx(20)
    assert spent(found.areas) == {"training_new": 15, "shutdown": 5}
    assert found.notes == ()


def test_how_attempts_ended(tmp_path: Path) -> None:
    run = Script(tmp_path)
    first = run.begin(1, restarts=0)
    run.steps(first, 1, 2)
    first.record("preempted", step=2, position=2, asked=0, why="SIGTERM")
    run.spend(first, "blocked_in_save", 1)
    run.close(first, 0.5)
    second = run.begin(2, at=2, of=1, restarts=0)
    run.steps(second, 3, 4)
    run.clock.advance(2.5)  # a step that never ends
    second.record("closing", error="RuntimeError: lost a peer")
    run.clock.advance(0.5)
    second.record("closed")
    third = run.begin(3, at=2, of=1, restarts=3)
    run.steps(third, 3, 4)
    found = read_report(tmp_path)
    check_sums(found)
    (mend,) = [loss.mend for loss in losses(found, 9) if loss.area == "shutdown"]
    assert mend.startswith("1 failed attempts took 3.0 s each from their last whole step")
    assert [a.ended for a in found.attempts] == ["preempted", "failed", "unknown"]
    assert (found.failures, found.preemptions) == (3, 1)
    assert found.notes[0].startswith(
        "2 starts between attempts 2 and 3 ended before they had a ledger"
    )
    assert spent(found.attempts[0].areas) == {
        "training_new": 2,
        "blocked_in_save": 1,
        "shutdown": 0.5,
    }
    assert spent(found.attempts[1].areas) == {"training_new": 2, "shutdown": 3}


def test_measures_what_saves_cost(tmp_path: Path) -> None:
    """Steps are slower while a save is being written: 1.1 s instead of 1 s, for 20 steps."""
    run = Script(tmp_path)
    ledger = run.begin(1)
    step = 0
    for _ in range(3):
        run.steps(ledger, step + 1, step + 30)
        run.save(ledger, step + 30, 0.5)
        run.steps(ledger, step + 31, step + 50, 1.1)
        ledger.record("save_committed", step=step + 30)
        step += 50
    run.close(ledger)
    m = read_report(tmp_path).measured
    assert m.block_s == pytest.approx(0.5 + 20 * 0.1)
    assert m.lag_s == pytest.approx(0.5 + 20 * 1.1)
    assert m.interval_s == pytest.approx((30 + 52 + 52) / 3)
    assert m.step_s == pytest.approx(1.0)
    assert (m.failures_per_day, m.recover_s) == (None, None)


@pytest.mark.parametrize("how", ["save_committed", "save_failed"])
def test_a_step_is_calm_only_if_no_save_was_written_in_any_of_it(tmp_path: Path, how: str) -> None:
    run = Script(tmp_path)
    ledger = run.begin(1)
    step = 0
    for _ in range(3):
        run.steps(ledger, step + 1, step + 30)
        run.save(ledger, step + 30, 0.5)
        run.steps(ledger, step + 31, step + 49, 1.5)
        run.clock.advance(1.125)
        ledger.record(how, step=step + 30)  # told by a persist thread, in the middle of a step
        run.steps(ledger, step + 50, step + 50, 0.375)
        step += 50
    run.save(ledger, step, 0.5)  # lost
    run.steps(ledger, step + 1, step + 20, 1.5)
    run.clock.advance(1)
    ledger.record("closing", error="RuntimeError: killed")
    m = read_report(tmp_path).measured
    assert m.step_s == pytest.approx(1.0)
    assert m.block_s == pytest.approx(0.5 + 20 * 0.5)


def test_case_e43_saves_are_told_as_they_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is skipped here and its step saved again; one is skipped by another rank; one fails."""
    run = Script(tmp_path)
    ledger = run.begin(1)
    events = SaveEvents(ledger)
    run.steps(ledger, 1, 4)
    events.emit("save_staged", step=4, blocked_s=0.0, staged_bytes=1, guarded_bytes=0)
    run.steps(ledger, 5, 8)
    with ledger.span("blocked_in_save"):
        run.clock.advance(0.5)
        events.emit("save_skipped", step=8, error="1 earlier saves are pending", blocked_s=0.5)
    events.emit("save_committed", step=4, epoch=1)
    events.emit("save_staged", step=8, blocked_s=0.0, staged_bytes=1, guarded_bytes=0)
    events.emit("save_committed", step=8, epoch=1)
    run.steps(ledger, 9, 12)
    events.emit("save_failed", step=12, error="no room")  # before save() has returned
    events.emit("save_staged", step=12, blocked_s=0.25, staged_bytes=1, guarded_bytes=0)
    run.steps(ledger, 13, 16)
    events.emit("save_staged", step=16, blocked_s=0.0, staged_bytes=1, guarded_bytes=0)
    events.emit("save_skipped", step=16, error="rank 1: step 16: skipped")
    run.close(ledger)
    told = [e["event"] for e in read_ledger(tmp_path / ledger_key(1, 0))]
    assert (told.count("saved"), told.count("save_skipped")) == (4, 2)
    found = read_report(tmp_path)
    check_sums(found)
    assert [(s.step, s.outcome, s.blocked_s) for s in found.attempts[0].saves] == [
        *((4, "committed", 0), (8, "skipped", 0.5), (8, "committed", 0)),
        *((12, "failed", 0.25), (16, "skipped", 0)),
    ]
    skipped = found.attempts[0].saves[1]
    assert skipped.error == "1 earlier saves are pending"
    assert skipped.at_s - found.attempts[0].started_at_s == pytest.approx(8)
    assert found.areas["blocked_in_save"] == pytest.approx(0.5)
    assert as_dict([found], None)["saves"] == found.saves
    assert found.saves == {"committed": 2, "failed": 1, "skipped": 2, "lost": 0}
    show([found], None)
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "│ skipped saves │ 2 │ 2 │ │" in shown
    assert "2 saves skipped, the last one: rank 1: step 16: skipped (step 16)." in shown
    assert "1 saves failed, the last one: no room (step 12)." in shown
    sample = prometheus_registry([found]).get_sample_value
    assert sample("sidestage_ett_saves_skipped", {"root": found.root}) == 2
    assert sample("sidestage_ett_saves_failed", {"root": found.root}) == 1


def test_ledgers_of_before_say_saved_of_a_save_that_was_skipped(tmp_path: Path) -> None:
    run = Script(tmp_path)
    ledger = run.begin(1)
    run.steps(ledger, 1, 4)
    ledger.record("save_skipped", step=4, error="busy")
    ledger.record("saved", step=4, blocked_s=0.0)
    run.close(ledger)
    assert [(s.step, s.outcome) for s in read_report(tmp_path).attempts[0].saves] == [
        (4, "skipped")
    ]


def test_a_fleet_weighs_runs_by_wall_time_and_ranks(tmp_path: Path) -> None:
    reports = []
    for name, ranks, down_s in (("a", 1, 30.0), ("b", 4, 10.0)):
        run = Script(tmp_path / name)
        ledger = run.attempt(1, world_size=ranks)
        run.spend(ledger, "restore", down_s)
        ledger.record("restored", step=0, position=0, epoch=None)
        run.steps(ledger, 1, 10)
        run.close(ledger)
        reports.append(read_report(tmp_path / name))
    assert [r.ett_percent for r in reports] == pytest.approx([25, 50])
    found = fleet(reports)
    assert found.ett_percent == pytest.approx((40 * 25 + 80 * 50) / 120)
    assert found.notes[0].endswith("b: attempt 1: 3 of 4 ranks left no ledger")


def test_strays_are_no_ledgers_and_what_is_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no ledger under events/"):
        read_report(tmp_path)
    run = Script(tmp_path)
    run.steps(run.begin(1), 1, 1)
    (tmp_path / "events" / "000001" / "notes.jsonl").write_text("hello")
    (tmp_path / "events" / "000001" / "r00001.jsonl").write_text("")
    assert len(read_report(tmp_path).attempts) == 1
    path = tmp_path / ledger_key(2, 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"event": "process", "t": 1}) + "\n")
    with pytest.raises(CorruptError, match=r"r00000\.jsonl:1: .*created_at_s"):
        read_report(tmp_path)
    path.write_text('{"event":"process","t":1,"created_at_s":1}\n{"event":"steps","t":2}\n')
    with pytest.raises(CorruptError, match=r"r00000\.jsonl:2: .*begin"):
        read_report(tmp_path)


def test_a_kill_in_a_long_silence(tmp_path: Path) -> None:
    script = Script(tmp_path)
    ledger = script.begin(1)
    script.steps(ledger, 1, 10)
    ledger.begin_span("evaluation")
    for _ in range(100):
        script.clock.advance(5.0)
        ledger.beat()
    script.clock.advance(2.0)  # and a kill
    script.clock.advance(8.0)
    second = script.begin(2)
    script.steps(second, 1, 10)
    script.close(second)
    found = read_report(tmp_path)
    check_sums(found)
    assert found.attempts[0].ended == "failed"
    assert spent(found.areas) == {
        "training_new": 10.0,
        "training_repeated": 10.0,
        "evaluation": 500.0,
        "between_attempts": 10.0,
    }


_seconds = st.floats(0, 30, allow_nan=False)
_event = st.tuples(
    _seconds,
    st.one_of(
        st.tuples(
            st.just("steps"),
            _seconds,
            st.integers(0, 30),
            st.lists(_seconds, min_size=4, max_size=4),
        ),
        st.tuples(st.sampled_from(["span_begin", "span_end"]), st.integers(1, 5), st.booleans()),
        st.tuples(st.sampled_from(["restored", "saved", "save_committed"]), st.integers(0, 30)),
        st.tuples(st.sampled_from(["preempted", "closing", "closed", "exited", "alive"])),
    ),
)
_names = st.lists(
    st.sampled_from(["restore", "pt2_compilation", "blocked_in_save", "evaluation", "mine"]),
    min_size=6,
    max_size=6,
)
_rank = st.tuples(st.floats(1.8e9 - 200, 1.8e9 + 200), _names, st.lists(_event, max_size=12))
_run = st.lists(st.lists(_rank, min_size=1, max_size=2), min_size=1, max_size=3)


def _row(t: float, names: list[str], what: tuple[Any, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"event": what[0], "t": t}
    match what:
        case ("steps", begin, n, waits):
            kinds = ("data_s", "overlay_s", "fence_s", "slot_s")
            row |= {
                "begin": begin,
                "step": n,
                "position": n,
                **dict(zip(kinds, waits, strict=True)),
            }
        case ("span_begin" | "span_end", n, main):
            row |= {"id": n, "name": names[n], "main": main}
        case (_, n):
            row |= {"step": n, "position": n, "epoch": 0, "blocked_s": n / 10}
    return row


@given(_run)
def test_areas_tile_the_wall_time_whatever_the_events(run: list[list[Any]]) -> None:
    attempts: dict[int, dict[int, Any]] = {}
    for epoch, ranks in enumerate(run):
        for rank, (created_s, names, events) in enumerate(ranks):
            first = {
                "event": "process",
                "t": 0.0,
                "created_at_s": created_s,
                "launcher_created_at_s": 1.8e9,
            }
            rows = [_row(t, names, what) for t, what in events]
            attempts.setdefault(epoch, {})[rank] = [first, *rows]
    check_sums(report(attempts))


def test_a_moment_that_contradicts_the_process_is_left_out() -> None:
    clock = FakeClock()
    created_s = clock.time()
    process = {"event": "process", "t": 1.0, "created_at_s": created_s}
    found = report(
        {1: {0: [process | {"allocated_at_s": created_s + 1, "submitted_at_s": created_s - 2}]}}
    )
    check_sums(found)
    assert spent(found.areas) == {"scheduling": 2, "imports": 1}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12))
def test_counts_each_batch_as_new_once(stretches: list[tuple[int, int]]) -> None:
    trained, known = Trained(), set[int]()
    for first, last in stretches:
        batches = set(range(first, last))
        assert trained.add(first, last) == len(batches - known)
        known |= batches
