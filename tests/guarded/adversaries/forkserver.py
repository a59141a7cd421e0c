"""Runs adversaries, each in a fork of one process that has imported everything: `python -m`.

Requests and answers are lines of JSON. A fork that dies or stalls is named in its answer, and costs
nothing but its deadline.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

_AFTER_ANOTHER_S = 2.0  # how long a rank may go on without one that has died


def preload() -> None:
    """What any adversary imports. Must start no thread: forks have only the one that calls."""
    gc.disable()  # collections are a quarter of the time of imports
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    import torch._dynamo
    import torch._logging
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.nn.utils.parametrizations

    with contextlib.suppress(ImportError):
        import torchrec.distributed.mc_embeddingbag
        import torchrec.distributed.model_parallel
        import torchrec.distributed.train_pipeline.train_pipelines  # noqa: F401

    torch._logging.set_logs(all=logging.ERROR)
    for backend in ("eager", "aot_eager"):  # what the first compilation imports, once for all
        torch.compile(torch.nn.Linear(1, 1), backend=backend)(torch.ones(1, 1)).sum().backward()
    import tests.guarded.adversaries.stage  # noqa: F401

    gc.freeze()  # no fork looks for garbage in what was imported, nor copies it by looking
    gc.enable()


def main() -> None:
    preload()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one case: {"ended": "well" | "crash" | "hang" | "error", "detail", "seen", "cpu_s"}."""
    importlib.import_module(f"tests.guarded.adversaries.{request['theme']}")
    folder = Path(request["folder"])
    running = {_fork(request, rank): rank for rank in range(request["world"])}
    pids = list(running)
    deadline = time.monotonic() + request["deadline_s"]
    ended, detail, cpu_s = "well", "", 0.0
    polled = select.poll()
    handles = {os.pidfd_open(pid): pid for pid in running}
    for handle in handles:
        polled.register(handle, select.POLLIN)
    while running:
        left_s = deadline - time.monotonic()
        ready = polled.poll(left_s * 1000) if left_s > 0 else []
        if not ready:
            if ended == "well":
                ended, detail = "hang", f"no end after {request['deadline_s']:g} s"
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
            for handle, pid in handles.items():
                if pid in running:
                    os.waitpid(pid, 0)
                    polled.unregister(handle)
            break
        for handle, _ in ready:
            polled.unregister(handle)
            pid = handles[handle]
            rank = running.pop(pid)
            _, status, used = os.wait4(pid, 0)
            cpu_s += used.ru_utime + used.ru_stime
            code = os.waitstatus_to_exitcode(status)
            if code and ended == "well":
                ended = "error" if code == 1 else "crash"
                detail = f"rank {rank} ended with {code}" if code != 1 else f"rank {rank}"
                deadline = min(deadline, time.monotonic() + _AFTER_ANOTHER_S)
    for handle in handles:
        os.close(handle)
    for pid in pids:  # what they have started and left behind
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    if ended != "well":
        errors = (folder / f"rank-{rank}.err" for rank in range(request["world"]))
        tails = [e.read_text(errors="replace")[-2500:] for e in errors if e.exists()]
        detail = "\n".join([detail, *tails])
    seen = []
    for rank in range(request["world"]):
        told = folder / f"rank-{rank}.jsonl"
        if told.exists():
            seen += [{"rank": rank, **json.loads(x)} for x in told.read_text().splitlines()]
    return {"ended": ended, "detail": detail, "seen": seen, "cpu_s": cpu_s}


def _fork(request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # it may have done so itself, and even have ended
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        folder = Path(request["folder"])
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open(folder / f"rank-{rank}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(null, 0)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
        faulthandler.enable()
        faulthandler.dump_traceback_later(max(1.0, request["deadline_s"] - 1))
        _play(request, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _play(request: dict[str, Any], rank: int) -> None:
    if request["guards"] == "torch":
        os.environ["SIDESTAGE_NATIVE"] = "0"
    from tests.guarded.adversaries.registry import find
    from tests.guarded.adversaries.stage import Seen, Stage

    world, folder = request["world"], request["folder"]
    if request["kind"] == "ranks":
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
        )
    with open(f"{folder}/rank-{rank}.jsonl", "a", buffering=1) as told:
        for number, name in enumerate(request["passes"]):

            def note(seen: Seen, name: str = name) -> None:
                told.write(json.dumps({"pass": name, **seen.told()}) + "\n")

            os.mkdir(f"{folder}/{rank}-{number}")
            stage = Stage(
                find(request["name"]),
                request["kind"],
                request["odd"],
                rank=rank,
                world=world,
                folder=f"{folder}/{rank}-{number}" if world == 1 else f"{folder}/pass-{number}",
                part=name == "part",
                seed=int(name) if name.isdigit() else None,
                note=note,
            )
            stage.play()


if __name__ == "__main__":
    main()
