"""The parts of the benchmark of ETT that compare lives, and that no process outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ett import _order, ablated, pace
from benchmarks.ett.compare import Compared, beside_row, ratios
from benchmarks.ett.job import Figures, LifeJob, Technique, Way, replay, training_for
from benchmarks.ett.life import check_lived, end_tree, undisturbed
from benchmarks.ett.lives import Lives, figures
from benchmarks.ett.pace import Pace
from ckpt.errors import BadInputError, SidestageError
from tests.processes import alive
from trainer.ett.records import AREAS, Area, AttemptTime, Ended, Measured, RunReport, SaveTime

SYNC = Figures(3.0, 3.0, 30.0, 30.0, 30.0, True, 1.0, 5.0)


@pytest.mark.parametrize("level", [60, 80, 90])
def test_a_level_is_reached_with_the_training_found_for_it(level: int) -> None:
    training_s = training_for(SYNC, level)
    assert replay(SYNC, training_s).ett_same == pytest.approx(level, abs=1e-3)


def test_more_training_at_the_same_losses_is_more_effective() -> None:
    less, more = replay(SYNC, 100.0), replay(SYNC, 1000.0)
    assert less.ett_same < more.ett_same
    assert less.interval_s < more.interval_s


def a_life(
    new_s: float,
    *,
    steps: int = 100,
    repeated: int = 20,
    start_s: float = 10.0,
    calm_s: float | None = None,
) -> RunReport:
    """Two attempts, a kill between them; a save blocked 2 s in each. calm_s: a step without one."""
    attempts = []
    for epoch in (1, 2):
        again_s = new_s / steps * repeated if epoch == 2 else 0.0
        areas: dict[Area, float] = dict.fromkeys(AREAS, 0.0)
        areas |= {"imports": start_s, "training_new": new_s / 2, "blocked_in_save": 2.0}
        areas["training_repeated"] = again_s
        attempts.append(
            AttemptTime(
                epoch=epoch,
                started_at_s=1000.0 * epoch,
                ended_at_s=1000.0 * epoch + sum(areas.values()),
                ended="failed" if epoch == 1 else "closed",
                ranks=2,
                world_size=2,
                areas=areas,
                segments=(),
                stages=(),
                saves=(SaveTime(20 * epoch, 1000.0 * epoch + 20, 2.0, "committed"),),
                resumed_step=None,
                last_step=steps // 2 * epoch,
                batches_new=steps // 2,
                batches_repeated=repeated if epoch == 2 else 0,
                lost_batches=0,
                samples_repeated=0,
                time_to_start_s=start_s,
                time_to_recover_s=None,
            )
        )
    sums = {a: sum(t.areas[a] for t in attempts) for a in AREAS}
    wall_s = sum(sums.values())
    return RunReport(
        root="",
        attempts=tuple(attempts),
        wall_s=wall_s,
        areas=sums,
        ett_percent=100 * new_s / wall_s,
        failures=1,
        preemptions=0,
        time_to_start_s=start_s,
        time_to_recover_s=None,
        measured=Measured(2.5, 2.0, None, calm_s, None, None),
    )


def test_a_step_counts_as_much_as_one_without_a_save_in_the_same_life() -> None:
    lives = Lives("tables", "measured", 50.0)
    lives.of["sync", None] = [a_life(50.0)]
    lives.of["ours", None] = [a_life(100.0, calm_s=0.8)]
    lives.of["ours", "overlap"] = [a_life(100.0, calm_s=0.8, start_s=20.0)]
    lives.of["async", None] = [a_life(25.0, calm_s=0.3)]
    sync, ours, without, faster = lives.rows()
    assert sync["ett_same"] == pytest.approx(sync["ett"])
    assert faster["ett_same"] == pytest.approx(faster["ett"])  # never more than it took
    assert ours["inflation"] == pytest.approx(1.25)
    assert ours["calm_ms"] == pytest.approx(800.0)
    assert ours["ett_same"] == pytest.approx(ours["ett"] * 0.8)
    assert without["name"] == "ours without overlap"
    assert without["points"] == pytest.approx(ours["ett_same"] - without["ett_same"])
    assert without["points"] > 0
    assert lives.step_s == pytest.approx(0.5)
    assert ours["ett_by_sync"] == pytest.approx(ours["ett"] / 2)
    assert faster["ett_by_sync"] == pytest.approx(faster["ett"])
    assert lives.calm_ratio == pytest.approx(1.6)
    # What the account of a run says that a save costs, and 2 s of its lag were blocked.
    assert (figures(lives.of["ours", None][0]).block_s, ours["lag_s"]) == (2.5, 0.0)


def test_a_session_is_told_by_the_rounds_that_stood_beside_each_other() -> None:
    found = {
        "steps": 100,
        "plain": [1.0, 2.0, 1.0],
        "session": [1.1, 1.8, 1.0],
        "saving": [1.4, 2.0, 1.1],
        "block_s": [0.01, 0.02, 0.03],
        "lag_s": [0.5, 0.4, 0.6],
    }
    told = beside_row("tables", found)
    assert told["step_ratio"] == pytest.approx(1.0)
    assert told["save_costs_ms"] == pytest.approx(200.0)
    assert (told["plain_ms"], told["step_ms"]) == pytest.approx((10.0, 11.0))
    assert (told["blocked_ms"], told["lag_s"]) == pytest.approx((20.0, 0.5))
    late = beside_row("tables", {**found, "lag_s": [1.2, 0.4, 1.3]})
    assert late["save_costs_ms"] is None  # some of it came after the last step that was timed
    compared = ratios({}, [told, {**told, "step_ratio": 1.2}])
    assert compared["session_step"] == pytest.approx(1.1)
    assert compared["session_step_max"] == pytest.approx(1.2)


def test_repeats_are_told_by_their_medians_in_alternating_order() -> None:
    assert [w for w, _ in _order(["ours", "sync"], 3)] == [
        *("sync", "ours", "ours", "sync"),
        *("sync", "ours"),
    ]
    assert [w for w, _ in _order(["sync", "async", "ours"], 2)] == [
        *("sync", "async", "ours"),
        *("ours", "sync"),
    ]
    lives = Lives("tables", "measured", 50.0)
    lives.of["sync", None] = [a_life(s) for s in (50.0, 90.0, 60.0)]
    *each, last = lives.rows()
    assert len(each) == 3
    assert last["source"] == "measured, median of 3"
    assert last["training_s"] == 60.0
    assert lives.step_s == pytest.approx(0.6)


def test_what_was_lived_goes_before_what_is_replayed() -> None:
    def lives(source: str, sync_s: float, ours_s: float, level: int | None = None) -> Lives:
        made = Lives("tables", source, sync_s, level)
        ways: list[tuple[Way, float]] = [("sync", sync_s), ("ours", ours_s)]
        for way, start_s in zip(ways, (20.0, 5.0), strict=True):
            made.of[way[0], None] = [a_life(way[1], start_s=start_s)]
        return made

    short = Compared(lives("measured", 10.0, 10.0))
    replayed = ratios({"tables": short}, short.rows())
    assert replayed["source_60"] == "replayed"
    assert replayed["gain_min_60"] == pytest.approx(
        short.replayed("ours", 60).ett_same - 60, abs=0.01
    )
    assert "replay_error_points" not in replayed
    both = Compared(short.short, {60: lives("lived at 60%", 80.0, 80.0, 60)})
    lived = ratios({"tables": both}, both.rows())
    assert (lived["source_60"], lived["source_80"]) == ("lived", "replayed")
    ours, sync = (r["ett_same"] for r in reversed(both.lived[60].rows()))
    assert lived["gain_min_60"] == pytest.approx(ours - sync)
    assert lived["gain_min_60_by_sync"] == pytest.approx(ours - sync)  # their steps are the same
    assert lived["calm_ratio"] == pytest.approx(1.0)
    assert lived["replay_error_points"] > 0


@pytest.mark.parametrize(
    ("way", "without", "ended", "whole"),
    [
        ("ours", (), ("failed", "failed", "preempted", "closed"), True),
        ("ours", ("preemption",), ("failed", "failed", "failed", "closed"), True),
        ("sync", (), ("failed", "failed", "failed", "closed"), True),
        ("sync", (), ("failed", "failed", "preempted", "closed"), False),
        ("ours", (), ("failed", "failed", "closed"), False),
        ("ours", (), ("failed", "failed", "preempted", "failed", "closed"), False),
    ],
)
def test_a_life_that_ended_otherwise_than_the_others_is_refused(
    way: Way, without: tuple[Technique, ...], ended: tuple[Ended, ...], whole: bool
) -> None:
    job = LifeJob("tables", way, "", "", 10.0, 3, without=without)
    lived = a_life(10.0)
    attempts = tuple(replace(lived.attempts[0], ended=e) for e in ended)
    report = replace(lived, attempts=attempts)
    if whole:
        check_lived(job, report)
        return
    with pytest.raises(SidestageError, match=f"ended as {', '.join(ended)}, not as failed, failed"):
        check_lived(job, report)


def test_compiled_code_is_switched_off_only_where_something_is_compiled() -> None:
    assert ("ours", "compile_cache") in list(ablated(compiled=True))
    assert ("ours", "compile_cache") not in list(ablated(compiled=False))


def test_saves_come_as_often_as_loses_least(tmp_path: Path) -> None:
    now = [0.0]
    plan = tmp_path / "plan.json"
    pace.write_steps(plan, 1000)
    assert json.loads(plan.read_text()) == {"steps": 1000}
    job = LifeJob("tables", "ours", str(tmp_path), str(plan), 150.0, failures=3)
    paced = Pace(job, 0, 0, lag_s=5.0, now_s=lambda: now[0], agree=lambda mine: mine)
    at = []
    writing_until_s = 0.0
    for step in range(1, 121):
        writing = now[0] < writing_until_s
        now[0] += 0.2 if writing else 0.1
        paced.stepped(step, writing=writing)
        if paced.due(step):
            at.append(step)
            now[0] += 0.01
            writing_until_s = now[0] + 3.0
            paced.saved(step, 0.01, writing=True)
    # First by the time that it is thought to take; then by 1.5 s that steps lose to each: every 12 s.
    assert at[0] == 20
    assert at[1] == 70
    assert len(at) == 2
    assert not paced.over(999)
    assert paced.over(1000)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--models", "large"], "--models large: there are tables, dense"),
        (["--models", "tables", "--ablate", "dense"], "--ablate dense: it must be one of"),
        (["--ways", "ours", "--lived", "60"], "measured by sync"),
    ],
)
def test_what_cannot_be_lived_is_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(["ett", "--json", str(tmp_path / "f"), "--root", str(tmp_path), *options])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == BadInputError.exit_code
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


_LAUNCHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_workers_in_a_session_of_their_own_end_with_their_launcher() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, start_new_session=True
    )
    assert launcher.stdout is not None
    worker = int(launcher.stdout.readline())
    launcher.stdout.close()

    def clean_up() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)  # comes when all is ended
            end_tree(launcher)

    # It is ignored where the tests run in a shell's background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            clean_up()
    finally:
        signal.signal(signal.SIGINT, before)
    assert launcher.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while alive(worker):  # killed; whoever inherited it has yet to reap it
        assert time.monotonic() < deadline
