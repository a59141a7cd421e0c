"""Real ranks: processes joined by gloo through a file, so that no port is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from tests import warm

DEADLINE_S = 180


def start_ranks(
    module: str, world_size: int, folder: Path, *args: str
) -> list[subprocess.Popen[str]]:
    """Start `python -m module ARGS...` as each rank; `folder` is where they meet, new each time."""
    folder.mkdir(parents=True)
    env = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "MEET": str(folder / "store"),
    }
    return [
        warm.Popen(
            [sys.executable, "-m", module, *args],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]


def run_ranks(module: str, world_size: int, folder: Path, *args: str) -> list[str]:
    """Run ranks to their end; what each printed. Fails with the error output of the first that failed."""
    processes = start_ranks(module, world_size, folder, *args)
    outputs = []
    try:
        for rank, p in enumerate(processes):
            out, err = p.communicate(timeout=DEADLINE_S)
            assert p.returncode == 0, f"rank {rank} of {module} {args}: {err[-3000:]}"
            outputs.append(out)
    finally:
        for p in processes:
            p.kill()
            p.wait()
    return outputs


def join() -> tuple[int, int]:
    """In a rank: join the group; (rank, world size)."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEET']}", rank=rank, world_size=world_size
    )
    return rank, world_size


def leave() -> NoReturn:
    """In a rank: leave the group and end, with what was found.

    Not by the interpreter's way out: threads of torch and fbgemm that still live then now and
    then abort the process ("terminate called without an active exception").
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
