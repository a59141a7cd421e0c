"""What people do today, and the same with DCP's asynchronous save.

`sync`: `dcp.save` of TorchRec's sharded state; `async`: `dcp.async_save` of each rank's local
tensors, which is all that it takes. Both keep nothing for a restart: the dense part is compiled
anew by each process, as on a machine that takes a lost one's place. At the end the trainer publishes:
it exports the dense part, and quantises and writes the tables.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fbgemm_gpu  # noqa: F401  (registers the operators)
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor

from benchmarks.ett.job import LifeJob
from benchmarks.ett.models import MODELS, Batches, Net, rows_of, shard, train_step
from benchmarks.ett.pace import Pace
from ckpt.config import restart_count
from ckpt.layout import ledger_key
from trainer.launch import joined, seed_generators
from trainer.ledger import Ledger
from trainer.origin import origin

_BYTES_PER_S = 64 << 20  # of a rank in the background, until a save has shown what it is


def live(job: LifeJob, ledger: Ledger) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    compile_anew(job)
    with ledger.span("process_group_init"):
        group = joined("cpu")
        place = group.__enter__()
    model = rows_of(MODELS[job.model])
    with ledger.span("preproc_creation"):
        batches = Batches(model, place.rank, place.world_size)
    with ledger.span("train_module_creation"):
        seed_generators(7)
        net = Net(model)
        if job.compiled:
            net.dense.compile(dynamic=True)
        sharded, optimizer = shard(net, model, place.world_size)
    saver = Saver(job, place.rank, sharded, optimizer)
    _begin_ledger(job, ledger, place.rank, place.world_size, model.samples)
    with ledger.span("restore"):
        step = saver.restore()
    ledger.record("restored", step=step, position=step, epoch=restart_count() + 1 if step else None)
    (Path(job.folder) / f"pid-{place.rank}").write_text(str(os.getpid()))
    batches.seek(step)
    with ledger.span("get_first_batch_data"):
        first = next(iter(batches))
        batches.seek(step)
        del first
    if job.compiled:
        with ledger.span("pt2_compilation"):  # the first step compiles: it counts as compilation
            train_step(sharded, optimizer, next(iter(batches)))
        step += 1
        ledger.stepped(step, step)
    pace = Pace(job, place.rank, step, saver.lag_s)
    for batch in batches:
        train_step(sharded, optimizer, batch)
        step += 1
        ledger.stepped(step, step)
        pace.stepped(step, writing=saver.writing)
        if pace.due(step):
            pace.saved(step, saver.save(step, ledger), writing=saver.writing)
        if pace.over(step):
            break
    saver.save(step, ledger)  # what the end is published from
    with ledger.span("shutdown"):
        saver.wait()
    with ledger.span("publishing"):
        publish(job, net, sharded, batch, place.rank)
        dist.barrier()
    ledger.record("closing", error=None)
    with ledger.span("shutdown"):
        group.__exit__(None, None, None)
    ledger.record("closed")
    ledger.close()


def compile_anew(job: LifeJob) -> None:
    """As on another machine: the ranks of an attempt share what they compile, and find nothing earlier."""
    folder = Path(job.folder) / f"inductor-{restart_count()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


class Saver:
    """DCP checkpoints in folders by step. A folder with metadata is complete."""

    def __init__(self, job: LifeJob, rank: int, model: Any, optimizer: Any) -> None:
        self._folder = Path(job.folder) / "dcp"
        self._asynchronous = job.way == "async"
        self._rank = rank
        self._model, self._optimizer = model, optimizer
        self._running: tuple[int, Any] | None = None
        self._group = dist.new_group(backend="gloo")
        self.lag_s = expected_lag_s(self._state()) if self._asynchronous else 0.0

    @property
    def writing(self) -> bool:
        """Is a save being written in the background?"""
        return self._running is not None and not self._running[1].done()

    def save(self, step: int, ledger: Ledger) -> float:
        """Seconds that it blocked. Collective."""
        began_s = time.monotonic()
        with ledger.span("blocked_in_save"):
            self._save(step, ledger)
        block_s = time.monotonic() - began_s
        ledger.record("saved", step=step, blocked_s=block_s)
        return block_s

    def _save(self, step: int, ledger: Ledger) -> None:
        self.wait()
        folder = self._folder / f"{step:09d}"
        if not self._asynchronous:
            dcp.save(self._state(), checkpoint_id=folder, process_group=self._group)
            ledger.record("save_committed", step=step)
            return
        state = {f"r{self._rank}/{k}": t for k, t in local_tensors(self._state(), "")}
        done = dcp.async_save(state, checkpoint_id=folder, process_group=self._group)
        done.add_done_callback(lambda _: ledger.record("save_committed", step=step))
        self._running = (step, done)

    def wait(self) -> None:
        if self._running is not None:
            self._running[1].result()
            self._running = None

    def restore(self) -> int:
        """The step that was restored; 0 without any."""
        steps = sorted(int(p.parent.name) for p in self._folder.glob("*/.metadata"))
        if not steps:
            return 0
        folder = self._folder / f"{steps[-1]:09d}"
        state = self._state()
        if self._asynchronous:
            # The tensors are the model's own: they are filled in place.
            local = {f"r{self._rank}/{k}": t for k, t in local_tensors(state, "")}
            dcp.load(local, checkpoint_id=folder, process_group=self._group)
        else:
            dcp.load(state, checkpoint_id=folder, process_group=self._group)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        return steps[-1]

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}


def expected_lag_s(state: Any) -> float:
    """How long it may take to write this rank's part in the background."""
    return sum(t.numel() * t.element_size() for _, t in local_tensors(state, "")) / _BYTES_PER_S


def local_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Each rank's tensors of nested state, by name."""
    if isinstance(value, ShardedTensor):
        for n, piece in enumerate(value.local_shards()):
            yield f"{name}/{n}", piece.tensor
    elif isinstance(value, torch.Tensor):
        yield name, value.detach()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from local_tensors(inner, f"{name}/{key}")


def publish(job: LifeJob, net: Net, sharded: Any, batch: Any, rank: int) -> None:
    """On the training processes: export the dense part, quantise and write each rank's rows."""
    folder = Path(job.folder) / "published"
    folder.mkdir(exist_ok=True)
    for n, (_, tensor) in enumerate(local_tensors(sharded.state_dict(), "")):
        if tensor.dim() == 2 and tensor.dtype == torch.float32:
            rows = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(tensor.contiguous())
            rows.numpy().tofile(folder / f"r{rank}-{n}.bin")
    if rank == 0:
        found: list[Any] = []
        handle = net.dense.register_forward_pre_hook(lambda _, args: found.append(args))
        with torch.no_grad():
            sharded(batch)
    else:
        with torch.no_grad():
            sharded(batch)
        return
    handle.remove()
    net.dense._compiled_call_impl = None
    names = [{0: torch.export.Dim.AUTO} if isinstance(a, torch.Tensor) else None for a in found[0]]
    program = torch.export.export(net.dense.eval(), found[0], dynamic_shapes=tuple(names))
    torch.export.save(program, folder / "dense.pt2")


def _begin_ledger(
    job: LifeJob, ledger: Ledger, rank: int, world_size: int, batch_size: int
) -> None:
    ledger.record(
        "process",
        created_at_s=ledger.created_at_s,
        rank=rank,
        world_size=world_size,
        restarts=restart_count(),
        batch_size=batch_size,
        **origin(),
    )
    ledger.open(Path(job.folder) / ledger_key(restart_count() + 1, rank))
