"""The fork server: a process that stands before its program, makes the imports, and forks workers.

It has one thread, touches no device and opens no connection.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from trainer.forks.client import SETTINGS
from trainer.forks.imports import Imports, forked
from trainer.tied import end_with_parent

_STREAMS = {1: "stdout", 2: "stderr"}
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def serve(started_with: frozenset[str]) -> None:
    """Import, then fork on request. Returns in each worker, ready for its program; never in the server.

    Args:
        started_with: names of the modules that every Python has before its program.
    """
    told = json.loads(os.environ.pop(SETTINGS))
    end_with_parent()
    if os.getppid() != told["launcher"]:
        os._exit(1)
    launcher = socket.socket(fileno=told["socket"])
    os.environ.pop("PYTHONPATH")
    if told["path"] is not None:
        os.environ["PYTHONPATH"] = told["path"]
    for name in [n for n in sys.modules if n.split(".")[0] == "trainer"]:
        del sys.modules[name]  # the program may have a `trainer` of its own
    gc.disable()  # half a million objects come to stay; to look through them is a quarter of the time
    before = _with_finalizers()
    imports = Imports(started_with, told["preload"], unasked=told["unasked"])
    finalizers = not _with_finalizers() <= before
    imports.hidden.hide()
    refused = imports.refused
    gc.freeze()  # what all workers have in common is no garbage, and isn't looked through for any
    ctypes.CDLL(None).fflush(None)  # or each fork would say it once more
    while (request := _received(launcher)) is not None:
        worker, files = request
        pid = None
        if not refused:
            try:
                pid = _forked(told["launcher"])
            except OSError as e:
                refused = f"a fork failed ({e})"
        if pid == 0:
            launcher.close()
            _become(worker, files, imports.renewals, finalizers=finalizers)
            imports.hidden.begin()
            return
        for fd in files:
            os.close(fd)
        answer = {"pid": pid} if pid else {"refused": refused}
        launcher.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)  # the launcher has ended, or needs no more workers


def _received(launcher: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What a worker is to be, and descriptors of its streams; None once nobody asks any more."""
    said, fds, _, _ = socket.recv_fds(launcher, 1, 1 + len(_STREAMS))
    if not said:
        return None
    with open(fds[0], "rb") as file:
        file.seek(0)
        return json.load(file), list(fds[1:])


def _forked(launcher: int) -> int:
    """Fork a worker: its pid here, 0 in itself. It is the leader of a session, as torchrun's workers are.

    The process between ends at once: the orphan becomes a child of the launcher, which has asked for
    such (`trainer.forks.client`), so that it has the parent that it would have under torchrun.
    """
    told, tell = os.pipe()
    wait, go = os.pipe()
    between = forked()
    if between:
        os.close(tell)
        os.close(wait)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            os.waitpid(between, 0)
        os.close(go)
        said = os.read(told, 8)
        os.close(told)
        if not said:
            raise OSError("the worker didn't become a child of the launcher")
        return int.from_bytes(said, "big")
    try:
        if forked():
            os._exit(0)
        os.close(told)
        os.close(go)
        os.setsid()  # Linux shares cores out among sessions first
        os.read(wait, 1)
        os.close(wait)
        end_with_parent()
        if os.getppid() != launcher:
            os._exit(1)
        os.write(tell, os.getpid().to_bytes(8, "big"))
        os.close(tell)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    return 0


def _become(
    worker: dict[str, Any],
    files: Sequence[int],
    renewals: Sequence[Callable[[], object]],
    *,
    finalizers: bool,
) -> None:
    """Put right what differs between this fork and a process that has just begun."""
    for number, fd in zip(worker["streams"], files, strict=True):
        os.dup2(fd, number)
        os.close(fd)
        _reopen(number)
    os.environ.clear()
    os.environ.update(worker["environment"])
    _heed(os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"))
    gc.enable()
    _renew_main()
    # At the end Python collects what modules hold, but not what is frozen: that would take a second.
    atexit.register(gc.unfreeze if finalizers else _flush_files)
    for renew in renewals:
        renew()
    main: Any = threading.main_thread()
    main._set_native_id()
    logs: Any = logging
    logs._startTime = time.time_ns() if isinstance(logs._startTime, int) else time.time()
    for name, attribute in (("tempfile", "tempdir"), ("uuid", "_node")):
        if name in sys.modules:
            setattr(sys.modules[name], attribute, None)  # found out anew
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    sys.path_importer_cache.clear()


def _heed(names: str) -> None:
    """Ignore none of the signals that torch's agent handles: no worker of its does, as under `nohup`."""
    for name in names.split(","):
        number = getattr(signal, name.strip(), None)
        if isinstance(number, signal.Signals) and signal.getsignal(number) == signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def _renew_main() -> None:
    """A `__main__` that isn't frozen, so that Python can collect what the program has left in it."""
    before = sys.modules["__main__"]
    main = ModuleType("__main__")
    vars(main).update(vars(before))
    for name in ("__main__", "__mp_main__"):
        if sys.modules.get(name) is before:
            sys.modules[name] = main


def _with_finalizers() -> set[int]:
    """Which objects there are whose end somebody may see: files, whatever has a `__del__`."""
    kinds: dict[type, bool] = {}
    found = set()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = any("__del__" in vars(base) for base in kind.__mro__)
        if kinds[kind]:
            found.add(id(thing))
    return found


def _flush_files() -> None:
    """Files that the program has put into a module which is frozen, and which nobody will collect."""
    for thing in gc.get_objects():
        if issubclass(type(thing), _WRITERS) and not thing.closed:
            with suppress(OSError, ValueError):
                thing.flush()


def _reopen(number: int) -> None:
    """A stream of this process that knows what kind of file it has now, as Python makes it under -u."""
    name = _STREAMS[number]
    before = getattr(sys, name)
    raw: Any = io.FileIO(number, "wb", closefd=False)
    raw.name = f"<{name}>"
    text: Any = io.TextIOWrapper(
        raw,
        before.encoding,
        before.errors,
        newline="\n",
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    text.mode = "w"
    setattr(sys, name, text)
    setattr(sys, f"__{name}__", text)
