"""The fleet's simulator against the closed form, its sums, and what it reads and writes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.fleet import ASYNC, BASELINE, BUILT_IN, OURS, RATES, read_times
from benchmarks.fleet_model import PARTS, Times, best_interval_s, simulate
from trainer.interval import DAY_S


@pytest.mark.parametrize(
    ("block_s", "minutes", "wasted"), [(15, 15.5, 3.23), (1, 4.0, 0.83), (0.2, 1.8, 0.37)]
)
def test_agrees_with_the_founding_studys_table(
    block_s: float, minutes: float, wasted: float
) -> None:
    """3 failures a day, nothing lost but blocks and repeated batches."""
    times = Times(block_s, interference_s=0, lag_s=0, start_s=0, recover_s=0)
    interval_s = best_interval_s(times, failures_per_day=3)
    assert interval_s / 60 == pytest.approx(minutes, abs=0.05)
    lives = simulate(times, np.full(300, 60 * DAY_S), 3, interval_s, seed=1)
    lost = (lives.parts["blocked"] + lives.parts["repeated"]).sum() / lives.parts["new"].sum()
    assert 100 * lost == pytest.approx(wasted, rel=0.04)
    for other in (0.6, 1.6):
        worse = simulate(times, np.full(300, 60 * DAY_S), 3, interval_s * other, seed=1)
        assert worse.ett_percent.mean() < lives.ett_percent.mean()


def test_one_job_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves at 100, 200; fails 25 s after the second began; its commit takes 30 s."""

    class Scripted:
        def exponential(self, _: float, count: int) -> object:
            return np.full(count, lives.pop(0))

    # start 10, train 100, block 2 + 3, train 100, 25 s into the save: 2 + 3 + 20 s of training.
    lives = [10 + 100 + 5 + 100 + 25.0, 4.0, 1e9]
    monkeypatch.setattr(np.random, "default_rng", lambda _: Scripted())
    times = Times(2, interference_s=3, lag_s=30, start_s=10, recover_s=20, publish_s=7)
    done = simulate(times, np.array([250.0]), 1, 100, seed=0)
    # Back to 100: the save at 200 had not committed. A failure 4 s into the first recovery.
    assert {name: float(s[0]) for name, s in done.parts.items()} == {
        "new": 250,
        "repeated": 120,
        "blocked": 2 + 2 + 2 + 2,
        "interference": 3 + 3 + 3,
        "start": 10,
        "recover": 4 + 20,
        "publishing": 7,
        "shutdown": 28,
    }


def one_life_after_another(times: Times, work_s: float, lives: list[float], every_s: float) -> dict:
    """The same job, event by event: an independent, slow way to the same figures."""
    parts = dict.fromkeys(PARTS, 0.0)
    saved = trained = 0.0
    name, begin_s = "start", times.start_s
    while True:
        left, at, commits = lives.pop(0), saved, []
        clock = 0.0

        def spend(part: str, seconds: float) -> float:
            nonlocal left, clock
            spent = min(seconds, left)
            parts[part] += spent
            left, clock = left - spent, clock + spent
            return spent

        spend(name, begin_s)
        while left > 0 and at < work_s:
            done = spend("new", min(every_s, work_s - at))
            at, trained = at + done, trained + done
            if left > 0:
                commits.append((clock + max(times.lag_s, times.block_s), at))
                spend("blocked", times.block_s)
                spend("interference", times.interference_s if at < work_s else 0.0)
        if left > 0 and saved < work_s:
            spend("shutdown", max(0.0, times.lag_s - times.block_s))
        if left > 0:
            spend("publishing", times.publish_s)
        saved = max([saved, *(p for when, p in commits if when <= clock)])
        if left > 0:
            parts.update(new=work_s, repeated=trained - work_s)
            return parts
        name, begin_s = "recover", times.recover_s


def test_every_second_is_where_an_event_by_event_walk_puts_it() -> None:
    times = Times(40, interference_s=25, lag_s=90, start_s=300, recover_s=200, publish_s=900)
    work_s = np.random.default_rng(2).uniform(0.1, 1.5, 100) * DAY_S
    done = simulate(times, work_s, 40, interval_s=700, seed=3)
    rng = np.random.default_rng(3)
    drawn = np.array([rng.exponential(DAY_S / 40, 100) for _ in range(600)])
    for job in range(100):
        walked = one_life_after_another(times, work_s[job], list(drawn[:, job]), 700)
        assert {n: s[job] for n, s in done.parts.items()} == pytest.approx(walked, abs=1e-4)
    assert ((done.ett_percent > 0) & (done.ett_percent < 100)).all()


def test_published_rates() -> None:
    assert 24 / (RATES["rsc-jobs"] * 128) == pytest.approx(8.9, abs=0.1)  # 7.9 h were seen
    assert 24 / (RATES["rsc-1"] * 2048) == pytest.approx(1.8, abs=0.01)
    assert RATES["llama-3"] * 2048 * 54 == pytest.approx(419)


def test_measured_times_replace_the_built_in_ones(tmp_path: Path) -> None:
    stall = [
        {"mode": OURS, "ranks": 1, "blocked_ms": 900.0, "lost_ms": 900.0, "persist_s": 9.0},
        {"mode": OURS, "ranks": 2, "blocked_ms": 5.0, "lost_ms": 605.0, "persist_s": 4.0},
        {"mode": ASYNC, "ranks": 2, "status": "failed", "blocked_ms": 1.0, "lost_ms": 2.0},
    ]
    ett = [{"way": "ours", "start_s": s, "recover_s": 5.0, "publish_s": None} for s in (8, 9, 40)]
    (tmp_path / "stall.json").write_text(json.dumps({"rows": stall}))
    (tmp_path / "ett.json").write_text(json.dumps({"rows": ett}))
    times = read_times([tmp_path / "stall.json", tmp_path / "ett.json"])
    assert times[OURS] == Times(0.005, 0.6, 4.0, 9, 5.0, 0.0)
    assert times[ASYNC] == BUILT_IN[ASYNC]
    assert times[BASELINE] == BUILT_IN[BASELINE]
    (tmp_path / "other.json").write_text('{"rows": [{"mode": "memcpy"}]}')
    with pytest.raises(ValueError, match="no times of dcp.save"):
        read_times([tmp_path / "other.json"])


def test_the_command(tmp_path: Path) -> None:
    options = ["--jobs", "20", "--ranks", "8,512", "--root", str(tmp_path)]
    for name in ("a", "b"):
        args = [
            "fleet",
            "--json",
            str(tmp_path / f"{name}.json"),
            "--plots",
            str(tmp_path / "plots"),
        ]
        assert command.main([*args, *options]) == 0
    report, again = (json.loads((tmp_path / f"{n}.json").read_text()) for n in "ab")
    assert report["rows"] == again["rows"], "not the same by the same seed"
    assert report["ratios"]["parts_add_up"] is True
    assert report["ratios"]["gain_512_ranks"] > 0
    sizes = [r for r in report["rows"] if r["part"] == "sizes"]
    assert [(r["ranks"], r["way"]) for r in sizes[:3]] == [(8, BASELINE), (8, ASYNC), (8, OURS)]
    assert all(r["p5"] <= r["ett_percent"] <= r["p95"] for r in sizes)
    plots = sorted(p.name for p in (tmp_path / "plots").iterdir())
    assert {"fleet-ranks.svg", "fleet-block.svg", "fleet-interval.svg"} <= set(plots)
    for name in plots:
        lines = ElementTree.parse(tmp_path / "plots" / name).iter(
            "{http://www.w3.org/2000/svg}polyline"
        )
        assert len(list(lines)) == 3
