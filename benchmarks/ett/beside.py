"""Steps with and without a session, in one process: `python -m benchmarks.ett.beside JOB`, under torchrun.

The lives' figures rest on this: while no save is written a step of a session takes what a plain one takes.
What a save costs is seen here too: neither depends on how fast the machine was in another life. Two models
lie in memory, one compiled by `torch.compile` alone and one by `prepare`, as `sync` and `ours` do.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  (registers the operators)
import torch.distributed as dist

from benchmarks.ett.job import BESIDE, LifeJob
from benchmarks.ett.models import MODELS, Batches, Model, Net, rows_of, shard, train_step
from benchmarks.ett.ours import prepare_dense
from ckpt import CheckpointConfig, SaveHandle
from trainer.launch import joined, seed_generators
from trainer.ledger import Ledger
from trainer.session import Session

_ROUNDS = 8
_BLOCK_S = 1.5
_WARM_UP = 30


def main() -> None:
    job = LifeJob.read(Path(sys.argv[1]))
    with joined("cpu") as place:
        model = rows_of(MODELS[job.model])
        batches = Batches(model, place.rank, place.world_size)
        found = _Rounds(job, model, batches, place.world_size).run(place.rank)
    if place.rank == 0:
        (Path(job.folder) / BESIDE).write_text(json.dumps(found) + "\n")


class _Rounds:
    def __init__(self, job: LifeJob, model: Model, batches: Batches, world_size: int) -> None:
        self._folder = Path(job.folder)
        self._batches = batches
        self._plain_step, _ = _trained(job, model, batches, world_size, "sync")
        self._step, self._state = _trained(job, model, batches, world_size, "ours")

    def run(self, rank: int) -> dict[str, Any]:
        """Seconds of a block of steps by kind, of each round; steps of a block; block and lag of its save."""
        feed = iter(self._batches)
        for _ in range(_WARM_UP):
            self._step(next(feed))
            self._plain_step(next(feed))
        began_s = time.perf_counter()
        for _ in range(_WARM_UP):
            self._plain_step(next(feed))
        said = [math.ceil(_WARM_UP * _BLOCK_S / (time.perf_counter() - began_s))]
        dist.broadcast_object_list(said, 0)
        steps = said[0]
        names = ("plain", "session", "saving", "block_s", "lag_s")
        found: dict[str, Any] = {name: [] for name in names}
        for n in range(_ROUNDS):
            root = self._folder / f"round-{n}"
            for kind in ("plain", "session")[:: 1 if n % 2 == 0 else -1]:
                if kind == "plain":
                    found["plain"].append(self._plain(steps))
                else:
                    self._with_session(root, steps, found)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(root)
        return {"steps": steps, **found}

    def _plain(self, steps: int) -> float:
        feed = iter(self._batches)
        dist.barrier()
        began_s = time.perf_counter()
        for _ in range(steps):
            self._plain_step(next(feed))
        return time.perf_counter() - began_s

    def _with_session(self, root: Path, steps: int, found: dict[str, Any]) -> None:
        session = Session(
            str(root),
            self._state,
            self._batches,
            save_every=10**12,
            checkpoint=CheckpointConfig(snapshot="guarded", persist_target_s=0),
        )
        with session:
            feed = session.batches()
            self._step(next(feed))
            session.step()
            session.save().committed.result()  # the first one allocates
            for kind in ("session", "saving"):
                dist.barrier()
                began_s = time.perf_counter()
                if kind == "saving":
                    handle = session.save()
                    lag_s = _lag_of(handle)
                for _ in range(steps):
                    self._step(next(feed))
                    session.step()
                found[kind].append(time.perf_counter() - began_s)
            found["block_s"].append(handle.blocked_s)
            found["lag_s"].append(lag_s())


def _trained(
    job: LifeJob, model: Model, batches: Batches, world_size: int, way: str
) -> tuple[Callable[[Any], None], dict[str, Any]]:
    """A step of a model that is compiled as the lives of this way do, and what to save of it."""
    seed_generators(7)
    net = Net(model)
    if job.compiled and way == "sync":
        net.dense.compile(dynamic=True)
    elif job.compiled:
        prepare_dense(job, net, batches, Ledger())
    sharded, optimizer = shard(net, model, world_size)
    sharded.train()
    state = {"model": sharded, "optimizer": optimizer}
    return lambda batch: train_step(sharded, optimizer, batch), state


def _lag_of(handle: SaveHandle) -> Callable[[], float]:
    """Waits for the commit; seconds from now until it came."""
    began_s = time.perf_counter()
    lag_s: Future[float] = Future()
    handle.committed.add_done_callback(lambda _: lag_s.set_result(time.perf_counter() - began_s))
    return lag_s.result


if __name__ == "__main__":
    main()
