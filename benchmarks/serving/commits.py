"""Makes commits of a model on request: `python -m benchmarks.serving.commits ROOT MODEL [ROWS]`.

MODEL is `ranker` (ROWS rows a table), `stamped` or `movielens`. Each line on stdin is a step; when its commit
is there, a line of JSON says so: {"event": "committed", "step": ..., "at_s": ...}.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.serving.models import Ranker, Root, Stamped
from ckpt import CheckpointConfig, Checkpointer
from ckpt.config import load_toml, trust_file
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from trainer.config import ModelConfig
from trainer.description import ServedModel, export_description
from trainer.model import build_training, scorer_of, to_batch
from trainer.movielens import load_movielens

Commit = Callable[[int], None]


def main(root: str, model: str, rows: str = "1000") -> None:
    torch.manual_seed(0)
    commit, close = _movielens(root) if model == "movielens" else _plain(root, model, int(rows))
    _tell("ready")
    for line in sys.stdin:
        step = int(line)
        commit(step)
        _tell("committed", step=step, at_s=time.time())
    close()


def _plain(root: str, model: str, rows: int) -> tuple[Commit, Callable[[], None]]:
    made: Any = Stamped() if model == "stamped" else Ranker(rows)
    run = Root(Path(root), made)

    def commit(step: int) -> None:
        if isinstance(made, Stamped):
            made.stamp(float(step))
        else:
            with torch.no_grad():
                next(p for n, p in made.named_parameters() if n.endswith("bias")).add_(1e-3)
        run.commit(step)

    return commit, run.close


def _movielens(root: str) -> tuple[Commit, Callable[[], None]]:
    """The demo's model, on one rank. Between commits its dense part is moved a little."""
    folder = load_toml(Path("trainer/configs/movielens.toml")).get("data", {}).get("folder")
    data = load_movielens(Path(folder) if folder else None)
    with tempfile.TemporaryDirectory() as meet:
        dist.init_process_group("gloo", init_method=f"file://{meet}/store", rank=0, world_size=1)
    training = build_training(ModelConfig(), data.rows, torch.device("cpu"), 1)
    golden = to_batch(data.test.take(torch.arange(64)))
    keys = {f"model.{key}" for key in training.model.state_dict()}
    args = (golden.dense_features, golden.sparse_features)
    served = ServedModel("movielens", scorer_of(training.model), args, "model.", keys)
    trust = TrustList(trust_file())
    description = export_description(served, open_storage(root), trust)
    state = {"model": training.model}
    saver = Checkpointer(
        root,
        CheckpointConfig(persist_target_s=0.1),
        annotations={"serving_description": description},
    )
    saver.restore(state)
    dense = next(p for n, p in training.model.named_parameters() if n.endswith("bias"))

    def commit(step: int) -> None:
        with torch.no_grad():
            dense.add_(1e-3)
        saver.save(step, state).committed.result()

    def close() -> None:
        saver.close()
        dist.destroy_process_group()

    return commit, close


def _tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
