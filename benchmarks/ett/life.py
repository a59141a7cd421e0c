"""One life of one model: launched, killed twice, preempted once, trained to its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ett.job import BESIDE, LifeJob
from benchmarks.watch import tree
from ckpt.errors import SidestageError
from ckpt.layout import ledger_key
from trainer.ett import read_report
from trainer.ett.records import RunReport
from trainer.ledger import read_ledger
from trainer.tied import end_with_parent

KILLS = (0.3, 0.55)
PREEMPTED_AT = 0.8
FAILURES = len(KILLS) + 1
# What each worker would import otherwise.
_PRELOAD = ("--preload", "benchmarks.ett.ours", "--preload", "torch._inductor.compile_fx")
_TIMEOUT_S = 900.0
_POLL_S = 0.02


def live(job: LifeJob) -> RunReport:
    """Run the life to its end; the account of it. SidestageError, with the log's end, if it fails."""
    launcher = (
        ("trainer.cli", "launch", *_PRELOAD)
        if job.way == "ours" and "warm_workers" not in job.without
        else ("torch.distributed.run",)
    )
    _launched(job, [*launcher, f"--max-restarts={FAILURES + 1}"], "benchmarks.ett.rank", _interrupt)
    report = read_report(job.folder)
    check_lived(job, report)
    return report


def beside(job: LifeJob) -> dict[str, Any]:
    """What `benchmarks.ett.beside` has found. SidestageError, with the log's end, if it fails."""
    _launched(job, ["torch.distributed.run"], "benchmarks.ett.beside", lambda *_: None)
    found: dict[str, Any] = json.loads((Path(job.folder) / BESIDE).read_text())
    return found


def _launched(
    job: LifeJob,
    launcher: list[str],
    module: str,
    meanwhile: Callable[[LifeJob, subprocess.Popen[bytes]], None],
) -> None:
    folder = Path(job.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = folder / "job.json"
    job.write(told)
    command = [
        *(sys.executable, "-m", *launcher, "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", "--monitor-interval=0.1", "-m", module, str(told)),
    ]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - no other threads run here
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "SIDESTAGE_TRUST_FILE": str(folder / "trust.json"),
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            meanwhile(job, process)
            code = process.wait(_timeout_s(job))
        except subprocess.TimeoutExpired:
            raise SidestageError(
                f"the life of {job.model} ({job.way}) had not ended after {_timeout_s(job):.0f} s"
            ) from None
        finally:
            with undisturbed():
                end_tree(process)
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SidestageError(f"the life of {job.model} ({job.way}) ended with code {code}:\n{tail}")


def check_lived(job: LifeJob, report: RunReport) -> None:
    """Every life must have had the same ends. SidestageError says which ones it had."""
    saves = job.way == "ours" and "preemption" not in job.without
    wanted = [*("failed" for _ in KILLS), "preempted" if saves else "failed", "closed"]
    ended = [a.ended for a in report.attempts]
    if ended != wanted:
        raise SidestageError(
            f"the attempts of {job.model} ({job.way}) ended as {', '.join(ended)}, not as "
            f"{', '.join(wanted)}: it isn't the life of the others"
        )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all below it, which may have sessions of their own."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGSTOP)  # it starts nothing while its tree is read
        below = tree(process.pid)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def undisturbed() -> Iterator[None]:
    """SIGINT and SIGTERM come after what runs inside, so that a second one doesn't stop a clean-up.

    On the main thread. Handlers, because a mask wouldn't keep a signal from other threads.
    """
    came: list[int] = []
    usual = {
        number: signal.signal(number, lambda n, _: came.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for one in came[:1]:
            signal.raise_signal(one)


def _timeout_s(job: LifeJob) -> float:
    return _TIMEOUT_S + 4 * job.training_s


def _interrupt(job: LifeJob, process: subprocess.Popen[bytes]) -> None:
    plan = Path(job.plan)
    timeout_s = _timeout_s(job)
    if not _wait_for(plan.exists, process, timeout_s, "the number of steps"):
        return
    steps = int(json.loads(plan.read_text())["steps"])
    folder = Path(job.folder)
    ends = [*((k, signal.SIGKILL) for k in KILLS), (PREEMPTED_AT, signal.SIGTERM)]
    for attempt, (share, number) in enumerate(ends, 1):
        reached = partial(_reached, folder / ledger_key(attempt, 0), int(share * steps))
        if not _wait_for(reached, process, timeout_s, f"{share:.0%} of the steps"):
            return
        os.kill(int((folder / "pid-1").read_text()), number)


def _reached(path: Path, step: int) -> bool:
    if not path.exists():
        return False
    steps = [e for e in read_ledger(path) if e["event"] == "steps"]
    return bool(steps) and int(steps[-1]["step"]) >= step


def _wait_for(
    look: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float, what: str
) -> bool:
    """False if the process has ended first: its exit code says why."""
    deadline = time.monotonic() + timeout_s
    while not look():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise SidestageError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(_POLL_S)
    return True
