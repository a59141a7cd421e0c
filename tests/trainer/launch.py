import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors import safe_open
from torch import Tensor

from tests import warm

ROOT = Path(__file__).parents[2]
STORE: Any = vars(torch.distributed)["TCPStore"]


def launch(
    module: str, *args: str | Path, ranks: int, restarts: int
) -> subprocess.CompletedProcess[str]:
    """`trainer launch` of a module on some ranks of this machine; a free port is chosen."""
    command = [
        *(sys.executable, "-m", "trainer.cli", "launch", "--standalone", "--local-addr=127.0.0.1"),
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        *("-m", module, *map(str, args)),
    ]
    return warm.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=240)


def run_ranks(
    module: str, *args: str | Path, ranks: int, restarts: int
) -> list[subprocess.CompletedProcess[str]]:
    """The same with this process as the agent, which ends no rank; the last life of each."""
    for life in range(restarts + 1):
        store = STORE("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {
            **os.environ,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "forks",
            "TORCHELASTIC_RESTART_COUNT": str(life),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        with ThreadPoolExecutor(ranks) as pool:
            running = [
                pool.submit(
                    warm.run,
                    [sys.executable, "-m", module, *args],
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    timeout=240,
                )
                for rank in range(ranks)
            ]
        ended = [one.result() for one in running]
        if not any(one.returncode for one in ended):
            break
    return ended


def read_state(folder: Path) -> dict[str, Tensor]:
    """Put the shards that `trainer.proof.write_state` wrote on all ranks together again."""
    whole: dict[str, Tensor] = {}
    for path in sorted(folder.glob("state-r*.safetensors")):
        with safe_open(path, "pt") as file:
            for name, text in (file.metadata() or {}).items():
                about, shard = json.loads(text), file.get_tensor(name)
                if about["key"] not in whole:
                    whole[about["key"]] = torch.zeros(about["shape"], dtype=shard.dtype)
                box = tuple(
                    slice(o, o + n) for o, n in zip(about["offsets"], shard.shape, strict=True)
                )
                whole[about["key"]][box] = shard
    return whole
