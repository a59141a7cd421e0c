"""Optimizers' steps while a snapshot is open: they wait for memory to be copied, never for storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckpt import CheckpointConfig
from ckpt.errors import UntrackedWriteError
from ckpt.events import ListSink
from ckpt.fence import Copy, DenseCopy, StepFence
from ckpt.storage.memory import MemoryStorage
from ckpt.types import SystemClock
from tests.faults import DEADLINE_S, FaultyStorage
from tests.guarded.oracle import Oracle
from tests.guarded.turnstile import SteppedCheckpointer

WIDE = 1200  # with Adam's state more than 4 MiB, so that it is fenced


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, 300), nn.Linear(300, 300)
        self.norm = nn.BatchNorm1d(300)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out


class Run:
    """A model, its optimizers and a checkpointer; `state` is saved."""

    def __init__(
        self, model: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any
    ) -> None:
        self.model, self.optimizers = model, optimizers
        self.storage, self.sink = FaultyStorage(MemoryStorage()), ListSink()
        config = CheckpointConfig(
            compression="off", persist_target_s=0, persist_priority="normal", **options
        )
        self.checkpointer = SteppedCheckpointer(self.storage, config, sink=self.sink)
        self.state = {"model": model, "optimizers": list(optimizers)}
        self.number = 0

    def backward(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(4, WIDE)).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def save(self) -> Any:
        self.number += 1
        self.oracle = Oracle(self.state)
        self.handle = self.checkpointer.save(self.number, self.state)
        return self.handle

    def finish(self) -> None:
        """The save ends well, and is exact."""
        self.checkpointer.turnstile.open()
        self.handle.committed.result(DEADLINE_S)
        self.checkpointer.wait()
        self.checkpointer.turnstile.close()
        self.oracle.check(self.storage, self.number)

    def fenced_bytes(self) -> int:
        """Of the open snapshot, what wasn't copied in save()."""
        dense = self.checkpointer._stager._fence._open  # type: ignore[union-attr]
        return sum(c.live.nbytes for d in dense for c in d._copies)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def test_a_step_waits_for_the_copy_and_not_for_the_persist_thread() -> None:
    model = Dense()
    run = Run(model, adam(model))
    run.step()
    run.save()
    run.checkpointer.turnstile.wait_standing()  # and nothing has been copied by it
    assert run.fenced_bytes() > 4 << 20
    for _ in range(3):
        run.step()
    assert not run.handle.committed.done()
    stats = run.checkpointer.stats
    assert stats.fence_wait_s > 0
    waits = [e for name, e in run.sink.events if name == "trainer_waited"]
    assert [e["why"] for e in waits] == ["fence"]
    assert waits[0]["wait_s"] == stats.fence_wait_s
    run.finish()


def test_steps_go_on_while_storage_stands_still() -> None:
    model = Dense()
    run = Run(model, adam(model), chunk_bytes=65536)
    run.step()
    gate = run.storage.on("write", "data/*").block()
    run.checkpointer.turnstile.open()
    run.save()
    gate.wait_reached()
    for _ in range(5):
        run.step()
    assert not run.handle.committed.done()
    gate.open()
    run.finish()


def test_the_persist_thread_copies_before_the_step_if_it_can() -> None:
    model = Dense()
    run = Run(model, adam(model))
    run.step()
    run.save()
    run.checkpointer.turnstile.open()
    run.handle.staged.result(DEADLINE_S)
    run.step()
    assert run.checkpointer.stats.fence_wait_s == 0
    run.finish()


def test_nothing_is_fenced_that_is_soon_copied() -> None:
    model = nn.Linear(WIDE, 4)
    run = Run(model, adam(model))
    run.step()
    run.save()
    assert run.fenced_bytes() == 0
    run.finish()


def two_optimizers(model: Dense) -> tuple[torch.optim.Optimizer, ...]:
    return adam(model.first), torch.optim.AdamW([*model.last.parameters()], lr=0.1)


def foreach(model: Dense) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.Adam(model.parameters(), foreach=True),)


def fused(model: Dense) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.Adam(model.parameters(), fused=True),)


def momentum(model: Dense) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),)


def tensor_rate(model: Dense) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True),)


@pytest.mark.parametrize("make", [two_optimizers, foreach, fused, momentum, tensor_rate])
@pytest.mark.parametrize("blocks", [0, 1])
def test_each_optimizer(
    make: Callable[[Dense], tuple[torch.optim.Optimizer, ...]], blocks: int
) -> None:
    model = Dense()
    run = Run(model, *make(model))
    run.step()
    for _ in range(2):
        run.save()
        run.checkpointer.turnstile.wait_standing()
        run.checkpointer.turnstile.go(blocks)
        run.step()
        run.finish()


def test_one_of_two_optimizers_steps_before_the_snapshot_has_the_others() -> None:
    """Also where it is one that nobody has shown to the checkpointer."""
    model = Dense()
    run = Run(model, adam(model))
    run.step()
    run.save()
    run.checkpointer.turnstile.wait_standing()
    run.backward()
    torch.optim.SGD(model.last.parameters(), lr=1.0).step()
    run.finish()


