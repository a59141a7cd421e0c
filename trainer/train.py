"""The reference trainer: MovieLens-100k, from the configuration to the last commit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.config import restart_count, trust_file
from ckpt.errors import BadInputError
from ckpt.prefetch import Prefetch
from ckpt.storage import Storage, check_place, open_storage
from ckpt.trust import TrustList
from trainer.config import TrainConfig, launched_place
from trainer.description import ServedModel, describe_once
from trainer.evaluate import progress, score
from trainer.fault import kill_if_due
from trainer.launch import Place, joined, seed_generators, take_device
from trainer.ledger import Ledger
from trainer.metrics import auc
from trainer.model import (
    DENSE_PARTS,
    KernelCounters,
    Training,
    build_model,
    scorer_of,
    shard_training,
    to_batch,
)
from trainer.movielens import SINGLE_FEATURES, MovieLens, item_mean_scores, load_movielens
from trainer.proof import write_predictions, write_state
from trainer.reader import BatchReader
from trainer.session import Session
from trainer.startup import Startup

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
    baseline: float
    description_id: str | None
    storage: Storage
    prefetched: Prefetch | None
    ledger: Ledger
    say: Say


def train(
    config: TrainConfig,
    say: Say = print,
    ledger: Ledger | None = None,
    prefetched: Prefetch | None = None,
) -> dict[str, Any]:
    """Train until `epochs` are done, from wherever the root's newest commit is. One call, one attempt.

    Collective: call on every rank that torchrun has started, or in a single process.

    ledger: of this process, begun before the packages were imported; prefetched: of the root, then too.

    Returns the figures of the run, which rank 0 also writes to `[run] result`.
    """
    with ExitStack() as stack:
        return _attempt(_start(config, say, ledger or Ledger(), stack, prefetched))


def _start(
    config: TrainConfig, say: Say, ledger: Ledger, stack: ExitStack, prefetched: Prefetch | None
) -> _Run:
    """Everything up to the session. What doesn't depend on each other is done at the same time."""
    start = Startup(ledger, threads=not config.run.serial_start)
    stage = partial(
        start.stage, main_thread=config.run.device != "cpu"
    )  # CUDA's device is a thread's
    start.stage("device_init", lambda: take_device(config.run.device), main_thread=True)
    stage(
        "process_group_init",
        lambda _: stack.enter_context(joined(config.run.device)),
        after=("device_init",),
    )
    start.stage("preproc_creation", lambda: _load(config))
    start.stage(
        "storage",
        lambda: _opened(config, prefetched),
        span="init_plugins",
    )
    stage(
        "dense_model",
        lambda device, data: _build(config, data, device),
        after=("device_init", "preproc_creation"),
        span="train_module_creation",
    )
    stage(
        "pt2_compilation",
        lambda model, data, storage: _compile(config, model, data, storage, ledger),
        after=("dense_model", "preproc_creation", "storage"),
    )
    # Its collectives are the main thread's, as those of training will be.
    start.stage(
        "train_module_creation",
        lambda place, model: shard_training(model, config.model, place.device, place.world_size),
        after=("process_group_init", "pt2_compilation"),
        main_thread=True,
    )
    start.stage(
        "reader",
        lambda place, data: _reader(config, data, place),
        after=("process_group_init", "preproc_creation"),
        span="get_first_batch_data",
    )
    start.stage("baseline", _item_mean_auc, after=("preproc_creation",), span="preproc_creation")
    start.stage(
        "description",
        lambda place, data, training, storage: _describe(config, place, data, training, storage),
        after=("process_group_init", "preproc_creation", "train_module_creation", "storage"),
        main_thread=True,
        span="init_plugins",
    )
    ready = start.run()
    place: Place = ready["process_group_init"]
    quiet: Say = lambda text: None  # noqa: E731
    return _Run(
        config=config,
        place=place,
        data=ready["preproc_creation"],
        training=ready["train_module_creation"],
        reader=ready["reader"],
        history={"auc": []},
        baseline=ready["baseline"],
        description_id=ready["description"],
        storage=ready["storage"],
        prefetched=prefetched,
        ledger=ledger,
        say=say if place.rank == 0 else quiet,
    )


def _load(config: TrainConfig) -> MovieLens:
    return load_movielens(Path(config.data.folder) if config.data.folder else None)


def _build(config: TrainConfig, data: MovieLens, device: torch.device) -> Any:
    seed_generators(config.run.seed)
    return build_model(config.model, data.rows, device)


