"""Lookups of fused tables, whose backward pass is their step: compiled, called past hooks, read ahead."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from tests.guarded.adversaries.jobs import (
    BAG,
    BATCH,
    CPU,
    DIM,
    FUSED,
    HERE,
    ROWS,
    WAYS,
    FusedJob,
    FusedModel,
    PlainJob,
    RankedModel,
    batched,
    fused_tables,
    lookups,
    loss_of,
    tables,
)
from tests.guarded.adversaries.registry import BEFORE, BOTH, adversary
from tests.guarded.adversaries.stage import Stage

NAMES = ("t0", "t1", *WAYS)


# Whoever lists a fused table, and wherever: it's memory that a backward pass changes.


@adversary(
    "a state of tensors and an optimizer over all parameters",
    "ranks",
    right="exact",
    guards=BOTH,
    worlds=(1,),
)
def tensors_only(stage: Stage) -> None:
    job = stage.job(settled=False, wide=True)
    every = optim.Adam(job.model.parameters(), lr=0.0)
    stage.state = lambda: {"model": job.model.state_dict(), "opt": every}
    for _ in range(4):
        stage.save()
        job.backward()
        job.apply()


@adversary("the same of a bare embedding, never shown", "fused", right="exact", guards=BOTH)
def never_shown(stage: Stage) -> None:
    job = stage.use(FusedJob(wide=True), settled=False)
    every = optim.Adam([*job.model.parameters(), *job.fused.parameters()])
    job.optimizers = [every]
    stage.state = lambda: {"model": job.model, "fused": tables(job.fused), "opt": every}
    for _ in range(4):
        stage.save()
        job.train()


@adversary(
    "a table that forward averages, under another optimizer", "fused", right="exact", passes=BEFORE
)
def averaged_under_adam(stage: Stage) -> None:
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe

    mode = tbe.EmainplaceModeDefinition(step_ema=1, step_start=0, step_ema_coef=0.6)
    job = stage.use(
        FusedJob("EMAINPLACE_ROWWISE_ADAGRAD", emainplace_mode=mode, wide=True), settled=False
    )
    every = optim.Adam([*job.model.parameters(), *job.fused.parameters()])
    job.optimizers = [every]
    stage.state = lambda: {"model": job.model, "fused": tables(job.fused), "opt": every}
    for _ in range(3):
        stage.save()
        job.train()


@adversary(
    "whole memory of a fused module beside its tables",
    "fused",
    right="exact",
    guarded=True,
    passes=BEFORE,
)
def whole_memory(stage: Stage) -> None:
    job = FusedJob()
    job.more["memory"] = {"weights": job.fused.weights_host, "m": job.fused.momentum1_host}
    stage.use(job)
    stage.rounds(lambda: None)


@adversary("the fused module itself is in the state", "fused", right="exact", passes=BEFORE)
def itself(stage: Stage) -> None:
    job = FusedJob()
    job.more["module"] = job.fused
    job.guarded = ()
    stage.use(job)
    stage.rounds(lambda: None)


@adversary(
    "tensors of tables only, and nothing is shown",
    "fused",
    "ranks",
    right="exact",
    guards=BOTH,
    worlds=(1,),
)
def unshown(stage: Stage) -> None:
    job = stage.job(settled=False)
    if stage.kind == "fused":
        stage.state = lambda: tables(job.fused)
    else:
        stage.state = job.model.state_dict
    for _ in range(4):
        stage.save()
        job.train()


@adversary("shown only after some saves", "fused", right="exact", guarded=True, passes=BEFORE)
def shown_late(stage: Stage) -> None:
    job = stage.job(settled=False)
    for n in range(6):
        stage.finish()
        if n == 2:
            stage.guard(job.fused)
        stage.save()
        job.train()


@adversary("shown while a save is open", "fused", right="exact")
def shown_amid(stage: Stage) -> None:
    job = stage.job(settled=False)
    for _ in range(4):
        stage.save()
        job.backward()
        stage.guard(job.fused)
        job.apply()
        job.train()


@adversary("parts of a sharded model's state", "ranks", right="exact", worlds=(2,))
def parts_of_state(stage: Stage) -> None:
    job = stage.job(settled=False)
    parts: list[Callable[[], Any]] = [
        lambda: {"m": job.model.module},
        lambda: {"m": job.model.state_dict(), "o": job.optimizer.state_dict()},
        lambda: {"o": job.model.fused_optimizer},
        lambda: {"t": job.model.state_dict()["tables.embedding_bags.row_wise.weight"]},
    ]
    for state in parts:
        keeper = stage.another()
        stage.state = state
        for _ in range(3):
            keeper.save()
            job.train()
        keeper.finish()
    stage.train = None


# Compiled, scripted, exported.


class Whole(nn.Module):
    """Lookup and dense part in one."""

    def __init__(self, job: FusedJob) -> None:
        super().__init__()
        self.fused, self.rest = job.fused, job.model

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return loss_of(self.rest(self.fused(ids, offsets)))


def _compiled(stage: Stage, job: FusedJob, forward: Callable[..., Tensor], saves: int = 4) -> None:
    """Trains with another forward from now on, for good: its last saves must be exact."""

    def train() -> None:
        forward(*job.batch()).backward()
        job.apply()

    stage.train = train
    for _ in range(saves):
        stage.save()
        train()
        train()


@adversary(
    "torch.compile of a bare embedding, after we attached", "fused", deadline_s=60.0, guards=BOTH
)
def compiled_after(stage: Stage) -> None:
    job = stage.job()
    fused = torch.compile(job.fused, backend="eager")
    _compiled(stage, job, lambda *b: loss_of(job.model(fused(*b))))


@adversary(
    "torch.compile of a bare embedding, before we attach", "fused", deadline_s=60.0, passes=BEFORE
)
def compiled_before(stage: Stage) -> None:
    job = stage.job(settled=False)
    fused = torch.compile(job.fused, backend="eager")
    job.backward = lambda: loss_of(job.model(fused(*job.batch()))).backward()
    job.train()
    stage.guard(job.fused)
    for _ in range(5):
        stage.save()
        job.train(2)


@adversary("torch.compile of lookups with the dense part", "fused", deadline_s=60.0, passes=BEFORE)
def compiled_whole(stage: Stage) -> None:
    job = stage.job()
    _compiled(stage, job, torch.compile(Whole(job), backend="eager"))


@adversary(
    "the state holds the compiled module", "fused", deadline_s=60.0, slow=True, passes=BEFORE
)
def compiled_in_state(stage: Stage) -> None:
    job = stage.job(settled=False)
    whole = torch.compile(Whole(job), backend="eager")
    stage.state = lambda: {"whole": whole, "tables": tables(job.fused), "adam": job.adam}
    _compiled(stage, job, whole)


@adversary(
    "a compiled function calls the embedding", "fused", deadline_s=60.0, slow=True, passes=BEFORE
)
def compiled_function(stage: Stage) -> None:
    job = stage.job()

    @torch.compile(backend="aot_eager")
    def forward(ids: Tensor, offsets: Tensor) -> Tensor:
        return loss_of(job.model(job.fused(ids, offsets)))

    _compiled(stage, job, forward)


@adversary("module.compile() in place", "fused", deadline_s=60.0, passes=BEFORE)
def compiled_in_place(stage: Stage) -> None:
    job = stage.job()
    job.fused.compile(backend="eager")
    _compiled(stage, job, lambda *b: loss_of(job.model(job.fused(*b))))


@adversary(
    "backward under compiled autograd", "fused", right="exact", deadline_s=60.0, passes=BEFORE
)
def compiled_autograd(stage: Stage) -> None:
    job = stage.job()

    def train() -> None:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            job.backward()
        job.apply()

    stage.train = train
    for _ in range(3):
        stage.save()
        train()


@adversary("torch.jit.script of a bare embedding", "fused", deadline_s=60.0, passes=BEFORE)
def scripted(stage: Stage) -> None:
    job = stage.job()
    fused = torch.jit.script(job.fused)
    _compiled(stage, job, lambda *b: loss_of(job.model(fused(*b))))


@adversary("scripted before we attach", "fused", deadline_s=60.0, passes=BEFORE)
def scripted_before(stage: Stage) -> None:
    job = stage.job(settled=False)
    fused = torch.jit.script(job.fused)
    job.backward = lambda: loss_of(job.model(fused(*job.batch()))).backward()
    job.train()
    stage.guard(job.fused)
    for _ in range(5):
        stage.save()
        job.train(2)


@adversary("torch.compile of a sharded model", "ranks", deadline_s=60.0, worlds=(1,), passes=BEFORE)
def compiled_sharded(stage: Stage) -> None:
    job = stage.job(ways=("row_wise",), even=True)
    model = torch.compile(job.model, backend="eager")

    def train() -> None:
        model(job.batch())[0].backward()
        job.apply()

    stage.train = train
    for _ in range(4):
        stage.save()
        train()
        train()


@adversary(
    "a sharded model's compile(), from the first step",
    "ranks",
    deadline_s=60.0,
    worlds=(1,),
    slow=True,
    passes=BEFORE,
)
def compiled_sharded_early(stage: Stage) -> None:
    job = stage.job(settled=False, ways=("row_wise",), even=True)
    job.model.compile(backend="eager")
    job.train()
    for _ in range(5):
        stage.save()
        job.train(2)


@adversary(
    "compiled kernels in a sharded model", "ranks", deadline_s=60.0, worlds=(1,), passes=BEFORE
)
def compiled_kernels(stage: Stage) -> None:
    job = stage.job(ways=("row_wise",), even=True)
    for kernel in job.kernels:
        kernel.compile(backend="eager")
    for _ in range(4):
        stage.save()
        job.train(2)


@adversary(
    "torch.compile of a model of plain tables", right="exact", deadline_s=60.0, passes=BEFORE
)
def compiled_plain(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    model = torch.compile(job.model, backend="eager")

    def train() -> None:
        loss_of(model(job.batch())).backward()
        job.apply()

    stage.train = train
    stage.rounds(lambda: None)


# Past the hooks.


@adversary("forward is called directly", "fused", "ranks", right="exact", guards=BOTH)
def direct_forward(stage: Stage) -> None:
    job = stage.job(settled=False)
    stage.guard(*job.guarded)
    if stage.kind == "fused":
        job.backward = lambda: loss_of(job.model(job.fused.forward(*job.batch()))).backward()
    else:
        for module in job.model.modules():
            for lookup in getattr(module, "_lookups", ()):
                _call_directly(lookup)
    for _ in range(4):
        stage.save()
        job.train()


def _call_directly(lookup: nn.Module) -> None:
    """The modules around kernels call their forward, not them."""
    for inner in lookup.modules():
        kernel = inner._modules.get("_emb_module")
        if kernel is not None:
            inner.forward = _Direct(kernel)  # type: ignore[assignment]


class _Direct:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, features: Any) -> Tensor:
        out: Tensor = self.kernel.forward(
            indices=features.values().long(), offsets=features.offsets().long()
        )
        return out


@adversary("forward of the class, on the settled module", "fused", names=("t0", "t1"))
def class_forward(stage: Stage) -> None:
    job = stage.job()
    kind = type(job.fused)
    job.backward = lambda: loss_of(job.model(kind.forward(job.fused, *job.batch()))).backward()
    stage.rounds(lambda: None, 4)


@adversary("forward is replaced on the instance", "fused", right="exact")
def replaced_forward(stage: Stage) -> None:
    job = stage.job()
    inner = job.fused.forward
    job.fused.forward = lambda *a, **k: inner(*a, **k) * 2
    stage.rounds(lambda: None)


@adversary("all hooks of the module are cleared", "fused", names=NAMES)
def hooks_cleared(stage: Stage) -> None:
    job = stage.job()
    job.fused._forward_hooks.clear()
    stage.rounds(lambda: None, 3)


@adversary("hooks of the output are cleared", "fused", names=NAMES)
def output_hooks_cleared(stage: Stage) -> None:
    job = stage.job()

    def backward() -> None:
        pooled = job.fused(*job.batch())
        if pooled._backward_hooks:
            pooled._backward_hooks.clear()
        loss_of(job.model(pooled)).backward()

    job.backward = backward
    stage.rounds(lambda: None, 3)


@adversary("the graph's node is called by hand", "fused", names=NAMES)
def node_called(stage: Stage) -> None:
    job = stage.job()

    def backward() -> None:
        pooled = job.fused(*job.batch())
        pooled.grad_fn(torch.ones_like(pooled))

    job.backward = backward
    for _ in range(3):
        stage.save()
        backward()


@adversary("the kernel's operator is called by hand", "fused", names=NAMES)
def operator_called(stage: Stage) -> None:
    """By the arguments that the module itself gives it."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe

    job = stage.job()
    seen: list[tuple[Any, Any]] = []
    module = tbe.invokers.lookup_rowwise_adagrad
    invoke = module.invoke

    def record(*args: Any, **kwargs: Any) -> Tensor:
        seen.append((args, kwargs))
        out: Tensor = invoke(*args, **kwargs)
        return out

    module.invoke = record
    stage.undo(lambda: setattr(module, "invoke", invoke))
    job.train()
    args, kwargs = seen[0]
    for _ in range(3):
        stage.save()
        loss_of(job.model(invoke(*args, **kwargs))).backward()
        job.apply()


