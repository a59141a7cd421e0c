"""Memory and CPU of process trees, read from /proc by a thread of another process.

Nothing runs in the watched processes, so watching doesn't disturb what they measure.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.02
LOOK_EVERY = 10  # samples between two searches for new children
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_KIB = 1024


@dataclass(frozen=True)
class Sample:
    """At monotonic time `at`: bytes of all trees, CPU seconds of them and of the whole machine.

    memory_bytes: private pages (RssAnon), and shared memory (RssShmem) once a tree.
    files_bytes: pages of mapped files (RssFile), which the kernel can take back at any time.
    """

    at: float
    memory_bytes: int
    files_bytes: int
    own_cpu_s: float
    all_cpu_s: float


@dataclass
class Watch:
    """Samples the trees of `pids` until stopped."""

    pids: Sequence[int]
    samples: list[Sample] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak_bytes(self, start: float, end: float) -> int:
        return max((s.memory_bytes for s in self._between(start, end)), default=0)

    def peak_files_bytes(self, start: float, end: float) -> int:
        return max((s.files_bytes for s in self._between(start, end)), default=0)

    def others_cores(self, start: float, end: float) -> float:
        """How many cores everybody else kept busy, on average, the kernel's own threads included."""
        seen = self._between(start, end)
        if len(seen) < 2:
            return 0.0
        first, last = seen[0], seen[-1]
        busy_s = last.all_cpu_s - first.all_cpu_s - (last.own_cpu_s - first.own_cpu_s)
        return max(0.0, busy_s / (last.at - first.at))

    def _between(self, start: float, end: float) -> list[Sample]:
        return [s for s in self.samples if start <= s.at <= end]

    def _loop(self) -> None:
        trees: list[list[int]] = []
        while not self._stop.wait(EVERY_S):
            if len(self.samples) % LOOK_EVERY == 0:
                trees = [tree(pid) for pid in self.pids]
            memory = [_memory(tree) for tree in trees]
            own = sum(_cpu_s(pid) for tree in trees for pid in tree)
            private, files = sum(m[0] for m in memory), sum(m[1] for m in memory)
            self.samples.append(Sample(time.monotonic(), private, files, own, machine_cpu_s()))


def machine_cpu_s() -> float:
    """CPU seconds that this machine has spent on anything, waiting aside."""
    user, nice, system, _, _, irq, softirq, *_ = _numbers(Path("/proc/stat"))
    return (user + nice + system + irq + softirq) * _TICK_S


def wait_until_calm(at_most_s: float, *, cores: float = 0.25) -> None:
    """Wait until others used fewer than `cores` for a second. Call it while nothing of ours runs."""
    end = time.monotonic() + at_most_s
    while time.monotonic() < end:
        before = machine_cpu_s()
        time.sleep(1)
        if machine_cpu_s() - before < cores:
            return


def _memory(tree: Sequence[int]) -> tuple[int, int]:
    """Private memory of all processes with once what they share, and their pages of mapped files."""
    anonymous, shared, files = 0, 0, 0
    for pid in tree:
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith("RssAnon:"):
                anonymous += int(line.split()[1]) * _KIB
            elif line.startswith("RssShmem:"):
                shared = max(shared, int(line.split()[1]) * _KIB)
            elif line.startswith("RssFile:"):
                files += int(line.split()[1]) * _KIB
    return anonymous + shared, files


def _cpu_s(pid: int) -> float:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def tree(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            fields = _read(f"/proc/{entry.name}/stat").rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:  # grows while it is read
        tree += children.get(pid, [])
    return tree


def _numbers(path: Path) -> list[int]:
    return [int(x) for x in path.read_text().partition("\n")[0].split()[1:]]


def _read(path: str) -> str:
    """A file of /proc, or nothing if its process has just ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
