"""Two processes: one commits and prunes without pause, the other pins and reads."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from ckpt.catalog import Catalog
from ckpt.errors import NotFoundError
from ckpt.pins import Pin
from ckpt.storage import LocalStorage
from ckpt.verify import verify_commit
from tests import warm

ROUNDS = 60


def test_a_pinned_commit_is_whole_while_another_process_prunes(tmp_path: Path) -> None:
    root = tmp_path / "run"
    job = warm.Popen(
        [sys.executable, "-m", "tests.retention.pruning_job", root, str(ROUNDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    read, late = set(), 0
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        storage = LocalStorage(root)
        stack = ExitStack()
        while job.poll() is None:
            try:
                # The oldest one, so that the pruner wants what is pinned.
                info = Catalog(storage).commits()[0]
                pin = stack.enter_context(Pin(storage, info.ref, "reader"))
            except (NotFoundError, IndexError):
                late += 1  # told before it read anything: the pruner was faster
                continue
            with stack.pop_all():
                assert info.record is not None
                report = verify_commit(storage, info.record, level="full")
                assert report.ok, (info.ref, report.problems)
                pin.check()
                read.add(info.ref)
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, err
    assert len(read) >= 10, f"{len(read)} read, {late} times too late"
    deleted, left, problems = out.split(maxsplit=2)
    assert problems.strip() == "[]"
    assert int(deleted) + int(left) == ROUNDS + 1
    for info in Catalog(storage).commits():
        assert info.record is not None
        assert verify_commit(storage, info.record, level="full").ok
