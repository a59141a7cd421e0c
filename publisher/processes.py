"""A pool of processes on this host.

They are forked from a server that was spawned and has done nothing but import what they need: that
takes seconds, once, and its memory is shared.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, cast

from ckpt.errors import BadInputError
from publisher.engine import ATTEMPTS, Failure, OpenWriter, WorkerError, open_writer
from publisher.tasks import BuildJob, FileResult, FileTask

if TYPE_CHECKING:
    from publisher.writing import TableWriter

_EXIT_HINT = (
    "its own error is on stderr; a script that builds with workers must do so below its "
    '`if __name__ == "__main__":`'
)


class ProcessPool:
    """Processes of this host; each opens the checkpoint for itself.

    They end with this process, however it ends. A worker that is killed is replaced, and its task
    done again, once. As with all spawned processes, a script that uses this needs its
    `if __name__ == "__main__":`.

    Args:
        workers: most processes at a time.
        opens: opens a worker's writer.
    """

    def __init__(self, workers: int, opens: OpenWriter = open_writer) -> None:
        if workers < 1:
            raise BadInputError(f"{workers} workers: give 1 or more")
        self._workers = workers
        self._opens = opens

    def map(self, writer: TableWriter, tasks: Sequence[FileTask]) -> Iterator[FileResult]:
        count, job = writer.job.shared(min(self._workers, len(tasks)))
        waiting = [(task, 1) for task in reversed(tasks)]
        busy: dict[Connection, _Worker] = {}
        idle: list[_Worker] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < count:
                    worker = idle.pop() if idle else _Worker(job, self._opens)
                    busy[worker.connection] = worker
                    worker.begin(*waiting.pop())
                for ready in wait(list(busy)):
                    worker = busy.pop(cast("Connection", ready))
                    answer = worker.answer()
                    if isinstance(answer, FileResult):
                        idle.append(worker)
                        yield answer
                    elif isinstance(answer, Failure):
                        idle.append(worker)  # it lives, and is stopped with the others
                        raise answer.error_here()
                    elif worker.attempt == ATTEMPTS:
                        raise WorkerError(worker.task, answer, worker.hint)
                    else:
                        waiting.append((worker.task, worker.attempt + 1))
        finally:
            for worker in (*busy.values(), *idle):
                worker.stop()


class _Worker:
    """One process and the task that it has."""

    def __init__(self, job: BuildJob, opens: OpenWriter) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["publisher.writing"])
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, job, opens), name="publisher-worker", daemon=True
        )
        self._process.start()
        theirs.close()
        self.task: FileTask
        self.attempt: int
        self.hint: str | None = None

    def begin(self, task: FileTask, attempt: int) -> None:
        self.task, self.attempt = task, attempt
        with suppress(OSError):  # it died already: its answer will tell
            self.connection.send(task)

    def answer(self) -> FileResult | Failure | str:
        """What the worker says; how it died, if it did."""
        try:
            answer: FileResult | Failure = self.connection.recv()
            return answer
        except (EOFError, OSError):
            self._process.join()
            self.connection.close()
            code = self._process.exitcode or 0
            with suppress(ValueError):
                return f"{self._process.pid} was killed by {signal.Signals(-code).name}"
            self.hint = _EXIT_HINT
            return f"{self._process.pid} ended with exit code {code}"

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _work(connection: Connection, job: BuildJob, opens: OpenWriter) -> None:
    """A worker process: tasks in, results or failures out."""
    for name in (signal.SIGINT, signal.SIGTERM):  # its parent decides when it ends
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    writer: TableWriter | None = None
    while True:
        try:
            task: FileTask = connection.recv()
        except EOFError:
            return
        answer: FileResult | Failure
        try:
            writer = writer or opens(job)
            answer = writer.write(task)
        except Exception as e:
            answer = Failure.of(e)
        connection.send(answer)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
