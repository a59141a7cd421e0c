"""The imports of a fork server, and whether forks with them are what a fresh process is."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.forks.client import OF_WORKERS
from trainer.forks.entropy import Unseeded
from trainer.forks.hidden import Hidden, Traces

# Of this project's packages one needs another, and both have names that programs give, too.
_NEEDS = {"trainer": ("trainer", "ckpt")}


class Imports:
    """Modules imported as the program would do it, and hidden until it does.

    Args:
        started_with: names of the modules that every Python has before its program.
        preload: what to import. What can't be is left to the program, which will say why.
        unasked: nobody has named them; where the program's folder has one of that name, it isn't imported.
    """

    def __init__(
        self, started_with: frozenset[str], preload: Iterable[str], *, unasked: bool
    ) -> None:
        self._started_with = started_with
        self._unasked = unasked
        self._folder = _program_folder()
        unseeded = Unseeded()
        traces: dict[str, list[Traces]] = {}
        with _watched() as watched, _put_back(), unseeded.noted():
            if self._folder is not None:
                sys.path.insert(0, self._folder)
            for name in preload:
                top = name.split(".")[0]
                if unasked and any(map(self._in_folder, _NEEDS.get(top, (top,)))):
                    continue
                watched.importing = name
                before = Traces()
                try:
                    importlib.import_module(name)
                except (Exception, SystemExit):
                    continue
                traces.setdefault(top, []).append(Traces().since(before))
            if self._folder is not None:
                sys.path.remove(self._folder)
        self.renewals = unseeded.renewals()
        """What to call in each fork, so that generators begin anew."""
        self.refused = watched.said or self._threads() or self._devices() or self._shadows()
        """Why no fork with these imports is what a fresh process is; None where one is."""
        self.hidden = Hidden(self._others(), traces)

    def _others(self) -> dict[str, ModuleType]:
        """All modules that came with the imports, but Python's own, and but the program itself."""
        if sys.argv[0] == "-m":
            for name in (sys.orig_argv[3], f"{sys.orig_argv[3]}.__main__"):
                module = sys.modules.get(name)
                if module is not None and not hasattr(module, "__path__"):
                    del sys.modules[name]  # it will be run as __main__
        ours = {
            name: module
            for name, module in sys.modules.items()
            if name not in self._started_with and name.split(".")[0] not in sys.stdlib_module_names
        }
        tops = {name for name in ours if "." not in name and ours[name].__spec__ is not None}
        return {name: module for name, module in ours.items() if name.split(".")[0] in tops}

    def _in_folder(self, top: str) -> str | None:
        """The file that a top-level module would come from that lies in the program's folder."""
        if self._folder is None:
            return None
        spec = PathFinder.find_spec(top, [self._folder])
        return spec.origin if spec is not None else None

    def _shadows(self) -> str | None:
        for top in {name.split(".")[0] for name in sys.modules if name not in self._started_with}:
            theirs = self._in_folder(top)
            spec = getattr(sys.modules.get(top), "__spec__", None)
            mine = getattr(spec, "origin", None)
            if theirs is None or mine in {"built-in", "frozen"}:  # no path is asked for those
                continue
            if theirs != mine or self._unasked:
                return f"{theirs} has the name of a module that was imported for them"
        return None

    def _threads(self) -> str | None:
        unknown = len(os.listdir("/proc/self/task")) - 1 - _blas_threads()
        if unknown <= 0 and threading.active_count() == 1:
            return None
        return "the imports for them start threads, which no fork has"

    def _devices(self) -> str | None:
        torch: Any = sys.modules.get("torch")
        in_bad_fork = getattr(getattr(torch, "_C", None), "_cuda_isInBadFork", None)
        if in_bad_fork is None:
            return None
        trial = forked()
        if trial == 0:
            os._exit(bool(in_bad_fork()))
        try:
            _, status = os.waitpid(trial, 0)
        except ChildProcessError:  # where SIGCHLD is ignored, nobody knows
            status = 1
        return "the imports for them ask for devices, which no fork has then" if status else None


class _Watched(dict[bytes, bytes]):
    """The environment while imports are made; says who asks for what only a worker has."""

    importing = ""
    said: str | None = None

    def __missing__(self, key: bytes) -> bytes:
        name = os.fsdecode(key)
        if name in OF_WORKERS:
            self.said = f"{self.importing} reads {name} when it is imported, before a worker has it"
        raise KeyError(key)


@contextmanager
def _watched() -> Iterator[_Watched]:
    environment: Any = os.environ
    plain = environment._data  # os.environb has the same one
    watched = environment._data = _Watched(plain)
    try:
        yield watched
    finally:
        plain.clear()
        plain.update(watched)
        environment._data = plain


@contextmanager
def _put_back() -> Iterator[None]:
    """Whatever the block leaves behind for the whole process is taken back."""
    before = Traces()
    with warnings.catch_warnings():
        yield
    for handler in Traces().since(before).handlers:
        logging.root.removeHandler(handler)
    logging.root.setLevel(before.level)


def forked() -> int:
    """os.fork(); Python 3.12 would warn of OpenBLAS's threads, which forks do well without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _program_folder() -> str | None:
    """What Python will put at the head of the program's path."""
    if sys.flags.safe_path:
        return None
    if sys.argv[0] == "-m":
        return os.getcwd()
    program = Path(sys.orig_argv[2])
    return str(program.resolve() if program.is_dir() else program.resolve().parent)


def _blas_threads() -> int:
    """Threads of OpenBLAS, which NumPy and SciPy bring along. A fork that needs them starts its own."""
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line}
    return len(libraries) * (len(os.sched_getaffinity(0)) - 1)
