"""Python processes that have imported torch, torchrec and Sidestage already: forks of one that has.

An import of all that takes a core for six seconds, a fork takes it for hundredths. `Popen` and `run` take the
command of a fresh process, and what they start is a child of the caller like that one. For a test of how a
process starts, or of a command as a user types it, use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.leaving import leave

ROOT = Path(__file__).parent.parent
_PR_SET_CHILD_SUBREAPER = 36
_TURN = threading.Lock()


class Popen(subprocess.Popen[str]):
    """As `subprocess.Popen` of `[sys.executable, "-m" or "-c", what, arguments...]`, with text streams.

    It takes streams, `cwd`, `env` and `start_new_session`. Torch uses one thread; what is read when
    Python or torch starts was read in the environment of the tests.
    """

    def __init__(
        self, args: Sequence[str | Path], *, start_new_session: bool = False, **given: Any
    ) -> None:
        assert args[0] == sys.executable
        assert args[1] in ("-m", "-c")
        self._leads = start_new_session
        super().__init__([str(arg) for arg in args], text=True, **given)

    def _execute_child(self, args: Any, *given: Any) -> None:
        """What `subprocess` calls once it has made the pipes: the only part that differs."""
        _, _, _, _, cwd, env, _, _, _, stdin, _, _, stdout, _, stderr, *_ = given
        told = {
            "args": args[1:],
            "cwd": os.fspath(cwd or ROOT),
            "env": dict(env or os.environ),
            "leads": self._leads,
        }
        streams = [own if fd == -1 else fd for own, fd in enumerate((stdin, stdout, stderr))]
        with _TURN:  # one server, and adoption is of the whole process
            self.pid = _server().fork(told, streams)
        self._child_created = True
        self._close_pipe_fds(*given[9:15])  # type: ignore[attr-defined]


def run(
    args: Sequence[str | Path], *, timeout: float, **given: Any
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` that captures the output."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Server:
    """The caller's end of the process that forks."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno())],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[its.fileno()],
            )
        atexit.register(self._close)

    def fork(self, told: dict[str, Any], streams: Sequence[int]) -> int:
        with os.fdopen(os.memfd_create("told"), "w") as text, _adopting():
            json.dump(told, text)
            text.flush()
            socket.send_fds(self._socket, [b"."], [text.fileno(), *streams])
            pid = int.from_bytes(self._socket.recv(8), "big")
        assert pid, "the server of warm processes has ended"
        return pid

    def _close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    """One for all tests of this process."""
    return _Server()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among what this process has started become its children as long as the block lasts."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(asked: socket.socket) -> list[str]:
    """Fork on request. Returns in each fork: its arguments. Nothing here starts a thread."""
    heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    while (request := socket.recv_fds(asked, 1, 4))[0]:
        fds = request[1]
        told, tell = os.pipe()
        if between := os.fork():
            os.close(tell)
            os.waitpid(between, 0)  # its child is an orphan now, and adopted
            asked.sendall(os.read(told, 8))
            for fd in (told, *fds):
                os.close(fd)
        elif pid := os.fork():
            os.write(tell, pid.to_bytes(8, "big"))
            os._exit(0)
        else:
            for fd in (asked.detach(), told, tell):
                os.close(fd)
            signal.signal(signal.SIGINT, heeded)
            return _become(*fds)
    os._exit(0)


def _become(text: int, *streams: int) -> list[str]:
    with open(text, encoding="utf-8") as file:
        file.seek(0)
        told = json.load(file)
    for own, fd in enumerate(streams):
        os.dup2(fd, own)
        os.close(fd)
    if told["leads"]:
        os.setsid()
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    sys.path[0] = told["cwd"]
    # What there was knows of the kind of file that it had.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    np.random.seed()  # which of itself goes on alike in each fork
    gc.enable()
    args: list[str] = told["args"]
    return args


_PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torchrec.distributed.model_parallel",
    "torchrec.distributed.train_pipeline",
    "trainer.session",
)


def _preload() -> None:
    gc.disable()  # collections are a quarter of the time of imports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOADED:
            with contextlib.suppress(ImportError):  # torchrec is an extra
                importlib.import_module(name)
    gc.freeze()  # no fork looks for garbage in what was imported, nor copies it by looking


def _play(kind: str, what: str, *rest: str) -> None:
    sys.argv = [what if kind == "-m" else kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def main() -> None:
    _preload()
    args = _serve(socket.socket(fileno=int(sys.argv[1])))
    code: Any = None
    try:
        _play(*args)
    except SystemExit as e:
        code = e.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    # Nothing that was imported is taken apart, which takes as long as many a test.
    leave(code or 0)


if __name__ == "__main__":
    main()
