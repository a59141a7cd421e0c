"""One of two ranks, which dies where it is told to: `rank.py RANK ROOT STORE [OP PATTERN]`.

STORE is `tcp` (rank 0 has the job's store, and prints its port), a port of that, or the path of a
file. Step 1 is saved in peace. In step 2 the rank kills itself before the first OP on a key that
matches PATTERN. It prints the steps that were committed, and why others weren't.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from ckpt import CheckpointConfig, Checkpointer, PerRank, persist
from ckpt.storage.local import LocalStorage


class DyingStorage(LocalStorage):
    """Sends SIGKILL to its own process before a `create` of a matching key."""

    def __init__(self, root: str, pattern: str | None) -> None:
        super().__init__(root)
        self._pattern = pattern

    def create(self, key: str, data: Any) -> Any:
        if self._pattern is not None and fnmatchcase(key, self._pattern):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().create(key, data)


def state(rank: int, step: int) -> dict[str, Any]:
    return {
        "t": torch.full((1000,), float(step)),
        "mine": PerRank(torch.full((3,), 10.0 * step + rank)),
        "step": step,
    }


def job_store(rank: int, where: str) -> dist.Store:
    if where == "tcp":
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        print(port, flush=True)
        return store
    if where.isdecimal():
        return dist.TCPStore("127.0.0.1", int(where), is_master=False)
    return dist.FileStore(where, 2)


def main() -> None:
    rank, root, where = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    pattern = sys.argv[4] if len(sys.argv) > 4 else None
    persist._GRACE_S = 0.5  # a test's patience
    config = CheckpointConfig(commit_timeout_s=25.0)  # what a loaded machine needs
    store = job_store(rank, where)
    storage = DyingStorage(root, pattern)
    with Checkpointer(storage, config, rank=rank, world_size=2, store=store) as c:
        c.restore(state(rank, 0))
        for step in (1, 2):
            error = c.save(step, state(rank, step)).committed.exception()
            print(f"{step} {type(error).__name__ if error else 'committed'}", flush=True)


if __name__ == "__main__":
    main()
