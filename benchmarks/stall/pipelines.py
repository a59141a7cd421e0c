"""Is a stored snapshot the state at save(), whatever pipeline trains on meanwhile?

Not timed. The oracle is a whole copy of all shards, taken right before save().
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks, serve
from benchmarks.report import MIB, Row
from benchmarks.training.modes import guard_all
from benchmarks.training.tables import row_bytes
from benchmarks.training.workload import DIM, TABLES
from ckpt import CheckpointConfig, Checkpointer
from ckpt.events import ListSink
from ckpt.tree import flatten

PIPELINES = ("loop", "TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite")
SAVES = 3
STEPS = 10  # between saves at least, and after the last one
DEADLINE_S = 600.0
_POOL = 16


def check(pipeline: str, size_mib: int, world: int, root: Path) -> dict[str, int]:
    """How many elements of how many differ, over all ranks and saves. Raises RanksFailed."""
    job = {"pipeline": pipeline, "size_mib": size_mib, "threads": 1}
    answers = run_ranks(__name__, job, world, root, DEADLINE_S).answers
    return {name: sum(a[name] for a in answers) for name in answers[0]}


def row(runs: list[dict[str, int]]) -> Row:
    differing = sum(r["differing"] for r in runs)
    return {
        "saves": sum(r["saves"] for r in runs),
        "compared": sum(r["compared"] for r in runs),
        "changed": sum(r["changed"] for r in runs),
        "differing": differing,
        "copied_tables": sum(r["copied_tables"] for r in runs),
        # Where nothing changed after save(), nothing was shown.
        "exact": differing == 0 and all(r["compared"] > 0 and r["changed"] > 0 for r in runs),
    }


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from benchmarks.training.sharded import sharded_model

    rows = max(64, job["size_mib"] * MIB // (TABLES * row_bytes("torchrec", DIM)))
    ours = sharded_model(rows)
    step = _stepper(job["pipeline"], ours, rows)
    kept: list[dict[str, torch.Tensor]] = []
    config = CheckpointConfig(persist_target_s=0.5)
    events = ListSink()
    with Checkpointer(str(folder), config, sink=events) as checkpointer:
        guard_all(checkpointer, (ours.model, ours.optimizer))
        for _ in range(STEPS):
            step()
        for number in range(1, SAVES + 1):
            kept.append({n: t.clone() for n, t in _shards(ours.state).items()})
            handle = checkpointer.save(number, ours.state)
            _train_until(handle.committed.done, step)
        checkpointer.wait()
        changed = _differing(kept[0], _shards(ours.state))
    found = {"saves": SAVES, "compared": 0, "changed": changed, "differing": 0}
    found["copied_tables"] = len(events.named("table_copied"))
    # The newest first: to restore a step is to give up those after it.
    for number, oracle in reversed(list(enumerate(kept, 1))):
        other = sharded_model(rows, seed=6)
        _make_state(other, rows)
        with Checkpointer(str(folder)) as reader:
            reader.restore(other.state, step=number)
        found["compared"] += sum(t.numel() for t in oracle.values())
        found["differing"] += _differing(oracle, _shards(other.state))
    return found


def _stepper(name: str, ours: Any, rows: int) -> Callable[[], None]:
    """One step of training in the way of `name`, over batches without end."""
    from torchrec.distributed.train_pipeline import train_pipelines

    from benchmarks.training.sharded import batches

    pool = itertools.cycle(batches(rows, _POOL, seed=dist.get_rank()))
    if name == "loop":
        return lambda: _plain_step(ours, next(pool))
    kind = getattr(train_pipelines, name)
    pipeline = kind(ours.model, ours.optimizer, torch.device("cpu"))
    return lambda: _discard(pipeline.progress(pool))


def _discard(_: object) -> None:
    return


def _plain_step(ours: Any, batch: Any) -> None:
    ours.optimizer.zero_grad()
    ours.model(batch)[0].backward()
    ours.optimizer.step()


def _train_until(done: Callable[[], bool], step: Callable[[], None]) -> None:
    """Train until all ranks are done, and STEPS steps at least: ranks must take as many."""
    for taken in itertools.count():
        flag = torch.tensor(float(done()))
        dist.all_reduce(flag)
        if taken >= STEPS and flag == dist.get_world_size():
            return
        step()


def _make_state(other: Any, rows: int) -> None:
    """A first step, so that optimizers have the state that a restore fills."""
    from benchmarks.training.sharded import batches

    _plain_step(other, batches(rows, 1, seed=0)[0])


def _shards(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The live memory of all shards of this rank, by name and place."""
    return dict(_named_shards(state))


def _named_shards(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, leaf in flatten(state, dist.get_rank()).leaves.items():
        for shard in leaf.shards:
            yield f"{name}{shard.offsets}", shard.tensor.detach()


def _differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> int:
    """Elements that aren't the same bits."""
    if a.keys() != b.keys():
        return sum(t.numel() for t in a.values())
    return sum(
        int((t.contiguous().view(torch.uint8) != b[n].contiguous().view(torch.uint8)).sum())
        if t.dim()
        else int(not torch.equal(t, b[n]))
        for n, t in a.items()
    )


if __name__ == "__main__":
    sys.exit(serve(_body))
