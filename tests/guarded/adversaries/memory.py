"""Memory that moves, is shared, mapped, freed or not what it seems, and processes that share it."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from tests.guarded.adversaries.jobs import (
    CPU,
    HERE,
    USERS,
    Job,
    PlainJob,
    PlainModel,
    blocks,
    loss_of,
)
from tests.guarded.adversaries.registry import BEFORE, BOTH, adversary
from tests.guarded.adversaries.spawned import add_one
from tests.guarded.adversaries.stage import Stage, WrongError

NAMES = (
    "users",
    "items",
    "t0",
    "t1",
    "row_wise",
    "table_wise",
    "column_wise",
    "top",
    "adam",
    "words",
)
CHILD_S = 8.0


def module_of(stage: Stage, job: Any) -> nn.Module:
    """What has the tables."""
    module: nn.Module = job.fused if stage.kind == "fused" else job.model
    return module


# Shared memory.


@adversary(
    "share_memory() while a save is open",
    "plain",
    "fused",
    "ranks",
    names=NAMES,
    guards=BOTH,
    worlds=(1,),
)
def shared(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    module_of(stage, job).share_memory()
    if stage.kind == "ranks":
        for kernel in job.kernels:
            kernel.share_memory()
    job.train()
    stage.save()
    job.train()


class Large(Job):
    """Two tables of 12.8 MB: their old memory is unmapped at once when they move."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleList(nn.EmbeddingBag(100_000, 32, sparse=True, **HERE) for _ in "ab")
        self.optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in self.model]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizers": self.optimizers}

    def forward(self, batch: Any = None) -> Tensor:
        ids = self.ids((8, 3), 100_000)
        return loss_of(torch.cat([m(ids) for m in self.model], 1))


@adversary(
    "share_memory() of large tables while a save is open", names=("model.0", "model.1"), guards=BOTH
)
def shared_large(stage: Stage) -> None:
    job = stage.use(Large())
    stage.save()
    job.model.share_memory()
    job.train()
    stage.save()
    job.train()


