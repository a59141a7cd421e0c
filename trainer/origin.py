"""Where this process comes from: its host, its launcher, its job."""

from __future__ import annotations

import os
import socket
import time

from ckpt.config import job_moments, launched_by_torchrun, restart_count
from trainer.ledger import process_age_s


def origin() -> dict[str, str | float | None]:
    """host, and what is known of submitted_at_s, allocated_at_s, launcher_created_at_s: Unix seconds.

    The launcher counts for the first start only: a restart's time before the process is a gap
    between attempts.
    """
    launcher_s = None
    if launched_by_torchrun() and restart_count() == 0:
        try:
            launcher_s = round(time.time() - process_age_s(os.getppid()), 6)
        except OSError:  # it is gone, or this isn't Linux
            launcher_s = None
    return {"host": socket.gethostname(), "launcher_created_at_s": launcher_s, **job_moments()}
