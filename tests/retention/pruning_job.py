"""A job that commits and prunes as fast as it can: `python -m tests.retention.pruning_job ROOT ROUNDS`."""

from __future__ import annotations

import sys

from ckpt.catalog import Catalog
from ckpt.config import RetentionPolicy
from ckpt.prune import Pruner
from ckpt.storage import LocalStorage
from ckpt.types import SystemClock
from tests.fake_run import FakeRun


def main() -> None:
    storage = LocalStorage(sys.argv[1])
    run = FakeRun(storage)
    run.attempt(1)
    ref = run.commit(1, 1)
    print("ready", flush=True)
    pruner = Pruner(storage, RetentionPolicy(keep_last=1), SystemClock(), epoch=1)
    problems = []
    deleted = 0
    for step in range(2, 2 + int(sys.argv[2])):
        ref = run.commit(1, step, ref)
        done = pruner.after_save(1, committed=True, uncommitted=0)
        deleted += len(done.deleted)
        problems += done.problems
    print(deleted, len(Catalog(storage).commits()), problems, flush=True)


if __name__ == "__main__":
    main()
