"""Optimizers of every kind, their schedules, their closures, and hooks around them."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.guarded.adversaries.jobs import (
    HERE,
    USERS,
    PlainJob,
    PlainModel,
    batched,
    blocks,
    fused_tables,
    loss_of,
    sparse_tables,
)
from tests.guarded.adversaries.registry import BEFORE, BOTH, adversary
from tests.guarded.adversaries.stage import Stage

Make = Callable[[list[Tensor]], Optimizer]


def of(kind: Any, **options: Any) -> Make:
    return lambda parameters: kind(parameters, **options)  # type: ignore[no-any-return]


# Torch's optimizers: dense state stands still between steps, whoever makes them.

DENSE: dict[str, Mapping[str, Make]] = {
    "ASGD": {
        "plain": of(optim.ASGD),
        "decayed": of(optim.ASGD, weight_decay=0.1, t0=1),
        "foreach": of(optim.ASGD, foreach=True, maximize=True),
    },
    "Adadelta": {
        "plain": of(optim.Adadelta),
        "foreach": of(optim.Adadelta, foreach=True, weight_decay=0.1),
        "up": of(optim.Adadelta, maximize=True),
    },
    "Adafactor": {
        "plain": of(optim.Adafactor),
        "decayed": of(optim.Adafactor, weight_decay=0.1),
        "foreach": of(optim.Adafactor, foreach=True),
    },
    "Adagrad": {
        "plain": of(optim.Adagrad, lr_decay=0.1, weight_decay=0.1),
        "foreach": of(optim.Adagrad, foreach=True, initial_accumulator_value=0.1),
        "fused": of(optim.Adagrad, fused=True),
    },
    "Adam": {
        "plain": of(optim.Adam, weight_decay=0.1),
        "amsgrad": of(optim.Adam, amsgrad=True, maximize=True),
        "foreach": of(optim.Adam, foreach=True),
        "fused": of(optim.Adam, fused=True),
        "decoupled": of(optim.Adam, decoupled_weight_decay=True, weight_decay=0.1),
    },
    "AdamW": {
        "plain": of(optim.AdamW),
        "amsgrad": of(optim.AdamW, amsgrad=True, foreach=True),
        "fused": of(optim.AdamW, fused=True, weight_decay=0.3),
    },
    "Adamax": {"plain": of(optim.Adamax), "foreach": of(optim.Adamax, foreach=True)},
    # One iteration: without AVX-512 its products in bfloat16 take seconds.
    "Muon": {
        "plain": of(optim.Muon, ns_steps=1),
        "nesterov": of(optim.Muon, ns_steps=1, nesterov=False),
    },
    "NAdam": {
        "plain": of(optim.NAdam),
        "decoupled": of(optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
        "foreach": of(optim.NAdam, foreach=True),
    },
    "RAdam": {
        "plain": of(optim.RAdam),
        "decoupled": of(optim.RAdam, decoupled_weight_decay=True, weight_decay=0.1),
        "foreach": of(optim.RAdam, foreach=True),
    },
    "RMSprop": {
        "plain": of(optim.RMSprop, weight_decay=0.1),
        "centred": of(optim.RMSprop, centered=True, momentum=0.9),
        "foreach": of(optim.RMSprop, foreach=True, momentum=0.9),
    },
    "Rprop": {"plain": of(optim.Rprop), "foreach": of(optim.Rprop, foreach=True)},
    "SGD": {
        "plain": of(optim.SGD, lr=0.1),
        "momentum": of(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
        "nesterov": of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        "fused": of(optim.SGD, lr=0.1, momentum=0.9, fused=True),
        "up": of(optim.SGD, lr=0.1, maximize=True),
    },
}


def _dense(kind: str, makes: Mapping[str, Make]) -> None:
    @adversary(f"dense: {kind}", right="exact", passes=BEFORE)
    def train(stage: Stage) -> None:
        # All that is left in place is more than 4 MiB, with one state for each parameter at least.
        stage.use(blocks(makes, 1_200_000 if kind in {"SGD", "Adafactor"} else 600_000))
        stage.rounds(lambda: None)


for _kind, _makes in DENSE.items():
    _dense(_kind, _makes)


@adversary("dense: LBFGS with closures", right="exact", passes=BEFORE)
def lbfgs(stage: Stage) -> None:
    job = blocks(
        {
            "plain": of(optim.LBFGS, max_iter=2, history_size=2),
            "wolfe": of(optim.LBFGS, max_iter=2, history_size=2, line_search_fn="strong_wolfe"),
        },
        400_000,
    )

    def train() -> None:
        for part in job.parts.values():
            optimizer = part.optimizer
            assert optimizer is not None
            seed = job.seed

            def closure(part: Any = part, optimizer: Any = optimizer, seed: int = seed) -> float:
                optimizer.zero_grad()
                job.seed = seed
                loss = part.loss(job)
                loss.backward()
                return float(loss)

            optimizer.step(closure)  # type: ignore[arg-type]

    train()
    stage.state, stage.train = lambda: job.state, train
    stage.settle()
    stage.rounds(lambda: None)


SPARSE: dict[str, Mapping[str, Make]] = {
    "SGD": {
        "plain": of(optim.SGD, lr=0.1),
        "foreach": of(optim.SGD, lr=0.1, foreach=True),
        "up": of(optim.SGD, lr=0.1, maximize=True, foreach=False),
    },
    "Adagrad": {
        "plain": of(optim.Adagrad, lr=0.1, lr_decay=0.1),
        "foreach": of(optim.Adagrad, lr=0.1, foreach=True),
        "begun": of(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    },
    "SparseAdam": {
        "plain": of(optim.SparseAdam),
        "up": of(optim.SparseAdam, maximize=True),
    },
}


def _sparse(kind: str, makes: Mapping[str, Make]) -> None:
    @adversary(f"sparse tables: {kind}", right="exact", guarded=True, guards=BOTH)
    def train(stage: Stage) -> None:
        stage.use(sparse_tables(makes))
        stage.rounds(lambda: None)


for _kind, _makes in SPARSE.items():
    _sparse(_kind, _makes)


# fbgemm's optimizers: their step is the lookup's backward pass.


def _modes() -> Any:
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe

    return tbe


FUSED: dict[str, Callable[[], Mapping[str, Callable[[], Any]]]] = {
    "EXACT_SGD": lambda: {
        "plain": lambda: batched("EXACT_SGD"),
        "clipped": lambda: batched("EXACT_SGD", gradient_clipping=True, max_gradient=0.01),
        "means": lambda: batched("EXACT_SGD", pooling_mode=_modes().PoolingMode.MEAN),
    },
    "EXACT_ADAGRAD": lambda: {
        "plain": lambda: batched("EXACT_ADAGRAD", eps=0.01),
        "clipped": lambda: batched("EXACT_ADAGRAD", gradient_clipping=True, max_gradient=0.01),
    },
    "EXACT_ROWWISE_ADAGRAD": lambda: {
        "plain": batched,
        "L2": lambda: batched(weight_decay=0.1, weight_decay_mode=_modes().WeightDecayMode.L2),
        "decoupled": lambda: batched(
            weight_decay=0.1, weight_decay_mode=_modes().WeightDecayMode.DECOUPLE
        ),
        "clipped": lambda: batched(gradient_clipping=True, max_gradient=0.01),
        "normed": lambda: batched(max_norm=0.5),
    },
    "EXACT_ROWWISE_ADAGRAD by counters": lambda: {
        "counted": lambda: batched(
            weight_decay=0.1,
            weight_decay_mode=_modes().WeightDecayMode.COUNTER,
            counter_based_regularization=_modes().CounterBasedRegularizationDefinition(),
        ),
        "cow": lambda: batched(
            weight_decay=0.1,
            weight_decay_mode=_modes().WeightDecayMode.COWCLIP,
            cowclip_regularization=_modes().CowClipDefinition(),
        ),
    },
    "EXACT_ROWWISE_ADAGRAD in half precision": lambda: {
        "rounded": lambda: batched(weights_precision=_modes().SparseType.FP16),
        "half out": lambda: batched(output_dtype=_modes().SparseType.FP16),
    },
    "EMAINPLACE_ROWWISE_ADAGRAD": lambda: {
        "each step": lambda: batched(
            "EMAINPLACE_ROWWISE_ADAGRAD",
            emainplace_mode=_modes().EmainplaceModeDefinition(
                step_ema=1, step_start=0, step_ema_coef=0.6
            ),
        ),
    },
}


def _fused(kind: str, makes: Callable[[], Mapping[str, Callable[[], Any]]]) -> None:
    @adversary(f"fused: {kind}", "fused", right="exact", guarded="EMA" not in kind, guards=BOTH)
    def train(stage: Stage) -> None:
        stage.use(fused_tables(makes()))
        stage.rounds(lambda: None)


for _kind, _fused_makes in FUSED.items():
    _fused(_kind, _fused_makes)


@adversary(
    "fused in TorchRec: each optimizer",
    "ranks",
    right="exact",
    guarded=True,
    guards=BOTH,
    worlds=(1,),
)
def torchrec_optimizers(stage: Stage) -> None:
    from torchrec.optim import optimizers
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    for kind, settings in (
        (optimizers.SGD, {"lr": 0.1}),
        (optimizers.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
        (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}),
    ):
        stage.job(settled=kind is optimizers.SGD, optimizer=kind, settings=settings)
        stage.rounds(lambda: None)


@adversary(
    "a fused learning rate is set between steps", "fused", "ranks", right="exact", worlds=(1,)
)
def fused_rate(stage: Stage) -> None:
    job = stage.job()
    fused = job.fused if stage.kind == "fused" else job.kernels[0]
    rates = iter([0.2, 0.05, 0.3, 0.01])
    stage.rounds(lambda: fused.set_learning_rate(next(rates)))


# Schedules, clipping, accumulation.

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=50, cycle_momentum=not isinstance(o, optim.SGD)
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@adversary("schedules of each kind, in the state", right="exact", passes=BEFORE)
def schedules(stage: Stage) -> None:
    job = PlainJob("sgd", of(optim.AdamW, lr=0.01), wide=True)
    made = [make(o) for make in SCHEDULES.values() for o in (job.users, job.items, job.adam)]
    job.more["schedules"] = made
    stage.use(job)
    stage.rounds(lambda: [one.step() for one in made])


@adversary("a rate that is a tensor and cycles in place", right="exact", passes=BEFORE)
def tensor_rate(stage: Stage) -> None:
    rate = torch.tensor(0.01, **HERE)
    job = PlainJob(dense=lambda p: optim.Adam(p, lr=rate), wide=True)
    stage.use(job)
    stage.rounds(lambda: rate.mul_(0.9))


@adversary("momentum appears on a guarded table after a save", names=("momentum_buffer",))
def momentum_appears(stage: Stage) -> None:
    """Torch then keeps sparse buffers, which can't be stored: later saves say so."""
    job = stage.job(sparse="sgd")
    stage.save()
    job.train()
    for optimizer in (job.users, job.items):
        optimizer.param_groups[0]["momentum"] = 0.9
    job.train(3)
    stage.exact()
    stage.save()

    def stop() -> None:
        for optimizer in (job.users, job.items):
            optimizer.param_groups[0]["momentum"] = 0.0
            optimizer.state.clear()

    stage.undo(stop)


