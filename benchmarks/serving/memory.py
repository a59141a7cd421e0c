"""Memory of a process tree above what its imports take: each process's private pages less an idle one's."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.watch import tree

EVERY_S = 0.02
_IDLE = """
import sys, torch, fbgemm_gpu
import ckpt.restore, publisher.build, publisher.parity, publisher.publish
publisher.program.rehearse()
print("ready", flush=True)
sys.stdin.read()
"""


def private_bytes(pid: int) -> int:
    """Private and shared memory; pages of mapped files aside, which the kernel can take back."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )


def imports_bytes() -> int:
    """What a process holds that has imported a publisher, torch's part for programs too, and does nothing."""
    idle = subprocess.Popen(
        [sys.executable, "-c", _IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert idle.stdout is not None
        idle.stdout.readline()
        return private_bytes(idle.pid)
    finally:
        idle.communicate()


class PeakAbove:
    """Samples a tree; `bytes` is the most that all its processes together had above `base` each."""

    def __init__(self, pid: int, base: int) -> None:
        self._pid, self._base = pid, base
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.bytes = 0

    def __enter__(self) -> PeakAbove:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(EVERY_S):
            held = (private_bytes(pid) - self._base for pid in tree(self._pid))
            self.bytes = max(self.bytes, sum(b for b in held if b > 0))