@adversary("a second module has the same memory", "fused", names=NAMES)
def same_memory(stage: Stage) -> None:
    job = stage.job()
    other = batched()
    other.weights_host = job.fused.weights_host
    other.momentum1_host = job.fused.momentum1_host
    for _ in range(3):
        stage.save()
        loss_of(job.model(other(*job.batch()))).backward()
        job.apply()


@adversary("a hook before ours gives out something else", "fused", right="exact")
def replaced_output(stage: Stage) -> None:
    job = stage.use(FusedJob(), settled=False)
    job.fused.register_forward_hook(lambda _m, _a, out: (out * 2, {"extra": out}))
    job.backward = lambda: loss_of(job.model(job.fused(*job.batch())[0])).backward()
    job.train()
    stage.settle(job.fused)
    stage.rounds(lambda: None)


@adversary("hooks that came later run first, and give out something else", "fused", right="exact")
def prepended_output(stage: Stage) -> None:
    job = stage.job()
    handles = [
        job.fused.register_forward_hook(lambda _m, _a, out: out * 2, prepend=True),
        nn.modules.module.register_module_forward_hook(
            lambda m, _a, out: (out.relu(), 1) if m is job.fused else None
        ),
    ]
    job.fused.register_forward_hook(lambda _m, _a, out: out if type(out) is tuple else (out, 1))
    job.backward = lambda: loss_of(job.model(job.fused(*job.batch())[0])).backward()
    stage.rounds(lambda: None)
    stage.undo(handles[1].remove)


