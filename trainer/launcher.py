"""torchrun with warm workers: each restart forks them from a process that has imported everything.

    trainer launch --standalone --nproc-per-node 2 --max-restarts 3 -m trainer.cli train --config FILE

takes torchrun's command line and is torchrun's agent: same rendezvous, environment, restarts, logs and
signals. Only how workers come to be differs. torchrun starts a Python for each, which imports torch and
torchrec for seconds at every start and at every restart. Here one process (`trainer.forks`) imports them
once, while the agent does so itself, and every worker is a fork of it. Where a fork would not be what a
fresh process is, workers are fresh processes, and one line says why.
"""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainer.forks.client import Fork, ForkServer, RefusedError
from trainer.forks.late import read_at_import, set_too_late

PRELOAD = ("numpy", "torch", "torchrec", "trainer.session")
"""What workers find imported if the caller names nothing."""
_OWN = {"trainer.cli": ("trainer.preload",)}
"""The same for a program of this package."""

# Options of torchrun that take no value.
_COMMANDS = {"--no-python", "--no_python", "--run-path", "--run_path"}
_MODULE = {"-m", "--module"}
_FLAGS = {"--standalone", "--virtual-local-rank", "--virtual_local_rank", *_MODULE, *_COMMANDS}


def launch(arguments: Sequence[str], preload: Sequence[str] = ()) -> None:
    """Run torchrun's command line with warm workers; returns when all have ended well.

    Raises SystemExit for a command line that torchrun refuses, and else with the exit code of the
    worker that failed first: 128 + the signal's number if one ended it, or the agent itself.

    Args:
        arguments: as for torchrun.
        preload: modules to import before the first fork; by default what the program needs if it is one of
            this package, else PRELOAD. Those that can't be imported are left to the workers, who say why.
    """
    workers = _Workers(preload)
    try:
        workers.prepare(*_guessed(arguments))  # on one core, while this process imports on another
        _run(arguments, workers)
    finally:
        workers.close()


def _run(arguments: Sequence[str], workers: _Workers) -> None:
    """Be torchrun's agent, as `torch.distributed.run.run` is."""
    from torch.distributed.elastic.multiprocessing import SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.launcher.api import elastic_launch

    from trainer.rendezvous import each_life_a_store

    class Handler(SubprocessHandler):
        """One worker: a fork, or else what torchrun starts."""

        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            fork = workers.start(args, env, self._stdout, self._stderr)
            return fork or super()._popen(args, env)

    config, entry, entry_arguments = _parsed(arguments)
    python = entry == sys.executable
    workers.prepare([sys.executable, *entry_arguments] if python else [], dict(os.environ))
    if not isinstance(entry, str):
        workers.say_fresh("--run-path is torchrun's own way to start them")
    config.rdzv_backend = each_life_a_store(config.rdzv_backend)
    agent: Any = elastic_launch(config, entry)
    parts: Any = api
    usual, parts.get_subprocess_handler = parts.get_subprocess_handler, Handler
    try:
        agent(*entry_arguments)
    except ChildFailedError as e:
        print(str(e).rstrip(), file=sys.stderr)
        _, first = e.get_first_failure()
        raise SystemExit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode) from e
    except SignalException as e:
        print(f"error: the launcher was ended by {e.sigval.name}", file=sys.stderr)
        raise SystemExit(128 + e.sigval.value) from e
    finally:
        parts.get_subprocess_handler = usual


def _parsed(arguments: Sequence[str]) -> tuple[Any, str | Callable[..., Any], list[str]]:
    """Torchrun's reading of its command line: the configuration, what to run, and its arguments."""
    run: Any = importlib.import_module("torch.distributed.run")
    args = run.parse_args(list(arguments))
    alone = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and run.parse_min_max_nnodes(args.nnodes)[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    parsed: tuple[Any, str | Callable[..., Any], list[str]] = run.config_from_args(args)
    return parsed


def _guessed(arguments: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command and the environment of workers, before torch is there to read the command line.

    It spares seconds where it's right. Where it isn't, another fork server is started.
    """
    flags: set[str] = set()
    values = {"--nproc-per-node": os.environ.get("PET_NPROC_PER_NODE", "1")}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in _FLAGS:
            flags.add(name)
        elif equals or rest:
            values[name.replace("_", "-")] = value if equals else rest.pop(0)
    environment = dict(os.environ)
    if not rest or flags & _COMMANDS or "PYTHON_EXEC" in environment:
        return (), environment
    if values["--nproc-per-node"] != "1":
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    return (sys.executable, "-u", *(["-m"] if flags & _MODULE else []), *rest), environment


class _Workers:
    """How workers come to be: as forks, or else as fresh processes, which one line says."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload
        self._server: ForkServer | None = None
        self._why_fresh = ""
        self._said = False

    def prepare(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Have a fork server for workers of this command and environment; () for what no fork can be."""
        server = self._server
        if (
            server
            and server.command == tuple(command)
            and _at_import(server.environment) == _at_import(environment)
        ):
            return
        self.close()
        if not command:
            self._why_fresh = "torchrun is told to start something else than a Python program"
            return
        module = command[3] if command[2] == "-m" else None
        late = set_too_late(_source(command[2], module), environment)
        if late:
            self._why_fresh = (
                f"the program sets {late}, which is read when torch is imported; "
                f"give it to the launcher instead ({late}=... trainer launch ...)"
            )
            return
        self._why_fresh = ""
        preload = self._preload or _OWN.get(module or "", ())
        self._server = ForkServer(command, preload or PRELOAD, environment, unasked=not preload)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: TextIO | None,
        stderr: TextIO | None,
    ) -> Fork | None:
        """A fork for one worker; None where it must be a fresh process."""
        if self._server and self._server.command != tuple(command):
            self._why_fresh = f"they are started otherwise ({' '.join(command[:3])} ...)"
            self.close()
        if self._server:
            streams = [None if file is None else file.fileno() for file in (stdout, stderr)]
            try:
                return self._server.fork(environment, *streams)
            except RefusedError as e:
                self._why_fresh = str(e)
                self.close()
        self.say_fresh(self._why_fresh)
        return None

    def say_fresh(self, why: str) -> None:
        """Say it once: this job's restarts will take their time."""
        if not self._said:
            self._said = True
            print(f"note: workers are fresh processes and no forks: {why}", file=sys.stderr)

    def close(self) -> None:
        """No more forks."""
        if self._server:
            self._server.close()
            self._server = None


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if read_at_import(k)}


def _source(script: str, module: str | None) -> Path:
    """The text of a program, as far as it lies where it's started."""
    if module is None:
        program = Path(script)
        return program / "__main__.py" if program.is_dir() else program
    path = Path(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
