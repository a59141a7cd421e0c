"""The status page in a real headless Chromium, clicks included. One browser for all of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.screenshots import Clock, Play, browser, chromium, fill, served
from publisher import status
from publisher.pointer import Reason
from publisher.records import Move

if importlib.util.find_spec("playwright") is None:
    pytest.skip("playwright isn't installed", allow_module_level=True)
if chromium() is None:
    pytest.skip("no Chromium on this host; apt install chromium", allow_module_level=True)

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as launched:
        yield launched


class Tab:
    """One page of a browser; what its console said, and what it asked of other hosts."""

    def __init__(self, chrome: Any, url: str, **options: Any) -> None:
        self.context = chrome.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text))
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(url)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for()

    def click(self, selector: str) -> None:
        self.page.click(selector)


@pytest.fixture
def play() -> Play:
    """Versions 1 to 3; 3 is the canary. Reasons, hosts and gates that would like to be markup."""
    play = Play(Clock(1000.0))
    for step in (10, 20, 30):
        manifest = play.publish(play.commit(step), why=HOSTILE, canary=step == 30)
        play.answer(manifest, "serve-1", 2.0)
    play.refuse(play.commit(40), "finite", f"row 7 holds NaN {HOSTILE}")
    return play


def live_move(play: Play) -> Move:
    move = play.registry.live()
    assert move is not None
    return move


def test_roll_back_with_clicks(chrome: Any, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = {"version": 2, "who": HOSTILE, "why": HOSTILE, "at_s": 1000.0}
    lease = {"owner": f"host pid 7 {HOSTILE}", "epoch": 5, "since_s": 900.0, "released": False}
    monkeypatch.setattr(status, "_pins_of", lambda _: [pin])
    monkeypatch.setattr(status, "_lease_of", lambda _: lease)
    with served(play) as url:
        tab = Tab(chrome, url)
        tab.wait_for("#card-live .big", "v2")
        assert tab.text("#card-canary .big") == "v3"
        assert "refused by finite" in tab.text("#card-newest")
        assert HOSTILE in tab.text("#card-lease")
        assert "epoch 5" in tab.text("#card-lease")
        assert tab.text("#versions tr.chosen td:first-child").split() == ["v2", "live", "pinned"]
        assert f"pinned by {HOSTILE}" in tab.text("#chosen")
        # Cancelled: nothing moves.
        tab.click("#open-rollback")
        assert tab.page.input_value("#rollback-to") == "1"
        tab.click("#rollback [data-close]")
        assert live_move(play).to_version == 2
        tab.click("#open-rollback")
        tab.page.fill("#rollback-who", "mira")
        tab.page.fill("#rollback-why", f"bad clicks {HOSTILE}")
        tab.click("#rollback-go")
        tab.wait_for("#card-live .big", "v1")
        tab.wait_for("#done", "Version 1 is live.")
        move = live_move(play)
        assert (move.kind, move.from_version, move.to_version) == ("rollback", 2, 1)
        assert (move.who, move.why) == ("mira (status page)", f"bad clicks {HOSTILE}")
        tab.wait_for("#history tbody tr:first-child", "v2 → v1")
        # Meanwhile somebody else moves it: what this user saw isn't so any more.
        tab.click("#open-rollback")
        play.registry.rollback(2, Reason("other", "again"))
        tab.click("#rollback-go")
        tab.wait_for("#rollback-error", "version 2 is live by now, not 1: look again")
        assert live_move(play).to_version == 2
        tab.click("#rollback [data-close]")
        # Text of the registry stays text, wherever it is shown.
        tab.wait_for("#card-live .big", "v2")
        assert HOSTILE in tab.text("#quarantine")
        assert HOSTILE in tab.text("#history")
        assert tab.page.locator("main script, main img").count() == 0
        assert tab.page.title() == "Sidestage publisher"
        assert {u.startswith(url) for u in tab.asked} == {True}
        assert [s for s in tab.said if "409" not in s] == []
        tab.context.close()


def test_promote_with_clicks(chrome: Any, play: Play) -> None:
    with served(play) as url:
        tab = Tab(chrome, url)
        tab.click("#open-promote")
        tab.page.fill("#promote-why", "holds up")
        tab.click("#promote-go")
        tab.wait_for("#card-live .big", "v3")
        tab.wait_for("#card-canary", "No version is on trial")
        move = live_move(play)
        assert (move.kind, move.to_version, move.why) == ("promote", 3, "holds up")
        assert tab.said == []
        tab.context.close()


def test_it_follows_the_registry_and_keeps_what_was_chosen(chrome: Any) -> None:
    play = fill(1_000_000.0)
    with served(play) as url:
        tab = Tab(chrome, url, viewport={"width": 390, "height": 800}, color_scheme="dark")
        tab.wait_for("#chosen h2", "Version 30")
        tab.page.locator("#versions .pick", has_text="v28").click()
        tab.wait_for("#chosen h2", "Version 28")
        assert "golden_parity" in tab.text("#chosen")
        assert "0.01" in tab.text("#chosen tr:has-text('golden_parity')")
        # Text that is being copied stays selected while the page refreshes itself.
        tab.page.evaluate("getSelection().selectAllChildren(document.querySelector('#history'))")
        bars = tab.page.locator("#plot-size .bar").count()
        play.publish(play.commit(99_000))
        play.clock.now_s += 60
        tab.wait_for("#card-live .big", "v32")  # by itself
        tab.wait_for("#chosen h2", "Version 28")
        assert tab.page.url.endswith("#v28")
        assert tab.page.locator("#plot-size .bar").count() == bars + 1
        assert "INC-4127" in tab.page.evaluate("getSelection().toString()")
        tab.page.evaluate("getSelection().empty()")
        tab.wait_for("#history tbody tr:first-child", "v30 → v32")
        # Nothing is wider than a phone.
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
        tab.page.locator("#plot-time .slot").last.click()
        tab.wait_for("#chosen h2", "Version 32")
        assert tab.said == []
        tab.context.close()


def test_a_token_is_asked_for(chrome: Any, play: Play) -> None:
    with served(play, token="open-sesame") as url:
        tab = Tab(chrome, url)
        for text in ("wrong", "open-sesame"):
            tab.page.fill("#token-text", text)
            tab.click("#token-go")
            if text == "wrong":
                tab.wait_for("#token-error", "That token is wrong.")
        tab.wait_for("#card-live .big", "v2")
        tab.click("#open-rollback")
        tab.click("#rollback-go")
        tab.wait_for("#card-live .big", "v1")
        assert live_move(play).to_version == 1
        tab.context.close()


def test_a_publisher_that_is_gone_is_told(chrome: Any, play: Play) -> None:
    with served(play) as url:
        tab = Tab(chrome, url)
        tab.wait_for("#card-live .big", "v2")
    tab.wait_for("#trouble", "The publisher doesn't answer.")
    assert tab.text("#card-live .big") == "v2"
    tab.context.close()
