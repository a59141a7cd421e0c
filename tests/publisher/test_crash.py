"""kill -9 of a publisher at every write: the live version stays right, and nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.crash
REPO = Path(__file__).parents[2]


def places(kind: str, folder: Path) -> list[dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.publisher.kill_at", kind, str(folder)],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_d54_killed_while_publishing(tmp_path: Path) -> None:
    found = places("publish", tmp_path)
    assert (
        len(found) >= 12
    )  # claim, six small files, pieces of the tables, manifest, pointer, history
    for place in found:
        assert place["live"] == 2, place
        assert place["versions"] == [1, 2], place  # one version of each commit
        assert place["history"] == [1, 2], place
        assert place["sequences"] == [1, 2], place
        assert place["refusals"] == 0, place
    live = [place["live_after_kill"] for place in found]
    assert live == sorted(live)  # the old one until the pointer moves, the new one from then on
    assert set(live) == {1, 2}


def test_d53_killed_while_rolling_back(tmp_path: Path) -> None:
    found = places("rollback", tmp_path)
    # Before the last move is recorded again (it is there already), before the pointer moves,
    # and before that is recorded.
    assert len(found) == 3
    for place in found:
        assert place["live"] == place["live_after_kill"], place
        assert place["history"] == ([1, 2] if place["live"] == 2 else [1, 2, 1]), place
        assert place["sequences"] == list(range(1, len(place["history"]) + 1)), place
    assert [place["live"] for place in found] == [2, 2, 1]
