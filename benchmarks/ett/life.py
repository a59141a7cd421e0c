"""One life of one model: launched, killed twice, preempted once, trained to its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.ett.job import Figures, LifeJob
from ckpt.errors import SidestageError
from ckpt.layout import ledger_key
from trainer.ett import read_report
from trainer.ett.records import AttemptTime, RunReport
from trainer.ledger import read_ledger

KILLS = (0.3, 0.55)
PREEMPTED_AT = 0.8
FAILURES = len(KILLS) + 1
_TIMEOUT_S = 900.0
_POLL_S = 0.02


def live(job: LifeJob) -> RunReport:
    """Run the life to its end; the account of it. SidestageError, with the log's end, if it fails."""
    folder = Path(job.folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = folder / "job.json"
    job.write(told)
    launcher = (
        ("trainer.cli", "launch")
        if job.way == "ours" and "warm_workers" not in job.without
        else ("torch.distributed.run",)
    )
    command = [
        *(sys.executable, "-m", *launcher, "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", f"--max-restarts={FAILURES + 1}", "--monitor-interval=0.1"),
        *("-m", "benchmarks.ett.rank", str(told)),
    ]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
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
            _interrupt(job, process)
            code = process.wait(_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SidestageError(f"the life of {job.model} ({job.way}) ended with code {code}:\n{tail}")
    return read_report(folder)


def figures(report: RunReport) -> Figures:
    """What a life has measured, for its replay with other amounts of training."""
    first, *others = report.attempts
    last = report.attempts[-1]
    back = [_recovery_s(report, a) for a in others]
    kills, after_preemption = back[: len(KILLS)], back[len(KILLS) :]
    measured = report.measured
    preempted = report.attempts[len(KILLS)].ended == "preempted"
    return Figures(
        block_s=max(1e-4, measured.block_s or 1e-4),
        lag_s=measured.lag_s or 0.0,
        start_s=first.time_to_start_s or 0.0,
        recover_s=sum(kills) / len(kills),
        preempt_s=after_preemption[0] if after_preemption else 0.0,
        preempt_repeats=not preempted,
        shutdown_s=last.areas["shutdown"],
        publish_s=sum(a.areas["publishing"] for a in report.attempts),
        recoveries_s=tuple(back),
    )


def _recovery_s(report: RunReport, attempt: AttemptTime) -> float:
    """From the last step before to this attempt's first one: survivors take their time to end, too."""
    before = [a for a in report.attempts if a.epoch < attempt.epoch][-1]
    gap_s = before.areas["shutdown"] + attempt.started_at_s - before.ended_at_s
    return gap_s + (attempt.time_to_start_s or 0.0)


def _interrupt(job: LifeJob, process: subprocess.Popen[bytes]) -> None:
    plan = Path(job.plan)
    if not _wait_for(lambda: plan.exists() or None, process, "the number of steps"):
        return
    steps = int(json.loads(plan.read_text())["steps"])
    folder = Path(job.folder)
    ends = [*((k, signal.SIGKILL) for k in KILLS), (PREEMPTED_AT, signal.SIGTERM)]
    for attempt, (share, number) in enumerate(ends, 1):
        reached = partial(_reached, folder / ledger_key(attempt, 0), int(share * steps))
        if not _wait_for(lambda: reached() or None, process, f"{share:.0%} of the steps"):  # noqa: B023
            return
        os.kill(int((folder / "pid-1").read_text()), number)


def _reached(path: Path, step: int) -> bool:
    if not path.exists():
        return False
    steps = [e for e in read_ledger(path) if e["event"] == "steps"]
    return bool(steps) and int(steps[-1]["step"]) >= step


def _wait_for(
    look: Callable[[], object | None], process: subprocess.Popen[bytes], what: str
) -> bool:
    """False if the process has ended first: its exit code says why."""
    deadline = time.monotonic() + _TIMEOUT_S
    while look() is None:
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise SidestageError(f"waited {_TIMEOUT_S:g} s for {what}")
        time.sleep(_POLL_S)
    return True
