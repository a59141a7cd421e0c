"""The processes of a publishing benchmark: whoever makes commits, the publisher, the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.demo.jobs import Job

READY_S = 300.0


def environment_of(folder: Path) -> dict[str, str]:
    """A trust list of this benchmark's own, and one core for each process's mathematics."""
    return {
        "SIDESTAGE_TRUST_FILE": str(folder / "trusted-code"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Committer:
    """`benchmarks.serving.commits` in a process of its own."""

    def __init__(self, folder: Path, root: Path, *model: str) -> None:
        self._log = (folder / "commits.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.commits", str(root), *model],
            env={**os.environ, **environment_of(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._hear("ready")

    def commit(self, step: int) -> float:
        """Wall clock at which the commit of `step` was there."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        return float(self._hear("committed")["at_s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(READY_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _hear(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and (said := json.loads(line))["event"] == event:
                return dict(said)
        said = Path(self._log.name).read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the process that makes commits ended: {said}")


@contextmanager
def committing(folder: Path, root: Path, *model: str) -> Iterator[Committer]:
    made = Committer(folder, root, *model)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def daemon(folder: Path, name: str, *command: str) -> Iterator[Job]:
    """`publisher COMMAND... --json` until the end of the block."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    job = Job(name, ["-m", "publisher.cli", *command, "--json"], environment_of(folder), logs)
    try:
        yield job
        job.stop()
    finally:
        job.kill()
