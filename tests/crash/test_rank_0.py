"""Rank 0 dies, for real, around the commit: what all ranks had written is not lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.storage.local import LocalStorage
from ckpt.verify import verify_commit
from tests import warm
from tests.checkpointer.ranks import on_ranks, values
from tests.crash.rank import state

pytestmark = pytest.mark.crash

COMMIT_2 = "commits/*/000000000002.json"
RECEIPT_2 = "data/*-000000000002-*/r00000.receipt.json"


def start(rank: int, root: Path, store: str, pattern: str | None) -> subprocess.Popen[str]:
    args = [str(rank), str(root), store, *([pattern] if pattern else [])]
    return warm.Popen(
        [sys.executable, "-m", "tests.crash.rank", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def job(
    tmp_path: Path, kind: str, first: str | None, second: str | None
) -> list[tuple[int, list[str], str]]:
    """Two ranks that die where told; of each its exit code, its words and its errors."""
    root, store = tmp_path / "run", str(tmp_path / "store") if kind == "file" else "tcp"
    ranks = [start(0, root, store, first)]
    try:
        if kind == "tcp":
            assert ranks[0].stdout is not None
            store = ranks[0].stdout.readline().strip()
        ranks.append(start(1, root, store, second))
        ended = [r.communicate(timeout=240) for r in ranks]
    finally:
        for r in ranks:
            r.kill()
            r.wait()
    return [(r.returncode, o.split("\n")[:-1], e) for r, (o, e) in zip(ranks, ended, strict=True)]


def resumed(tmp_path: Path) -> list[int]:
    """Where a next attempt of two ranks begins; its state is checked."""
    root = str(tmp_path / "run")

    def body(rank: int, place: dict[str, Any]) -> int:
        mine = state(rank, 0)
        with Checkpointer(root, **place) as c:
            result = c.restore(mine)
            assert result is not None
            step = result.step
            assert mine["t"].tolist() == [float(step)] * 1000
            assert mine["mine"].value.tolist() == [10.0 * step + rank] * 3
            assert c.save(step + 1, state(rank, step + 1)).committed.result()
        return step

    return values(on_ranks(2, body))


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_rank_0_killed_before_the_commit_the_survivor_finishes(tmp_path: Path, kind: str) -> None:
    """Its death takes the job's store along (tcp), or nobody hears of it (file)."""
    (killed, *_), (survived, said, errors) = job(tmp_path, kind, COMMIT_2, None)
    assert killed == -9
    assert (survived, said) == (0, ["1 committed", "2 committed"]), errors
    found = Catalog(LocalStorage(tmp_path / "run")).find(2)
    assert found.status == "latest"
    assert found.record is not None
    assert verify_commit(LocalStorage(tmp_path / "run"), found.record, level="full").ok
    assert resumed(tmp_path) == [2, 2]


def test_both_killed_before_the_commit_the_next_start_finishes(tmp_path: Path) -> None:
    both = job(tmp_path, "tcp", COMMIT_2, COMMIT_2)
    assert [code for code, _, _ in both] == [-9, -9], both
    assert [i.ref.step for i in Catalog(LocalStorage(tmp_path / "run")).lineage()] == [1]
    assert resumed(tmp_path) == [2, 2]


def test_rank_0_killed_among_the_receipts_nothing_is_committed(tmp_path: Path) -> None:
    (killed, *_), (survived, said, errors) = job(tmp_path, "tcp", RECEIPT_2, None)
    assert killed == -9
    assert survived == 0, errors
    assert said[0] == "1 committed"
    assert said[1] in ("2 StorageError", "2 DeadlineError")
    assert resumed(tmp_path) == [1, 1]
    assert [i.ref.step for i in Catalog(LocalStorage(tmp_path / "run")).commits()] == [1, 2]
