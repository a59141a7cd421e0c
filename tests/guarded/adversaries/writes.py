"""Edits by hand: in place, past torch's counters, announced rightly and wrongly, at any moment."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim

from tests.guarded.adversaries.jobs import (
    CPU,
    F32,
    FUSED_NAMES,
    HERE,
    WAYS,
    FusedJob,
    MixedJob,
    PlainJob,
    PlainModel,
    batched,
    blocks,
    fused_tables,
    sparse_tables,
    tables,
)
from tests.guarded.adversaries.registry import BEFORE, BOTH, Kind, adversary
from tests.guarded.adversaries.stage import Stage

NAMES = ("users", "top.2.weight", "adam.state", "t0", "t1", *WAYS)

# Ways to write some values of a tensor. Torch counts those of COUNTED, and none of UNCOUNTED.


def _rows(t: Tensor) -> Tensor:
    return torch.tensor([3, 9], device=CPU)


def _part(t: Tensor) -> Tensor:
    return torch.full((2, t.shape[1]), 0.25, **HERE) if t.dim() > 1 else torch.full((2,), 0.25)


def ends(t: Tensor) -> slice:
    """A row that is copied early, and one that is copied late."""
    return slice(5, None, t.shape[0] - 8)


def set_item(t: Tensor) -> None:
    t[ends(t)] = t[ends(t)] * 0.5 + 0.125


def arithmetic(t: Tensor) -> None:
    t.mul_(0.999).add_(0.001)


def by_index(t: Tensor) -> None:
    t.index_add_(0, _rows(t), _part(t))
    t.index_copy_(0, _rows(t) + 1, _part(t))
    t.index_fill_(0, _rows(t) + 2, 0.5)
    t.index_put_((_rows(t) + 3,), torch.tensor(0.5, **HERE), accumulate=True)


def by_mask(t: Tensor) -> None:
    mask = torch.zeros(t.shape, dtype=torch.bool, device=CPU)
    mask[4] = True
    t.masked_fill_(mask, 0.75)
    t.masked_scatter_(mask, torch.full((t[4].numel(),), 0.5, **HERE))


def by_scatter(t: Tensor) -> None:
    where = torch.zeros((1, *t.shape[1:]), dtype=torch.long, device=CPU) + 6
    t.scatter_(0, where, 0.5)
    t.scatter_add_(0, where, torch.ones(where.shape, **HERE))


def copied_over(t: Tensor) -> None:
    t.copy_(t * 0.5)


def same_values(t: Tensor) -> None:
    """No byte changes: whatever is told of it, what is committed is right."""
    t.copy_(t.clone())


def initialised(t: Tensor) -> None:
    nn.init.normal_(t[:40], std=0.1)


def foreach(t: Tensor) -> None:
    torch._foreach_mul_([t[2:3]], 0.5)


def out_argument(t: Tensor) -> None:
    torch.add(t[7:8], 1.0, out=t[7:8])


def through_views(t: Tensor) -> None:
    t.view(torch.int32)[8] = 1
    t.t()[0, 11] = 0.5
    t.as_strided((3,), (1,), t.storage_offset() + 2).zero_()
    t.unsqueeze(0).chunk(2, 1)[0].select(1, 1).fill_(0.5)


def in_inference(t: Tensor) -> None:
    with torch.inference_mode():
        t[5] += 1


COUNTED = (
    *(set_item, arithmetic, by_index, by_mask, by_scatter, copied_over, same_values, initialised),
    *(foreach, out_argument, through_views, in_inference),
)


def data_row(t: Tensor) -> None:
    t.data[ends(t)] += 0.125


def data_all(t: Tensor) -> None:
    t.data.mul_(0.999)


def one_value(t: Tensor) -> None:
    t.data.view(-1)[81] += 1


def last_value(t: Tensor) -> None:
    t.data.view(-1)[-1] += 1


def sign_of_zero(t: Tensor) -> None:
    """Equal by value, not by bytes: the row must have been zero."""
    t.data[5] *= -1.0


def numpy_view(t: Tensor) -> None:
    t.detach().numpy()[ends(t)] += 0.125


def numpy_operation(t: Tensor) -> None:
    array = np.asarray(t.detach())
    np.multiply(array[20:30], 0.5, out=array[20:30])


def dlpack(t: Tensor) -> None:
    torch.from_dlpack(t.detach())[ends(t)] += 0.125


def buffer(t: Tensor) -> None:
    view = memoryview(t.detach().numpy()).cast("B")
    view[640] ^= 1


def by_address(t: Tensor) -> None:
    byte = ctypes.c_uint8.from_address(t.data_ptr() + 640)
    ctypes.memset(t.data_ptr() + 640, byte.value ^ 1, 1)


def storage_bytes(t: Tensor) -> None:
    storage = t.untyped_storage()
    storage[640 + t.storage_offset() * 4] ^= 1


def apply_python(t: Tensor) -> None:
    t[5].apply_(lambda x: x + 1)


def another_alias(t: Tensor) -> None:
    """A tensor of its own on the same storage: what counts is its own counter."""
    alias = torch.empty(0, **HERE).set_(t.untyped_storage(), t.storage_offset(), t.shape)
    alias[ends(t)] += 0.125


def preserved_counter(t: Tensor) -> None:
    """FSDP hides its writes from autograd in this way."""
    with torch.autograd._unsafe_preserve_version_counter(t):
        t[ends(t)] += 0.125


def set_back_counter(t: Tensor) -> None:
    version = t._version
    t[ends(t)] += 0.125
    torch._C._autograd._unsafe_set_version_counter((t,), (version,))


def below_counters(t: Tensor) -> None:
    with torch._C._AutoDispatchBelowADInplaceOrView():
        t[ends(t)].add_(1)


UNCOUNTED = (
    *(data_row, data_all, one_value, last_value, sign_of_zero, numpy_view, numpy_operation, dlpack),
    *(buffer, by_address, storage_bytes, apply_python, another_alias, preserved_counter),
    *(set_back_counter, below_counters),
)


# One table, or one matrix, for each way: what was written to may be copied from then on.


def _name(way: Callable[[Tensor], None]) -> str:
    return way.__name__.replace("_", " ")


def _each_way(
    stage: Stage, targets: Mapping[str, Tensor], ways: Iterable[Callable[[Tensor], None]]
) -> None:
    """A save for each way, and the write right after it."""
    for way, target in zip(ways, targets.values(), strict=True):
        stage.save(label=_name(way))
        with torch.no_grad():
            way(target)
        assert stage.train is not None
        stage.train()


def _tables(kind: Kind, ways: Iterable[Any]) -> MixedJob:
    """A table for each way, made so that the sign of a zero row can change."""
    if kind == "plain":
        return sparse_tables({_name(w): lambda p: optim.Adagrad(p, lr=0.1) for w in ways})
    return fused_tables({_name(w): batched for w in ways})


def _written(what: str, ways: tuple[Callable[[Tensor], None], ...]) -> None:
    names = tuple(_name(w) for w in ways)

    @adversary(f"rows written {what}", "plain", "fused", names=(*names, *FUSED_NAMES), guards=BOTH)
    def rows(stage: Stage) -> None:
        job = stage.use(_tables(stage.kind, ways))
        weights = {
            name: tables(part.module)["t0"]["weight"]
            if part.optimizer is None
            else part.module.weight.detach()
            for name, part in job.parts.items()
        }
        if sign_of_zero in ways:
            weights[_name(sign_of_zero)][5] = 0.0
        _each_way(stage, weights, ways)

    @adversary(f"optimizer state of rows written {what}", names=names, passes=BEFORE)
    def states(stage: Stage) -> None:
        job = stage.use(_tables("plain", ways))
        held = {n: p.optimizer.state[p.module.weight]["sum"] for n, p in job.parts.items()}
        if sign_of_zero in ways:
            held[_name(sign_of_zero)][5] = 0.0
        _each_way(stage, held, ways)

    @adversary(f"parameters written {what}", names=names, passes=BEFORE)
    def parameters(stage: Stage) -> None:
        # Fenced, and all of it compared at each save.
        job = stage.use(blocks({_name(w): optim.Adam for w in ways}, 400_000 // len(ways)))
        weights = {n: p.module.weight.detach() for n, p in job.parts.items()}
        if sign_of_zero in ways:
            weights[_name(sign_of_zero)][5] = 0.0
        _each_way(stage, weights, ways)

    @adversary(f"optimizer state written {what}", names=names, passes=BEFORE)
    def moments(stage: Stage) -> None:
        job = stage.use(blocks({_name(w): optim.Adam for w in ways}, 400_000 // len(ways)))
        held = {n: p.optimizer.state[p.module.weight]["exp_avg"] for n, p in job.parts.items()}
        if sign_of_zero in ways:
            held[_name(sign_of_zero)][5] = 0.0
        _each_way(stage, held, ways)


_written("in place, as torch counts", COUNTED)
_written("past torch's counters", UNCOUNTED[:8])
_written("at their address", UNCOUNTED[8:])


@adversary(
    "a row written in place", "plain", "fused", "ranks", worlds=(1,), names=NAMES, guards=BOTH
)
def one_row_counted(stage: Stage) -> None:
    job = stage.job()
    stage.around(torch.no_grad()(lambda: set_item(job.table.detach())))


@adversary(
    "a row written through .data", "plain", "fused", "ranks", names=NAMES, odd=True, guards=BOTH
)
def one_row_uncounted(stage: Stage) -> None:
    job = stage.job()
    stage.around(lambda: data_row(job.table))


# Timing: at every step, at every second one, right before the row is trained.


def _edited_every(steps: int) -> None:
    often = "each step" if steps == 1 else f"every {steps} steps"
    on: tuple[Kind, ...] = ("plain", "fused", "ranks") if steps == 1 else ("plain", "fused")

    @adversary(f"one row edited in place after {often}", *on, names=NAMES)
    def edit(stage: Stage) -> None:
        job = stage.job()

        def act() -> None:
            job.train(steps - 1)
            with torch.no_grad():
                job.table[-7] += 1

        stage.rounds(act, 2, 3)


for _steps in (1, 2, 3):
    _edited_every(_steps)


@adversary(
    "one row edited in place after each step from the first",
    "plain",
    "fused",
    "ranks",
    names=NAMES,
    worlds=(1,),
)
def edited_from_the_first(stage: Stage) -> None:
    """What is learnt of a table while it is edited may be wrong."""
    job = stage.job(settled=False)
    stage.guard(*job.guarded)

    def edit() -> None:
        with torch.no_grad():
            job.table[-7] += 1

    edit()
    for _ in range(5):
        stage.save()
        job.train()
        edit()


@adversary(
    "an edit of a fused table that has no name", "fused", names=("nameless.",), passes=BEFORE
)
def nameless(stage: Stage) -> None:
    """What is said of it names the state's key then."""
    job = FusedJob(table_names=None)
    stage.use(job)
    stage.state = lambda: {"nameless": tables(job.fused), "model": job.model, "adam": job.adam}
    stage.save()
    job.table[ends(job.table)] = 1
    job.train()
    stage.save()
    job.table.data.mul_(0.5)
    job.train()


