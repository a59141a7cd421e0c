"""Snapshots of guarded tables against a whole copy, in every order of saves, steps and copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ckpt import native
from ckpt.rows import RowGuards, RowSnapshot, Table
from ckpt.rows.device import HostDevice
from ckpt.rows.device_pool import DevicePool
from ckpt.rows.native_pool import NativePool
from ckpt.rows.pools import Pools
from ckpt.rows.torch_pool import TorchPool
from ckpt.types import SystemClock

BUFFER = 8 * 4096


def table(name: str, rows: int, dim: int, *states: tuple[int, ...]) -> Table:
    parts = [torch.randn(rows, dim), *(torch.rand(rows, *shape) for shape in states)]
    return Table(name, tuple(parts))


def make(pool: str, monkeypatch: pytest.MonkeyPatch | None = None, **options: Any) -> RowGuards:
    if pool == "native" and native.load() is None:
        pytest.skip("the native part wasn't built: no C compiler at installation")
    guards = RowGuards(SystemClock(), 60.0, **options)
    if pool == "torch":
        guards._pool = TorchPool()
    elif pool == "device":  # what runs on CUDA, on tensors in host memory
        guards._pool = DevicePool(HostDevice())
    else:
        assert isinstance(guards._pool, Pools)
        assert isinstance(guards._pool._host, NativePool)
    return guards


@pytest.fixture(params=["native", "torch", "device"])
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Copying:
    """A snapshot being copied chunk by chunk, and what it must become."""

    snapshot: RowSnapshot
    want: list[tuple[torch.Tensor, ...]]
    got: list[tuple[torch.Tensor, ...]]
    left: list[tuple[int, int]] = field(default_factory=list)

    def step(self, tables: list[Table]) -> bool:
        """Copy the next chunk; False at the end."""
        if not self.left:
            return False
        t, chunk = self.left.pop(0)
        place = self.snapshot.find(tables[t].components[0])
        assert place is not None
        a, b = chunk * place.chunk_rows, min(tables[t].rows, (chunk + 1) * place.chunk_rows)
        out = [g[a:b].view(b - a, -1).view(torch.uint8).view(-1) for g in self.got[t]]
        self.snapshot.copy(place, chunk, out)
        return True

    def check(self) -> None:
        for t, (want, got) in enumerate(zip(self.want, self.got, strict=True)):
            for w, g in zip(want, got, strict=True):
                bad = (w != g).reshape(w.shape[0], -1).any(1).nonzero().flatten().tolist()
                assert not bad, f"table {t}: rows {bad[:8]} differ"


def begin(guards: RowGuards, tables: list[Table]) -> Copying:
    snapshot = guards.open()
    assert snapshot is not None
    want = [tuple(c.clone() for c in t.components) for t in tables]
    got = [tuple(torch.full_like(c, -7.0) for c in t.components) for t in tables]
    left = []
    for t, x in enumerate(tables):
        place = snapshot.find(x.components[0])
        assert place is not None
        left += [(t, c) for c in range(-(-x.rows // place.chunk_rows))]
    return Copying(snapshot, want, got, left)


class Machine(RuleBasedStateMachine):
    """Steps, saves, copies and closes in any order; several snapshots open at once."""

    pool = "native"

    @initialize(overlay=st.sampled_from([4096, 64 << 10, 4 << 20]), seed=st.integers(0, 99))
    def start(self, overlay: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.waits = 0
        self.guards = make(self.pool, hurry=self.copy_some)
        self.tables = [table("a", 5000, 8, ()), table("b", 333, 16, (), (16,)), table("c", 1, 4)]
        self.group = self.guards.group(self.tables)
        self.guards.lay_out(BUFFER, overlay)
        self.open: list[Copying] = []

    def copy_some(self) -> None:
        """Training waits: the copying side goes on."""
        self.waits += 1
        assert self.waits < 10_000
        for copying in list(self.open):
            if copying.step(self.tables):
                return
            self.finish(copying)

    def finish(self, copying: Copying) -> None:
        copying.check()
        copying.snapshot.close()
        self.open.remove(copying)

    @rule(
        n=st.integers(0, 400),
        seed=st.integers(0, 1 << 30),
        power=st.sampled_from([1, 4]),
        narrow=st.booleans(),
        bad=st.booleans(),
    )
    def train(self, n: int, seed: int, power: int, narrow: bool, bad: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        parts, order = [], [0, 2, 1, 0]
        for t in order:
            rows = self.tables[t].rows
            parts.append((torch.rand(n, generator=g).pow(power) * rows).long().clamp(max=rows - 1))
            if bad and n:
                parts[-1][0] = -1 if seed % 2 else rows + 5
        ids = torch.cat(parts)
        self.group.touch(ids.int() if narrow else ids, [n * i for i in range(5)], order)
        for t, part in zip(order, parts, strict=True):
            rows = torch.where((part < 0) | (part >= self.tables[t].rows), 0, part)
            for c in self.tables[t].components:
                c[rows] += torch.rand(1, generator=g).item() + 0.5

    @rule(t=st.integers(0, 2))
    def change_all(self, t: int) -> None:
        self.group.touch_all(t)
        for c in self.tables[t].components:
            c.mul_(1.25)

    @precondition(lambda self: len(self.open) < 3)
    @rule()
    def save(self) -> None:
        self.open.append(begin(self.guards, self.tables))

    @precondition(lambda self: self.open)
    @rule(chunks=st.integers(1, 9))
    def copy(self, chunks: int) -> None:
        for _ in range(chunks):
            if self.open and not self.open[0].step(self.tables):
                self.finish(self.open[0])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2))
    def abandon(self, which: int) -> None:
        if which < len(self.open):
            self.open.pop(which).snapshot.close()

    @precondition(lambda self: not self.open)
    @rule(saves=st.sampled_from([100, 260]))
    def save_often(self, saves: int) -> None:
        """Tags are one byte: they must survive more saves than that."""
        for _ in range(saves):
            snapshot = self.guards.open()
            assert snapshot is not None
            snapshot.close()
        assert not self.guards.busy

    @invariant()
    def overlay_is_bounded(self) -> None:
        if hasattr(self, "guards"):
            assert self.guards.pressure() <= 1
            if not self.open and not self.guards.busy:
                assert self.guards.overlay_bytes == 0

    def teardown(self) -> None:
        for copying in list(getattr(self, "open", [])):
            while copying.step(self.tables):
                pass
            self.finish(copying)


def test_more_saves_than_tags_while_some_snapshot_is_always_open(pool: str) -> None:
    open_ones: list[Copying] = []

    def copy_on() -> None:
        if open_ones and not open_ones[0].step(tables):
            done = open_ones.pop(0)
            done.check()
            done.snapshot.close()

    guards = make(pool, hurry=copy_on)
    tables = [table("t", 500, 4, ())]
    group = guards.group(tables)
    guards.lay_out(BUFFER, 1 << 20)
    g = torch.Generator().manual_seed(0)
    for _ in range(600):
        open_ones.append(begin(guards, tables))
        rows = torch.randint(0, 500, (20,), generator=g)
        group.touch_rows(0, rows)
        for c in tables[0].components:
            c[rows] += 1.0
        while len(open_ones) > 2:
            copy_on()
    while open_ones:
        copy_on()
    assert not guards.busy


class TorchMachine(Machine):
    pool = "torch"


class DeviceMachine(Machine):
    pool = "device"


for machine, examples in ((Machine, 20), (TorchMachine, 10), (DeviceMachine, 8)):
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None
    )
TestTorch = TorchMachine.TestCase
TestDevice = DeviceMachine.TestCase


@pytest.mark.skipif(native.load() is None, reason="no C compiler at installation")
class TestNative(Machine.TestCase):
    pass