@adversary("share_memory_ on one tensor, and on optimizer state", names=NAMES, passes=BEFORE)
def shared_state(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    job.row_state.share_memory_()
    job.dense_state.share_memory_()
    job.train()
    stage.save()
    job.dense.data.share_memory_()
    job.train()


@adversary(
    "a state dict goes through a torch.multiprocessing queue",
    "plain",
    "fused",
    names=NAMES,
    guards=BOTH,
)
def queued(stage: Stage) -> None:
    """To an evaluation process: what is put there moves into shared memory."""
    import torch.multiprocessing as mp

    job = stage.job()
    context = mp.get_context("fork")
    queue = context.SimpleQueue()
    stage.save()
    tables = job.model.state_dict() if stage.kind == "plain" else job.state["fused"]
    queue.put(tables)
    child = context.Process(target=_evaluate, args=(queue,))
    child.start()
    job.train()
    child.join(CHILD_S)
    if child.exitcode != 0:
        raise WrongError(f"the evaluation process ended with {child.exitcode}")
    stage.save()
    job.train()


def _evaluate(queue: Any) -> None:
    found = queue.get()
    os._exit(0 if found else 3)


@adversary("shared before training begins", "plain", names=NAMES, passes=BEFORE)
def shared_early(stage: Stage) -> None:
    job = PlainJob("sgd")
    job.model.share_memory()
    stage.use(job)
    stage.rounds(lambda: None)


@adversary("another process writes to shared tables (Hogwild)", names=NAMES)
def hogwild(stage: Stage) -> None:
    job = PlainJob("sgd")
    job.model.share_memory()
    stage.use(job)

    def act() -> None:
        in_child(lambda: job.table.data[-5].add_(1))

    stage.around(act)


@adversary(
    "another process trains the shared model (Hogwild)", names=NAMES, right="either", passes=BEFORE
)
def hogwild_training(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    job.model.share_memory()
    stage.use(job)
    stage.rounds(lambda: in_child(job.train))


# Processes.


def in_child(act: Callable[[], Any]) -> None:
    """Fork, and do something there; raises WrongError if the child hangs, crashes or raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        code = 1
        try:
            act()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    handle = os.pidfd_open(pid)
    ready = select.select([handle], [], [], CHILD_S)[0]
    os.close(handle)
    if not ready:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise WrongError(f"a forked child hasn't ended after {CHILD_S:g} s")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise WrongError(f"a forked child ended with {code}")


@adversary(
    "a forked child trains on while a save is open", "plain", "fused", right="exact", guards=BOTH
)
def child_trains(stage: Stage) -> None:
    job = stage.job(wide=True)
    for _ in range(2):
        stage.save()
        in_child(lambda: job.train(3))
        job.train()
        in_child(lambda: job.train(2))


@adversary(
    "a forked child steps an optimizer of its own", "plain", "fused", right="exact", guards=BOTH
)
def child_steps(stage: Stage) -> None:
    """Whatever it trains: hooks are global."""
    job = stage.job(wide=True)

    def own() -> None:
        weight = nn.Parameter(torch.ones(3, **HERE))
        weight.grad = torch.ones_like(weight)
        optim.SGD([weight], lr=0.1).step()

    stage.save()
    in_child(own)
    job.train()


@adversary("a forked child looks up, evaluates and collects garbage", right="exact", passes=BEFORE)
def child_evaluates(stage: Stage) -> None:
    job = stage.job(wide=True)

    def evaluate() -> None:
        with torch.no_grad():
            job.forward()
        gc.collect()

    stage.save()
    in_child(evaluate)
    job.train()


@adversary("a forked child lets go of everything", right="exact", passes=BEFORE)
def child_lets_go(stage: Stage) -> None:
    job = stage.job(wide=True)

    def let_go() -> None:
        for keeper in stage.keepers:
            keeper.open.clear()
        stage.keepers.clear()
        stage.state = dict
        job.__dict__.clear()
        gc.collect()

    stage.save()
    in_child(let_go)
    job.train()


@adversary("a forked child saves, touches and closes", "plain", right="exact")
def child_saves(stage: Stage) -> None:
    """The checkpointer is the parent's: the child is told so, or nothing happens."""
    from ckpt.errors import SidestageError

    job = stage.job(wide=True)

    def save() -> None:
        checkpointer = stage.keeper.checkpointer
        try:
            checkpointer.save(100, job.state)
        except SidestageError:
            pass
        else:
            raise AssertionError("a child's save on its parent's checkpointer")
        checkpointer.touched(job.table, torch.tensor([3], device=CPU))
        job.train()
        checkpointer.close()

    stage.save()
    in_child(save)
    job.train()


@adversary("a forked child makes a checkpointer of its own", "plain", right="exact", guards=BOTH)
def child_has_its_own(stage: Stage) -> None:
    job = stage.job()

    def own() -> None:
        keeper = stage.another()
        keeper.save()
        job.train()
        keeper.finish()
        assert keeper.seen[-1].verdict == "exact", keeper.seen[-1]
        keeper.close()

    stage.save()
    in_child(own)
    del stage.keepers[1:]
    job.train()


@adversary("the parent trains while its forked child lives", right="exact", passes=BEFORE)
def parent_trains(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    os.close(read)
    job.train(2)
    stage.finish()
    os.close(write)
    os.waitpid(pid, 0)


@adversary("forks while persist threads copy dense state", right="exact", passes=BEFORE)
def forks_amid_copies(stage: Stage) -> None:
    """So large that the fork comes amid a copy, which no thread of the child will ever end."""
    job = stage.use(blocks({"a": lambda p: optim.SGD(p, lr=0.1)}, 16 << 20))
    for _ in range(3):
        stage.save()
        stage.keeper.gate.open()
        time.sleep(0.004)  # the copy has begun, and takes longer than this
        in_child(job.apply)
        job.train()


@adversary("a forked child waits for no copy", "plain", right="exact")
def child_needs_all(stage: Stage) -> None:
    """What it does may reach all rows, of which the parent's snapshot has only some."""
    job = stage.job(sparse="sgd")

    def act() -> None:
        loss = job.forward()
        loss.backward()
        job.users.step(lambda: loss)
        stage.keeper.checkpointer.touched(job.table)

    stage.save()
    in_child(act)
    job.train()


@adversary("a loader's worker processes start while a save is open", right="exact", passes=BEFORE)
def loader_workers(stage: Stage) -> None:
    job = stage.job(wide=True)
    data = torch.utils.data.TensorDataset(job.ids((32, 3), 1 << 20))
    stage.save()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = torch.utils.data.DataLoader(
            data, batch_size=8, num_workers=1, multiprocessing_context="fork"
        )
        for (batch,) in loader:
            job.forward(batch).backward()
            job.apply()


@adversary("a process is spawned with the tables", names=NAMES, deadline_s=40.0, passes=BEFORE)
def spawned(stage: Stage) -> None:
    """Spawned ones import torch anew; they get the memory by its name."""
    import torch.multiprocessing as mp

    job = stage.job()
    stage.save()
    context = mp.get_context("spawn")
    child = context.Process(target=add_one, args=(job.table.detach(),))
    child.start()
    child.join(30)
    if child.exitcode != 0:
        raise WrongError(f"the spawned process ended with {child.exitcode}")
    job.train()


# Mapped memory.


@adversary("parameters lie in a mapped file that another mapping writes", names=NAMES)
def mapped(stage: Stage) -> None:
    path = Path(stage.folder) / f"weights-{int(stage.part)}"
    job = PlainJob("sgd")
    size = job.table.numel()
    weight = torch.from_file(str(path), shared=True, size=size, **HERE).view(job.table.shape)
    weight.copy_(job.table.detach())
    job.model.users.weight = nn.Parameter(weight)
    job.users = optim.SGD([job.table], lr=0.1)
    job.optimizers[0] = job.users
    stage.use(job)
    other = np.memmap(path, dtype=np.float32, mode="r+", shape=tuple(weight.shape))

    def act() -> None:
        other[5] += 1
        other[-5] += 1

    stage.around(act)


@adversary("parameters made of numpy arrays that stay in use", names=NAMES)
def from_numpy(stage: Stage) -> None:
    array = np.zeros((USERS, 16), np.float32)
    job = PlainJob("sgd")
    job.model.users.weight = nn.Parameter(torch.from_numpy(array))
    job.users = optim.SGD([job.table], lr=0.1)
    job.optimizers[0] = job.users
    stage.use(job)

    def act() -> None:
        array[7] += 1
        array[-7] += 1

    stage.around(act)


@adversary("parameters in pinned memory", right="exact", guarded=True, guards=BOTH, passes=BEFORE)
def pinned(stage: Stage) -> None:
    """Where there is a device; elsewhere memory locked by hand."""
    import ctypes

    job = PlainJob("sgd")
    if torch.cuda.is_available():
        job.model.users.weight = nn.Parameter(job.table.detach().pin_memory())
        job.users = optim.SGD([job.table], lr=0.1)
        job.optimizers[0] = job.users
    else:
        libc = ctypes.CDLL(None)
        libc.mlock(ctypes.c_void_p(job.table.data_ptr()), ctypes.c_size_t(job.table.nbytes))
    stage.use(job)
    stage.rounds(lambda: None)


# Tensors that move, shrink, grow, are freed or swapped.


@adversary(
    "the model changes its dtype and back while a save is open", right="exact", passes=BEFORE
)
def half_and_back(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def act() -> None:
        job.model.double()
        job.model.float()

    stage.around(act)


@adversary("the model changes its dtype for good", passes=BEFORE)
def double_for_good(stage: Stage) -> None:
    job = stage.job(sparse="sgd", dense=optim.SGD, wide=True)
    stage.save()
    job.model.double()
    job.train()
    stage.save()
    job.train()


@adversary("a fused module is moved (.to) while a save is open", "fused", right="exact")
def fused_moved(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        job.fused.to(torch.device("cpu"))
        job.fused._apply(lambda t: t.clone())  # what a real move does to its tensors

    stage.around(act)


@adversary(
    "the model goes to another device and its memory is freed",
    names=NAMES,
    after="either",
    passes=BEFORE,
)
def to_meta(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    job.model.to("meta")
    gc.collect()
    stage.finish()
    stage.train = None


def _free_and_refill(tensors: list[Tensor], act: Callable[[], Any]) -> None:
    """Free the storages, as FSDP and offloading do, and bring the values back."""
    held = [t.detach().clone() for t in tensors]
    sizes = [t.untyped_storage().nbytes() for t in tensors]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    filler = [torch.full((t.numel(),), 7.0, **HERE) for t in held]
    act()
    del filler
    for tensor, size, value in zip(tensors, sizes, held, strict=True):
        tensor.untyped_storage().resize_(size)
        tensor.detach().copy_(value)


@adversary("storages are freed after save(), and come back later", names=NAMES, guards=BOTH)
def freed(stage: Stage) -> None:
    """They come back while the save is open, or after it has read what was there."""
    job = stage.job(wide=True)
    tensors = [job.table.data, job.row_state, job.dense.data, job.dense_state]
    stage.save()
    _free_and_refill(tensors, lambda: None)
    job.train()
    stage.save()
    _free_and_refill(tensors, stage.finish)
    job.train()


@adversary(
    "storages of a fused table are freed after save()", "fused", "ranks", names=NAMES, guards=BOTH
)
def fused_freed(stage: Stage) -> None:
    job = stage.job()
    fused = job.fused if stage.kind == "fused" else job.kernels[0]
    stage.save()
    _free_and_refill([fused.weights_host.data], lambda: None)
    job.train()
    stage.save()
    _free_and_refill([fused.weights_host.data], stage.finish)
    job.train()


@adversary(
    "large storages are freed and unmapped after save()",
    names=("model.0", "model.1"),
    passes=BEFORE,
)
def freed_large(stage: Stage) -> None:
    job = stage.use(Large())
    stage.save()
    _free_and_refill([m.weight.data for m in job.model], stage.finish)
    job.train()


@adversary("a state with freed storages is saved", right="refused", passes=BEFORE)
def saved_while_freed(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)
    for tensor in (job.table.data, job.dense.data):
        stage.finish()
        _free_and_refill([tensor], stage.save)


@adversary("tables grow while a save is open (resize_)", names=NAMES, guards=BOTH)
def grown(stage: Stage) -> None:
    """The same storage, elsewhere."""
    job = stage.job(sparse="sgd", wide=True)
    stage.save()
    for tensor in (job.table.data, job.dense.data):
        shape = tuple(tensor.shape)
        tensor.resize_(shape[0] * 3, *shape[1:])
        tensor.resize_(shape)
    job.train()
    stage.save()
    job.train()


@adversary("a vocabulary grows by replacing its table", right="exact", guarded=True)
def grown_vocabulary(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    stage.save()
    old = job.table.detach()
    more = torch.zeros((200, old.shape[1]), **HERE)
    job.model.users.weight = nn.Parameter(torch.cat([old, more]))
    job.model.users.num_embeddings += 200
    job.users = optim.SGD([job.table], lr=0.1)
    job.optimizers[0] = job.users
    del old
    gc.collect()
    job.train()
    stage.exact()
    for _ in range(3):
        stage.save()
        job.train()


@adversary(
    "a replicated tensor of the state is resized after a save", right="exact", odd=True, guards=BOTH
)
def resized(stage: Stage) -> None:
    job = PlainJob("sgd" if not stage.odd else "sparse_adam")
    job.more["history"] = torch.zeros(100, **HERE)
    stage.use(job)

    def act() -> None:
        job.more["history"].resize_(job.more["history"].numel() + 50).zero_()

    stage.around(act)


@adversary("a replicated tensor is resized with copied snapshots", right="exact", passes=BEFORE)
def resized_copied(stage: Stage) -> None:
    state = {"history": torch.zeros(100, **HERE), "n": 1}
    keeper = stage.another(snapshot="copied")
    stage.state = lambda: state
    for _ in range(3):
        keeper.save()
        state["history"].resize_(state["history"].numel() + 50).zero_()  # type: ignore[attr-defined]


@adversary("set_ puts other memory under a parameter", "plain", names=NAMES)
def set_other(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def act() -> None:
        for tensor in (job.table.data, job.dense.data):
            tensor.set_(torch.ones_like(tensor))
        with torch.no_grad():
            job.model.words.weight.set_(torch.ones_like(job.model.words.weight))

    stage.around(act)


@adversary(".data is replaced, and its old memory used again", "plain", right="exact", guards=BOTH)
def data_replaced(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def act() -> None:
        for parameter in (job.model.users.weight, job.dense):
            parameter.data = parameter.data * 0.5
        gc.collect()
        torch.full((USERS, 16), 7.0, **HERE)

    stage.around(act)


@adversary(".data is replaced, and the old tensor is written", "plain", names=NAMES)
def data_replaced_and_written(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def act() -> None:
        for parameter in (job.model.users.weight, job.dense):
            old = parameter.data
            parameter.data = old.clone()
            old.zero_()

    stage.around(act)


@adversary("swap_tensors between models while a save is open", "plain", names=NAMES, guards=BOTH)
def swapped(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)
    other = PlainModel(wide=True)

    def act() -> None:
        for name, parameter in job.model.named_parameters():
            torch.utils.swap_tensors(parameter, other.get_parameter(name))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()

    stage.around(act)


@adversary("swap_tensors of a fused table's weights", "fused", names=NAMES)
def fused_swapped(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    other = nn.Parameter(job.fused.weights_host.detach().clone())
    torch.utils.swap_tensors(job.fused.weights_host, other)
    other.data.zero_()
    job.train()
    stage.save()
    job.train()


@adversary("modules convert by swapping (torch.__future__)", names=NAMES, passes=BEFORE)
def swapping_conversion(stage: Stage) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    stage.undo(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
    job = stage.job(sparse="sgd", wide=True)
    stage.save()
    job.model.to(torch.float64)
    job.model.to(torch.float32)
    job.train()
    stage.save()
    job.train()


@adversary("two tables exchange their memory", names=("users", "others"))
def exchanged(stage: Stage) -> None:
    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.others = nn.EmbeddingBag(USERS, 16, sparse=True, **HERE)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.others(ids % USERS).sum()

    job = PlainJob("sgd", model=Model)
    job.more["others"] = optim.SGD([job.model.others.weight], lr=0.1)
    job.optimizers.append(job.more["others"])
    stage.use(job)

    def act() -> None:
        a, b = job.model.users.weight, job.model.others.weight
        a.data, b.data = b.data, a.data

    stage.around(act)


# Shapes, strides and storages that are shared.


@adversary("parameters are views of one flat buffer", right="exact", passes=BEFORE)
def flat_views(stage: Stage) -> None:
    """As in flattening optimizers: what steps is the buffer, what is saved are its views."""
    job = PlainJob("sgd", wide=True)
    parameters = [*job.model.top.parameters()]
    flat = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    at = 0
    for parameter in parameters:
        parameter.data = flat.data[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()
    job.adam = optim.Adam([flat])
    job.optimizers[2] = job.adam
    stage.use(job, settled=False)

    def train() -> None:
        job.backward()
        flat.grad = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
        job.apply()
        job.model.zero_grad()

    train()
    stage.train = train
    stage.settle()
    stage.rounds(lambda: None)


@adversary("the state has a flat buffer, optimizers its views", right="exact", passes=BEFORE)
def flat_buffer(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    parameters = [*job.model.top.parameters()]
    flat = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(flat, parameters)
    job.more["flat"] = flat
    stage.use(job)
    stage.rounds(lambda: None)


@adversary("vector_to_parameters, and the vector is written later", passes=BEFORE)
def vector_written(stage: Stage) -> None:
    job = stage.job(wide=True)
    parameters = [*job.model.top.parameters()]
    flat = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(flat, parameters)

    def act() -> None:
        flat.mul_(0.99)

    stage.around(act)


@adversary("tied weights, one the other's transpose", right="exact", passes=BEFORE)
def transposed(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    job.model.decoder = nn.ParameterDict({"w": nn.Parameter(job.dense.detach().t())})
    job.adam = optim.SGD([job.dense], lr=0.1)
    job.optimizers[2] = job.adam
    stage.use(job)
    stage.rounds(lambda: None)


@adversary("two optimizers each hold half of one storage", right="exact")
def halves(stage: Stage) -> None:
    whole = torch.randn((USERS * 2, 16), **HERE)
    job = PlainJob("sgd", wide=True)
    job.model.users.weight = nn.Parameter(whole[:USERS])
    job.users = optim.SGD([job.table], lr=0.1)
    other = nn.Parameter(whole[USERS:])
    second = optim.SGD([other], lr=0.1)
    job.optimizers[0] = job.users
    job.optimizers.append(second)
    job.more |= {"second": second, "other": nn.ParameterDict({"w": other})}
    stage.use(job)

    def act() -> None:
        other.grad = torch.ones_like(other)

    stage.rounds(act)


@adversary("overlapping parameters of one storage", names=NAMES)
def overlapping(stage: Stage) -> None:
    job = PlainJob("sgd")
    overlap = nn.Parameter(job.table.detach()[100:400])
    second = optim.SGD([overlap], lr=0.1)
    job.more |= {"second": second, "overlap": nn.ParameterDict({"w": overlap})}
    stage.use(job)

    def act() -> None:
        overlap.grad = torch.ones_like(overlap)
        second.step()

    stage.around(act)


@adversary("an optimizer outside of the state holds a table's alias", names=NAMES)
def outside_alias(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    alias = nn.Parameter(job.table.detach())
    outside = optim.SGD([alias], lr=0.1)

    def act() -> None:
        alias.grad = torch.ones_like(alias)
        outside.step()

    stage.around(act)


@adversary(
    "expanded, strided, empty, scalar and conjugate tensors",
    right="exact",
    odd=False,
    guards=BOTH,
    passes=BEFORE,
)
def odd_shapes(stage: Stage) -> None:
    job = PlainJob("sparse_adam")
    base = torch.arange(64, **HERE)
    job.more["odd"] = {
        "expanded": torch.ones((1, 4), **HERE).expand(8, 4),
        "strided": base.view(8, 8)[::2, 1::3],
        "transposed": base.view(8, 8).t(),
        "overlapping": base.as_strided((4, 4), (1, 1)),
        "empty": torch.zeros((0, 4), **HERE),
        "scalar": torch.tensor(1.0, **HERE),
        "conjugate": torch.zeros(4, dtype=torch.complex64, device=CPU).conj(),
        "negative": torch.zeros(4, dtype=torch.complex64, device=CPU).conj().imag,
        "channels": torch.zeros((2, 3, 4, 4), **HERE).to(memory_format=torch.channels_last),
        "bytes": torch.zeros(5, dtype=torch.uint8, device=CPU),
        "truth": torch.zeros(5, dtype=torch.bool, device=CPU),
        "brain": torch.zeros(5, dtype=torch.bfloat16, device=CPU),
        "fp8": torch.zeros(5, dtype=torch.float8_e4m3fn, device=CPU),
    }
    stage.use(job)

    def act() -> None:
        base.add_(1)
        for name in ("scalar", "channels", "bytes", "brain"):
            job.more["odd"][name].add_(1)

    stage.around(act)


@adversary("strided parameters under an optimizer", right="exact", passes=BEFORE)
def strided_parameters(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    wide = nn.Parameter(torch.randn((600, 1000), **HERE)[:, ::2].t())
    conv = nn.Conv2d(32, 32, 9, **HERE).to(memory_format=torch.channels_last)
    second = optim.Adam([wide, *conv.parameters()])
    job.more |= {"w": nn.ParameterDict({"w": wide}), "conv": conv, "second": second}
    job.optimizers.append(second)
    stage.use(job)

    def act() -> None:
        for parameter in (wide, *conv.parameters()):
            parameter.grad = torch.ones_like(parameter)

    stage.rounds(act)


@adversary("a state that can't be stored", right="refused", after="exact", passes=BEFORE)
def not_storable(stage: Stage) -> None:
    job = stage.job()
    bad = {
        "sparse": torch.zeros((4, 4), **HERE).to_sparse(),
        "meta": torch.zeros(4, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.zeros(4, **HERE), 1.0, 0, torch.quint8),
        "nested": torch.nested.nested_tensor([torch.zeros(2, **HERE)], device=CPU),
        "lazy": nn.parameter.UninitializedParameter(device=CPU),
    }
    for name, value in bad.items():
        job.more["bad"] = {name: value}
        stage.save()
        job.train()
    job.more.clear()


@adversary("inference tensors in the state", "plain", right="exact", passes=BEFORE)
def inference_tensors(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    with torch.inference_mode():
        job.more["scores"] = torch.zeros(100, **HERE)
    stage.use(job)

    def act() -> None:
        with torch.inference_mode():
            job.more["scores"].add_(1)

    stage.around(act)


@adversary("parameters made in inference mode, edited there", names=("codes",), passes=BEFORE)
def inference_parameters(stage: Stage) -> None:
    """They have no counter."""
    job = PlainJob(wide=True)
    with torch.inference_mode():
        codes = torch.zeros((3000, 32), **HERE)
    job.more["codes"] = codes
    stage.use(job, settled=False)
    job.train()
    job.adam.state[job.dense]["codes"] = codes
    stage.settle()

    def act() -> None:
        with torch.inference_mode():
            codes[-7] += 1

    stage.around(act)


# What saving leaves behind.


@adversary(
    "collection is off, and gradients are made anew", "plain", "fused", right="exact", guards=BOTH
)
def no_collection(stage: Stage) -> None:
    """What a save kept is gone when it has ended, without a garbage collector."""
    job = stage.job(wide=True)
    stage.save()
    job.train()
    stage.finish()
    gc.collect()
    gc.disable()
    stage.undo(gc.enable)
    held = []
    for _ in range(5):
        stage.save()
        job.train()
        stage.finish()
        held.append(_tensor_bytes())
    if all(a < b for a, b in itertools.pairwise(held)):
        raise WrongError(
            f"bytes of living tensors grow from save to save without collections: {held}"
        )


def _tensor_bytes() -> int:
    storages = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided:
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


@adversary(
    "the state is gone when its save has ended", "plain", "fused", right="exact", passes=BEFORE
)
def let_go(stage: Stage) -> None:
    """A checkpointer keeps no model alive."""
    import weakref

    job = stage.job(wide=True)
    stage.save()
    job.train()
    stage.finish()
    watched = [weakref.ref(job.model), *map(weakref.ref, job.optimizers)]
    watched += [weakref.ref(job.fused)] if stage.kind == "fused" else []
    job.__dict__.clear()
    del job
    gc.collect()
    left = [w() for w in watched if w() is not None]
    if left:
        raise WrongError(f"still alive: {[type(x).__name__ for x in left]}")
    stage.train = None


@adversary("tables move between saves", "plain", "fused", right="exact", guarded=True, guards=BOTH)
def moved_between(stage: Stage) -> None:
    job = stage.job()
    for _ in range(3):
        stage.finish()
        if stage.kind == "plain":
            job.model.users.weight.data = job.model.users.weight.data.clone()
        else:
            job.fused._apply(lambda t: t.clone())
        stage.save()
        job.train()


@adversary("a deep copy of the model trains on", "plain", "fused", right="exact", passes=BEFORE)
def deep_copy(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    if stage.kind == "plain":
        model = copy.deepcopy(job.model)
        optimizer = optim.SGD([model.users.weight, model.items.weight], lr=0.5)
        for _ in range(2):
            loss_of(model(job.batch())).backward()
            optimizer.step()
    else:
        fused = copy.deepcopy(job.fused)
        for _ in range(2):
            loss_of(job.model(fused(*job.batch()))).backward()
    job.train()