@adversary("a hook before ours looks up other rows", "fused", right="exact")
def nested_lookup(stage: Stage) -> None:
    """As another thread's lookup may come between the kernel's and our hook."""
    job = stage.use(FusedJob(), settled=False)
    inside: list[bool] = []

    def look_up(module: Any, *_: Any) -> None:
        if not inside:
            inside.append(True)
            with torch.no_grad():
                module(*job.batch())
            inside.clear()

    job.fused.register_forward_hook(look_up)
    job.train()
    stage.settle(job.fused)
    stage.rounds(lambda: None)


@adversary(
    "a hook after ours gives out something else",
    "fused",
    right="exact",
    guarded=True,
    passes=BEFORE,
)
def replaced_output_later(stage: Stage) -> None:
    job = stage.job()
    job.fused.register_forward_hook(lambda _m, _a, out: (out.detach().requires_grad_(), out))

    def backward() -> None:
        cut, out = job.fused(*job.batch())
        loss_of(job.model(cut)).backward()
        out.backward(cut.grad)

    job.backward = backward
    stage.rounds(lambda: None)


@adversary(
    "an always-call hook, and a lookup that raises",
    "fused",
    right="exact",
    guarded=True,
    passes=BEFORE,
)
def lookup_raises(stage: Stage) -> None:
    job = stage.job()
    stage.save()
    job.fused.register_forward_hook(lambda *_: None, always_call=True)
    try:
        job.fused(torch.tensor([1], device=CPU), "no offsets")
    except Exception:
        job.train()
    stage.save()
    job.train()