@adversary(
    "a hidden write to the very rows that training changes next", "plain", "fused", guards=BOTH
)
def hidden_under_training(stage: Stage) -> None:
    """What the overlay then keeps as the old row is the edited one."""
    job = stage.job()
    for _ in range(2):
        stage.save()
        batch = job.batch()
        rows = batch % job.table.shape[0] if stage.kind == "plain" else batch[0][:24]
        job.table.data[rows.flatten()] += 1
        job.forward(batch).backward()
        job.apply()


@adversary("a hidden write between a lookup and its update", "plain", "fused", guards=BOTH)
def hidden_between(stage: Stage) -> None:
    job = stage.job()
    for _ in range(2):
        batch = job.batch()
        rows = batch % job.table.shape[0] if stage.kind == "plain" else batch[0][:24]
        loss = job.forward(batch)
        stage.save()
        job.table.data[rows.flatten()[:1]] += 1
        loss.backward()
        job.apply()


@adversary("a write that is undone before it's copied", "plain", "fused", names=NAMES)
def undone(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    for tensor in (job.table.data, job.dense.data):
        old = tensor.clone()
        tensor.zero_()
        tensor.copy_(old)
    job.train()


@adversary("a row changes to and fro, in view of the copying", "plain", "fused", names=NAMES)
def to_and_fro(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    for sign in (1, -1, 1):
        job.table.data[1500 % job.table.shape[0]] += sign
        job.train()


@adversary(
    "a hidden write to another row in each of many saves",
    "plain",
    "fused",
    names=NAMES,
    passes=BEFORE,
)
def hidden_again_and_again(stage: Stage) -> None:
    """Each refused one is followed by quiet ones, so that trust may come back."""
    job = stage.job()
    rows = job.ids((12,), job.table.shape[0]).tolist()
    for row in rows:
        stage.save()
        job.table.data[row] += 1
        job.train()
        stage.save()
        job.train()


# Announced, rightly and wrongly.


@adversary(
    "announced rows are edited", "plain", "fused", "ranks", right="exact", guarded=True, guards=BOTH
)
def announced(stage: Stage) -> None:
    job = stage.job()
    rows = torch.tensor([3, 5, 8], device=CPU)

    def act() -> None:
        stage.touched(job.table, rows)
        with torch.no_grad():
            job.table[rows] = 0.5
        job.table.data[rows] += 1

    stage.around(act)


@adversary("announced by mask, by view and whole", "plain", "fused", right="exact", guards=BOTH)
def announced_otherwise(stage: Stage) -> None:
    job = stage.job(wide=True)
    mask = torch.zeros(job.table.shape[0], dtype=torch.bool, device=CPU)
    mask[10:20] = True

    def act() -> None:
        stage.touched(job.table, mask)
        job.table.data[mask] += 1
        stage.touched(job.table.detach()[30:40])
        job.table.data[30:40] += 1
        stage.touched(job.dense)
        job.dense.data.mul_(0.9)
        stage.touched(job.table)
        job.table.data.mul_(0.9)

    stage.around(act)


@adversary(
    "other rows than those announced",
    "plain",
    "fused",
    "ranks",
    names=NAMES,
    guards=BOTH,
    worlds=(1,),
)
def announced_wrongly(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        stage.touched(job.table, torch.tensor([3], device=CPU))
        with torch.no_grad():
            job.table[3:5] = 0.5

    stage.around(act)


@adversary("announced after the edit", "plain", "fused", names=NAMES)
def announced_late(stage: Stage) -> None:
    job = stage.job()
    rows = torch.tensor([3], device=CPU)

    def act() -> None:
        job.table.data[rows] += 1
        stage.touched(job.table, rows)

    stage.around(act)


@adversary("counted, and announced after the edit", "plain", "fused", names=NAMES)
def counted_late(stage: Stage) -> None:
    job = stage.job()
    rows = torch.tensor([3], device=CPU)

    def act() -> None:
        with torch.no_grad():
            job.table[rows] += 1
        stage.touched(job.table, rows)

    stage.around(act)


@adversary("announced before the save, edited after it", "plain", "fused", names=NAMES)
def announced_early(stage: Stage) -> None:
    job = stage.job()
    rows = torch.tensor([3], device=CPU)
    for _ in range(2):
        stage.touched(job.table, rows)
        stage.save()
        with torch.no_grad():
            job.table[rows] += 1
        job.train()


@adversary("announced once, edited again after a step", "plain", "fused", names=NAMES)
def announced_once(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    stage.touched(job.table, torch.tensor([3], device=CPU))
    for row in (3, 4):
        with torch.no_grad():
            job.table[row] += 1
        job.train()


@adversary("announcing what isn't in the state, or has no rows", right="exact", guarded=True)
def announced_nothing(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    stage.touched(torch.zeros((3, 4), **HERE))
    stage.touched(torch.zeros((0, 4), **HERE))
    stage.touched(job.table, torch.tensor([], dtype=torch.long, device=CPU))
    stage.touched(job.table[:0])
    job.train()


# What trainers do to modules.


@adversary(
    "load_state_dict while a save is open", "plain", names=("users", "items", "top"), guards=BOTH
)
def loaded(stage: Stage) -> None:
    job = stage.job(wide=True)
    other = PlainModel(wide=True).state_dict()
    stage.around(lambda: job.model.load_state_dict(other))


@adversary(
    "load_state_dict of a sharded model while a save is open", "ranks", names=NAMES, worlds=(2,)
)
def loaded_sharded(stage: Stage) -> None:
    job = stage.job()
    held = copy.deepcopy(job.model.state_dict())
    job.train()
    # A copy each time: TorchRec takes keys out of what it's given.
    stage.around(lambda: job.model.load_state_dict(copy.deepcopy(held)))


@adversary("load_state_dict with assign while a save is open", right="exact", passes=BEFORE)
def assigned(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    job.model.load_state_dict(PlainModel(wide=True).state_dict(), assign=True)
    job.forward()
    stage.train = None


@adversary(
    "modules are initialised anew", names=("users", "items", "words", "norm", "top"), passes=BEFORE
)
def initialised_anew(stage: Stage) -> None:
    job = stage.job(wide=True)

    def reset(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    stage.around(lambda: job.model.apply(reset))


@adversary("a fused module is initialised anew", "fused", "ranks", names=NAMES, worlds=(1,))
def fused_initialised(stage: Stage) -> None:
    job = stage.job()
    fused = job.fused if stage.kind == "fused" else job.kernels[0]
    stage.around(lambda: fused.init_embedding_weights_uniform(-0.1, 0.1))


@adversary("a fused module's own load_state_dict", "fused", names=NAMES)
def fused_loaded(stage: Stage) -> None:
    job = stage.job()
    held = copy.deepcopy(job.fused.state_dict())
    stage.around(lambda: job.fused.load_state_dict(held))


@adversary("weights are clipped after each step", passes=BEFORE)
def clipped_weights(stage: Stage) -> None:
    job = stage.job(wide=True)

    def clip() -> None:
        for parameter in job.model.top.parameters():
            parameter.data.clamp_(-0.02, 0.02)

    stage.rounds(clip, 3)


@adversary("a table's rows are normalised after each step", "plain", "fused", names=NAMES)
def normalised(stage: Stage) -> None:
    job = stage.job()
    stage.rounds(lambda: job.table.data.div_(job.table.data.norm(dim=1, keepdim=True) + 1e-6))


@adversary("pruning, and its removal", passes=BEFORE)
def pruned(stage: Stage) -> None:
    from torch.nn.utils import prune

    job = stage.job(wide=True)
    stage.save()
    prune.l1_unstructured(job.model.top[2], "weight", amount=0.5)
    job.train()
    stage.save()
    job.train()
    prune.remove(job.model.top[2], "weight")
    stage.save()
    job.train()


@adversary("a table is pruned", names=("users",), passes=BEFORE)
def pruned_table(stage: Stage) -> None:
    from torch.nn.utils import prune

    job = stage.job()
    stage.save()
    prune.random_unstructured(job.model.users, "weight", amount=0.5)
    job.forward()
    stage.save()
    prune.remove(job.model.users, "weight")
    job.forward()
    stage.train = None


@adversary("weight and spectral norm as parametrisations", right="exact", passes=BEFORE)
def parametrised(stage: Stage) -> None:
    from torch.nn.utils import parametrizations

    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            parametrizations.weight_norm(self.top[0])
            parametrizations.spectral_norm(self.top[2])

    stage.use(PlainJob(model=Model, wide=True))
    stage.rounds(lambda: None)


@adversary("a parametrisation appears while a save is open", passes=BEFORE)
def parametrised_late(stage: Stage) -> None:
    from torch.nn.utils import parametrizations

    job = stage.job(wide=True)
    stage.save()
    parametrizations.orthogonal(job.model.top[0])
    job.train()
    stage.save()
    job.train()


@adversary("lookups that renormalise rows (max_norm)", right="exact", guards=BOTH)
def max_norm(stage: Stage) -> None:
    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.users.max_norm = 0.5
            self.words.max_norm = 0.5

    stage.use(PlainJob(model=Model, wide=True))
    stage.rounds(lambda: None)


@adversary("max_norm appears while a save is open", names=("users", "words"))
def max_norm_appears(stage: Stage) -> None:
    job = stage.job(wide=True)
    stage.save()
    job.model.users.max_norm = job.model.words.max_norm = 0.5
    job.train()
    stage.save()
    job.train()


@adversary("functional lookups that renormalise a guarded table", names=("users",))
def functional_renorm(stage: Stage) -> None:
    job = stage.job()
    rows = torch.arange(50, device=CPU)

    def act() -> None:
        nn.functional.embedding(rows, job.table.detach(), max_norm=0.1)
        torch.embedding_renorm_(job.table.detach(), rows + 50, 0.1, 2.0)

    stage.around(act)


@adversary("averaged weights are swapped in for evaluation", passes=BEFORE)
def swapped_for_evaluation(stage: Stage) -> None:
    job = stage.job(wide=True)
    average = [p.detach().clone() for p in job.model.top.parameters()]

    def evaluate() -> None:
        own = [p.detach().clone() for p in job.model.top.parameters()]
        with torch.no_grad():
            for parameter, mean in zip(job.model.top.parameters(), average, strict=True):
                parameter.copy_(mean)
            job.forward()
            for parameter, mine in zip(job.model.top.parameters(), own, strict=True):
                parameter.copy_(mine)

    stage.rounds(evaluate, 3)


@adversary("averaged weights are swapped in through .data", passes=BEFORE)
def data_swapped_for_evaluation(stage: Stage) -> None:
    job = stage.job(wide=True)
    average = [p.detach().clone() * 0.5 for p in job.model.top.parameters()]

    def evaluate() -> None:
        own = [p.data for p in job.model.top.parameters()]
        for parameter, mean in zip(job.model.top.parameters(), average, strict=True):
            parameter.data = mean
        with torch.no_grad():
            job.forward()
        for parameter, mine in zip(job.model.top.parameters(), own, strict=True):
            parameter.data = mine

    def stay() -> None:
        """A save that is opened while they are in."""
        for parameter, mean in zip(job.model.top.parameters(), average, strict=True):
            parameter.data = mean.clone()

    stage.rounds(evaluate)
    stage.save()
    stay()
    job.train()


@adversary("low-rank updates are merged and taken out again", passes=BEFORE)
def merged(stage: Stage) -> None:
    job = stage.job(wide=True)
    a, b = torch.randn((job.dense.shape[0], 4), **HERE), torch.randn((4, 256), **HERE)

    def evaluate() -> None:
        job.dense.data += a @ b
        job.forward()
        job.dense.data -= a @ b

    stage.rounds(evaluate, 3)


@adversary("weights are quantised in place after each step", passes=BEFORE)
def quantised(stage: Stage) -> None:
    job = stage.job(wide=True)

    def quantise() -> None:
        for parameter in job.model.top.parameters():
            scale = parameter.data.abs().max() / 127
            parameter.data.div_(scale).round_().mul_(scale)

    stage.rounds(quantise, 3)


@adversary("written through a parameter that shares a table's memory", names=("users", "tied"))
def tied(stage: Stage) -> None:
    job = PlainJob("sgd")
    alias = nn.Parameter(job.table.detach())
    job.model.tied = nn.ParameterDict({"t": alias})
    stage.use(job)
    stage.around(torch.no_grad()(lambda: alias[ends(alias)].add_(1)))


@adversary("a codebook that follows by hand, inside forward", passes=BEFORE)
def codebook(stage: Stage) -> None:
    """As in vector-quantised models: a parameter of the optimizer without a gradient."""

    class Model(PlainModel):
        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.codes = nn.Parameter(torch.randn((3000, 32), **HERE))

        def forward(self, ids: Tensor) -> Tensor:
            out = super().forward(ids)
            self.codes.data[ids[:, 0] % 3000] *= 0.9
            return out

    stage.use(PlainJob(model=Model, wide=True))
    stage.rounds(lambda: None, 3)


@adversary("a memory bank whose rows forward overwrites", right="exact", passes=BEFORE)
def memory_bank(stage: Stage) -> None:
    class Model(PlainModel):
        queue: Tensor

        def __init__(self, *, wide: bool = False) -> None:
            super().__init__(wide=wide)
            self.register_buffer("queue", torch.zeros((3000, 32), **HERE))
            self.at = 0

        def forward(self, ids: Tensor) -> Tensor:
            out = super().forward(ids)
            self.queue[self.at : self.at + 8] = float(self.at) + 1
            self.at = (self.at + 8) % 3000
            return out

    stage.use(PlainJob(model=Model, wide=True))
    stage.rounds(lambda: None)


@adversary("a frozen table that is edited by hand", right="exact", passes=BEFORE)
def frozen(stage: Stage) -> None:
    job = PlainJob("sgd")
    job.model.frozen = nn.Embedding(500, 8, sparse=True, **HERE).requires_grad_(False)
    stage.use(job)
    stage.around(lambda: job.model.frozen.weight.data.mul_(0.5))


@adversary("plain values and small tensors change right after save()", right="exact", passes=BEFORE)
def values(stage: Stage) -> None:
    job = PlainJob("sgd")
    job.more["progress"] = {"step": 0, "seen": [1, 2], "best": torch.zeros(3, dtype=F32)}
    stage.use(job)

    def act() -> None:
        job.more["progress"]["step"] += 1
        job.more["progress"]["seen"].append(3)
        job.more["progress"]["best"] += 1

    stage.around(act)


@adversary("fused state is edited through its own tensors", "fused", names=NAMES)
def fused_parameters(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        with torch.no_grad():
            job.fused.weights_host.view(-1)[8:16] += 1

    stage.around(act)
    stage.save()
    job.fused.momentum1_host.data[3] += 1
    job.train()
    stage.save()
    tables(job.fused)["t1"]["m0"].data[5] += 1
    job.train()


@adversary("parameters are averaged over ranks", "ranks", worlds=(2,))
def averaged_over_ranks(stage: Stage) -> None:
    """Collectives write in place, and not all of them count."""
    import torch.distributed as dist

    job = stage.job(wide=True)

    def average() -> None:
        for name, parameter in job.model.named_parameters():
            if ".top." in name:
                parameter.data.mul_(0.5)
                dist.all_reduce(parameter.data)

    stage.rounds(average, 3)


@adversary("a table is overwritten by a broadcast", "ranks", names=NAMES, guards=BOTH, worlds=(2,))
def broadcast(stage: Stage) -> None:
    """Each rank's own part, with what rank 0 has of it."""
    import torch.distributed as dist

    job = stage.job()

    def act() -> None:
        row = job.table.detach()[-4]
        row.data.add_(1)
        dist.broadcast(row, 0)

    stage.around(act)


@adversary("received in place from another rank", "ranks", names=NAMES, worlds=(2,))
def received(stage: Stage) -> None:
    import torch.distributed as dist

    job = stage.job()
    sent = torch.full((DIM_OF_RANKS,), 0.5, **HERE)

    def act() -> None:
        if stage.rank == 0:
            dist.send(sent, 1)
            dist.recv(job.table.detach()[-2], 1)
        else:
            dist.recv(job.table.detach()[-2], 0)
            dist.send(sent, 0)

    stage.around(act)


DIM_OF_RANKS = 8  # the first table of a kernel may be a part of columns: see `RankedJob.table`
