"""What is saved by whom and when: several models, checkpointers and threads, and wrappers of all kinds."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from ckpt import PerRank
from tests.guarded.adversaries.jobs import (
    CPU,
    HERE,
    USERS,
    WAYS,
    FusedJob,
    PlainJob,
    PlainModel,
    RankedJob,
    batched,
    loss_of,
    tables,
)
from tests.guarded.adversaries.registry import BEFORE, BOTH, adversary
from tests.guarded.adversaries.stage import FINISH_S, Stage, WrongError

NAMES = ("users", "items", "top", "words", "norm", "t0", "t1", *WAYS)


@adversary(
    "nothing but training",
    "plain",
    "fused",
    "ranks",
    right="exact",
    guarded=True,
    odd=True,
    guards=BOTH,
)
def training(stage: Stage) -> None:
    stage.job()
    stage.rounds(lambda: None)


@adversary(
    "nothing but training, dense part and all",
    "plain",
    "fused",
    right="exact",
    odd=True,
    guards=BOTH,
)
def training_wide(stage: Stage) -> None:
    stage.job(wide=True)
    stage.rounds(lambda: None)


@adversary(
    "saved from the first step on, without a restore", "plain", "fused", right="exact", guards=BOTH
)
def from_the_first(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    stage.guard(*job.guarded)
    for _ in range(4):
        stage.save()
        job.train()


@adversary("default device and dtype change while a save is open", right="exact", guards=BOTH)
def defaults_change(stage: Stage) -> None:
    job = stage.job(sparse="sparse_adam", wide=True)
    for device, dtype in (("meta", torch.float32), ("cpu", torch.float64), ("meta", torch.half)):
        stage.save()
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        job.train()
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@adversary("a device context around everything", "plain", "fused", right="exact", guards=BOTH)
def device_context(stage: Stage) -> None:
    with torch.device("meta"):
        stage.job(**({"sparse": "sparse_adam"} if stage.kind == "plain" else {}))
        stage.rounds(lambda: None)
        stage.finish()


@adversary("read back and restored under another default device", right="exact", passes=BEFORE)
def restored_under_meta(stage: Stage) -> None:
    from ckpt import Checkpointer

    job = stage.job(sparse="sparse_adam")
    stage.save()
    job.train()
    stage.finish()
    again = PlainJob("sparse_adam")
    again.train()
    with torch.device("meta"), Checkpointer(stage.keeper.storage) as restoring:
        restoring.restore(again.state)
    stage.train = None


@adversary("restored, with lookups that are pending", "plain", "fused", right="exact", guarded=True)
def restored(stage: Stage) -> None:
    first = stage.job()
    stage.save()
    first.train()
    stage.keeper.close()
    storage = stage.keepers.pop().storage
    job = stage.job(settled=False)
    job.train()
    keeper = stage.another(storage)
    keeper.step = 10
    keeper.checkpointer.restore(job.state)
    loss = job.forward()
    stage.guard(*job.guarded)
    stage.save()
    loss.backward()
    job.apply()
    for _ in range(3):
        stage.save()
        job.train()


# Which objects make up the state.


@adversary(
    "dicts of live tensors that were made once", "plain", "fused", names=NAMES, passes=BEFORE
)
def made_once(stage: Stage) -> None:
    """The same dict at each save; nothing else is ever shown."""
    job = stage.job(settled=False, wide=True)
    job.train()
    held = {
        "model": job.model.state_dict(),
        "adam": job.adam.state_dict(),
        **({"fused": tables(job.fused)} if stage.kind == "fused" else {}),
    }
    stage.state = lambda: held
    for _ in range(4):
        stage.save()
        job.train()


@adversary("state dicts only, of model and optimizers", right="exact", guards=BOTH)
def state_dicts(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    stage.state = lambda: {
        "model": job.model.state_dict(),
        "optimizers": [o.state_dict() for o in job.optimizers],
    }
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("modules, without the optimizers that train them", right="exact", passes=BEFORE)
def without_optimizers(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    stage.state = lambda: {"model": job.model}
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("optimizers, without their modules", right="exact", passes=BEFORE)
def without_modules(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    stage.state = lambda: {"optimizers": job.optimizers, "table": job.table, "w": job.dense}
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("tables under two keys", "plain", "fused", right="exact", guarded=True, guards=BOTH)
def two_keys(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    inner = stage.state
    stage.state = lambda: {
        "again": {"table": job.table.detach(), "dense": job.dense.detach()},
        **inner(),
        "more": [job.table.detach(), job.row_state],
        "view": job.table.detach()[10:20],
    }
    job.train()
    stage.settle(*job.guarded)
    stage.rounds(lambda: None)


@adversary("DCP's own state dicts, made at each save", right="exact", passes=BEFORE)
def dcp_state_dicts(stage: Stage) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600, **HERE), nn.Linear(600, 600, **HERE))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    job = PlainJob()

    def train() -> None:
        loss_of(model(torch.randn((4, 600), generator=job.generator(), **HERE))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    stage.state = state
    stage.train = train
    train()
    stage.settle()
    stage.rounds(lambda: None)


class App:
    """State in an object of its own, made anew by each save."""

    def __init__(self, job: Any) -> None:
        self.model, self.optimizers = job.model, job.optimizers
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        return {
            "model": {k: v for k, v in self.model.state_dict().items() if "top" in k},
            "halves": {k: v.half() for k, v in self.model.state_dict().items() if "norm" in k},
            "table": self.model.users.weight,
            "optimizers": [o.state_dict() for o in self.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


@adversary("an object whose state_dict makes things up", right="exact", passes=BEFORE)
def made_up(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    app = App(job)
    stage.state = lambda: {"app": app}
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("state_dict hooks that convert, and one that writes first", right="exact", passes=BEFORE)
def state_dict_hooks(stage: Stage) -> None:
    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.register_state_dict_pre_hook(self.write)
            self.register_state_dict_post_hook(self.convert)

        @staticmethod
        @torch.no_grad()
        def write(module: Any, *_: Any) -> None:
            module.words.weight[0] = 0.5
            module.users.weight[0] = 0.5

        @staticmethod
        def convert(_m: Any, state: dict[str, Any], prefix: str, _meta: Any) -> None:
            state[f"{prefix}norm.running_mean"] = state[f"{prefix}norm.running_mean"].double()

    stage.use(PlainJob(model=Model, wide=True))
    stage.rounds(lambda: None)


@adversary(
    "extra state, buffers that don't persist, lazy and frozen modules", right="exact", passes=BEFORE
)
def odd_modules(stage: Stage) -> None:
    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.register_buffer("scratch", torch.zeros(9, **HERE), persistent=False)
            self.lazy = nn.LazyLinear(4, **HERE)
            self.lazy(torch.zeros((1, 3), **HERE))
            self.frozen = nn.Linear(4, 4, **HERE).requires_grad_(False)
            self.calls = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"calls": self.calls, "t": torch.tensor([self.calls], device=CPU)}

        def set_extra_state(self, state: Any) -> None: ...

        def forward(self, ids: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(ids)

    stage.use(PlainJob(model=Model, wide=True))
    stage.rounds(lambda: None)


@adversary("state in PerRank", "plain", "ranks", right="exact", passes=BEFORE, worlds=(2,))
def per_rank(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    inner = stage.state
    own = torch.zeros(5, **HERE)
    stage.state = lambda: {**inner(), "mine": PerRank({"r": stage.rank, "t": own})}
    job.train()
    stage.settle()
    stage.rounds(lambda: own.add_(stage.rank + 1))


# Structures that change between saves.


@adversary(
    "tables come, go and are replaced between saves", right="exact", guarded=True, guards=BOTH
)
def tables_change(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    stage.save()
    job.train()
    job.model.more = nn.EmbeddingBag(700, 8, sparse=True, **HERE)
    extra = optim.SparseAdam([job.model.more.weight])
    job.more["extra"] = extra
    for _ in range(2):
        stage.save()
        job.model.more(job.ids((8, 3), 700)).sum().backward()
        extra.step()
        job.train()
    del job.model.more, job.more["extra"]
    gc.collect()
    stage.save()
    job.train()
    job.model.users = nn.EmbeddingBag(USERS, 16, sparse=True, **HERE)
    job.users = optim.SGD([job.table], lr=0.1)
    job.optimizers[0] = job.users
    for _ in range(2):
        stage.save()
        job.train()


@adversary("a module is replaced while a save is open", right="exact")
def replaced_amid(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def act() -> None:
        job.model.users = nn.EmbeddingBag(USERS, 16, sparse=True, **HERE)
        job.users = optim.SGD([job.table], lr=0.1)
        job.optimizers[0] = job.users
        gc.collect()

    stage.around(act)


@adversary("a whole new model takes the old one's place", "plain", "fused", right="exact")
def new_model(stage: Stage) -> None:
    stage.job()
    for _ in range(2):
        stage.save()
        other = stage.job(settled=False)
        gc.collect()
        other.train()
        stage.finish()
        stage.guard(*other.guarded)


@adversary("one table is shared by two modules, then isn't", right="exact")
def untied(stage: Stage) -> None:
    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.again = nn.EmbeddingBag(USERS, 16, sparse=True, **HERE)
            self.again.weight = self.users.weight

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.again((ids * 3) % USERS).mean()

    job = PlainJob("sgd", model=Model)
    stage.use(job)
    stage.save()
    job.train()
    job.model.again.weight = nn.Parameter(job.table.detach().clone())
    job.optimizers.append(optim.SGD([job.model.again.weight], lr=0.1))
    job.more["again"] = job.optimizers[-1]
    job.train()
    stage.save()
    job.train()


@adversary("sparse becomes dense and back (module.sparse)", right="exact", passes=BEFORE)
def sparse_flag(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    stage.save()
    job.model.users.sparse = False
    job.train()
    stage.save()
    job.train()
    job.model.users.sparse = True
    job.train()


# Several models, several checkpointers.


@adversary("three models in one state", right="exact", guarded=True, passes=BEFORE)
def three_models(stage: Stage) -> None:
    jobs = [PlainJob("sgd"), PlainJob("sparse_adam"), PlainJob("adagrad", wide=True)]
    stage.state = lambda: {f"j{n}": j.state for n, j in enumerate(jobs)}

    def train() -> None:
        for job in jobs:
            job.train()

    stage.train = train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary(
    "two checkpointers on one model",
    "plain",
    "fused",
    "ranks",
    right="exact",
    guards=BOTH,
    worlds=(2,),
)
def two_checkpointers(stage: Stage) -> None:
    job = stage.job(wide=stage.kind != "ranks")
    second = stage.another()
    second.guard(*job.guarded)
    for _ in range(3):
        second.save()
        job.train()
    for _ in range(2):
        stage.save()
        job.train()
        second.save()
        job.train()
        stage.finish()
        stage.save()
        job.train()


@adversary("a second checkpointer that copies", right="exact", guarded=True, passes=BEFORE)
def second_copies(stage: Stage) -> None:
    job = stage.job()
    second = stage.another(snapshot="copied")
    for _ in range(2):
        stage.save()
        second.save()
        job.train()


@adversary("checkpointers come and go on one model", "plain", "fused", right="exact")
def come_and_go(stage: Stage) -> None:
    job = stage.job()
    for _ in range(3):
        other = stage.another()
        other.guard(*job.guarded)
        other.save()
        job.train()
        stage.save()
        other.close()
        stage.keepers.remove(other)
        job.train()


@adversary("each checkpointer has a part of the model", right="exact", passes=BEFORE)
def parted(stage: Stage) -> None:
    job = stage.job(wide=True)
    second = stage.another()
    stage.state = lambda: {"users": job.model.users, "o": job.users}
    for _ in range(4):
        stage.save()
        second.save({"top": job.model.top, "items": job.model.items, "adam": job.adam})
        job.train()
    second.finish()


@adversary("an edit that only one of two checkpointers is told of", names=NAMES)
def told_one(stage: Stage) -> None:
    job = stage.job()
    second = stage.another()
    for _ in range(3):
        second.save()
        job.train()
    rows = torch.tensor([3], device=CPU)
    stage.save()
    second.save()
    stage.touched(job.table, rows)
    with torch.no_grad():
        job.table[rows] += 1
    job.train()


@adversary("several saves are open at a time", "plain", "fused", right="exact", guards=BOTH)
def several_open(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    keeper = stage.another(max_pending=4)
    assert keeper is stage.keeper
    job.train()
    stage.settle(*job.guarded)
    for _ in range(2):
        for _ in range(4):
            keeper.save(beside=True)
            job.train()
        keeper.finish()


@adversary("an edit while several saves are open", "plain", "fused", names=NAMES)
def edited_amid_several(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    keeper = stage.another(max_pending=4)
    job.train()
    stage.settle(*job.guarded)
    for n in range(4):
        keeper.save(beside=True)
        job.train()
        if n == 1:
            with torch.no_grad():
                job.table[-7] += 1
    keeper.finish()


@adversary("saves are given up for newer ones (coalesce)", right="exact")
def coalesced(stage: Stage) -> None:
    from ckpt.errors import SaveSkippedError

    job = stage.job(settled=False, wide=True)
    keeper = stage.another(max_pending=2, when_busy="coalesce")
    job.train()
    stage.settle()
    for _ in range(5):
        keeper.save(beside=True)
        job.train()
    given_up = [
        one
        for one in keeper.open[1:-1]
        if isinstance(one[2].committed.exception(FINISH_S), SaveSkippedError)
    ]
    if stage.seed is None and len(given_up) != 3:
        raise WrongError(f"{len(given_up)} saves were given up, not 3")
    keeper.open = [one for one in keeper.open if one not in given_up]


# When it is saved.


@adversary("saved inside a step's hooks", names=NAMES)
def saved_in_hooks(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    for register in (job.users.register_step_post_hook, job.users.register_step_pre_hook):
        handle = register(lambda *_: stage.save() and None)
        job.train()
        handle.remove()
        job.train()


@adversary("saved inside backward", "plain", "fused", names=NAMES)
def saved_in_backward(stage: Stage) -> None:
    job = stage.job()
    handle = job.model.top[2].weight.register_hook(lambda _: stage.save() and None)
    job.train()
    handle.remove()
    job.train()


@adversary("saved inside forward", "plain", "fused", right="exact")
def saved_in_forward(stage: Stage) -> None:
    job = stage.job()
    handle = job.model.top.register_forward_pre_hook(lambda *_: stage.save() and None)
    job.train()
    handle.remove()
    job.train()


@adversary("saved on a fused output's gradient, right before the update", "fused", names=NAMES)
def saved_before_update(stage: Stage) -> None:
    job = stage.job()

    def backward() -> None:
        pooled = job.fused(*job.batch())
        pooled.register_hook(lambda _: stage.save() and None)
        loss_of(job.model(pooled)).backward()

    for _ in range(2):
        backward()
        job.train()


@adversary("saved on another thread than trains", "plain", "fused", right="exact")
def saved_elsewhere(stage: Stage) -> None:
    job = stage.job(wide=True)
    for _ in range(2):
        thread = threading.Thread(target=stage.save)
        thread.start()
        thread.join()
        job.train(2)
        stage.finish()


@adversary("two threads train two models", right="exact", passes=BEFORE)
def two_threads(stage: Stage) -> None:
    jobs = [PlainJob("sgd"), PlainJob("adagrad")]
    stage.state = lambda: {f"j{n}": j.state for n, j in enumerate(jobs)}

    def train() -> None:
        threads = [threading.Thread(target=j.train) for j in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    stage.train = train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("another thread edits rows while this one trains", names=NAMES)
def thread_edits(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        def edit() -> None:
            with torch.no_grad():
                job.table[9] += 1
            job.table.data[11] += 1

        thread = threading.Thread(target=edit)
        thread.start()
        thread.join()

    stage.around(act)


@adversary("another thread evaluates while this one trains", "plain", "fused", right="exact")
def thread_evaluates(stage: Stage) -> None:
    job = stage.job()
    ending = threading.Event()
    batches = [job.batch() for _ in range(8)]

    def evaluate() -> None:
        n = 0
        while not ending.is_set():
            with torch.no_grad():  # the tables only: statistics of a forward pass would change
                job.model.users(batches[n % 8] % USERS) if stage.kind == "plain" else job.fused(
                    *batches[n % 8]
                )
            n += 1

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        stage.rounds(lambda: None)
        stage.finish()
    finally:
        ending.set()
        thread.join()


@adversary("a step fails, and training goes on", "plain", "fused", right="exact", passes=BEFORE)
def failed_steps(stage: Stage) -> None:
    job = stage.job(wide=True)

    def act() -> None:
        handle = job.dense.register_hook(_fail)
        with contextlib.suppress(KeyboardInterrupt):
            job.train()
        handle.remove()
        job.model.zero_grad()

    stage.around(act)


def _fail(_: Tensor) -> None:
    raise KeyboardInterrupt


@adversary(
    "the checkpointer is closed, another one goes on",
    "plain",
    "fused",
    right="exact",
    guards=BOTH,
    passes=BEFORE,
)
def closed_and_new(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    job.train()
    first = stage.keeper
    first.close()
    stage.keepers.remove(first)
    job.train()
    stage.guard(*job.guarded)
    for _ in range(3):
        stage.save()
        job.train()


# Wrappers of torch.


@adversary("functional_call with parameters of its own", right="exact", passes=BEFORE)
def functional_call(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)
    copies = {n: p.detach().clone().requires_grad_() for n, p in job.model.named_parameters()}

    def act() -> None:
        own = dict(job.model.named_parameters())
        loss_of(torch.func.functional_call(job.model, copies, (job.batch(),))).backward()
        loss_of(torch.func.functional_call(job.model, own, (job.batch(),))).backward()
        job.apply()

    stage.rounds(act)


@adversary("an ensemble under vmap", right="exact", passes=BEFORE)
def vmapped(stage: Stage) -> None:
    models = [nn.Linear(300, 500, **HERE) for _ in range(4)]
    parameters, buffers = torch.func.stack_module_state(models)
    optimizer = optim.Adam(parameters.values())
    bare = copy.deepcopy(models[0]).to("meta")
    job = PlainJob()

    def forward(p: Any, b: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(bare, (p, b), (x,))

    def train() -> None:
        x = torch.randn((8, 300), generator=job.generator(), **HERE)
        out = torch.vmap(forward, in_dims=(0, 0, None))(parameters, buffers, x)
        loss_of(out).backward()
        optimizer.step()
        optimizer.zero_grad()

    stage.state, stage.train = lambda: {"p": parameters, "b": buffers, "o": optimizer}, train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("gradients and updates by torch.func", passes=BEFORE)
def functional_gradients(stage: Stage) -> None:
    model = nn.Linear(1000, 1200, **HERE)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    job = PlainJob()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(model, parameters, (x,)))

    def train() -> None:
        own = {n: p.detach() for n, p in model.named_parameters()}
        x = torch.randn((8, 1000), generator=job.generator(), **HERE)
        found = torch.func.grad(loss)(own, x)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(0.1 * found[name])

    stage.state, stage.train = lambda: {"m": model, "o": optimizer}, train
    for _ in range(4):
        stage.save()
        train()


@adversary(
    "autocast and a scaler", "plain", "fused", "ranks", right="exact", guarded=True, worlds=(1,)
)
def autocast(stage: Stage) -> None:
    job = stage.job()
    inner = job.backward

    def backward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inner()

    job.backward = backward
    stage.rounds(lambda: None)


@adversary("averaged copies: EMA and SWA", right="exact", odd=True, guards=BOTH, passes=BEFORE)
def averaged(stage: Stage) -> None:
    from torch.optim import swa_utils

    job = PlainJob("sgd" if not stage.odd else "sparse_adam", wide=True)
    ema = swa_utils.AveragedModel(
        job.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    mean = swa_utils.AveragedModel(job.model)
    rate = swa_utils.SWALR(job.adam, swa_lr=0.01)
    job.more |= {"ema": ema, "mean": mean, "rate": rate}
    stage.use(job)

    def act() -> None:
        ema.update_parameters(job.model)
        mean.update_parameters(job.model)
        rate.step()

    stage.rounds(act)


@adversary("batch statistics are updated anew for an average", right="exact", passes=BEFORE)
def updated_statistics(stage: Stage) -> None:
    from torch.optim import swa_utils

    job = PlainJob("sgd", wide=True)
    mean = swa_utils.AveragedModel(job.model)
    job.more["mean"] = mean
    stage.use(job)

    def act() -> None:
        mean.update_parameters(job.model)
        swa_utils.update_bn([job.batch() for _ in range(2)], mean)
        swa_utils.update_bn([job.batch() for _ in range(2)], job.model)

    stage.around(act)


@adversary("an average whose parameters an optimizer holds", right="either", passes=BEFORE)
def average_in_optimizer(stage: Stage) -> None:
    from torch.optim import swa_utils

    job = PlainJob("sgd", wide=True)
    mean = swa_utils.AveragedModel(job.model, avg_fn=lambda a, b, _: a.lerp_(b, 0.1))
    job.more["mean"] = mean
    job.adam.add_param_group({"params": [*mean.module.top.parameters()]})
    stage.use(job, settled=False)
    job.train()
    stage.rounds(lambda: mean.update_parameters(job.model), 3)


@adversary(
    "DistributedDataParallel with buckets as views",
    "ranks",
    right="exact",
    passes=BEFORE,
    worlds=(2,),
)
def ddp(stage: Stage) -> None:
    from torch.nn.parallel import DistributedDataParallel

    job = PlainJob("sgd", wide=True)
    wrapped = DistributedDataParallel(job.model, gradient_as_bucket_view=True)
    job.forward = lambda batch=None: loss_of(wrapped(job.batch() if batch is None else batch))
    inner = stage_state(job)
    stage.state = lambda: {**inner(), "model": wrapped}
    stage.train = job.train
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


def stage_state(job: Any) -> Callable[[], dict[str, Any]]:
    return lambda: job.state


@adversary(
    "DistributedDataParallel with a communication hook and a static graph",
    "ranks",
    right="exact",
    passes=BEFORE,
    worlds=(2,),
)
def ddp_hook(stage: Stage) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    job = PlainJob("sgd", wide=True)
    wrapped = DistributedDataParallel(job.model, static_graph=True)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    job.forward = lambda batch=None: loss_of(wrapped(job.batch() if batch is None else batch))
    stage.state, stage.train = stage_state(job), job.train
    job.train()
    stage.settle()

    def accumulate() -> None:
        with wrapped.no_sync():
            job.backward()
        job.train()

    stage.rounds(accumulate)


@adversary(
    "tables under DistributedDataParallel", "ranks", right="exact", passes=BEFORE, worlds=(2,)
)
def ddp_tables(stage: Stage) -> None:
    """Every rank changes the rows of all."""
    from torch.nn.parallel import DistributedDataParallel

    job = PlainJob("adagrad")
    job.model.norm = nn.BatchNorm1d(32, track_running_stats=False, **HERE)
    wrapped = DistributedDataParallel(job.model)
    job.adam = optim.Adam([*job.model.top.parameters(), *job.model.norm.parameters()])
    job.optimizers[2] = job.adam

    def forward(_: Any = None) -> Tensor:
        batch = (job.batch() + 17 * stage.rank) % (1 << 20)
        return loss_of(wrapped(batch))

    job.forward = forward  # type: ignore[method-assign]
    stage.state, stage.train = stage_state(job), job.train
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary(
    "batch statistics that differ by rank",
    "ranks",
    worlds=(2,),
    right="refused",
    names=("norm.running_mean",),
    after="either",
    passes=BEFORE,
)
def statistics_differ(stage: Stage) -> None:
    """As under DistributedDataParallel between a forward pass and the next."""
    job = PlainJob("sgd")
    stage.state = stage_state(job)
    job.forward((job.batch() + 17 * stage.rank) % (1 << 20))
    for _ in range(2):
        stage.save()


@adversary("FSDP2 (fully_shard)", "ranks", right="exact", passes=BEFORE, worlds=(2,))
def fsdp2(stage: Stage) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 768, **HERE),
        nn.ReLU(),
        nn.Linear(768, 768, **HERE),
        nn.Linear(768, 4, **HERE),
    )
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    job = PlainJob()

    def train() -> None:
        x = torch.randn((8, 512), generator=job.generator(), **HERE)
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    stage.state, stage.train = lambda: {"model": model, "optimizer": optimizer}, train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary(
    "FSDP2: parameters are gathered and freed between saves", "ranks", passes=BEFORE, worlds=(2,)
)
def fsdp2_gathered(stage: Stage) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 768, **HERE), nn.Linear(768, 768, **HERE))
    fully_shard(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    job = PlainJob()

    def train() -> None:
        x = torch.randn((8, 512), generator=job.generator(), **HERE)
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def act() -> None:
        model.unshard()
        model.reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(0.999)  # type: ignore[attr-defined]

    stage.state, stage.train = lambda: {"model": model, "optimizer": optimizer}, train
    train()
    stage.settle()
    stage.around(act)


@adversary(
    "an optimizer whose state lies on other ranks (ZeRO)",
    "ranks",
    right="exact",
    passes=BEFORE,
    worlds=(2,),
)
def zero(stage: Stage) -> None:
    """It isn't in the state: its state dict would be a collective of its own."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    job = PlainJob("sgd", wide=True)
    dense = [p for g in job.adam.param_groups for p in g["params"]]
    sharded = ZeroRedundancyOptimizer(dense, optimizer_class=optim.Adam, lr=0.01)
    job.optimizers[2] = sharded
    stage.state = lambda: {"model": job.model, "users": job.users, "items": job.items}
    stage.train = job.train
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("ranks drift apart in a tensor that all have", "ranks", worlds=(2,), names=("drift",))
def drift(stage: Stage) -> None:
    """What is committed is one rank's; the others'd get back what they never had."""
    job = stage.job(settled=False)
    drifting = torch.zeros(5, **HERE)
    inner = stage.state
    stage.state = lambda: {**inner(), "drift": drifting}
    job.train()
    stage.settle()
    stage.save()
    job.train()
    stage.finish()
    drifting += stage.rank
    stage.save()
    job.train()
    stage.finish()
    drifting.zero_()


