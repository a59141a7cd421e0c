"""One rank of several: saves tables, or restores its share of them from a store that counts what it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.ranks import serve
from benchmarks.training.workload import DIM, TABLES
from ckpt import CheckpointConfig, Checkpointer
from ckpt.storage import LocalStorage
from ckpt.types import ObjectInfo

_STEP = 1
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Case:
    """rows: of each table, over all ranks. root: where the checkpoint is, or shall be. restore: or save?"""

    rows: int
    root: str
    restore: bool
    threads: int


class CountingStorage:
    """A local root as if it were far away, so that each byte has to travel; counts those that do."""

    def __init__(self, root: str) -> None:
        self._inner = LocalStorage(root)
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        if name == "near":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._inner.read(key, start, length)
        self.read_bytes += len(data)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._inner.read_into(key, start, buffer)
        self.read_bytes += buffer.nbytes

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)


def measure(case: Case) -> dict[str, Any]:
    """Bytes of this rank's share, and of a restore those that it read."""
    state = _tables(case.rows)
    local = [t.to_local() for t in state.values()]
    share_bytes = sum(t.nbytes for t in local)
    if not case.restore:
        config = CheckpointConfig(persist_target_s=0.0, compression="off")
        with Checkpointer(case.root, config) as checkpointer:
            checkpointer.save(_STEP, {"tables": state}).committed.result(_DEADLINE_S)
            checkpointer.wait()
        return {"share_bytes": share_bytes}
    saved = [t.clone() for t in local]
    for tensor in local:
        tensor.zero_()
    storage = CountingStorage(case.root)
    with Checkpointer(storage) as checkpointer:
        checkpointer.restore({"tables": state}, step=_STEP)
    return {
        "share_bytes": share_bytes,
        "read_bytes": storage.read_bytes,
        "exact": all(map(torch.equal, local, saved)),
    }


def _tables(rows: int) -> dict[str, DTensor]:
    """Tables and moments that belong to their rows, cut by row; each element says where it is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = rows // mesh.size()
    first = mesh.get_rank() * mine
    local: dict[str, torch.Tensor] = {}
    for n in range(TABLES):
        at = torch.arange(first * DIM, (first + mine) * DIM, dtype=torch.float64)
        local[f"{n}.weight"] = (at + n).sin().float().view(mine, DIM)
        local[f"{n}.momentum"] = (at[::DIM] + n).cos().float()
    return {
        name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for name, tensor in local.items()
    }


def _body(job: dict[str, Any], _: Path) -> dict[str, Any]:
    return measure(Case(**job))


if __name__ == "__main__":
    sys.exit(serve(_body))
