"""D40 (s3fs#889): used in a parent, then in a forked child, s3fs hung."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.storage.s3 import S3Storage
from tests.s3.server import BUCKET, SeaweedFS

CHILD = """
import gc, os, sys, time
from ckpt.storage import open_storage

storage = open_storage(sys.argv[1])
storage.create("parent", b"1")
pid = os.fork()
if not pid:
    if sys.argv[2] == "use":
        storage.create("child", storage.read("parent") + b"2")
        with storage.writer("streamed") as out:
            out.write(b"3")
    del storage          # taking the parent's connections apart must not hurt the parent
    gc.collect()
    sys.exit(0)          # with the interpreter's whole end, which os._exit leaves out
pid, status = os.waitpid(pid, 0)
assert status == 0, status
began_s = time.monotonic()
storage.create("after", b"".join(storage.read(i.key) for i in list(storage.list())))
# A connection that the child had cut off would be noticed only after 10 s without an answer.
assert time.monotonic() - began_s < 7.0
print(storage.read("after").decode())
"""

OPEN_WRITER = """
import os, sys
from ckpt.errors import BadInputError
from ckpt.storage import open_storage

storage = open_storage(sys.argv[1])
with storage.writer("k") as out:
    out.write(b"x" * (17 << 20))
    pid = os.fork()
    if not pid:
        try:
            out.write(b"y" * (17 << 20))
        except BadInputError as e:
            print(e, flush=True)
        sys.exit(0)      # leaves the block by SystemExit: the upload is not its own to abort
    os.waitpid(pid, 0)
print(storage.stat("k").size_bytes)
"""

LOADER = """
import sys
import torch
from ckpt import Checkpointer
from torch.utils.data import DataLoader

if __name__ == "__main__":
    state = {"w": torch.zeros(1000), "progress": {"step": 0}}
    with Checkpointer(sys.argv[1]) as checkpointer:
        checkpointer.restore(state)
        loader = DataLoader(range(40), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for step, batch in enumerate(loader, 1):
            state["w"] += batch.sum()
            checkpointer.save(step, state).committed.result(60)
    print(checkpointer.stats.commits, step, state["w"][0].item())
"""


def run(code: str, *args: str, server: SeaweedFS, timeout_s: float) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "SIDESTAGE_S3_ENDPOINT": server.endpoint, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("child", "expected"), [("use", "1213"), ("drop", "1")])
def test_d40_a_forked_child_works_and_leaves_its_parent_alone(
    seaweedfs: SeaweedFS, root: str, child: str, expected: str
) -> None:
    url = f"s3://{BUCKET}/{root}"
    assert run(CHILD, url, child, server=seaweedfs, timeout_s=30) == expected


def test_d40_an_open_writer_stays_the_parents(
    seaweedfs: SeaweedFS, root: str, storage: S3Storage
) -> None:
    url = f"s3://{BUCKET}/{root}"
    said = run(OPEN_WRITER, url, server=seaweedfs, timeout_s=30).splitlines()
    assert said == [f"{url}/k: was begun before this process was forked off", str(17 << 20)]
    assert list(storage.unfinished()) == []


def test_d40_forked_loader_workers_do_not_break_saves(seaweedfs: SeaweedFS, root: str) -> None:
    said = run(LOADER, f"s3://{BUCKET}/{root}", server=seaweedfs, timeout_s=120)
    assert said == "10 10 780.0"
