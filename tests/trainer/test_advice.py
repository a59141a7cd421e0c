"""What a run lost most by, how often it should save, and what it would be with other settings."""

from dataclasses import replace

import pytest

from ckpt.errors import BadInputError
from trainer.ett import AREAS, Area, Measured, RunReport, advise, losses, parse_changes, what_if
from trainer.ett.advice import best_interval_s, interval_cost

DAY_S = 86400.0
NOTHING = Measured(None, None, None, None, None, None)


def run(measured: Measured = NOTHING, **areas: float) -> RunReport:
    """A run without attempts, of a wall time that its areas add up to."""
    spent: dict[Area, float] = {area: areas.get(area, 0.0) for area in AREAS}
    wall_s = sum(spent.values())
    percent = 100 * spent["training_new"] / wall_s
    return RunReport("run", (), wall_s, spent, percent, 0, 0, None, None, measured)


@pytest.mark.parametrize(
    ("block_s", "interval_min", "points"), [(15.0, 15.5, 3.23), (1.0, 4.0, 0.83), (0.2, 1.8, 0.37)]
)
def test_the_table_of_the_founding_study(
    block_s: float, interval_min: float, points: float
) -> None:
    """arXiv 2610.02057, at 3 failures a day."""
    measured = Measured(block_s, 0.0, 3600.0, 0.5, 3.0, 60.0)
    advice = advise(run(measured, training_new=DAY_S))
    assert advice is not None
    assert advice.interval_s / 60 == pytest.approx(interval_min, abs=0.05)
    assert advice.points_then == pytest.approx(points, abs=0.005)
    assert advice.interval_steps == round(advice.interval_s / 0.5)
    assert advice.points_now == pytest.approx(100 * (block_s / 3600 + 1800 * 3 / DAY_S))


def test_no_interval_is_shorter_than_a_commit_takes() -> None:
    interval_s, why = best_interval_s(0.01, 90.0, 28800.0)
    assert interval_s == 90.0
    assert why.endswith("= 24.0 s, but a save takes 90.0 s to commit")
    # A failure loses half an interval, and what wasn't committed yet.
    assert interval_cost(90.0, 0.01, 90.0, 28800.0) == pytest.approx(
        100 * (0.01 / 90 + 135 / 28800)
    )


@pytest.mark.parametrize("missing", ["block_s", "failures_per_day"])
def test_no_advice_from_what_was_not_measured(missing: str) -> None:
    whole = Measured(1.0, 2.0, 60.0, 0.5, 3.0, 60.0)
    assert advise(run(replace(whole, **{missing: None}), training_new=1.0)) is None


def test_the_largest_losses_are_told_with_what_mends_them() -> None:
    report = run(training_new=60.0, imports=25.0, evaluation=10.0, restore=4.0, shutdown=1.0)
    found = losses(report)
    assert [(loss.area, loss.points) for loss in found] == [
        *(("imports", 25.0), ("evaluation", 10.0), ("restore", 4.0))
    ]
    assert "trainer launch" in found[0].mend
    everything = run(**dict.fromkeys(AREAS, 1.0))
    assert {loss.area for loss in losses(everything, len(AREAS))} == set(AREAS) - {"training_new"}
    assert all(loss.mend for loss in losses(everything, len(AREAS)))


def test_reads_changes() -> None:
    text = "block=0.1s, interval=5m,failures=3/day,start=2min,recover=1.5h,lag=20ms"
    assert parse_changes(text) == pytest.approx(
        {"block": 0.1, "interval": 300, "failures": 3, "start": 120, "recover": 5400, "lag": 0.02}
    )
    assert parse_changes("failures=2/week") == pytest.approx({"failures": 2 / 7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "speed=3s",
            "'speed' is no setting; give block, interval, start, recover, lag or failures",
        ),
        ("block=3", "block='3': give a duration such as 0.5s; units: ms, s, m, min, h, d"),
        ("block=-3s", "block='-3s': give a duration"),
        ("failures=3", "failures='3': give a number per time, such as 3/day"),
        ("failures=3/s", "failures='3/s': give a number per time"),
        ("interval=0s", "interval='0s': give more than 0"),
        ("lag=1s,lag=2s", "lag is given twice"),
        ("", "'' is no setting"),
    ],
)
def test_refuses_changes_by_key_and_unit(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse_changes(text)


def test_the_model_meets_the_run_and_follows_changes() -> None:
    """A day with 3 failures: 600 s saving, 3 x (300 + 20) s repeated, 3 x 100 s recovering."""
    measured = Measured(5.0, 20.0, 600.0, 0.5, 3.0, 100.0)
    saved_s, repeated_s, recovered_s, other_s = 600.0, 960.0, 300.0, 1000.0
    new_s = DAY_S - saved_s - repeated_s - recovered_s - other_s
    report = replace(
        run(
            measured,
            training_new=new_s,
            blocked_in_save=saved_s,
            training_repeated=repeated_s,
            between_attempts=recovered_s,
            evaluation=other_s,
        ),
        failures=3,
        time_to_start_s=200.0,
    )
    same = what_if(report, {})
    assert (
        same.ett_percent_model
        == same.ett_percent_then
        == pytest.approx(report.ett_percent, abs=0.2)
    )
    asked = what_if(report, {"block": 0.0, "failures": 0.0, "start": 100.0})
    assert asked.ett_percent_then == pytest.approx(100 * new_s / (new_s + other_s - 100))
    with pytest.raises(BadInputError, match=r"1000 failures a day .* take up all time"):
        what_if(report, {"failures": 1000.0})
    without_saves = replace(report, measured=NOTHING)
    with pytest.raises(BadInputError, match="give interval=DURATION too"):
        what_if(without_saves, {"failures": 1.0})
    assert what_if(without_saves, {"failures": 1.0, "interval": 600.0}).ett_percent_then < 100
