"""torchrun with warm workers: each restart forks them from a process that has imported everything.

    trainer launch --standalone --nproc-per-node 2 --max-restarts 3 -m trainer.cli train --config FILE

takes torchrun's command line and is torchrun's agent: same rendezvous, environment, restarts and signals.
Only how workers come to be differs. torchrun starts a Python for each, which imports torch and
torchrec for seconds at every start and at every restart. Here one process (multiprocessing's fork server)
imports them once, while the agent does so itself, and every worker is a fork of it.

The fork server runs one thread, touches no device and opens no connection. Its workers see the code as
it was when the job was launched: to change code, launch anew.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import logging
import os
import runpy
import sys
import uuid
from collections.abc import Sequence
from multiprocessing import forkserver
from typing import Any

from ckpt.config import LAUNCHER_PID
from trainer.tied import end_with_parent

PRELOAD = ("trainer.preload",)
"""What the fork server imports if the caller names nothing: the reference trainer, torchrec and torch."""


def launch(arguments: Sequence[str], preload: Sequence[str] = PRELOAD) -> None:
    """Run torchrun's command line with warm workers; returns when all have ended well.

    Raises SystemExit for a command line that torchrun refuses, and else with the exit code of the
    worker that failed first: 128 + the signal's number if one ended it, or the agent itself.

    Args:
        arguments: as for torchrun.
        preload: modules to import before the first fork. Those that can't be imported are left to
            the workers, who say why.
    """
    # Read when libgomp is loaded, by the fork server: torchrun's default for several workers.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Asking for devices in the usual way would leave the driver in a state that no fork can use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ[LAUNCHER_PID] = str(os.getpid())  # workers are children of the fork server
    server: Any = vars(forkserver)["_forkserver"]
    server.set_forkserver_preload(["trainer.uncollected", *preload])
    server.ensure_running()  # now: it imports on one core while this process does on another
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    args, config = _parsed(arguments)
    # Where the agent tells of a worker that ended: a restart waits for that.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_with_text)
    agent: Any = elastic_launch(config, work)
    try:
        agent(args.training_script, list(args.training_script_args), bool(args.module))
    except ChildFailedError as e:
        print(str(e).rstrip(), file=sys.stderr)
        _, first = e.get_first_failure()
        raise SystemExit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode) from e
    except SignalException as e:
        print(f"error: the launcher was ended by {e.sigval.name}", file=sys.stderr)
        raise SystemExit(128 + e.sigval.value) from e


def _parsed(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Torchrun's reading of its command line, and the launch configuration made of it."""
    run: Any = importlib.import_module("torch.distributed.run")
    args = run.parse_args(list(arguments))
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and run.parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    config, _, _ = run.config_from_args(args)
    config.start_method = "forkserver"
    return args, config


def _with_text(record: logging.LogRecord) -> bool:
    """Format an exception here: torch's formatter imports torch._dynamo for it, which takes two seconds."""
    if record.exc_info:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
    return True


def work(script: str, arguments: list[str], module: bool) -> None:
    """In a worker: be the program `python [-m] script arguments...`."""
    # A session of its own, as torchrun's workers have: Linux shares cores out among sessions first, and
    # ranks that share one were seen to take 8% longer for a step.
    os.setsid()
    # What kills the launcher's group doesn't reach this process any more. Torch asks for SIGINT then, which
    # is ignored in what a shell has started in the background.
    end_with_parent()
    gc.freeze()  # what all workers have in common is no garbage, and isn't looked through for any
    gc.enable()
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    finally:
        # A fork ends without them, and without the teardown of a whole interpreter, which takes a second.
        atexit._run_exitfuncs()
