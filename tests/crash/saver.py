"""A process that saves until it is told to die: `saver.py MODE ROOT [NTH CALL]`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from ckpt import Checkpointer
from ckpt.storage.local import LocalStorage

STATE_SIZE = 50_000


class DyingStorage(LocalStorage):
    """Sends SIGKILL to its own process at the nth durable operation."""

    def __init__(self, root: str, nth: int) -> None:
        super().__init__(root)
        self._left = nth

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, key: str, data: Any) -> Any:
        self._count()  # before it takes effect
        done = super().create(key, data)
        self._count()  # and after
        return done

    def writer(self, key: str) -> Any:
        self._count()
        return super().writer(key)


def state(step: int) -> dict[str, Any]:
    return {"t": torch.full((STATE_SIZE,), float(step)), "step": step}


def main() -> None:
    mode, root = sys.argv[1], sys.argv[2]
    if mode == "die":
        c = Checkpointer(DyingStorage(root, int(sys.argv[3])))
        now = state(0)
        c.restore(now)
        for step in range(now["step"] + 1, now["step"] + 4):
            c.save(step, state(step)).committed.result()
            print(step, flush=True)
        c.close()
    elif mode == "no-close":
        Checkpointer(root).save(1, state(1))  # and the process ends


if __name__ == "__main__":
    main()
