"""Where the tasks of a version run: one protocol, in this process, and how errors travel.

An engine gives back results in any order. The first failure ends it: the others are stopped, and
nothing of them is left running when `map` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckpt import errors
from ckpt.errors import BadInputError, SidestageError, StorageError
from publisher.gates import GateError
from publisher.tasks import BuildJob, FileResult, FileTask

if TYPE_CHECKING:
    from ckpt.storage import Storage
    from publisher.policy import BuildPolicy
    from publisher.writing import TableWriter

OpenWriter = Callable[[BuildJob], "TableWriter"]
"""Runs in the worker; given to other processes by its name."""
ATTEMPTS = 2
"""How often a task is tried whose worker dies."""


class WorkerError(StorageError):
    """A worker died, more than once, in one task: nothing was found out about the commit.

    hint: what to look at; memory, unless it's known better.
    """

    def __init__(self, task: FileTask, how: str, hint: str | None = None) -> None:
        hint = hint or "is there memory for it? (build.memory_mib and build.workers of the policy)"
        super().__init__(
            f"{task.name}: the worker process {how}, {ATTEMPTS} times in this task; {hint}"
        )


class Engine(Protocol):
    """Runs tasks."""

    def map(self, writer: TableWriter, tasks: Sequence[FileTask]) -> Iterator[FileResult]:
        """Do all tasks of `writer.job`; results in any order.

        `writer` is this process's own; other processes open one like it. Raises what a task
        raised, wherever it ran, or WorkerError.
        """
        ...


class InProcess:
    """One task after the other, here."""

    def map(self, writer: TableWriter, tasks: Sequence[FileTask]) -> Iterator[FileResult]:
        return map(writer.write, tasks)


@dataclass(frozen=True)
class Failure:
    """An error of a task on its way from a worker, by what it means.

    error: its class, if that is one of `ckpt.errors`. gate, exit_code: of a GateError.
    """

    error: str
    message: str
    gate: str | None = None
    exit_code: int = SidestageError.exit_code

    @classmethod
    def of(cls, e: Exception) -> Failure:
        if isinstance(e, GateError):
            return cls("GateError", e.reason, e.gate, e.exit_code)
        if isinstance(e, SidestageError):
            known = next(k.__name__ for k in type(e).__mro__ if hasattr(errors, k.__name__))
            return cls(known, str(e))
        return cls("", f"{type(e).__name__}: {e}")

    def error_here(self) -> Exception:
        """The same error, to be raised in this process."""
        if self.gate is not None:
            return GateError(self.gate, self.message, self.exit_code)  # type: ignore[arg-type]
        known: type[Exception] = getattr(errors, self.error) if self.error else RuntimeError
        return known(self.message)


def open_writer(job: BuildJob) -> TableWriter:
    """What a worker works with."""
    from publisher.writing import TableWriter

    return TableWriter.open(job)


def engine_of(policy: BuildPolicy, *stores: Storage) -> Engine:
    """The engine that a policy names, for these stores.

    BadInputError if Ray is wanted and isn't installed, or if other processes can't reach a store.
    """
    for store in stores:
        if (policy.engine == "ray" or policy.workers) and store.url.startswith("memory:"):
            raise BadInputError(
                f"build.engine {policy.engine} with {policy.workers} workers: no other process can reach "
                f"{store.url}; set build.workers = 0, or use a folder or a bucket"
            )
    if policy.engine == "ray":
        from publisher.on_ray import RayCluster

        return RayCluster(policy.workers)
    if policy.workers:
        from publisher.processes import ProcessPool

        return ProcessPool(policy.workers)
    return InProcess()