@adversary("gradients are clipped and scaled by hand", right="exact", guarded=True)
def clipped(stage: Stage) -> None:
    job = stage.job(wide=True)

    def train() -> None:
        job.backward()
        dense = [p for g in job.adam.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(dense, 0.1)
        nn.utils.clip_grad_value_(dense, 0.01)
        for table in (job.model.users.weight, job.model.items.weight):
            table.grad = table.grad * 0.5
        job.apply()

    stage.train = train
    stage.rounds(lambda: None)


@adversary("zero_grad without set_to_none", right="exact", guarded=True, passes=BEFORE)
def zeroed_gradients(stage: Stage) -> None:
    job = stage.job(wide=True)

    def train() -> None:
        job.backward()
        for optimizer in job.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    stage.train = train
    stage.rounds(lambda: None)


@adversary(
    "saves amid accumulated gradients", "plain", "fused", right="exact", guarded=True, guards=BOTH
)
def accumulated(stage: Stage) -> None:
    job = stage.job()
    for _ in range(2):
        job.backward()
        stage.save()
        job.backward()
        job.backward()
        job.apply()
        job.train()


@adversary("optimizers step inside backward, by torch's hooks", right="exact", passes=BEFORE)
def inside_backward(stage: Stage) -> None:
    job = PlainJob(wide=True)
    held = {p: type(job.adam)([p]) for p in job.adam.param_groups[0]["params"]}
    held |= {job.model.users.weight: job.users, job.model.items.weight: job.items}

    def apply(parameter: Tensor) -> None:
        held[parameter].step()
        held[parameter].zero_grad()

    for parameter in held:
        parameter.register_post_accumulate_grad_hook(apply)
    stage.state = lambda: {"model": job.model, "optimizers": list(held.values())}
    stage.train = job.backward
    job.backward()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("optimizers step inside backward, by torch.distributed", right="exact", passes=BEFORE)
def applied_in_backward(stage: Stage) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    job = PlainJob()
    tables = [job.model.users.weight, job.model.items.weight]
    _apply_optimizer_in_backward(optim.SGD, tables, {"lr": 0.1})
    job.optimizers = [job.adam]
    stage.state = lambda: {"model": job.model, "adam": job.adam}
    stage.train = job.train
    job.train()
    stage.settle()
    stage.rounds(lambda: None)


@adversary("sparse tables stepped with a closure", right="exact", guards=BOTH)
def closures(stage: Stage) -> None:
    job = stage.job(sparse="sgd")

    def train() -> None:
        def closure() -> Tensor:
            for optimizer in job.optimizers:
                optimizer.zero_grad()
            loss: Tensor = job.forward()
            loss.backward()
            return loss

        for optimizer in job.optimizers:
            optimizer.step(closure)

    stage.train = train
    stage.rounds(lambda: None)


@adversary("a closure steps another optimizer", right="exact")
def nested_steps(stage: Stage) -> None:
    job = stage.job(wide=True)

    def train() -> None:
        def closure() -> Tensor:
            loss: Tensor = job.forward()
            loss.backward()
            job.users.step()
            job.items.step()
            return loss

        job.adam.step(closure)
        for optimizer in job.optimizers:
            optimizer.zero_grad()

    stage.train = train
    stage.rounds(lambda: None)


# Gradients that others change right before the step.


def more_rows(parameter: Tensor) -> None:
    """What a gradient exchange does: rows of another rank come to this one's."""
    grad = parameter.grad
    assert grad is not None
    grad = grad.coalesce()
    rows = (grad.indices()[0] * 7 + 11) % parameter.shape[0]
    parameter.grad = torch.sparse_coo_tensor(
        torch.cat([grad.indices(), rows[None]], 1),
        torch.cat([grad.values(), grad.values()]),
        parameter.shape,
        check_invariants=False,
        device=parameter.device,
    )


def exchange(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                more_rows(parameter)


@adversary(
    "gradient exchange in the optimizer's own step pre-hook", right="exact", odd=True, guards=BOTH
)
def exchanged_in_own_hook(stage: Stage) -> None:
    job = stage.job(sparse="sparse_adam")
    for optimizer in (job.users, job.items):
        stage.undo(optimizer.register_step_pre_hook(exchange).remove)
    stage.rounds(lambda: None, 3)


@adversary(
    "gradient exchange in a global pre-hook that came after ours", right="exact", guards=BOTH
)
def exchanged_in_later_hook(stage: Stage) -> None:
    stage.job(sparse="sparse_adam")
    stage.undo(register_optimizer_step_pre_hook(exchange).remove)
    stage.rounds(lambda: None, 3)


@adversary("gradient exchange in a global pre-hook that came before ours", right="exact")
def exchanged_in_earlier_hook(stage: Stage) -> None:
    stage.undo(register_optimizer_step_pre_hook(exchange).remove)
    stage.job(sparse="sparse_adam")
    stage.rounds(lambda: None)


@adversary("a pre-hook makes a sparse gradient dense", right="exact", guards=BOTH)
def densified(stage: Stage) -> None:
    job = stage.job(sparse="sgd")

    def densify(*_: Any) -> None:
        weight = job.model.users.weight
        weight.grad = weight.grad.to_dense() + 0.01

    stage.undo(job.users.register_step_pre_hook(densify).remove)
    stage.rounds(lambda: None, 3)


@adversary("gradients of rows that nobody looked up", right="exact", guarded=True, guards=BOTH)
def foreign_gradients(stage: Stage) -> None:
    job = stage.job(sparse="adagrad")

    def train() -> None:
        weight = job.model.users.weight
        rows = job.ids((1, 40), USERS)
        weight.grad = torch.sparse_coo_tensor(
            rows, torch.ones((40, 16), **HERE), weight.shape, check_invariants=False
        )
        job.users.step()
        job.users.zero_grad()

    stage.train = train
    stage.rounds(lambda: None)


# Rows and parameters edited by hooks of every kind.


@torch.no_grad()
def evict(weight: Tensor) -> None:
    rows = slice(10, None, weight.shape[0] - 20)  # one that is copied early, and one late
    weight[rows] = weight[rows] * 0.5 - 1


def _own(before: bool) -> Callable[[Any, Callable[..., None]], Any]:
    def register(job: Any, act: Callable[..., None]) -> Any:
        o = job.users
        return (o.register_step_pre_hook if before else o.register_step_post_hook)(act)

    return register


def _of_another(job: Any, act: Callable[..., None]) -> Any:
    return job.adam.register_step_post_hook(act)


HOOKS: dict[str, Callable[[Any, Callable[..., None]], Any]] = {
    "the optimizer's own pre-hook": _own(before=True),
    "the optimizer's own post-hook": _own(before=False),
    "another optimizer's post-hook": _of_another,
    "a global optimizer pre-hook": lambda _, act: register_optimizer_step_pre_hook(act),
    "a global optimizer post-hook": lambda _, act: register_optimizer_step_post_hook(act),
    "a module's forward pre-hook": lambda job, act: job.model.users.register_forward_pre_hook(
        lambda *_: act()
    ),
    "a module's forward hook": lambda job, act: job.model.register_forward_hook(lambda *_: act()),
    "a module's full backward hook": lambda job, act: job.model.top[0].register_full_backward_hook(
        lambda *_: act()
    ),
    "a module's backward pre-hook": lambda job, act: job.model.top.register_full_backward_pre_hook(
        lambda *_: act()
    ),
    "a global forward pre-hook": lambda _, act: nn.modules.module.register_module_forward_pre_hook(
        lambda *_: act()
    ),
    "a gradient's hook": lambda job, act: job.dense.register_hook(lambda _: act()),
    "an accumulated gradient's hook": lambda job, act: (
        job.model.users.weight.register_post_accumulate_grad_hook(lambda _: act())
    ),
}


def _hooked(where: str, register: Callable[[Any, Callable[..., None]], Any]) -> None:
    @adversary(f"rows evicted in {where}, registered after us", names=("users",))
    def evicted_after(stage: Stage) -> None:
        job = stage.job(sparse="sparse_adam")
        handle = register(job, lambda *_: evict(job.table))
        stage.undo(handle.remove)
        stage.rounds(lambda: None)

    @adversary(f"rows evicted in {where}, registered before us", names=("users",), passes=BEFORE)
    def evicted_before(stage: Stage) -> None:
        job = PlainJob("sparse_adam")
        active = []

        def act(*_: Any) -> None:
            if active:
                evict(job.table)

        handle = register(job, act)
        stage.use(job)
        active.append(True)
        stage.undo(handle.remove)
        stage.rounds(lambda: None)


for _where, _register in HOOKS.items():
    _hooked(_where, _register)


@adversary(
    "a dense parameter is edited in its optimizer's pre-hook",
    names=("top.2.weight",),
    passes=BEFORE,
)
def dense_edited_in_hook(stage: Stage) -> None:
    job = stage.job(wide=True)

    @torch.no_grad()
    def edit(*_: Any) -> None:
        job.dense.mul_(0.9)

    stage.undo(job.adam.register_step_pre_hook(edit).remove)
    stage.rounds(lambda: None)


@adversary("a dense parameter is edited in a global pre-hook before ours", passes=BEFORE)
def dense_edited_in_earlier_hook(stage: Stage) -> None:
    job = PlainJob(wide=True)
    active = []

    @torch.no_grad()
    def edit(*_: Any) -> None:
        if active:
            job.dense.mul_(0.9)

    handle = register_optimizer_step_pre_hook(edit)
    stage.undo(handle.remove)
    stage.use(job)
    active.append(True)
    stage.rounds(lambda: None, 3)


@adversary(
    "a fused table is edited in the dense optimizer's post-hook", "fused", names=("t0", "t1")
)
def fused_evicted_in_hook(stage: Stage) -> None:
    job = stage.job()
    stage.undo(job.adam.register_step_post_hook(lambda *_: evict(job.table)).remove)
    stage.rounds(lambda: None)


@adversary("a graph node's own hook edits a table", names=("users",))
def node_hooks(stage: Stage) -> None:
    job = stage.job(sparse="adagrad")

    def train() -> None:
        loss = job.forward()
        loss.grad_fn.register_prehook(lambda *_: evict(job.table))  # type: ignore[union-attr]
        loss.backward()
        job.apply()

    for _ in range(2):
        stage.save()
        train()


# Steps that aren't the optimizer's usual one.


class DecaysAll(optim.SGD):
    """Decays all rows in its own step, as decoupled decay does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return loss


@adversary("a class of optimizer that decays all rows in its step", right="exact", passes=BEFORE)
def subclassed(stage: Stage) -> None:
    stage.job(sparse=of(DecaysAll, lr=0.1))
    stage.rounds(lambda: None)


class Known(optim.SGD):
    """Named like torch's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)
        return super().step(closure)


Known.__name__ = Known.__qualname__ = "SGD"


@adversary("an optimizer class with the name of a known one", right="exact", passes=BEFORE)
def same_name(stage: Stage) -> None:
    stage.job(sparse=of(Known, lr=0.1))
    stage.rounds(lambda: None)


@adversary("step is replaced on the instance, and edits rows first", names=("users",))
def patched_step(stage: Stage) -> None:
    job = stage.job(sparse="sgd")
    inner = job.users.step

    def step(self: Any, closure: Any = None) -> Any:
        evict(job.table)
        return inner(closure)

    job.users.step = types.MethodType(step, job.users)
    stage.undo(lambda: job.users.__dict__.pop("step"))
    stage.rounds(lambda: None)


@adversary("step is called without its hooks", names=("users", "items", "top"))
def unhooked_step(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)

    def train() -> None:
        job.backward()
        for optimizer in job.optimizers:
            type(optimizer).step.__wrapped__(optimizer)
            optimizer.zero_grad()

    for _ in range(2):
        stage.save()
        train()


@adversary("functional optimizers of torch", names=("users", "top"))
def functional(stage: Stage) -> None:
    from torch.optim.sgd import sgd

    job = stage.job(sparse="sgd", wide=True)

    def train() -> None:
        job.backward()
        for weight in (job.table, job.dense):
            with torch.no_grad():
                sgd(
                    [weight],
                    [weight.grad],
                    [None],
                    weight_decay=0.0,
                    momentum=0.0,
                    lr=0.1,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )
        for optimizer in job.optimizers:
            optimizer.zero_grad()

    for _ in range(2):
        stage.save()
        train()


@adversary("steps by hand, with torch's foreach operations", passes=BEFORE)
def by_hand(stage: Stage) -> None:
    job = stage.job(wide=True)

    def train() -> None:
        job.backward()
        parameters = [p for p in job.model.parameters() if not p.grad.is_sparse]
        torch._foreach_add_([p.data for p in parameters], [p.grad for p in parameters], alpha=-0.1)
        job.model.zero_grad()

    for _ in range(3):
        stage.save()
        train()


@adversary("steps by hand on what no optimizer holds", right="exact", passes=BEFORE)
def without_optimizers(stage: Stage) -> None:
    torch.manual_seed(0)
    model = PlainModel(wide=True)
    job = PlainJob()
    stage.state = lambda: {"model": model}

    def train() -> None:
        loss_of(model(job.batch())).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

    stage.train = train
    stage.settle()
    stage.rounds(lambda: None)


@adversary("sharpness-aware minimisation", names=("top", "norm", "words"), passes=BEFORE)
def sharpness_aware(stage: Stage) -> None:
    """Parameters move away, a gradient is taken there, and they move back before the step."""
    job = stage.job(wide=True)
    dense = [p for g in job.adam.param_groups for p in g["params"]]

    def train() -> None:
        batch = job.batch()
        job.forward(batch).backward()
        with torch.no_grad():
            moved = [0.05 * p.grad for p in dense]
            for parameter, by in zip(dense, moved, strict=True):
                parameter.add_(by)
        for optimizer in job.optimizers:
            optimizer.zero_grad()
        job.forward(batch).backward()
        with torch.no_grad():
            for parameter, by in zip(dense, moved, strict=True):
                parameter.sub_(by)
        job.apply()

    for _ in range(3):
        stage.save()
        train()


class Lookahead(Optimizer):
    """Holds slow weights and, as many do, never calls its base class."""

    def __init__(self, inner: Optimizer) -> None:
        self.base_optimizer = inner
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state
        self.slow = {p: p.detach().clone() for g in self.param_groups for p in g["params"]}

    def state_dict(self) -> dict[str, Any]:
        return self.base_optimizer.state_dict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step()
        for parameter, slow in self.slow.items():
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)


@adversary(
    "an optimizer in another that moves all rows after it",
    names=("users", "items", "top"),
    passes=BEFORE,
)
def lookahead(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    job.users, job.items, job.adam = (Lookahead(o) for o in job.optimizers)
    job.optimizers = [job.users, job.items, job.adam]
    stage.use(job, settled=False)
    job.train()
    stage.rounds(lambda: None, 3)


@adversary("a scaler that skips steps", right="exact", guarded=True, passes=BEFORE)
def scaled(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job.more["scaler"] = scaler
    stage.use(job)
    bad = iter([True, False] * 20)

    def train() -> None:
        scaler.scale(job.forward()).backward()
        if next(bad):
            job.dense.grad[0, 0] = float("inf")  # type: ignore[index]
        for optimizer in job.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()

    stage.train = train
    stage.rounds(lambda: None)


@adversary("groups are added to an optimizer while a save is open", right="exact", passes=BEFORE)
def group_added(stage: Stage) -> None:
    job = stage.job(wide=True)
    for _ in range(2):
        stage.save()
        extra = nn.Parameter(torch.ones((300, 300), **HERE))
        job.adam.add_param_group({"params": [extra], "lr": 0.5})
        extra.grad = torch.ones_like(extra)
        job.train()


@adversary(
    "parameters go over to another optimizer while a save is open", right="exact", guards=BOTH
)
def handed_over(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)
    stage.save()
    job.users.param_groups[0]["params"].clear()
    other = optim.Adagrad([job.table], lr=0.1)
    job.users = other
    job.optimizers = [other, *job.optimizers]
    job.train(2)
    stage.save()
    job.train()


@adversary("optimizer state is made anew while a save is open", right="exact", passes=BEFORE)
def state_made_anew(stage: Stage) -> None:
    job = stage.job(wide=True)

    def renew() -> None:
        for optimizer in job.optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    state[name] = value.clone()

    stage.around(renew)


@adversary("load_state_dict on optimizers while a save is open", right="exact", passes=BEFORE)
def optimizer_loaded(stage: Stage) -> None:
    job = stage.job(wide=True)
    held = [o.state_dict() for o in job.optimizers]
    held = [torch.utils._pytree.tree_map(_cloned, h) for h in held]

    def load() -> None:
        for optimizer, state in zip(job.optimizers, held, strict=True):
            optimizer.load_state_dict(state)

    stage.around(load)


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@adversary("two optimizers on one table", right="exact", guards=BOTH)
def two_on_one(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    second = optim.SparseAdam([job.table])
    job.more["second"] = second
    job.optimizers.insert(0, second)
    stage.use(job)
    stage.rounds(lambda: None)


@adversary("an optimizer that nobody has shown steps on everything", right="exact", guards=BOTH)
def unshown(stage: Stage) -> None:
    job = stage.job(sparse="sgd", wide=True)
    stage.save()
    job.backward()
    optim.SGD([p for p in job.model.parameters() if p.grad.is_sparse], lr=0.5).step()
    optim.RMSprop([p for p in job.model.parameters() if not p.grad.is_sparse]).step()
    job.apply()


@adversary(
    "the same optimizer in the state under two names, with all parameters",
    right="exact",
    passes=BEFORE,
)
def all_parameters(stage: Stage) -> None:
    job = PlainJob("sgd", wide=True)
    every = optim.SGD(job.model.parameters(), lr=0.1)
    job.more["every"] = job.more["again"] = every
    stage.use(job)
    stage.rounds(lambda: (job.backward(), every.step(), every.zero_grad()))


@adversary("steps on another thread", "plain", "fused", right="exact", guarded=True, guards=BOTH)
def on_another_thread(stage: Stage) -> None:
    job = stage.job(wide=True)

    def train() -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                job.train()
            except BaseException as e:
                errors.append(e)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    stage.train = train
    stage.rounds(lambda: None)


@adversary("a step raises halfway", right="exact", passes=BEFORE)
def raises_halfway(stage: Stage) -> None:
    job = stage.job(wide=True)

    class Fails(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["params"][0].mul_(0.5)
            raise RuntimeError("out of memory")

    fails = Fails(job.model.top.parameters(), lr=0.1)
    for _ in range(2):
        stage.save()
        job.backward()
        try:
            fails.step()
        except RuntimeError:
            job.train()


@adversary("optimizer.step under torch.compile", deadline_s=40.0, passes=BEFORE)
def compiled_step(stage: Stage) -> None:
    job = stage.job(wide=True)
    step = torch.compile(job.adam.step, backend="eager")
    sparse = (job.users, job.items)

    def train() -> None:
        job.backward()
        for optimizer in sparse:
            optimizer.step()
        step()
        for optimizer in job.optimizers:
            optimizer.zero_grad()

    for _ in range(3):
        stage.save()
        train()


@adversary("an optimizer's state holds a view of a guarded table", right="exact")
def state_is_a_view(stage: Stage) -> None:
    job = stage.job(wide=True)
    job.adam.state[job.dense]["rows"] = job.table.detach()[100:200]
    job.adam.state[job.dense]["flat"] = job.table.detach().view(-1)
    stage.rounds(lambda: None)


@adversary(
    "trained rows in parameters that an optimizer holds but backward never reaches", passes=BEFORE
)
def frozen_teacher(stage: Stage) -> None:
    """A teacher's parameters are in the optimizer, without gradients, and follow by hand."""
    torch.manual_seed(0)
    job = PlainJob(wide=True)
    teacher = PlainModel(wide=True).requires_grad_(False)
    job.adam.add_param_group({"params": [*teacher.top.parameters()]})
    job.more["teacher"] = teacher
    stage.use(job, settled=False)
    job.train()

    @torch.no_grad()
    def follow() -> None:
        for mine, theirs in zip(teacher.parameters(), job.model.parameters(), strict=True):
            mine.lerp_(theirs, 0.01)

    stage.rounds(follow, 3)


@adversary(
    "all global hooks of optimizers are cleared", names=("users", "items", "top"), after="either"
)
def global_hooks_cleared(stage: Stage) -> None:
    from torch.optim import optimizer

    job = stage.job(sparse="sgd", wide=True)
    optimizer._global_optimizer_pre_hooks.clear()
    optimizer._global_optimizer_post_hooks.clear()
    stage.save()
    job.train()
    stage.save()
    job.train()


@adversary("half-precision parameters that follow master weights", right="exact", passes=BEFORE)
def master_weights(stage: Stage) -> None:
    """The optimizer has the masters; the model's own are copied from them after each step."""
    torch.manual_seed(0)
    model = nn.Linear(1200, 1200, device=HERE["device"], dtype=torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = optim.Adam(masters)
    job = PlainJob()

    def train() -> None:
        x = torch.randn((4, 1200), generator=job.generator(), **HERE).bfloat16()
        loss_of(model(x).float()).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)

    stage.state, stage.train = lambda: {"model": model, "optimizer": optimizer}, train
    train()
    stage.settle()
    stage.rounds(lambda: None)