def test_optimizers_in_the_backward_pass() -> None:
    model = Dense()
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def apply(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)
    run = Run(model, *optimizers.values())
    run.backward()
    run.save()
    run.checkpointer.turnstile.wait_standing()
    assert run.fenced_bytes() > 4 << 20
    run.backward()
    run.finish()


@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_steps_with_a_closure(kind: str) -> None:
    model = Dense()
    optimizer: torch.optim.Optimizer = (
        torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=4)
        if kind == "lbfgs"
        else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    )
    run = Run(model, optimizer)

    def closure() -> float:
        optimizer.zero_grad()
        return run.backward().item()

    optimizer.step(closure)
    for _ in range(2):
        run.save()
        run.checkpointer.turnstile.wait_standing()
        optimizer.step(closure)
        optimizer.step(closure)
        run.finish()


def test_a_scaler_that_skips_a_step() -> None:
    model = Dense()
    optimizer = adam(model)
    run = Run(model, optimizer)
    run.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.state["scaler"] = scaler  # type: ignore[assignment]
    run.save()
    run.checkpointer.turnstile.wait_standing()
    for bad in (True, False):
        scaler.scale(model(torch.randn(4, WIDE)).square().mean()).backward()
        if bad:
            model.first.weight.grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.finish()


class Renormed(nn.Module):
    """Its forward pass rewrites rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 300, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(torch.arange(x.shape[0]))
        return out


class Clamped(Dense):
    """Its forward pass changes a parameter, as weight clipping does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_rows_that_max_norm_rewrites_in_forward() -> None:
    model = Renormed()
    run = Run(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        run.save()
        run.checkpointer.turnstile.wait_standing()
        run.step()
        run.finish()


def test_a_parameter_that_forward_changes_is_named_once_and_exact_from_then_on() -> None:
    model = Clamped()
    run = Run(model, adam(model))
    run.step()
    run.save()
    run.checkpointer.turnstile.wait_standing()
    run.step()
    run.checkpointer.turnstile.open()
    error = run.handle.committed.exception(DEADLINE_S)
    assert error is not None
    assert "model.first.weight: changed outside" in str(error)
    run.checkpointer.turnstile.close()
    for _ in range(2):
        run.save()
        run.checkpointer.turnstile.wait_standing()
        run.step()
        run.finish()


def test_parameters_of_a_compiled_model_are_fenced() -> None:
    model = Dense()
    compiled = torch.compile(model, backend="eager")
    run = Run(model, adam(model))
    compiled(torch.randn(4, WIDE)).square().mean().backward()
    run.optimizers[0].step()
    run.save()
    run.checkpointer.turnstile.wait_standing()
    compiled(torch.randn(4, WIDE)).square().mean().backward()
    run.optimizers[0].step()
    run.finish()


def test_tensors_that_share_memory_in_other_shapes() -> None:
    """A slice, a transposed and a conjugated view of what an optimizer owns."""
    model = nn.Module()
    model.big = nn.Parameter(torch.randn(900, 900, dtype=torch.complex64))
    run = Run(model, torch.optim.SGD([model.big], lr=0.1))
    views = {"conj": model.big.detach().conj(), "t": model.big.detach().t()}
    run.state |= {**views, "rows": model.big.detach()[3:40]}  # type: ignore[dict-item]
    run.save()
    run.checkpointer.turnstile.wait_standing()
    model.big.grad = torch.ones_like(model.big)
    run.optimizers[0].step()
    run.finish()


def test_a_closed_checkpointer_leaves_no_hook() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    model = Dense()
    run = Run(model, adam(model))
    assert len(hooks) > before
    run.save()
    run.finish()
    run.checkpointer.close()
    assert len(hooks) == before


def fence_of(live: Tensor) -> tuple[StepFence, DenseCopy]:
    fence = StepFence(SystemClock(), lambda _: None, lambda: None)
    return fence, fence.open([Copy("w", live, torch.empty_like(live))])


def test_an_operation_that_is_under_way_at_the_last_look_is_seen_by_what_it_has_changed() -> None:
    """In-place operations count when they end. What isn't counted is for the look what isn't yet."""
    live = torch.zeros(1 << 21)  # 8 MiB: 16 places
    fence, copy = fence_of(live)
    copy.help()
    live.data[: len(live) // 2] += 1
    with pytest.raises(UntrackedWriteError, match="w: changed outside of an optimizer's step"):
        copy.settle()
    assert fence.unsteady == {"w"}
    fence.close()


@pytest.mark.parametrize("announced", ["by a step", "by hand"])
def test_what_training_changes_after_the_copy_is_no_concern_of_the_look(announced: str) -> None:
    live = torch.zeros(1 << 21, requires_grad=True)
    optimizer = torch.optim.SGD([live], lr=0.1)
    fence, copy = fence_of(live.detach())
    copy.help()
    if announced == "by a step":
        live.grad = torch.ones_like(live)
        optimizer.step()
    else:
        fence.finish()
        live.data += 1
    copy.settle()
    assert live.all()
    fence.close()
