"""Real processes, real SIGKILLs: the latest checkpoint is right whatever was being written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.storage.local import LocalStorage
from ckpt.verify import verify_commit
from tests import warm
from tests.crash.saver import STATE_SIZE, state

pytestmark = pytest.mark.crash


SAVER = [sys.executable, "-m", "tests.crash.saver"]


def test_d47_killed_at_each_storage_operation_it_resumes_from_what_was_committed(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    acknowledged = 0
    # Every operation of the first saves: run record, attempt, data, index, objects, receipt, commit.
    for nth in (1, 2, 3, 4, 5, 7, 9, 11, 12, 13, 14, 16, 23):
        done = warm.run([*SAVER, "die", root, str(nth)], timeout=120)
        assert done.returncode == -9, done.stderr
        acknowledged = max([acknowledged, *map(int, done.stdout.split())])
        storage = LocalStorage(root)
        latest = Catalog(storage).latest()
        found = latest.ref.step if latest else 0
        assert found in (acknowledged, acknowledged + 1), "the acknowledged one, or one just made"
        acknowledged = found
        if latest is not None:
            assert latest.record is not None
            assert verify_commit(storage, latest.record, level="full").ok
    now = state(0)
    with Checkpointer(str(root)) as c:
        result = c.restore(now)
        assert result is not None
        assert result.step == now["step"] == acknowledged > 0
        assert torch.equal(now["t"], torch.full((STATE_SIZE,), float(acknowledged)))
        c.save(acknowledged + 1, state(acknowledged + 1)).committed.result()


def test_d08_a_process_that_ends_without_close_has_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SAVER, "no-close", tmp_path / "run"], cwd=warm.ROOT, timeout=120, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    latest = Catalog(LocalStorage(tmp_path / "run")).latest()
    assert latest is not None
    assert latest.ref.step == 1
