"""Runs one measurement in fresh ranks, watched from here; and the other end, in each rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.watch import Watch

_CHECKOUT = Path(__file__).parent.parent
_GRACE_S = 10.0  # for the other ranks, once one has failed
_JOB = "BENCHMARK_JOB"


class RanksFailed(Exception):  # noqa: N818 - it reads as what happened
    """The measurement doesn't work here; says why in one line."""


@dataclass(frozen=True)
class Seen:
    """answers: what each rank left, in rank order; watch: memory and CPU of all of them."""

    answers: list[dict[str, Any]]
    watch: Watch

    def moment(self, name: str) -> float:
        """A time on the machine's monotonic clock that rank 0 has noted."""
        return float(self.answers[0]["moments"][name])

    def peak_bytes(self, start: str, end: str) -> int:
        """Most memory of all ranks together between two moments."""
        return self.watch.peak_bytes(self.moment(start), self.moment(end))

    def others_cores(self, start: str, end: str) -> float:
        return self.watch.others_cores(self.moment(start), self.moment(end))


def run_ranks(
    module: str, job: Mapping[str, Any], world: int, root: Path, deadline_s: float
) -> Seen:
    """Start `python -m module` as `world` ranks that call `serve`, and wait for what they say.

    job: handed to every rank; it has `threads`, the intra-op threads of a rank, at least.

    Raises RanksFailed. A scratch folder in `root` is theirs meanwhile.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=root)).resolve()
    try:
        with _Ranks(module, job, world, folder) as ranks, Watch(ranks.pids) as watch:
            ranks.wait(deadline_s)
        return Seen(ranks.answers(), watch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # whatever is still being written or discarded belongs to this measurement


def serve(body: Callable[[dict[str, Any], Path], dict[str, Any]]) -> int:
    """In a rank: join the others, do `body(job, folder for saves)`, leave its answer or error."""
    import torch
    import torch.distributed as dist

    job = json.loads(os.environ[_JOB])
    folder, answer = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        torch.set_num_threads(job["threads"])
        # Of several ranks each needs a GPU of its own.
        dist.init_process_group("cpu:gloo,cuda:nccl" if job.get("device") == "cuda" else "gloo")
        result = body(job, folder)
    except BaseException as e:  # DCP's CheckpointException is no Exception
        lines = str(e).strip().splitlines() or ["no message"]
        answer.write_text(json.dumps({"error": f"{type(e).__name__}: {lines[-1]}"}))
        raise
    answer.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    return 0


class _Ranks:
    """The processes of one measurement, each in a session of its own with its children."""

    def __init__(self, module: str, job: Mapping[str, Any], world: int, folder: Path) -> None:
        self._folder = folder
        env = {
            **os.environ,
            _JOB: json.dumps(job),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": str(job["threads"]),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_CHECKOUT), os.getenv("PYTHONPATH")))),
        }
        self._processes = []
        for rank in range(world):
            with self._log(rank).open("w") as log:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", module),
                        *(str(folder / "saves"), str(self._answer(rank))),
                    ],
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(process)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes]

    def wait(self, deadline_s: float) -> None:
        """Until all have ended, or the deadline is over, or one has failed and grace is over."""
        end = time.monotonic() + deadline_s
        for process in self._processes:
            while process.poll() is None and time.monotonic() < end:
                if any(p.returncode for p in self._processes if p.poll() is not None):
                    end = min(end, time.monotonic() + _GRACE_S)
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue

    def answers(self) -> list[dict[str, Any]]:
        """What each rank left; RanksFailed with the first reason if one left nothing good."""
        found: list[dict[str, Any]] = []
        for rank in range(len(self._processes)):
            path = self._answer(rank)
            answer = json.loads(path.read_text()) if path.exists() else {}
            if "error" in answer:
                raise RanksFailed(answer["error"])
            found.append(answer)
        for rank, (process, answer) in enumerate(zip(self._processes, found, strict=True)):
            if not answer:
                last = self._log(rank).read_text(errors="replace").strip().splitlines()[-1:]
                raise RanksFailed(f"rank {rank} ended with {process.returncode}: {last}")
        return found

    def _answer(self, rank: int) -> Path:
        return self._folder / f"answer.{rank}.json"

    def _log(self, rank: int) -> Path:
        return self._folder / f"log.{rank}"


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
