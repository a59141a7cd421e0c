"""Copies of dense state on a device: all begun at once, ordered before the step, awaited before reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt.errors import UntrackedWriteError
from ckpt.fence import Copy, StepFence
from ckpt.rows.device import HostDevice
from ckpt.types import SystemClock


class SlowDevice(HostDevice):
    """Notes what is waited for, by whom: "order" on the device, "host" on the host."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def mark(self) -> Any:
        return _Slow(self.waits)


class _Slow:
    def __init__(self, waits: list[str]) -> None:
        self.waits = waits

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.waits.append("order")

    def synchronize(self) -> None:
        self.waits.append("host")


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice()


@pytest.fixture
def fence(device: SlowDevice) -> Iterator[StepFence]:
    fence = StepFence(SystemClock(), lambda _: None, lambda: None, lambda _: device)
    yield fence
    fence.close()


def trained() -> tuple[torch.optim.Optimizer, torch.nn.Parameter, Copy]:
    weight = torch.nn.Parameter(torch.randn(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], 0.1)
    return optimizer, weight, Copy("w", weight.detach(), torch.empty(4))


def test_a_step_only_orders_and_the_reader_still_waits(
    fence: StepFence, device: SlowDevice
) -> None:
    optimizer, weight, copy = trained()
    want = weight.detach().clone()
    dense = fence.open([copy])
    assert not dense.done
    assert device.waits == ["order"]  # behind what was enqueued before
    optimizer.step()
    assert dense.done
    assert device.waits == ["order", "order"]  # training's host never waits
    dense.settle()
    assert device.waits[2:] == ["host"]
    assert torch.equal(copy.home, want)


def test_what_was_read_already_may_change(fence: StepFence, device: SlowDevice) -> None:
    optimizer, weight, copy = trained()
    dense = fence.open([copy])
    dense.settle()
    with torch.no_grad():
        weight.mul_(2)
    optimizer.step()
    dense.settle()
    assert not fence.unsteady


@pytest.mark.parametrize("step", [False, True])
def test_a_change_outside_of_a_step_is_found(fence: StepFence, step: bool) -> None:
    optimizer, weight, copy = trained()
    dense = fence.open([copy])
    with torch.no_grad():
        weight.mul_(2)
    if step:
        optimizer.step()
    with pytest.raises(UntrackedWriteError, match="w: changed outside"):
        dense.settle()
    assert fence.unsteady == {"w"}


def test_abandoned_copies_have_ended(fence: StepFence, device: SlowDevice) -> None:
    optimizer, _, copy = trained()
    dense = fence.open([copy])
    optimizer.step()
    dense.abandon()
    assert device.waits[-1] == "host"
    assert dense.done
