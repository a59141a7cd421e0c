"""Work on one version in a process of its own, which has its imports done before it's needed.

    python -m publisher.spare < job

imports what loading a version takes, waits for one job, does it, and dies. Importing takes seconds; so
the next process is started as soon as one was used, and a version's check begins at once. Whatever
crashes there is the job's failure, not the publisher's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt import config
from ckpt.errors import BadInputError, DeadlineError, SidestageError, StorageError
from ckpt.storage import open_storage
from ckpt.trust import TrustList
from publisher.gates import GateError
from publisher.records import GateName, VersionManifest, decode, encode
from publisher.registry import Registry

_CLOSED = "the publisher is ending: this is begun anew when it's started again"


@dataclass(frozen=True)
class _Spare:
    """A process that waits for its job. It ends when `life` is closed, by us or by our death."""

    process: subprocess.Popen[bytes]
    life: int

    def kill(self) -> None:
        """It and what it started: compilers, say, which would hold its pipes open."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone already
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.life)
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):  # a job that it never read is still in there
                if pipe is not None:
                    pipe.close()


class SpareProcesses:
    """Runs functions on versions, each in a fresh process, and keeps one such process waiting.

    Args:
        trust: the code that may be loaded there.
        timeout_s: a job that takes longer is killed.
        spares: 0 keeps none waiting: for jobs that are rare.
    """

    def __init__(self, trust: TrustList, timeout_s: float = 600.0, *, spares: int = 1) -> None:
        self._trust = trust
        self._timeout_s = timeout_s
        self._spares = spares
        self._lock = threading.Lock()
        self._waiting: list[_Spare] = []
        self._working: list[_Spare] = []
        self._closed = False
        weakref.finalize(self, _close, self._waiting)  # at the latest when this process ends

    def start(self) -> None:
        """Begin to warm up what should wait. Returns at once."""
        with self._lock:
            while len(self._waiting) < self._spares and not self._closed:
                self._waiting.append(self._spawn())

    def run(
        self,
        function: str,
        registry: Registry,
        manifest: VersionManifest,
        gate: GateName,
        **more: Any,
    ) -> dict[str, Any]:
        """What `function`, "publisher.<module>:<name>", returns for a version of a registry.

        It's called with the registry, the manifest, a ProgramCache and `more`, all of which must be
        plain JSON values. Raises GateError of this gate for whatever goes wrong there, a crash or
        a hang too; StorageError where storage failed there, or this was closed meanwhile.
        """
        job = {
            "do": function,
            "url": registry.storage.url,
            "prefix": registry.prefix,
            "manifest": encode(manifest).decode(),
            "more": more,
        }
        spare = self._take()
        try:
            out, said = spare.process.communicate(json.dumps(job).encode(), self._timeout_s)
        except subprocess.TimeoutExpired:
            raise GateError(
                gate, f"no answer within {self._timeout_s:g} s", DeadlineError.exit_code
            ) from None
        finally:
            with self._lock:
                self._working.remove(spare)
                closed = self._closed
            spare.close()
            with contextlib.suppress(StorageError):  # the next job says so, if it's still true
                self.start()
        if closed and spare.process.returncode < 0:
            raise StorageError(_CLOSED)  # nothing was found out about the version
        return _answer(gate, spare.process.returncode, out, said)

    def close(self) -> None:
        """End the processes that wait, kill those that work, start no more. Idempotent."""
        with self._lock:
            self._closed = True
            _close(self._waiting)
            for spare in self._working:
                spare.kill()

    def _take(self) -> _Spare:
        with self._lock:
            if self._closed:
                raise StorageError(_CLOSED)
            spare = self._waiting.pop() if self._waiting else None
            if spare is not None and spare.process.poll() is not None:
                spare.close()  # something killed it while it waited: that says nothing about the job
                spare = None
            spare = spare or self._spawn()
            self._working.append(spare)
            return spare

    def _spawn(self) -> _Spare:
        # Where this process finds its modules, in the same order, and never the current folder.
        path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).resolve().parents[1])])
        env = {**os.environ, "PYTHONPATH": path}
        if self._trust.path is not None:
            env["SIDESTAGE_TRUST_FILE"] = str(self._trust.path)
        alive, life = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "publisher.spare", str(alive)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                pass_fds=(alive,),
                # A Ctrl-C for the daemon must not fail the gate of the work that it finishes.
                start_new_session=True,
            )
        except OSError as e:
            os.close(life)
            raise StorageError(f"{sys.executable}: can't be started: {e.strerror}") from e
        finally:
            os.close(alive)
        return _Spare(process, life)


def _close(waiting: list[_Spare]) -> None:
    while waiting:
        waiting.pop().close()


def _answer(gate: GateName, returncode: int, out: bytes, said: bytes) -> dict[str, Any]:
    lines = said.decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it said nothing"
    if returncode == StorageError.exit_code:
        raise StorageError(f"{gate}: {last}")
    if returncode < 0:
        number = -returncode
        name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
        raise GateError(gate, f"the process that loaded the version died of {name}: {last}")
    if returncode != 0:
        raise GateError(
            gate, last.removeprefix("error: "), returncode if returncode in (2, 5) else 1
        )
    try:
        answer = json.loads(out)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise GateError(gate, f"no answer in what it wrote, {out[:80]!r}")
    return answer


def main(argv: list[str]) -> int:
    """Entry of the process. Ignores the signals that tell its parent to finish."""
    # The answer has the pipe for itself: whatever torch or a compiler prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    alive = int(argv[0])

    def end_with_parent() -> None:
        os.read(alive, 1)  # nothing is ever written: it returns when the other end is closed
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    from publisher import loading, program

    if not select.select([sys.stdin], [], [], 0)[0]:  # else there is no time for it
        program.rehearse()
    job_text = sys.stdin.buffer.read()
    if not job_text:
        return 1
    try:
        job = json.loads(job_text)
        manifest = decode(VersionManifest, job["manifest"].encode(), "draft manifest")
        registry = Registry(open_storage(job["url"], must_exist=True), job["prefix"])
        programs = loading.ProgramCache(TrustList(config.trust_file()))
        answer = _function(job["do"])(registry, manifest, programs, **job["more"])
    except SidestageError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    with answers:
        json.dump(answer, answers)
    return 0


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    if not module.startswith("publisher."):
        raise BadInputError(f"{name}: not a function of the publisher")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch takes seconds to tidy up
