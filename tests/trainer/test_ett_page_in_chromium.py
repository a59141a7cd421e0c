"""The page of an account in a real headless Chromium. One browser for all of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.made_runs import made_attempt, made_run, sample_advice, sample_losses, sample_run
from benchmarks.screenshots import browser, chromium
from tests.trainer.test_ett_page import ENDS_SCRIPT, HOSTILE, large_run
from trainer.ett.page import write_page

if importlib.util.find_spec("playwright") is None:
    pytest.skip("playwright isn't installed", allow_module_level=True)
if chromium() is None:
    pytest.skip("no Chromium on this host; apt install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as launched:
        yield launched


class Tab:
    """A page, what its console said, and what it asked of anybody."""

    def __init__(self, chrome: Any, path: Path, **options: Any) -> None:
        self.page = chrome.new_page(viewport={"width": 1200, "height": 900}, **options)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text))
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.url = path.as_uri()
        self.page.goto(self.url)

    def sums(self, selector: str, value: str) -> float:
        script = f"all => all.reduce((sum, n) => sum + Number(n.dataset.{value}), 0)"
        return float(self.page.eval_on_selector_all(selector, script))

    def close(self) -> None:
        assert self.said == []
        assert [u for u in self.asked if u != self.url and not u.startswith("data:")] == []
        self.page.close()


def test_a_run(chrome: Any, tmp_path: Path) -> None:
    run = sample_run()
    run = replace(run, root=HOSTILE, notes=(ENDS_SCRIPT,))
    write_page([run], [sample_losses(run)], [sample_advice()], tmp_path / "page.html")
    tab = Tab(chrome, tmp_path / "page.html")
    page = tab.page
    assert page.inner_text(".card.ett .big") == f"{run.ett_percent:.1f}%"
    assert page.title() == "Effective training time"
    assert page.inner_text("#roots") == HOSTILE
    assert ENDS_SCRIPT in page.inner_text(".notes")
    # The bars add up: seconds of each timeline to its attempt, points of the waterfall to 100.
    for a in run.attempts:
        bars = f"#timeline-0-{a.epoch} rect.bar"
        assert tab.sums(bars, "seconds") == pytest.approx(a.wall_s, abs=0.01)
        drawn = page.eval_on_selector_all(
            bars, "all => all.reduce((w, n) => w + n.width.baseVal.value, 0)"
        )
        axis = page.eval_on_selector(f"#timeline-0-{a.epoch}", "n => n.viewBox.baseVal.width - 20")
        assert drawn == pytest.approx(axis, rel=0.02)
        stages = page.eval_on_selector_all(
            f"#start-0-{a.epoch} rect.stage", "all => all.map(n => n.dataset.stage)"
        )
        assert stages == [s.name for s in a.stages]
    lost = tab.sums("#waterfall-0 rect:not(.new)[data-points]", "points") - 100
    assert lost + run.ett_percent == pytest.approx(100, abs=0.01)
    # Hover, then keys.
    bar = page.locator("#timeline-0-2 rect.bar.again").first
    page.locator("#timeline-0-2").scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert page.inner_text("#tip") == "training repeated: 5.2 min\nfrom 77.9 s to 6.5 min"
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()
    page.locator("#start-0-1").focus()
    page.keyboard.press("End")
    assert page.inner_text("#tip").startswith("pt2_compilation: 2.5 min")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#tip").startswith("get_first_batch_data: 18.0 s")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    tab.close()


def test_a_fleet_and_a_large_run(chrome: Any, tmp_path: Path) -> None:
    waiting = made_attempt(1, 0.0, [("scheduling", 30.0)], ended="unknown")
    runs = [sample_run(HOSTILE), large_run(), made_run("waiting", [waiting])]
    write_page(runs, [sample_losses(runs[0]), (), ()], [None] * 3, tmp_path / "page.html")
    tab = Tab(chrome, tmp_path / "page.html", color_scheme="dark")
    assert tab.page.locator("#comparison tbody tr").count() == 3
    assert HOSTILE in tab.page.inner_text("#comparison")
    assert tab.page.locator("#timeline-1-1").count() == 0, "drawn once it is opened"
    tab.page.click("#comparison a[href='#run-1']")
    tab.page.locator("#timeline-1-1 rect.bar").first.wait_for()
    wall_s = runs[1].attempts[0].wall_s
    assert tab.sums("#timeline-1-1 rect.bar", "seconds") == pytest.approx(wall_s, abs=0.1)
    assert "100 000 stretches drawn as" in tab.page.inner_text("#run-1").replace("\u202f", " ")
    tab.page.click("#run-2 > summary")
    tab.page.locator("#timeline-2-1 rect.bar").first.wait_for()  # drawn after the click returns
    assert "running, or unknown" in tab.page.inner_text("#run-2")
    assert "Nothing was saved." in tab.page.inner_text("#run-2")
    assert tab.sums("#timeline-2-1 rect.bar", "seconds") == 30
    loaded = tab.page.evaluate(
        "performance.timing.loadEventEnd - performance.timing.navigationStart"
    )
    assert loaded < 5000
    tab.close()
