"""The reference trainer: MovieLens-100k, from the configuration to the last commit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt.config import restart_count, trust_file
from ckpt.errors import BadInputError
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from trainer.config import TrainConfig
from trainer.description import ServedModel, export_description
from trainer.evaluate import progress, score
from trainer.fault import kill_if_due
from trainer.launch import Place, joined, seed_generators
from trainer.metrics import auc
from trainer.model import KernelCounters, Training, build_training, scorer_of, to_batch
from trainer.movielens import SINGLE_FEATURES, MovieLens, item_mean_scores, load_movielens
from trainer.proof import write_predictions, write_state
from trainer.reader import BatchReader
from trainer.session import Session

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """All that one attempt works with."""

    config: TrainConfig
    place: Place
    data: MovieLens
    training: Training
    reader: BatchReader[Any]
    history: dict[str, Any]
    say: Say


def train(config: TrainConfig, say: Say = print) -> dict[str, Any]:
    """Train until `epochs` are done, from wherever the root's newest commit is. One call, one attempt.

    Collective: call on every rank that torchrun has started, or in a single process.

    Returns the figures of the run, which rank 0 also writes to `[run] result`.
    """
    with joined(config.run.device) as place:
        folder = Path(config.data.folder) if config.data.folder else None
        data = load_movielens(folder)
        seed_generators(config.run.seed)
        training = build_training(config.model, data.rows, place.device, place.world_size)
        reader = BatchReader(
            len(data.train),
            config.data.batch_size,
            lambda index: to_batch(data.train.take(index)),
            rank=place.rank,
            world_size=place.world_size,
            event_times_s=data.train.event_times_s,
        )
        quiet: Say = lambda text: None  # noqa: E731
        run = _Run(
            config, place, data, training, reader, {"auc": []}, say if place.rank == 0 else quiet
        )
        return _attempt(run)


def _attempt(run: _Run) -> dict[str, Any]:
    config = run.config
    description_id = _describe(run) if config.serving.export else None
    session = Session(
        config.run.root,
        {
            "model": run.training.model,
            "optimizer": run.training.optimizer,
            "kernels": KernelCounters(run.training.model),
            "history": run.history,
        },
        run.reader,
        save_every=config.run.save_every,
        checkpoint=config.checkpoint,
        elastic=config.run.elastic,
        annotations={"serving_description": description_id} if description_id else None,
        ledger=Path(config.run.ledger) if config.run.ledger else None,
    )
    with session:
        if session.restored:
            run.say(f"resumed at step {session.steps}, batch {session.position}")
        baseline = _item_mean_auc(run.data)
        _fit(run, session, baseline)
        session.finish()
        if config.proof.dir:
            with session.evaluating():
                _prove(run, session, Path(config.proof.dir))
    result = _result(run, session, baseline, description_id)
    if config.run.result and run.place.rank == 0:
        path = Path(config.run.result)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _describe(run: _Run) -> str:
    """Export the serving description. Before the restore: its forward passes then leave no trace."""
    golden = to_batch(
        run.data.test.take(torch.arange(min(run.config.serving.golden_rows, len(run.data.test))))
    ).to(run.place.device)
    served = ServedModel(
        name="movielens",
        module=scorer_of(run.training.model),
        args=(golden.dense_features, golden.sparse_features),
        prefix="model.",
        checkpoint_keys={f"model.{key}" for key in run.training.model.state_dict()},
    )
    return export_description(served, open_storage(run.config.run.root), TrustList(trust_file()))


def _fit(run: _Run, session: Session[Any], baseline: float) -> None:
    """Train and evaluate, epoch by epoch. An epoch that ended right before a restart is evaluated now."""
    epochs, pipeline = run.config.run.epochs, run.training.pipeline
    began = time.monotonic()
    while True:
        if len(run.history["auc"]) < run.reader.epoch:
            with session.evaluating():
                logits = score(pipeline, run.data.test, to_batch, run.place)
            reached = auc(logits, run.data.test.labels)
            run.history["auc"].append(reached)
            run.say(
                f"epoch {len(run.history['auc'])}/{epochs}: AUC {reached:.4f} on the held-out ratings "
                f"(item mean {baseline:.4f}), {time.monotonic() - began:.1f} s"
            )
        if run.reader.epoch >= epochs:
            return
        began = time.monotonic()
        run.training.model.train()
        batches = session.batches()
        while progress(pipeline, batches) is not None:
            session.step(in_flight=len(pipeline.batches))
            kill_if_due(run.config.fault, run.place.rank, session.steps, session.stats.commits)


def _item_mean_auc(data: MovieLens) -> float:
    items = data.test.ids[:, SINGLE_FEATURES.index("item")]
    return auc(item_mean_scores(data.train, items), data.test.labels)


def _prove(run: _Run, session: Session[Any], folder: Path) -> None:
    """Collective. Write the state first: scoring moves the kernels' counters on."""
    count = run.config.proof.predictions
    if not 1 <= count <= len(run.data.test):
        raise BadInputError(f"[proof] predictions = {count}: give 1 to {len(run.data.test)}")
    write_state(session.state, run.place.rank, folder)
    some = run.data.test.take(torch.arange(count))
    logits = score(run.training.pipeline, some, to_batch, run.place)
    if run.place.rank == 0:
        write_predictions(some, logits, folder)


def _result(
    run: _Run, session: Session[Any], baseline: float, description_id: str | None
) -> dict[str, Any]:
    stats = session.stats
    restored = session.restored
    return {
        "auc": run.history["auc"],
        "auc_item_mean": baseline,
        "steps": session.steps,
        "batches": session.position,
        "world_size": run.place.world_size,
        "restarts": restart_count(),
        "resumed_step": restored.step if restored else None,
        "commits": stats.commits,
        "failed_saves": stats.failed,
        "skipped_saves": stats.skipped,
        "max_block_ms": 1000 * stats.max_blocked_s,
        "last_error": stats.last_error,
        "serving_description": description_id,
    }