# Looked up ahead, again, without an update.


@adversary(
    "a lookup before the first save, its update after it",
    "fused",
    "ranks",
    right="exact",
    guards=BOTH,
)
def pending_at_first(stage: Stage) -> None:
    job = stage.job(settled=False)
    loss = job.forward()
    stage.guard(*job.guarded)
    stage.save()
    loss.backward()
    job.apply()


@adversary(
    "trained for long, looked up, then saved first", "fused", "ranks", right="exact", worlds=(1,)
)
def pending_after_training(stage: Stage) -> None:
    job = stage.job(settled=False)
    job.train(3)
    loss = job.forward()
    stage.guard(*job.guarded)
    stage.save()
    loss.backward()
    job.apply()


@adversary("looked up before it's shown, saved later", "fused", right="exact")
def pending_before_shown(stage: Stage) -> None:
    job = stage.job(settled=False)
    pooled = job.fused(*job.batch())
    stage.guard(*job.guarded)
    job.train()
    stage.save()
    stage.finish()
    stage.save()
    pooled.sum().backward()


@adversary(
    "looks up ahead across saves",
    "fused",
    "ranks",
    right="exact",
    guarded=True,
    worlds=(1,),
    guards=BOTH,
)
def ahead(stage: Stage) -> None:
    job = stage.job()
    for order in (1, -1):
        losses = [job.forward() for _ in range(3)]
        stage.save()
        for loss in losses[::order]:
            loss.backward()
        job.apply()


@adversary(
    "several lookups before one step", "fused", right="exact", guarded=True, odd=True, guards=BOTH
)
def several(stage: Stage) -> None:
    job = stage.job()

    def backward() -> None:
        (job.forward() + job.forward() + job.forward()).backward()

    job.backward = backward
    stage.rounds(lambda: None)


