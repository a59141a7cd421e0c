"""The backends that the contract suite runs over, and workers that race each other on one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage import LocalStorage, MemoryStorage, Storage

DEADLINE_S = 120.0


@dataclass
class Backend:
    """A fresh, empty store, and the kind of workers that can share it."""

    name: str
    storage: Storage
    pool: Callable[[int], Executor]

    def race(self, work: Callable[[Storage, int], Any], workers: int) -> list[Any]:
        """work(storage, i) in so many workers at once; their results in order."""
        with self.pool(workers) as pool:
            futures = [pool.submit(work, self.storage, i) for i in range(workers)]
            return [f.result(DEADLINE_S) for f in futures]


def _processes(workers: int) -> Executor:
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(workers, timeout=DEADLINE_S)
    return ProcessPoolExecutor(workers, spawn, _wait_for_all, (start,))


def _threads(workers: int) -> Executor:
    start = threading.Barrier(workers, timeout=DEADLINE_S)
    return ThreadPoolExecutor(workers, initializer=_wait_for_all, initargs=(start,))


def _wait_for_all(start: threading.Barrier) -> None:
    """Begin together, however long each took to start."""
    start.wait()


@pytest.fixture(params=["local", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "local":
        return Backend("local", LocalStorage(tmp_path / "root"), _processes)
    return Backend("memory", MemoryStorage(), _threads)


@pytest.fixture
def storage(backend: Backend) -> Storage:
    return backend.storage
