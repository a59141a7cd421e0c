"""Runs one block: fresh ranks for one mode, watched from here."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.stall.rank import Block
from benchmarks.watch import Watch

_CHECKOUT = Path(__file__).parent.parent.parent
_GRACE_S = 10.0  # for the other ranks, once one has failed


@dataclass(frozen=True)
class BlockResult:
    """All ranks of one block. Of what each rank saw, the worst counts.

    saves: figures of each save, by the names of SaveFigures.
    extra_bytes: memory at its peak, beyond what training took before the mode was set up.
    differing: elements of the restored state that weren't what they had been at save().
    """

    state_bytes: int
    first_blocked_s: float
    saves: list[dict[str, float | None]]
    extra_bytes: int
    differing: int
    others_cores: float


class BlockFailed(Exception):  # noqa: N818 - it reads as what happened
    """The mode doesn't work here; says why in one line."""


def run_block(block: Block, world: int, root: Path, deadline_s: float) -> BlockResult:
    """Start the ranks, wait for them, put together what they saw. Raises BlockFailed."""
    folder = Path(tempfile.mkdtemp(prefix="stall-", dir=root)).resolve()
    try:
        with _Ranks(block, world, folder) as ranks, Watch(ranks.pids) as watch:
            ranks.wait(deadline_s)
        return _joined(ranks.answers(), watch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # whatever is still being written or discarded belongs to this block


class _Ranks:
    """The processes of one block, each in a session of its own with its children."""

    def __init__(self, block: Block, world: int, folder: Path) -> None:
        self._folder = folder
        env = {
            **os.environ,
            "BENCHMARK_BLOCK": json.dumps(asdict(block)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": str(block.threads),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_CHECKOUT), os.getenv("PYTHONPATH")))),
        }
        self._processes = []
        for rank in range(world):
            with self._log(rank).open("w") as log:
                command = [sys.executable, "-m", "benchmarks.stall.rank"]
                process = subprocess.Popen(
                    [*command, str(folder / "saves"), str(self._answer(rank))],
                    env={**env, "RANK": str(rank)},
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
        """What each rank left; BlockFailed with the first reason if one left nothing good."""
        found: list[dict[str, Any]] = []
        for rank in range(len(self._processes)):
            path = self._answer(rank)
            answer = json.loads(path.read_text()) if path.exists() else {}
            if "error" in answer:
                raise BlockFailed(answer["error"])
            found.append(answer)
        for rank, (process, answer) in enumerate(zip(self._processes, found, strict=True)):
            if not answer:
                last = self._log(rank).read_text(errors="replace").strip().splitlines()[-1:]
                raise BlockFailed(f"rank {rank} ended with {process.returncode}: {last}")
        return found

    def _answer(self, rank: int) -> Path:
        return self._folder / f"answer.{rank}.json"

    def _log(self, rank: int) -> Path:
        return self._folder / f"log.{rank}"


def _joined(answers: list[dict[str, Any]], watch: Watch) -> BlockResult:
    saves = []
    for of_ranks in zip(*(a["saves"] for a in answers), strict=True):
        names = of_ranks[0].keys()
        saves.append({n: _worst([figures[n] for figures in of_ranks]) for n in names})
    moments = answers[0]["moments"]
    before = watch.peak_bytes(moments["baseline"], moments["open"])
    peak = watch.peak_bytes(moments["open"], moments["saved"])
    return BlockResult(
        state_bytes=sum(a["state_bytes"] for a in answers),
        first_blocked_s=max(a["first_blocked_s"] for a in answers),
        saves=saves,
        extra_bytes=max(0, peak - before),
        differing=sum(n for a in answers for n in a["differing"].values()),
        others_cores=watch.others_cores(moments["open"], moments["saved"]),
    )


def _worst(values: list[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