@adversary("backward twice through one graph", "fused", right="exact", guarded=True, guards=BOTH)
def retained(stage: Stage) -> None:
    job = stage.job()

    def backward() -> None:
        loss = job.forward()
        loss.backward(retain_graph=True)
        loss.backward()

    job.backward = backward
    stage.rounds(lambda: None)


@adversary("a graph kept over saves is run again in each", "fused", right="exact", guards=BOTH)
def kept_graph(stage: Stage) -> None:
    job = stage.job()
    pooled = job.fused(*job.batch())
    for _ in range(3):
        stage.save()
        pooled.sum().backward(retain_graph=True)


@adversary(
    "lookups without an update",
    "fused",
    "ranks",
    right="exact",
    guarded=True,
    guards=BOTH,
    worlds=(1,),
)
def without_update(stage: Stage) -> None:
    job = stage.job()

    def evaluate() -> None:
        job.model.eval()
        with torch.no_grad():
            job.forward()
        job.model.train()
        job.forward()  # and forgotten

    stage.rounds(evaluate)


@adversary("gradients of the dense part only", "fused", right="exact", guarded=True, passes=BEFORE)
def partial_backward(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        dense = [*job.model.parameters()]
        torch.autograd.grad(job.forward(), dense)
        job.forward().backward(inputs=dense)
        job.apply()

    stage.rounds(act)


@adversary(
    "the embedding's backward pass by hand, later",
    "fused",
    right="exact",
    guarded=True,
    guards=BOTH,
)
def split_backward(stage: Stage) -> None:
    job = stage.job()
    waiting: list[tuple[Tensor, Tensor]] = []

    def backward() -> None:
        pooled = job.fused(*job.batch())
        cut = pooled.detach().requires_grad_()
        loss_of(job.model(cut)).backward()
        assert cut.grad is not None
        waiting.append((pooled, cut.grad))
        if len(waiting) > 1:
            torch.autograd.backward(*waiting.pop(0))

    job.backward = backward
    stage.rounds(lambda: None)


@adversary(
    "the output is changed in place and cut up", "fused", right="exact", guarded=True, passes=BEFORE
)
def output_in_place(stage: Stage) -> None:
    job = stage.job()

    def backward() -> None:
        pooled = job.fused(*job.batch())
        pooled.mul_(2).relu_()
        parts = pooled.split([d for _, d in FUSED], 1)
        loss_of(job.model(torch.cat([parts[0], parts[1].detach()], 1))).backward()

    job.backward = backward
    stage.rounds(lambda: None)


def _checkpointed(reentrant: bool) -> None:
    how = "reentrant" if reentrant else "not reentrant"

    @adversary(f"activation checkpointing, {how}", "fused", right="exact", guarded=True)
    def recomputed(stage: Stage) -> None:
        job = stage.job()
        dummy = torch.zeros(1, requires_grad=True, **HERE)

        def forward(ids: Tensor, offsets: Tensor, dummy: Tensor) -> Tensor:
            return loss_of(job.model(job.fused(ids, offsets))) + dummy.sum() * 0

        def backward() -> None:
            loss = checkpoint(forward, *job.batch(), dummy, use_reentrant=reentrant)
            loss.backward()

        job.backward = backward
        stage.rounds(lambda: None)


_checkpointed(reentrant=True)
_checkpointed(reentrant=False)


@adversary(
    "backward raises after the tables' update", "fused", right="exact", guarded=True, passes=BEFORE
)
def backward_raises(stage: Stage) -> None:
    job = stage.job()
    weights = torch.ones((BATCH * BAG * 2,), requires_grad=True, **HERE)

    def fail(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    weights.register_hook(fail)

    def act() -> None:
        ids, offsets = job.batch()
        try:
            loss_of(job.model(job.fused(ids, offsets, weights))).backward()
        except RuntimeError:
            job.train()

    stage.around(act)


@adversary(
    "backward raises before the tables' update", "fused", right="exact", guarded=True, passes=BEFORE
)
def backward_raises_early(stage: Stage) -> None:
    job = stage.job()

    def fail(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    def act() -> None:
        pooled = job.fused(*job.batch())
        pooled.register_hook(fail)
        try:
            loss_of(job.model(pooled)).backward()
        except RuntimeError:
            job.train()

    stage.around(act)


@adversary(
    "lookups and backward passes on other threads", "fused", "ranks", right="exact", worlds=(1,)
)
def threads(stage: Stage) -> None:
    job = stage.job(**({} if stage.kind == "fused" else {"ways": ("row_wise",)}))

    def train() -> None:
        losses: list[Tensor] = []

        def look_up() -> None:
            losses.append(job.forward())

        def update() -> None:
            losses[0].backward()

        for work in (look_up, update):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        job.apply()

    stage.train = train
    stage.rounds(lambda: None)


# Ways to look up.


@adversary(
    "weighted, unpooled, half, empty and repeated ids",
    "fused",
    right="exact",
    guarded=True,
    guards=BOTH,
)
def ways_to_look_up(stage: Stage) -> None:
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe

    job = fused_tables(
        {
            "plain": batched,
            "mean": lambda: batched(pooling_mode=tbe.PoolingMode.MEAN),
            "shared": lambda: batched(feature_table_map=[0, 0, 1]),
            "sgd": lambda: batched("EXACT_SGD"),
        }
    )

    def ids_of(features: int, most: int = 700) -> tuple[Tensor, Tensor]:
        edges = torch.arange(0, features * BATCH * BAG + 1, BAG, device=CPU)
        return job.ids((features * BATCH * BAG,), most), edges

    def weighted() -> Tensor:
        ids, edges = ids_of(2)
        weights = torch.rand(ids.shape, requires_grad=True, **HERE)
        return loss_of(job.parts["plain"].module(ids, edges, weights))

    def repeated() -> Tensor:
        ids, edges = ids_of(2, 3)
        return loss_of(job.parts["mean"].module(ids.int(), edges.int()))

    def shared() -> Tensor:
        ids, edges = ids_of(3)
        return loss_of(job.parts["shared"].module(ids, edges))

    def out_of_range() -> Tensor:
        ids, edges = ids_of(2)
        ids[::5] = 10**6
        ids[1::5] = -7
        return loss_of(job.parts["plain"].module(ids, edges))

    def empty() -> Tensor:
        edges = torch.zeros(2 * BATCH + 1, dtype=torch.long, device=CPU)
        return loss_of(job.parts["sgd"].module(edges[:0], edges))

    def variable() -> Tensor:
        ids, _ = ids_of(2)
        batches = [[3], [5]]
        edges = torch.tensor([0, 3, 6, 9, 12, 15, 18, 21, 24], device=CPU)
        return loss_of(
            job.parts["plain"].module(ids[:24], edges, batch_size_per_feature_per_rank=batches)
        )

    def half() -> Tensor:
        ids, edges = ids_of(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(job.parts["sgd"].module(ids, edges).float())

    def backward() -> None:
        for look in (weighted, repeated, shared, out_of_range, empty, variable, half):
            loss = look()
            if loss.requires_grad:
                loss.backward()

    job.backward = backward  # type: ignore[method-assign]
    stage.use(job)
    stage.rounds(lambda: None)


@adversary("ids are changed between the lookup and its update", "fused", names=NAMES)
def ids_changed(stage: Stage) -> None:
    """The kernel reads them again in its backward pass."""
    job = stage.job()

    def backward() -> None:
        ids, offsets = job.batch()
        loss = loss_of(job.model(job.fused(ids, offsets)))
        ids.data.add_(1).remainder_(700)
        loss.backward()

    job.backward = backward
    for _ in range(2):
        stage.save()
        job.train()


@adversary("ids lie in a buffer that the next lookup reuses", "fused", right="exact", guards=BOTH)
def ids_reused(stage: Stage) -> None:
    """As readers do that fill one pinned buffer again and again, once the step is over."""
    job = stage.job()
    ids, offsets = job.batch()
    ids, offsets = ids.clone(), offsets.clone()

    def backward() -> None:
        ids.copy_(job.batch()[0])
        loss_of(job.model(job.fused(ids, offsets))).backward()
        ids.zero_()

    job.backward = backward
    stage.rounds(lambda: None)


@adversary("rows and momentum are reset by the module", "fused", names=NAMES)
def reset_rows(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        rows = torch.tensor([3, 4], device=CPU)
        job.fused.split_embedding_weights()[0].data.index_fill_(0, rows, 0.0)
        job.fused.split_optimizer_states()[0][0].data.index_fill_(0, rows, 0.0)
        job.fused.reset_cache_states()
        job.fused.flush()

    stage.around(act)


@adversary("what only asks a fused module", "fused", right="exact", guarded=True, passes=BEFORE)
def asked(stage: Stage) -> None:
    job = stage.job()

    def ask() -> None:
        job.fused.split_embedding_weights()
        job.fused.split_optimizer_states()
        job.fused.get_optimizer_state()
        job.fused.state_dict()
        job.fused.float()
        job.fused.eval()
        job.fused.train()
        job.fused.set_optimizer_step(7)

    stage.around(ask)


@adversary("the fused module is replaced while a save is open", "fused", right="exact", guards=BOTH)
def replaced(stage: Stage) -> None:
    job = stage.job()
    for _ in range(2):
        stage.save()
        old = job.fused
        job.fused = batched()
        job.fused.weights_host.data.copy_(old.weights_host.data)
        del old
        gc.collect()
        job.guarded = (job.fused,)
        stage.guard(job.fused)
        job.train(2)
    stage.finish()
    stage.guard(job.fused)


# TorchRec.


@adversary(
    "unpooled lookups of a sharded collection", "ranks", right="exact", guarded=True, worlds=(2,)
)
def unpooled(stage: Stage) -> None:
    stage.job(unpooled=True, ways=("row_wise", "table_wise"))
    stage.rounds(lambda: None)


# Others prefetch on streams, which only devices have.
PIPELINES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineSparseDistLite")


def _pipeline(name: str) -> None:
    def make(job: Any) -> Any:
        from torchrec.distributed.train_pipeline import train_pipelines

        return getattr(train_pipelines, name)(job.model, job.optimizer, CPU)

    worlds = (1, 2) if name == "TrainPipelineSparseDist" else (1,)

    @adversary(
        f"{name}, saved between its steps", "ranks", right="exact", guarded=True, worlds=worlds
    )
    def settled(stage: Stage) -> None:
        job = stage.job(settled=False)
        pipeline, source = make(job), job.batches()
        stage.train = lambda: pipeline.progress(source)
        stage.train()
        stage.settle()
        stage.rounds(lambda: None)

    @adversary(f"{name}, filled before the first save", "ranks", right="exact", worlds=worlds)
    def filled(stage: Stage) -> None:
        job = stage.job(settled=False)
        pipeline, source = make(job), job.batches()
        for _ in range(3):
            pipeline.progress(source)
        stage.train = lambda: pipeline.progress(source)
        for _ in range(3):
            stage.save()
            pipeline.progress(source)


for _name in PIPELINES:
    _pipeline(_name)


@adversary("evaluation amid a filled pipeline", "ranks", right="exact", worlds=(2,))
def evaluated_amid(stage: Stage) -> None:
    from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist

    job = stage.job(settled=False)
    pipeline, source = TrainPipelineSparseDist(job.model, job.optimizer, CPU), job.batches()
    stage.train = lambda: pipeline.progress(source)
    stage.train()
    stage.settle()

    def evaluate() -> None:
        pipeline.detach()
        job.model.eval()
        with torch.no_grad():
            job.forward()
        job.model.train()
        pipeline.attach()

    stage.rounds(evaluate)


@adversary(
    "a data-parallel table among sharded ones",
    "ranks",
    right="exact",
    guarded=True,
    guards=BOTH,
    worlds=(2,),
)
def data_parallel(stage: Stage) -> None:
    job = stage.job(settled=False, ways=("row_wise", "data_parallel"))
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("tables with a dense kernel", "ranks", right="exact", worlds=(1,))
def dense_kernel(stage: Stage) -> None:
    job = stage.job(settled=False, ways=("row_wise", "table_wise"), kernel="dense", wide=True)
    every = optim.Adam(job.model.parameters(), lr=0.01)
    job.optimizers = [every]
    stage.state = lambda: {"model": job.model, "opt": every}
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary(
    "warm-up and clipping wrapped around TorchRec's optimizers",
    "ranks",
    right="exact",
    passes=BEFORE,
    worlds=(1,),
)
def wrapped(stage: Stage) -> None:
    from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

    job = stage.job(settled=False)
    stages = [WarmupStage(policy=WarmupPolicy.LINEAR, max_iters=20, value=0.1, lr_scale=1.0)]
    outer = WarmupOptimizer(
        GradientClippingOptimizer(job.optimizer, clipping=GradientClipping.VALUE, max_gradient=0.1),
        stages,
        lr=0.1,
    )
    job.optimizers = [outer]
    stage.state = lambda: {"model": job.model, "optimizer": outer}
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary(
    "an unsharded collection with its optimizer in backward", "fused", right="exact", passes=BEFORE
)
def unsharded(stage: Stage) -> None:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=t, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f])
            for t, f in (("t0", "f0"), ("t1", "f1"))
        ],
        device=CPU,
    )
    apply_optimizer_in_backward(optim.SGD, collection.parameters(), {"lr": 0.1})
    job = PlainJob("sgd")

    def train() -> None:
        ids = KeyedJaggedTensor.from_lengths_sync(
            ["f0", "f1"],
            job.ids((2 * BATCH * BAG,), ROWS),
            torch.full((2 * BATCH,), BAG, device=CPU),
        )
        loss_of(collection(ids).values()).backward()

    stage.state, stage.train = lambda: {"collection": collection}, train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("TorchRec's own fused collection, unsharded", "fused", right="exact", passes=BEFORE)
def fused_collection(stage: Stage) -> None:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    collection = FusedEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=t, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f])
            for t, f in (("t0", "f0"), ("t1", "f1"))
        ],
        optimizer_type=RowWiseAdagrad,
        optimizer_kwargs={"lr": 0.1},
        device=CPU,
    )
    job = PlainJob("sgd")

    def train() -> None:
        ids = KeyedJaggedTensor.from_lengths_sync(
            ["f0", "f1"],
            job.ids((2 * BATCH * BAG,), ROWS),
            torch.full((2 * BATCH,), BAG, device=CPU),
        )
        loss_of(collection(ids).values()).backward()

    stage.state, stage.train = lambda: {"c": collection, "o": collection.fused_optimizer()}, train
    train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("managed collisions evict rows", "ranks", names=("table_wise", "row_wise"))
