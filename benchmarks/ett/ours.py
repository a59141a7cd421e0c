"""The same training with `trainer.Session`, a start of overlapping stages, and what restarts keep."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ett.job import LifeJob
from benchmarks.ett.models import MODELS, Batches, Model, Net, rows_of, shard, train_step
from benchmarks.ett.pace import Pace
from benchmarks.ett.peers import compile_anew, expected_lag_s, publish
from ckpt import CheckpointConfig, SaveHandle
from ckpt.config import trust_file
from ckpt.prefetch import Prefetch
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from trainer.config import CompileConfig
from trainer.description import ServedModel, describe_once, export_description
from trainer.launch import joined, seed_generators
from trainer.ledger import Ledger
from trainer.pt2 import prepare
from trainer.session import Session
from trainer.startup import Startup

_NEVER = 10**12


def live(job: LifeJob, ledger: Ledger) -> None:
    with ExitStack() as stack:
        ready = _start(job, ledger, stack)
        _train(job, ledger, ready)


def _start(job: LifeJob, ledger: Ledger, stack: ExitStack) -> dict[str, Any]:
    model = rows_of(MODELS[job.model])
    storage, trust = open_storage(job.folder), TrustList(trust_file())
    if "compile_cache" in job.without:
        compile_anew(job)
    start = Startup(ledger, threads="overlap" not in job.without)

    def build() -> Net:
        seed_generators(7)
        return Net(model)

    def compiled(net: Net, batches: Batches) -> Net:
        if job.compiled:
            prepare_dense(job, net, batches, ledger)
        return net

    if "overlap" not in job.without:
        start.stage("prefetch", lambda: stack.enter_context(Prefetch(storage)))
    start.stage("process_group_init", lambda: stack.enter_context(joined("cpu")))
    start.stage(
        "preproc_creation",
        lambda place: Batches(model, place.rank, place.world_size),
        after=("process_group_init",),
    )
    start.stage("net", build, span="train_module_creation")
    start.stage("compiled", compiled, after=("net", "preproc_creation"), span="pt2_compilation")
    start.stage(
        "train_module_creation",
        lambda place, net: shard(net, model, place.world_size),
        after=("process_group_init", "compiled"),
        main_thread=True,
    )
    start.stage(
        "description",
        lambda training, batches: _describe(job, model, training[0], batches, storage, trust),
        after=("train_module_creation", "preproc_creation"),
        main_thread=True,
        span="init_plugins",
    )
    return {**start.run(), "storage": storage}


def prepare_dense(job: LifeJob, net: Net, batches: Batches, ledger: Ledger) -> None:
    """Compile the dense part, from the run's cache where there is one."""
    prepare(
        net,
        (batches.example,),
        storage=open_storage(job.folder),
        trust=TrustList(trust_file()),
        ledger=ledger,
        settings=CompileConfig(enabled=True, cache="compile_cache" not in job.without),
        parts=["dense"],
    )


class Served(torch.nn.Module):
    """What is served of a live model: lookups and dense part, without labels and loss."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.embeddings, self.dense = net.embeddings, net.dense

    def forward(self, dense: torch.Tensor, features: Any) -> dict[str, torch.Tensor]:
        return {"logit": self.dense(dense, self.embeddings(features).values())}


def _describe(  # noqa: PLR0917
    job: LifeJob, model: Model, sharded: Any, batches: Batches, storage: Any, trust: TrustList
) -> str | None:
    if not model.pooled:
        return None  # padding a sequence by hand, as this model does, is outside of a description
    net = getattr(sharded, "module", sharded)
    some = batches.golden
    served = ServedModel(
        name=model.name,
        module=Served(net).eval(),
        args=(some.dense_features, some.sparse_features),
        prefix="model.",
        checkpoint_keys={f"model.{key}" for key in sharded.state_dict()},
    )
    if "description_reuse" in job.without:
        return export_description(served, storage, trust)
    return describe_once(served, storage, trust, depends_on=repr(model.tables)).description_id


def _train(job: LifeJob, ledger: Ledger, ready: dict[str, Any]) -> None:
    place, batches = ready["process_group_init"], ready["preproc_creation"]
    sharded, optimizer = ready["train_module_creation"]
    described = ready["description"]
    copied = "async_save" in job.without
    session = Session(
        ready["storage"],
        {"model": sharded, "optimizer": optimizer},
        batches,
        save_every=_NEVER,
        # Unpaced: commits come sooner, and here saves cost less in all (docs/performance.md).
        checkpoint=CheckpointConfig(snapshot="copied" if copied else "guarded", persist_target_s=0),
        annotations={"serving_description": described} if described else None,
        events=ledger,
        prefetched=ready.get("prefetch"),
        grace_s=None if "preemption" in job.without else 25.0,
    )
    with session:
        (Path(job.folder) / f"pid-{place.rank}").write_text(str(os.getpid()))
        lag_s = expected_lag_s({"model": sharded.state_dict(), "optimizer": optimizer.state_dict()})
        pace = Pace(job, place.rank, session.steps, 0.0 if copied else lag_s)
        handle: SaveHandle | None = None
        sharded.train()
        for batch in session.batches():
            train_step(sharded, optimizer, batch)
            session.step()
            pace.stepped(session.steps, writing=handle is not None and not handle.committed.done())
            if pace.due(session.steps):
                handle = session.save()
                block_s = handle.blocked_s
                if copied:
                    block_s += _wait(ledger, handle)
                pace.saved(session.steps, block_s, writing=not copied)
            if pace.over(session.steps):
                break
        # No publisher knows this model: the trainer publishes, as the others do.
        if described is None:
            session.finish()
            with ledger.span("publishing"):
                publish(job, ready["net"], sharded, batch, place.rank)
                dist.barrier()


def _wait(ledger: Ledger, handle: SaveHandle) -> float:
    """Wait for the commit, as a blocking save does; the seconds that it took."""
    began_s = time.monotonic()
    with ledger.span("blocked_in_save"):
        handle.committed.result()
    return time.monotonic() - began_s
