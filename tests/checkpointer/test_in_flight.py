"""Case D05: what a reader is told of a save that has no commit yet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.errors import BadInputError, NotFoundError
from ckpt.storage import Storage
from ckpt.storage.local import LocalStorage
from ckpt.storage.memory import MemoryStorage
from tests import warm
from tests.faults import FaultyStorage

RESTORE = """
import sys, torch
from ckpt import Checkpointer
state = {"w": torch.zeros(3)}
with Checkpointer(sys.argv[1]) as c:
    try:
        print("restored", c.restore(state, step=1).step, state["w"].tolist())
    except Exception as e:
        print(type(e).__name__, e)
"""


def restored_elsewhere(root: Path) -> str:
    done = warm.run([sys.executable, "-c", RESTORE, root], timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("files", [0, 1, 2])
def test_d05_restoring_a_step_in_flight_says_so_and_gives_it_once_it_is_committed(
    files: int,
) -> None:
    storage: Storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    kind = [("writer", "*.bin"), ("create", "*.idx"), ("create", "*.receipt.json")][files]
    gate = faulty.on(*kind).block()
    w = torch.ones(3)
    with Checkpointer(faulty) as c:
        handle = c.save(1, {"w": w})
        w.add_(100.0)
        gate.wait_reached()
        state = {"w": torch.zeros(3)}
        with pytest.raises(BadInputError, match="restore\\(\\) comes once"):
            c.restore(state, step=1)
        with Checkpointer(storage) as other, pytest.raises(NotFoundError) as refused:
            other.restore(state, step=1)
        # Before its first file nothing tells that there will be such a step.
        expected = (
            "no step 1" if files == 0 else "step 1 isn't committed: its save in epoch 1 is in"
        )
        assert expected in str(refused.value)
        gate.open()
        assert handle.committed.result().step == 1
        assert state["w"].tolist() == [0.0] * 3
    with Checkpointer(storage) as other:
        assert other.restore(state, step=1)
    assert state["w"].tolist() == [1.0] * 3


def test_d05_another_process_is_told_too_and_the_save_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    faulty = FaultyStorage(LocalStorage(root))
    gate = faulty.on("create", "*.receipt.json").block()
    w = torch.ones(3)
    with Checkpointer(faulty) as c:
        handle = c.save(1, {"w": w})
        w.add_(100.0)
        gate.wait_reached()
        told = restored_elsewhere(root)
        assert told.startswith("NotFoundError")
        assert "step 1 isn't committed: its save in epoch 1 is in flight" in told
        gate.open()
        handle.committed.result()
    assert restored_elsewhere(root) == "restored 1 [1.0, 1.0, 1.0]\n"


def test_d05_all_parts_written_and_not_committed_it_is_restored_at_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    faulty = FaultyStorage(LocalStorage(root))
    gate = faulty.on("create", "commits/*").block()
    with Checkpointer(faulty) as c:
        handle = c.save(1, {"w": torch.ones(3)})
        gate.wait_reached()
        assert restored_elsewhere(root) == "restored 1 [1.0, 1.0, 1.0]\n"
        gate.open()
        assert handle.committed.result().step == 1
