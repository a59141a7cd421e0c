"""The page of an account: what its data says, what it does with hostile text and with large runs."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.made_runs import (
    made_attempt,
    made_run,
    sample_advice,
    sample_losses,
    sample_run,
)
from trainer.ett.page import render, write_page
from trainer.ett.page_data import GROUPS, merge_segments
from trainer.ett.records import AREAS, RunReport, SaveTime

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
ENDS_SCRIPT = "</script><script>document.title='owned'</script><!--"


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def large_run() -> RunReport:
    """50,000 steps' worth of alternating waits, and a save at each fifth of them."""
    parts = [p for _ in range(50_000) for p in (("data_wait", 0.02), ("training_new", 0.48))]
    saves = [
        SaveTime(n, 1000.0 + 2.5 * n, 0.3 if n == 4321 else 0.001, "committed", 1001 + 2.5 * n)
        for n in range(10_000)
    ]
    return made_run("large", [made_attempt(1, 1000.0, parts, saves=saves)])


def test_every_area_is_in_one_group() -> None:
    grouped = [a for _, areas in GROUPS.values() for a in areas]
    assert sorted(grouped) == sorted(AREAS)


def test_merged_columns_tile_the_time_and_keep_each_areas_seconds() -> None:
    attempt = large_run().attempts[0]
    columns = merge_segments(attempt.segments, 1000)
    assert 500 < len(columns) <= 2001
    assert columns[0].begin_s == attempt.started_at_s
    assert columns[-1].end_s == attempt.ended_at_s
    for before, after in itertools.pairwise(columns):
        assert before.end_s == after.begin_s
    for area in ("data_wait", "training_new"):
        kept = math.fsum(c.seconds.get(area, 0.0) for c in columns)
        assert kept == pytest.approx(attempt.areas[area], rel=1e-9)
    assert sum(c.segments for c in columns) == 100_000
    assert len(merge_segments(attempt.segments[:1000], 1000)) == 1000


def test_large_runs_make_a_small_page() -> None:
    run = large_run()
    page = render([run], [()], [None])
    assert len(page) < 2_500_000
    saves = data_of(page)["runs"][0]["saves"]
    assert saves["count"] == 10_000
    assert len(saves["plotted"]) <= 400
    assert len(saves["listed"]) <= 150
    # The one that was long is in both; the newest is in the table.
    assert all(any(s["step"] == 4321 for s in saves[key]) for key in ("plotted", "listed"))
    assert saves["listed"][-1]["step"] == 9999
    assert saves["blocked_max_s"] == 0.3
    assert saves["blocked_s"] == pytest.approx(9999 * 0.001 + 0.3)


def test_text_of_ledgers_stays_text(tmp_path: Path) -> None:
    save = SaveTime(5, 1001.0, 0.1, "failed", None, ENDS_SCRIPT)
    run = made_run(
        HOSTILE + "\udcff", [made_attempt(1, 1000.0, [("training_new", 5)], saves=[save])]
    )
    target = tmp_path / "page.html"
    write_page([run], [()], [None], target)
    page = target.read_text()
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    told = data_of(page)["runs"][0]
    assert told["root"] == HOSTILE + "\udcff"
    assert told["saves"]["listed"][0]["error"] == ENDS_SCRIPT
    assert not re.search(r"(?:src|href)=\"(?!data:,)", page), "a page that needs other files"


def test_several_runs_have_the_fleets_figure() -> None:
    short = made_run("short", [made_attempt(1, 0.0, [("imports", 50), ("training_new", 50)])])
    long = made_run("long", [made_attempt(1, 0.0, [("imports", 30), ("training_new", 270)])])
    told = data_of(render([short, long], [(), ()], [None, None]))
    assert told["fleet_percent"] == pytest.approx((50 * 100 + 90 * 300) / 400)
    given = render([short, long], [(), ()], [None, None], fleet_percent=42.0)
    assert data_of(given)["fleet_percent"] == 42.0
    with pytest.raises(ValueError, match="2 reports, 1 lists of losses"):
        render([short, long], [()], [None, None])


def test_losses_and_advice_are_told() -> None:
    run = sample_run()
    told = data_of(render([run], [sample_losses(run)], [sample_advice()]))["runs"][0]
    assert [loss["mend"] for loss in told["losses"]] == [x.mend for x in sample_losses(run)]
    assert told["advice"]["interval_s"] == sample_advice().interval_s
    assert sum(s for _, s in told["areas"]) == pytest.approx(run.wall_s)
