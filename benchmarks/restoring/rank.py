"""One rank that restores the same state by us and by dcp.load in turn, and notes what each took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.limits import Stopwatch, direct_read_s, forget
from benchmarks.ranks import serve
from benchmarks.report import MIB
from benchmarks.training.tables import Kind
from benchmarks.training.workload import State, Trainer, Workload
from ckpt import CheckpointConfig, Checkpointer
from ckpt.digest import digest_of
from ckpt.layout import DATA_SUFFIX
from ckpt.tree import host_bytes

OURS, DCP = "sidestage", "dcp.load"
LIMIT = "read limit"
STEP = 1
# glibc gives larger ones back at once; of smaller ones it may keep the memory for the next dcp.load.
_TENSOR_BYTES = 64 * MIB
MOST_READERS = 4
_DEADLINE_S = 600.0

Tensors = Literal["plain", "tables"]


@dataclass(frozen=True)
class Case:
    """tensors: plain ones, which every rank has whole, or tables over all ranks with their moments.

    total_bytes: of the state of all ranks, each tensor counted once. cold: drop all files first.
    """

    tensors: Tensors
    tables: Kind
    total_bytes: int
    cold: bool
    repeats: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """One restore on this rank, or one reading of our files past the page cache.

    extra_bytes: the most memory beyond what was there before, pages of mapped files included.
    """

    way: str
    wall_s: float
    cpu_s: float
    extra_bytes: int
    exact: bool


class Ways:
    """A state that both have saved below `folder`, to be restored into its own memory."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder
        # Tables stay alive with their trainer.
        self._trainer, self.state = _made(case)
        self._expected = self._digests()
        state = {"tensors": self.state.trained}
        with Checkpointer(str(self._ours), CheckpointConfig(persist_target_s=0.0)) as checkpointer:
            if self._trainer is not None:
                checkpointer.guard(*self._trainer.guarded)
            checkpointer.save(STEP, state).committed.result(_DEADLINE_S)
            checkpointer.wait()
        self._saved = self._files()
        dcp.save(self.state.sharded, checkpoint_id=self._dcp)

    @property
    def _ours(self) -> Path:
        return self._folder / "ours"

    @property
    def _dcp(self) -> Path:
        return self._folder / "dcp"

    def ours(self) -> Sample:
        """Everything from a new Checkpointer on; what ending it takes is another time's."""
        made: list[Checkpointer] = []

        def restore() -> None:
            made.append(Checkpointer(str(self._ours)))
            made[0].restore({"tensors": self.state.trained}, step=STEP)

        sample = self._restored(OURS, restore)
        with closing(made[0]):
            dist.barrier()
            if dist.get_rank() == 0:
                # The next one finds the root as it was, not one more attempt in it.
                for path in self._files() - self._saved:
                    path.unlink(missing_ok=True)
            return sample

    def dcp(self) -> Sample:
        return self._restored(DCP, lambda: dcp.load(self.state.sharded, checkpoint_id=self._dcp))

    def limits(self) -> list[Callable[[], Sample]]:
        """Ways to read what we have stored, and nothing else; none on a filesystem without O_DIRECT."""
        (path,) = self._ours.rglob(f"*{DATA_SUFFIX}")
        try:
            direct_read_s(path, 1)
        except OSError:
            return []

        def read(threads: int) -> Sample:
            return Sample(f"{LIMIT} {threads}", direct_read_s(path, threads), 0.0, 0, exact=True)

        return [partial(read, n) for n in range(1, MOST_READERS + 1)]

    def _restored(self, way: str, restore: Callable[[], None]) -> Sample:
        for tensor in self.state.local.values():
            tensor.zero_()
        if self._case.cold:
            forget(self._folder)
        dist.barrier()
        # Resets VmHWM: proc(5).
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        with Stopwatch() as watch:
            restore()
        extra = _status_bytes("VmHWM") - before
        return Sample(way, *watch.both, extra, exact=self._digests() == self._expected)

    def _files(self) -> set[Path]:
        return {p for p in self._ours.rglob("*") if p.is_file()}

    def _digests(self) -> dict[str, str]:
        return {
            name: digest_of(host_bytes(tensor.contiguous()))
            for name, tensor in self.state.local.items()
        }


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """All samples of this rank, in the order in which they were taken."""
    ways = Ways(case, folder)
    moments = {"began": time.monotonic()}
    order: list[Callable[[], Sample]] = [ways.ours, ways.dcp]
    if case.cold:
        order += ways.limits()
    else:  # what has been written past the page cache is read into it
        ways.ours()
        ways.dcp()
    samples = [
        asdict(way())
        for number in range(case.repeats)
        for way in (order if number % 2 == 0 else reversed(order))
    ]
    moments["ended"] = time.monotonic()
    return {"state_bytes": ways.state.nbytes, "samples": samples, "moments": moments}


def _made(case: Case) -> tuple[Trainer | None, State]:
    if case.tensors == "tables":
        trainer = Trainer(Workload(case.total_bytes, case.tables))
        for tensor in trainer.state.local.values():
            tensor.uniform_(-0.05, 0.05)  # zeros, as fresh moments are, would be compressed
        return trainer, trainer.state
    each = min(_TENSOR_BYTES, case.total_bytes // 4)
    torch.manual_seed(1)  # the same on every rank
    local = {
        f"t{n}": torch.empty(each // 1024, 256).uniform_(-0.05, 0.05)
        for n in range(case.total_bytes // each)
    }
    return None, State(local, local, local)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _body(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    return measure(Case(**job), folder)


if __name__ == "__main__":
    sys.exit(serve(_body))
