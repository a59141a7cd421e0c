from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.events import ListSink
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.trust import TrustList
from publisher.build import VersionBuilder
from publisher.lease import Lease
from publisher.loading import ProgramCache
from publisher.metric import MetricCheck, metric_in_process
from publisher.parity import ParityCheck, parity_in_process
from publisher.policy import Policy
from publisher.publish import Publisher
from publisher.registry import Registry
from tests.publisher.tiny import TinyRun


@dataclass
class FakeClock:
    """Time that moves only when a test says so."""

    now_s: float = 1000.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Bench:
    """A run, its registry, and a publisher whose parity gate runs in this process."""

    run: TinyRun
    registry: Registry
    clock: FakeClock = field(default_factory=FakeClock)
    sink: ListSink = field(default_factory=ListSink)
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        self.programs = ProgramCache(self.run.trust)

    def publisher(
        self,
        parity: ParityCheck | None = None,
        *,
        lease: Lease | None = None,
        metric: MetricCheck | None = None,
    ) -> Publisher:
        builder = VersionBuilder(
            self.run.root, self.registry, self.programs, CheckpointReader, policy=self.policy
        )
        return Publisher(
            builder,
            parity or partial(parity_in_process, self.programs),
            "tester@here",
            policy=self.policy,
            lease=lease,
            metric=metric or partial(metric_in_process, self.programs),
            sink=self.sink,
        )

    def publish(self, step: int) -> Any:
        return self.publisher().publish(self.run.info(step), "test")


MakeBench = Callable[..., Bench]


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors are tiny: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trust(tmp_path: Path) -> TrustList:
    return TrustList(tmp_path / "trusted-code")


@pytest.fixture(params=["memory", "local"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage() if request.param == "memory" else LocalStorage(tmp_path / "root")


@pytest.fixture
def bench(trust: TrustList) -> Bench:
    """In memory."""
    return make_bench(MemoryStorage(), trust)


@pytest.fixture
def local_bench(tmp_path: Path, trust: TrustList) -> Bench:
    """On disk, for what other processes must see."""
    return make_bench(LocalStorage(tmp_path / "root"), trust)


def make_bench(storage: Storage, trust: TrustList) -> Bench:
    clock = FakeClock()
    return Bench(TinyRun(storage, trust).begin(), Registry(storage, clock=clock), clock)
