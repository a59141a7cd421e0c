"""Fault injection for demos and tests: `[fault]` in the configuration kills one rank on purpose."""

from __future__ import annotations

import os
import signal

from ckpt.config import restart_count
from trainer.config import FaultConfig


def kill_if_due(config: FaultConfig, rank: int, step: int) -> None:
    """SIGKILL this process, as a lost machine would end it, if the configuration says so.

    Only on attempt `only_on_attempt`, counted by torchrun's restarts, so that the restarted job lives.
    """
    due = (config.kill_rank, config.kill_at_step, config.only_on_attempt)
    if due == (rank, step, restart_count()):
        os.kill(os.getpid(), signal.SIGKILL)