def evicted(stage: Stage) -> None:
    """Each few steps rows are given to other ids, and reset."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training as tbe

    tbe.SplitTableBatchedEmbeddingBagsCodegen.reset_embedding_weight_momentum = reset
    job = Evicting()
    stage.state, stage.train = lambda: {"model": job.model}, job.train
    job.train()
    stage.settle()
    stage.rounds(lambda: None, 3)


def reset(module: Any, pruned_indices: Tensor, **_: Any) -> None:
    """What fbgemm's operator does, which exists on GPUs only: past all counters."""
    rows = pruned_indices.long()
    for weight, (momentum,) in zip(
        module.split_embedding_weights(), module.split_optimizer_states(), strict=True
    ):
        weight.data[rows] = 0
        momentum.data[rows] = 0


class Evicting:
    """A sharded collection with managed collisions: rows are given away at every second step."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torchrec.distributed.mc_embeddingbag import (
            ManagedCollisionEmbeddingBagCollectionSharder,
        )
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingPlan
        from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
        from torchrec.modules.mc_modules import (
            DistanceLFU_EvictionPolicy,
            ManagedCollisionCollection,
            MCHManagedCollisionModule,
        )
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.seed = 0
        inner = RankedModel(("row_wise",)).tables
        module = MCHManagedCollisionModule(
            zch_size=ROWS,
            device=CPU,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            input_hash_size=1 << 30,
        )
        collection = ManagedCollisionEmbeddingBagCollection(
            inner, ManagedCollisionCollection({"row_wise": module}, inner.embedding_bag_configs())
        )
        apply_optimizer_in_backward(RowWiseAdagrad, inner.parameters(), {"lr": 0.1})
        sharder = ManagedCollisionEmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(
            collection,
            per_param_sharding={"row_wise": row_wise()},
            sharder=sharder,
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        self.model = DistributedModelParallel(
            nn.ModuleDict({"m": collection}),
            device=CPU,
            plan=ShardingPlan({"m": plan}),
            sharders=[sharder],
        )

    def train(self) -> None:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        self.seed += 1
        g = torch.Generator(device=CPU).manual_seed(self.seed * 10 + self.rank)
        n = 400
        ids = KeyedJaggedTensor.from_lengths_sync(
            ["f0"],
            torch.randint(0, 1 << 28, (n,), generator=g, device=CPU),
            torch.full((n // 4,), 4, device=CPU),
        )
        found = self.model.module.m(ids)
        pooled = found[0] if isinstance(found, tuple) else found
        loss_of(pooled.values()).backward()


@adversary(
    "a quantised copy is made for serving while a save is open",
    "fused",
    right="exact",
    passes=BEFORE,
)
def quantised_copy(stage: Stage) -> None:
    job = stage.job()

    def act() -> None:
        for weight in job.fused.split_embedding_weights():
            torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weight.detach())
        FusedModel(sum(d for _, d in FUSED)).load_state_dict(job.model.state_dict())

    stage.around(act)


@adversary(
    "two sharded models of one optimizer", "ranks", right="exact", passes=BEFORE, worlds=(1,)
)
def two_sharded(stage: Stage) -> None:
    first = stage.job(settled=False, ways=("row_wise",))
    second = type(first)(ways=("table_wise",))
    stage.state = lambda: {"a": first.state, "b": second.state}

    def train() -> None:
        first.train()
        second.train()

    stage.train = train
    train()
    stage.settle()
    stage.rounds(lambda: None)
    assert list(lookups(first.model))