@adversary("one rank edits by hand, others don't", "ranks", worlds=(2,), names=WAYS)
def one_rank_edits(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        if stage.rank == 0:
            with torch.no_grad():
                job.table[5] += 1

    stage.around(act)


@adversary("ranks train a different number of steps", "ranks", worlds=(2,), right="exact")
def uneven(stage: Stage) -> None:
    """Between two saves one rank's persist thread is far ahead of the other's."""
    import torch.distributed as dist

    job = stage.job()
    for _ in range(2):
        stage.save()
        if stage.rank == 1:
            stage.keeper.gate.open()
        dist.barrier()
        job.train(3)


@adversary("a replicated model beside a sharded one", "ranks", right="exact", worlds=(2,))
def beside(stage: Stage) -> None:
    sharded = RankedJob(ways=("row_wise",))
    plain = PlainJob("sgd")
    stage.state = lambda: {"sharded": sharded.state, "plain": plain.state}

    def train() -> None:
        sharded.train()
        plain.train()

    stage.train = train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary(
    "deterministic algorithms, anomaly detection and profiling", right="exact", passes=BEFORE
)
def debugging(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def act() -> None:
        with torch.autograd.detect_anomaly(check_nan=False):
            job.train()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            job.train()

    torch.use_deterministic_algorithms(True, warn_only=True)
    stage.undo(lambda: torch.use_deterministic_algorithms(False))
    stage.around(act)


@adversary("a dispatch mode sees everything", "plain", "fused", right="exact", passes=BEFORE)
def dispatch_mode(stage: Stage) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    job = stage.job()
    with Sees():
        stage.rounds(lambda: None)
        stage.finish()
    job.train()


@adversary("tensors of a subclass", right="exact", passes=BEFORE)
def subclasses(stage: Stage) -> None:
    class Tagged(Tensor):
        pass

    class Own(nn.Parameter):
        pass

    job = PlainJob("sgd", wide=True)
    job.more["tagged"] = torch.zeros(5, **HERE).as_subclass(Tagged)
    job.model.own = Own(torch.zeros((1100, 1100), **HERE))
    own = optim.SGD([job.model.own], lr=0.1)
    job.more["own"] = own
    job.optimizers.append(own)
    stage.use(job)

    def act() -> None:
        job.more["tagged"].add_(1)
        job.model.own.grad = torch.ones_like(job.model.own)

    stage.rounds(act)


@adversary(
    "a fused module in two states under two names",
    "fused",
    right="exact",
    guarded=True,
    passes=BEFORE,
)
def fused_twice(stage: Stage) -> None:
    job = FusedJob()
    other = batched("EXACT_SGD")
    job.more["other"] = tables(other)
    job.guarded = (job.fused, other, {"again": job.fused})
    stage.use(job)
    stage.rounds(lambda: loss_of(other(*job.batch())).backward())
