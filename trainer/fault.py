"""Fault injection for demos and tests: `[fault]` in the configuration kills one rank on purpose."""

from __future__ import annotations

import os
import signal

from ckpt.config import restart_count
from trainer.config import FaultConfig


def kill_if_due(config: FaultConfig, rank: int, step: int, commits: int) -> None:
    """SIGKILL this process, as a lost machine would end it, if the configuration says so.

    Only on attempt `only_on_attempt`, counted by torchrun's restarts, so that the restarted job
    lives, and only once this attempt has made `after_commits` commits, so that a demo on slow
    storage has something to resume from.
    """
    if config.kill_rank != rank or config.only_on_attempt != restart_count():
        return
    due = config.kill_at_step is not None and step >= config.kill_at_step
    if due and commits >= config.after_commits:
        os.kill(os.getpid(), signal.SIGKILL)
