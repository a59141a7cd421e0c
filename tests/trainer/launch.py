import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

ROOT = Path(__file__).parents[2]


def torchrun(
    module: str, *args: str | Path, ranks: int, restarts: int
) -> subprocess.CompletedProcess[str]:
    """Run a module on some ranks of this machine and wait; a free port is chosen."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        *("-m", module, *map(str, args)),
    ]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


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
