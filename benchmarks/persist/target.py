"""What a persist is measured on: saves of idle tables into one root, beside that root's limit."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from dataclasses import dataclass

import torch

from benchmarks.training.modes import guard_all
from benchmarks.training.tables import fill, make_tables, row_bytes
from benchmarks.training.workload import DIM, TABLES
from ckpt import CheckpointConfig, Checkpointer
from ckpt.storage import Storage

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Sample:
    """One save: stored bytes over the seconds from save() to its commit, and the limit around it."""

    bytes_per_s: float
    limit_bytes_per_s: float
    blocked_s: float


class Target(contextlib.AbstractContextManager["Target"]):
    """Tables that nobody trains, and a checkpointer over `storage`. Saves as fast as it can."""

    def __init__(self, storage: Storage | str, size_bytes: int) -> None:
        rows = size_bytes // (TABLES * row_bytes("plain", DIM))
        tables = make_tables("plain", TABLES, rows, DIM, torch.device("cpu"))
        random = torch.Generator().manual_seed(1)
        fill(tables.weights, random)
        fill(tables.momenta, random)  # zeros would be compressed
        self._state = {
            "weights": dict(enumerate(tables.weights)),
            "momenta": dict(enumerate(tables.momenta)),
        }
        self.total_bytes = sum(t.nbytes for t in (*tables.weights, *tables.momenta))
        self._checkpointer = Checkpointer(
            storage, CheckpointConfig(persist_target_s=0.0, keep_last=1)
        )
        self._tables = tables  # keeps the modules alive
        guard_all(self._checkpointer, tables.guarded)
        self._step = 0
        self._save()  # the first one allocates

    def measure(self) -> Sample:
        before = self.limit_bytes_per_s()
        speed, blocked_s = self._save()
        after = self.limit_bytes_per_s()
        return Sample(speed, (before + after) / 2, blocked_s)

    @abstractmethod
    def limit_bytes_per_s(self) -> float:
        """What the storage takes, by its simplest fast way, of as many bytes as a save has."""

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def _save(self) -> tuple[float, float]:
        """(stored bytes a second, blocked seconds)."""
        self._step += 1
        began = time.perf_counter()
        handle = self._checkpointer.save(self._step, self._state)
        blocked_s = time.perf_counter() - began
        handle.committed.result(DEADLINE_S)
        took_s = time.perf_counter() - began
        self._checkpointer.wait()
        return self.total_bytes / took_s, blocked_s
