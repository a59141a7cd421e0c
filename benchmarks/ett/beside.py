"""Steps with and without a session, in one process: `python -m benchmarks.ett.beside JOB`, under torchrun.

The lives' figures rest on this: while no save is written a step of a session takes what a plain one takes.
What a save costs is seen here too: neither depends on how fast the machine was in another life.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ett.job import LifeJob
from benchmarks.report import Row

RESULT = "beside.json"
_ROUNDS = 8
_BLOCK_S = 1.5
_WARM_UP = 30
_KINDS = ("plain", "session", "saving")


def row(model: str, found: dict[str, Any]) -> Row:
    """Medians over rounds of what rank 0 measured; ratios are of the same round.

    found: seconds of a block by kind, of each round; steps of a block; block and lag of its save.
    """
    plain_s, session_s, saving_s = (found[kind] for kind in _KINDS)
    return {
        "model": model,
        "name": "ours",
        "source": "beside plain steps",
        "status": "ok",
        "step_ms": 1000 * statistics.median(session_s) / found["steps"],
        "plain_ms": 1000 * statistics.median(plain_s) / found["steps"],
        "step_ratio": statistics.median(
            ours / plain for ours, plain in zip(session_s, plain_s, strict=True)
        ),
        "block_ms": 1000 * statistics.median(found["block_s"]),
        "lag_s": statistics.median(found["lag_s"]),
        "save_costs_ms": 1000
        * statistics.median(
            saving - calm for saving, calm in zip(saving_s, session_s, strict=True)
        ),
        "rounds": len(plain_s),
    }


def main() -> None:
    import fbgemm_gpu  # noqa: F401  (registers the operators)

    from benchmarks.ett.models import MODELS, Batches, Net, rows_of, shard, train_step
    from trainer.launch import joined, seed_generators
    from trainer.quiet import quiet_libraries

    quiet_libraries()
    job = LifeJob.read(Path(sys.argv[1]))
    with joined("cpu") as place:
        model = rows_of(MODELS[job.model])
        batches = Batches(model, place.rank, place.world_size)
        seed_generators(7)
        net = Net(model)
        if job.compiled:
            net.dense.compile(dynamic=True)
        sharded, optimizer = shard(net, model, place.world_size)
        sharded.train()
        rounds = _Rounds(sharded, optimizer, batches, train_step)
        found = rounds.run(Path(job.folder), place.rank)
    if place.rank == 0:
        (Path(job.folder) / RESULT).write_text(json.dumps(found) + "\n")


class _Rounds:
    def __init__(
        self, model: Any, optimizer: Any, batches: Any, train_step: Callable[..., None]
    ) -> None:
        self._state = {"model": model, "optimizer": optimizer}
        self._batches = batches
        self._step = lambda batch: train_step(model, optimizer, batch)

    def run(self, folder: Path, rank: int) -> dict[str, Any]:
        feed = iter(self._batches)
        for _ in range(_WARM_UP):
            self._step(next(feed))
        began_s = time.perf_counter()
        for _ in range(_WARM_UP):
            self._step(next(feed))
        said = [math.ceil(_WARM_UP * _BLOCK_S / (time.perf_counter() - began_s))]
        dist.broadcast_object_list(said, 0)
        steps = said[0]
        found: dict[str, Any] = {name: [] for name in (*_KINDS, "block_s", "lag_s")}
        for n in range(_ROUNDS):
            root = folder / f"round-{n}"
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
            self._step(next(feed))
        return time.perf_counter() - began_s

    def _with_session(self, root: Path, steps: int, found: dict[str, Any]) -> None:
        from ckpt import CheckpointConfig
        from trainer.session import Session

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
                committed_s: list[float] = []
                if kind == "saving":
                    handle = session.save()
                    handle.committed.add_done_callback(
                        lambda _, at=committed_s: at.append(time.perf_counter())
                    )
                for _ in range(steps):
                    self._step(next(feed))
                    session.step()
                found[kind].append(time.perf_counter() - began_s)
            handle.committed.result()
            found["block_s"].append(handle.blocked_s)
            found["lag_s"].append(committed_s[0] - began_s - handle.blocked_s)


if __name__ == "__main__":
    main()
