"""kill -9 or SIGSTOP of a publisher at its writes: live stays right, and nothing is lost or doubled."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.crash


Places = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """What was found for each place to die, by kind."""
    folder = tmp_path_factory.mktemp("kill")
    done = warm.run([sys.executable, "-m", "tests.publisher.kill_at", folder], timeout=300)
    assert done.returncode == 0, done.stderr
    found: Places = defaultdict(list)
    for line in done.stdout.splitlines():
        kind, place = json.loads(line)
        found[kind].append(place)
    return found


def test_d54_killed_while_publishing(places: Places) -> None:
    found = places["publish"]
    # Lease, its fence, claim, six small files, pieces of the tables, manifest, pointer, history, release.
    assert len(found) >= 15
    for place in found:
        assert place["live"] == 2, place
        assert place["versions"] == [1, 2], place  # one version of each commit
        assert place["history"] == [1, 2], place
        assert place["sequences"] == [1, 2], place
        assert place["refusals"] == 0, place
    live = [place["live_after_kill"] for place in found]
    assert live == sorted(live)  # the old one until the pointer moves, the new one from then on
    assert set(live) == {1, 2}


def test_d53_killed_while_rolling_back(places: Places) -> None:
    found = places["rollback"]
    # Before the last move is recorded again (it is there already), before the pointer moves,
    # and before that is recorded.
    assert len(found) == 3
    for place in found:
        assert place["live"] == place["live_after_kill"], place
        assert place["history"] == ([1, 2] if place["live"] == 2 else [1, 2, 1]), place
        assert place["sequences"] == list(range(1, len(place["history"]) + 1)), place
    assert [place["live"] for place in found] == [2, 2, 1]


def test_killed_while_deleting_versions(places: Places) -> None:
    found = places["retention"]
    assert len(found) > 10
    for place in found:
        assert place["numbers"] == place["stored"] == [3, 4], place
    after = [place["after_kill"] for place in found]
    assert after == sorted(after, key=len, reverse=True)
    assert [list(a) for a in dict.fromkeys(map(tuple, after))] == [
        [1, 2, 3, 4],
        [2, 3, 4],
        [3, 4],
    ]


def test_a_paused_owner_publishes_nothing_over_a_newer_one(places: Places) -> None:
    found = places["pause"]
    assert len(found) == 7
    for place in found:
        assert (place["code"], place["live_while_paused"], place["live"]) == (0, 3, 3), place
        assert place["refusals"] == 0, place
        moved = place["at"][0].startswith("history")
        assert place["history"] == ([1, 2, 3] if moved else [1, 3]), place
        sealed = moved or place["at"] == ["live.json", 2]
        assert place["versions"] == ([1, 2, 3] if sealed else [1, 3]), place
        assert place["epochs"] == sorted(place["epochs"]), place
        assert ("version_live" in place["told"]) == moved, place
        if not moved and place["at"][0] != "lease.json":  # there it had nothing yet to lose
            assert "lease_lost" in place["told"], place


def test_a_paused_first_owner_makes_nothing_live(places: Places) -> None:
    found = places["first_pause"]
    assert len(found) == 2
    for place in found:
        assert (place["code"], place["live_while_paused"], place["live"]) == (0, 3, 3), place
        assert place["history"] == [3], place
        assert place["epochs"] == [2], place
        assert "lease_lost" in place["told"], place
