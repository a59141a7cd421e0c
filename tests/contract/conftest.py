"""The backends that the contract suite runs over, and workers that race each other on one."""

from __future__ import annotations

import multiprocessing
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from tests.s3.server import BUCKET, SeaweedFS

DEADLINE_S = 120.0


@dataclass
class Backend:
    """A fresh, empty store, and the kind of workers that can share it.

    backslashes: False where the server under test can't tell a backslash from a slash.
    versioned_etags: False where equal content has an equal etag.
    """

    name: str
    storage: Storage
    pool: Callable[[int], Executor]
    backslashes: bool = True
    versioned_etags: bool = True

    def race(self, work: Callable[[Storage, int], Any], workers: int) -> list[Any]:
        """work(storage, i) in so many workers at once; their results in order."""
        with self.pool(workers) as pool:
            futures = [pool.submit(work, self.storage, i) for i in range(workers)]
            return [f.result(DEADLINE_S) for f in futures]


def _processes(workers: int) -> Executor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.contract.test_storage"])
    start = context.Barrier(workers, timeout=DEADLINE_S)
    return ProcessPoolExecutor(workers, context, _wait_for_all, (start,))


def _threads(workers: int) -> Executor:
    start = threading.Barrier(workers, timeout=DEADLINE_S)
    return ThreadPoolExecutor(workers, initializer=_wait_for_all, initargs=(start,))


def _wait_for_all(start: threading.Barrier) -> None:
    """Begin together, however long each took to start."""
    start.wait()


@pytest.fixture(scope="session")
def s3_client(seaweedfs: SeaweedFS) -> S3Client:
    """One for all tests: it costs half a second to make."""
    return S3Client(BUCKET, seaweedfs.settings)


@pytest.fixture(params=["local", "memory", "s3"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "local":
        return Backend("local", LocalStorage(tmp_path / "root"), _processes)
    if request.param == "memory":
        return Backend("memory", MemoryStorage(), _threads)
    client: S3Client = request.getfixturevalue("s3_client")
    storage = S3Storage(client, f"contract/{secrets.token_hex(8)}")
    return Backend("s3", storage, _threads, backslashes=False, versioned_etags=False)


@pytest.fixture
def storage(backend: Backend) -> Storage:
    return backend.storage
