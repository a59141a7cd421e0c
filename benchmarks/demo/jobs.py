"""The demo's processes: started here, ended here by pid, each with a log file of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckpt.errors import DeadlineError, SidestageError

POLL_S = 0.05
T = TypeVar("T")


class Job:
    """A process in the background. `lines()` gives what it has printed since the last call."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str], logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._out = self.log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **env},
            stdout=self._out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        self._read_to = 0

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def lines(self) -> list[str]:
        with self.log.open("rb") as fh:
            fh.seek(self._read_to)
            data = fh.read()
        whole = data.rpartition(b"\n")[0]
        self._read_to += len(whole) + 1 if whole else 0
        return whole.decode(errors="replace").splitlines() if whole else []

    def event(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Wait until the job prints the JSON event `name`."""

        def found() -> dict[str, Any] | None:
            for line in self.log.read_text(errors="replace").splitlines():
                if line.startswith("{") and (event := json.loads(line)).get("event") == name:
                    return dict(event)
            return None

        return wait_for(found, timeout_s, f"{self.name} to say {name!r}", [self])

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and the exit code. DeadlineError, after SIGKILL, if it doesn't end."""
        if self.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DeadlineError(f"{self.name} didn't end {timeout_s:g} s after SIGTERM") from None
        finally:
            self._out.close()

    def kill(self) -> None:
        """End it in any case."""
        if self.returncode is None:
            self._process.kill()
            self._process.wait()
        self._out.close()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def wait_for(look: Callable[[], T | None], timeout_s: float, what: str, jobs: Sequence[Job]) -> T:
    """Poll `look` until it gives something; an error as soon as one of `jobs` has ended badly."""
    deadline = time.monotonic() + timeout_s
    while True:
        if (found := look()) is not None:
            return found
        for job in jobs:
            if job.returncode not in (None, 0):
                raise SidestageError(
                    f"{job.name} ended with code {job.returncode}; see {job.log}\n{job.tail()}"
                )
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {timeout_s:g} s for {what}")
        time.sleep(POLL_S)


def run(command: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
    """Run a command with --json to its end; what it printed. SidestageError with its words if it failed."""
    done = subprocess.run(
        [sys.executable, *command, "--json"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise SidestageError(
            f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}"
        )
    return dict(json.loads(done.stdout))
