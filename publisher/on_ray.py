"""The tasks of a version over a Ray cluster, for models that are too large for one host.

Each host of the cluster needs this package, the storage's credentials in the environment of its Ray
processes, and nothing else: tasks say where to read and write, and no table passes the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.errors import BadInputError
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
        ray = self._ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        hosts = [int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"]]
        count = min(self._workers or sum(hosts), len(tasks))
        fit, job = writer.job.shared(min(count, max(hosts, default=1)))
        count = max(1, min(count, fit * len(hosts)))
        remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_work)
        waiting = list(reversed(tasks))
        busy: dict[Any, FileTask] = {}
        shared = ray.put(job)  # once, not with each task
        try:
            while waiting or busy:
                while waiting and len(busy) < count:
                    task = waiting.pop()
                    busy[remote.remote(self._opens, shared, task)] = task
                for ref in ray.wait(list(busy))[0]:
                    yield self._result(ref, busy.pop(ref))
        finally:
            self._stop(list(busy))

    def _result(self, ref: Any, task: FileTask) -> FileResult:
        try:
            answer: FileResult | Failure = self._ray.get(ref)
        except self._ray.exceptions.RayError as e:
            raise WorkerError(task, f"was lost ({type(e).__name__})") from e
        if isinstance(answer, Failure):
            raise answer.error_here()
        return answer

    def _stop(self, refs: list[Any]) -> None:
        for ref in refs:
            self._ray.cancel(ref, force=True)
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=_STOP_S)


def _work(opens: OpenWriter, job: BuildJob, task: FileTask) -> FileResult | Failure:
    """One task in a process of the cluster."""
    try:
        return opens(job).write(task)
    except Exception as e:
        return Failure.of(e)
