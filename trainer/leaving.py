"""The end of a training process, without the second that tearing an interpreter down takes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process: wait for its threads, run what is registered to run at exit, flush, and be gone.

    A worker of a process pool ends by SystemExit: its parent waits for a word.

    What is left out is freeing every module and object of torch, whose memory goes with the process.
    """
    if multiprocessing.parent_process() is not None:
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that aren't daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1  # what was said didn't arrive
    os._exit(code)
