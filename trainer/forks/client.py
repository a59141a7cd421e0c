"""The launcher's side of forks: a fork server is started, and asked for workers."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = "SIDESTAGE_FORK_SERVER"
"""The environment variable that tells a process to be a fork server, and how: JSON."""

# A worker's own, or its agent's. The fork server has none of them, so that it sees who asks at import.
OF_WORKERS = frozenset(
    {
        *(
            "RANK",
            "LOCAL_RANK",
            "GROUP_RANK",
            "ROLE_RANK",
            "ROLE_NAME",
            "MASTER_ADDR",
            "MASTER_PORT",
        ),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"),
    }
)
_SITE = Path(__file__).parent / "site"
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class RefusedError(Exception):
    """There will be no fork: the text says why. A process of its own does instead."""


class Fork:
    """A worker that was forked: what torch's agent uses of a `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus a signal's number, or None while it lives."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except (
                ChildProcessError
            ):  # nobody knows, as where SIGCHLD is ignored; `subprocess` says so
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired after `timeout` seconds."""
        if self.poll() is None:
            ends = os.pidfd_open(self.pid)
            try:
                waiting = select.poll()
                waiting.register(ends, select.POLLIN)
                waiting.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(ends)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code


class ForkServer:
    """A process that has made the imports and forks workers.

    Args:
        command: of each worker, `python -u [-m] program arguments...`.
        preload: modules to import; those that can't be are left to the workers, who say why.
        environment: what those find that read it when they are imported.
        unasked: nobody has named them: one that the program's folder has, too, isn't imported.
    """

    def __init__(
        self,
        command: Sequence[str],
        preload: Sequence[str],
        environment: Mapping[str, str],
        *,
        unasked: bool,
    ) -> None:
        self.command = tuple(command)
        self.environment = dict(environment)
        self._socket, its = (_past_streams(end) for end in socket.socketpair())
        path = environment.get("PYTHONPATH")
        settings = {
            "socket": its.fileno(),
            "launcher": os.getpid(),
            "preload": list(preload),
            "unasked": unasked,
            "path": path,
        }
        with its:
            self._process = subprocess.Popen(
                self.command,
                env={
                    # To ask for devices in the usual way would leave the driver as no fork can use it.
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                    **{k: v for k, v in self.environment.items() if k not in OF_WORKERS},
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(_SITE), path])),
                    SETTINGS: json.dumps(settings),
                },
                pass_fds=[its.fileno()],
                start_new_session=True,  # Ctrl-C is the launcher's
            )

    def fork(
        self,
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Fork:
        """One more worker, a child of this process and the leader of a session.

        Args:
            environment: all of its environment.
            stdout: the descriptor of a file to have instead of this process's own.
            stderr: the same.

        Raises RefusedError if forks of this server would not be what a fresh process is.
        """
        given = {1: stdout, 2: stderr}
        told = {
            "environment": dict(environment),
            "streams": [number for number, fd in given.items() if fd is not None],
        }
        with os.fdopen(os.memfd_create("worker"), "wb") as text, _adopting():
            text.write(json.dumps(told).encode())
            text.flush()
            fds = [text.fileno(), *(fd for fd in given.values() if fd is not None)]
            try:
                socket.send_fds(self._socket, [b"."], fds)
                answer = self._read()
            except OSError:
                answer = {}
        if "pid" in answer:
            return Fork(answer["pid"], self.command)
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        self.close()
        raise RefusedError(f"their fork server has ended with exit code {self._process.returncode}")

    def close(self) -> None:
        """End it, and not its workers."""
        self._socket.close()
        self._process.kill()  # does nothing to one that has ended, whose exit code stays
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        line = b""
        while not line.endswith(b"\n"):
            more = self._socket.recv(4096)
            if not more:
                return {}
            line += more
        answer: dict[str, Any] = json.loads(line)
        return answer


def _past_streams(end: socket.socket) -> socket.socket:
    """The same socket with a descriptor that is none of the three streams', which may be closed here."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


@contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among what this process has started become its children, as long as the block lasts.

    A fork of the server's is orphaned at once, so that it's a child of this process like torchrun's workers.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
