"""The tasks of a version over a Ray cluster, for models that are too large for one host.

Each host of the cluster needs this package, the storage's credentials in the environment of its Ray
processes, and nothing else: tasks say where to read and write, and no table passes the driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ckpt.errors import BadInputError, StorageError
from publisher.engine import ATTEMPTS, Failure, OpenWriter, WorkerError, open_writer
from publisher.tasks import BuildJob, FileResult, FileTask

if TYPE_CHECKING:
    from publisher.writing import TableWriter

_STOP_S = 30.0


class RayCluster:
    """A Ray cluster: the one of `RAY_ADDRESS`, else one that runs on this host, else a new local one.

    Args:
        workers: most tasks at a time; 0: one for each CPU of the cluster.
        opens: opens a worker's writer.
    """

    def __init__(self, workers: int = 0, opens: OpenWriter = open_writer) -> None:
        try:
            import ray
        except ImportError:
            raise BadInputError(
                "engine ray: Ray isn't installed; pip install 'sidestage[ray]'"
            ) from None
        self._ray: Any = ray
        self._workers = workers
        self._opens = opens

    def map(self, writer: TableWriter, tasks: Sequence[FileTask]) -> Iterator[FileResult]:
        """As Engine.map; StorageError too where the cluster can't be reached or gives up."""
        if not tasks:
            return
        ray = self._ray
        with self._reached():
            if not ray.is_initialized():
                ray.init(log_to_driver=False)
            hosts = [int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]]
        if not any(hosts):
            raise StorageError("engine ray: no host of the cluster has a CPU to give; start one")
        count, cpus, job = share_out(writer.job, hosts, self._workers, len(tasks))
        busy: dict[Any, FileTask] = {}
        try:
            with self._reached():
                remote = ray.remote(num_cpus=cpus, max_retries=ATTEMPTS - 1)(_work)
                shared = ray.put(job)  # once, not with each task
            waiting = list(reversed(tasks))
            while waiting or busy:
                with self._reached():
                    while waiting and len(busy) < count:
                        task = waiting.pop()
                        busy[remote.remote(self._opens, shared, task)] = task
                    ready = ray.wait(list(busy))[0]
                for ref in ready:
                    yield self._result(ref, busy.pop(ref))
        finally:
            self._stop(list(busy))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """What goes wrong with the cluster itself says nothing about the commit: try again."""
        try:
            yield
        except Exception as e:
            why = (str(e).strip().splitlines() or [""])[0]
            raise StorageError(
                f"engine ray: the cluster can't be used: {type(e).__name__}: {why}; is it up? "
                f"(`ray status`, RAY_ADDRESS)"
            ) from e

    def _result(self, ref: Any, task: FileTask) -> FileResult:
        try:
            answer: FileResult | Failure = self._ray.get(ref)
        except self._ray.exceptions.RayError as e:
            raise WorkerError(task, f"was lost ({type(e).__name__})") from e
        if isinstance(answer, Failure):
            raise answer.error_here()
        return answer

    def _stop(self, refs: list[Any]) -> None:
        with suppress(Exception):  # a cluster that is gone does nothing more, and has told
            for ref in refs:
                self._ray.cancel(ref, force=True)
            if refs:
                self._ray.wait(refs, num_returns=len(refs), timeout=_STOP_S)


def share_out(
    job: BuildJob, hosts: Sequence[int], workers: int, tasks: int
) -> tuple[int, int, BuildJob]:
    """(tasks at a time, CPUs that each one asks for, the job with one task's memory).

    hosts: the CPUs of each, not all 0. Ray places tasks by CPUs alone, all on one host if they fit:
    where the memory of a host is enough for fewer, each one asks for more CPUs than it uses.
    """
    wanted, most = min(workers or sum(hosts), tasks), max(hosts)
    on_one = min(wanted, most)
    fit, _ = job.shared(on_one)
    cpus = 1 if fit >= on_one else math.ceil(most / fit)
    _, job = job.shared(min(on_one, most // cpus))
    return min(wanted, sum(h // cpus for h in hosts)), cpus, job


def _work(opens: OpenWriter, job: BuildJob, task: FileTask) -> FileResult | Failure:
    """One task in a process of the cluster."""
    try:
        return opens(job).write(task)
    except Exception as e:
        return Failure.of(e)