def _compile(
    config: TrainConfig, model: Any, data: MovieLens, storage: Storage, ledger: Ledger
) -> Any:
    """Compile the dense part on the first samples, as many as this rank trains on at once."""
    if config.compile.enabled:
        from trainer.pt2 import prepare

        device = next(p.device for p in model.parameters() if not p.is_meta)
        _, world_size, _ = launched_place() or (0, 1, 0)
        samples = min(max(2, config.data.batch_size // world_size), len(data.train))
        some = to_batch(data.train.take(torch.arange(samples))).to(device)
        prepare(
            model,
            (some,),
            storage=storage,
            trust=TrustList(trust_file()),
            ledger=ledger,
            settings=config.compile,
            device=device,
            parts=DENSE_PARTS,
        )
    return model


def _opened(config: TrainConfig, prefetched: Prefetch | None) -> Storage:
    """The root, refused before other stages write to it."""
    storage = prefetched.storage if prefetched else open_storage(config.run.root)
    check_place(storage)
    return storage


def _reader(config: TrainConfig, data: MovieLens, place: Place) -> BatchReader[Any]:
    """The reader, warmed up: what the first batch loads is loaded now."""

    def fetch(index: torch.Tensor) -> Any:
        return to_batch(data.train.take(index))

    reader = BatchReader(
        len(data.train),
        config.data.batch_size,
        fetch,
        rank=place.rank,
        world_size=place.world_size,
        event_times_s=data.train.event_times_s,
    )
    fetch(reader.indices(0))
    return reader


def _attempt(run: _Run) -> dict[str, Any]:
    config = run.config
    description_id = run.description_id
    session = Session(
        run.storage,
        {
            "model": run.training.model,
            "optimizer": run.training.optimizer,
            "history": run.history,
        },
        run.reader,
        save_every=config.run.save_every,
        checkpoint=config.checkpoint,
        restore=config.restore,
        elastic=config.run.elastic,
        prefetched=run.prefetched,
        annotations={"serving_description": description_id} if description_id else None,
        ledger=Path(config.run.ledger) if config.run.ledger else None,
        grace_s=config.run.grace_s or None,
        events=run.ledger,
    )
    with session:
        if session.restored:
            run.say(f"resumed at step {session.steps}, batch {session.position}")
        _fit(run, session)
        session.finish()
        if config.proof.dir:
            with session.evaluating():
                _prove(run, session, Path(config.proof.dir))
    result = _result(run, session)
    if config.run.result and run.place.rank == 0:
        path = Path(config.run.result)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _describe(
    config: TrainConfig, place: Place, data: MovieLens, training: Training, storage: Storage
) -> str | None:
    """The serving description's id. Collective; an export's forward passes leave no trace."""
    if not config.serving.export:
        return None
    golden = to_batch(
        data.test.take(torch.arange(min(config.serving.golden_rows, len(data.test))))
    ).to(place.device)
    served = ServedModel(
        name="movielens",
        module=scorer_of(training.model),
        args=(golden.dense_features, golden.sparse_features),
        prefix="model.",
        checkpoint_keys={f"model.{key}" for key in training.model.state_dict()},
    )
    trust = TrustList(trust_file())
    counters = KernelCounters(training.model)
    before = counters.state_dict()
    described = describe_once(served, storage, trust, depends_on=repr(config.model))
    counters.load_state_dict(before)
    return described.description_id


def _fit(run: _Run, session: Session[Any]) -> None:
    """Train and evaluate, epoch by epoch. An epoch that ended right before a restart is evaluated now."""
    epochs, pipeline = run.config.run.epochs, run.training.pipeline
    most = run.config.run.max_steps
    began = time.monotonic()
    while True:
        if len(run.history["auc"]) < run.reader.epoch:
            with session.evaluating():
                logits = score(pipeline, run.data.test, to_batch, run.place, session.poll)
            reached = auc(logits, run.data.test.labels)
            run.history["auc"].append(reached)
            run.say(
                f"epoch {len(run.history['auc'])}/{epochs}: AUC {reached:.4f} on the held-out ratings "
                f"(item mean {run.baseline:.4f}), {time.monotonic() - began:.1f} s"
            )
            if session.steps > (session.restored.step if session.restored else 0):
                session.save({"auc": f"{reached:.6f}"})
        if run.reader.epoch >= epochs or (most is not None and session.steps >= most):
            return
        began = time.monotonic()
        run.training.model.train()
        batches = session.batches()
        while (out := progress(pipeline, batches)) is not None:
            # The save of an epoch's end waits for its evaluation, and carries the result.
            ends = (session.position + 1) % run.reader.batches_per_epoch == 0
            session.step(in_flight=len(pipeline.batches), loss=out[0], save=not ends)
            kill_if_due(run.config.fault, run.place.rank, session.steps, session.stats.commits)
            if most is not None and session.steps >= most:
                return


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


def _result(run: _Run, session: Session[Any]) -> dict[str, Any]:
    stats = session.stats
    restored = session.restored
    return {
        "auc": run.history["auc"],
        "auc_item_mean": run.baseline,
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
        "serving_description": run.description_id,
    }
