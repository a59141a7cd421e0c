"""What this machine allows a persist thread, and what a save will cost on it. No torch.

The advised interval is Young's (1974): with a cost of `block_s` per save and failures every
`mtbf_s`, saving every sqrt(2 x block_s x mtbf_s) loses the least time to saves and to work
done again.
"""

from __future__ import annotations

import math
import os
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.config import CheckpointConfig
from ckpt.findings import Finding, gib_s, seconds, size
from ckpt.types import Clock

DAY_S = 86400.0
_COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class JobSize:
    """The job that will save here: bytes of state over all ranks, its ranks, the hosts they are on."""

    state_bytes: int
    ranks: int = 1
    hosts: int = 1

    @property
    def rank_bytes(self) -> float:
        return self.state_bytes / self.ranks

    @property
    def host_bytes(self) -> float:
        return self.state_bytes / self.hosts


def scheduling() -> list[Finding]:
    """May a background thread give way to training?"""
    idle = _in_thread(lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)))
    nice = _in_thread(lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19))
    slow = "persisting would take processor time from training"
    return [
        Finding("SCHED_IDLE", "ok", "a thread may run at idle priority")
        if idle is None
        else Finding("SCHED_IDLE", "warn", f"refused ({idle}): {slow}"),
        Finding("nice", "ok", "a thread may lower its own priority")
        if nice is None
        else Finding("nice", "warn", f"refused ({nice}): {slow}"),
    ]


def memory_lock(job: JobSize | None) -> Finding:
    """May as much memory be locked as is staged?"""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memory lock", "ok", "unlimited", {"limit_bytes": None})
    values = {"limit_bytes": soft}
    if job is not None and soft >= job.host_bytes:
        return Finding("memory lock", "ok", f"up to {size(soft)}", values)
    need = f", {size(job.host_bytes)} are staged on a host" if job else ""
    text = (
        f"up to {size(soft)}{need}: mlock and RDMA registration of more are refused (CUDA's own "
        f"pinning isn't concerned); raise `ulimit -l`"
    )
    return Finding("memory lock", "warn", text, values)


def copy_speed(clock: Clock) -> float:
    """Bytes per second that one thread copies between warm buffers in host memory."""
    source, target = memoryview(bytearray(_COPY_BYTES)), memoryview(bytearray(_COPY_BYTES))
    target[:] = source  # touch the pages first: staging memory is reused, too
    started = clock.monotonic()
    target[:] = source
    return _COPY_BYTES / max(clock.monotonic() - started, 1e-9)


def host_memory(job: JobSize, config: CheckpointConfig) -> Finding:
    """Is there room for the staged copies? As if nothing were guarded: what will be isn't known here."""
    need = staging_bytes(job, config)
    have = available_bytes()
    values = {"needed_bytes": round(need), "available_bytes": have}
    text = f"{size(need)} for staging on each host with max_pending = {config.max_pending}"
    if have is None:
        return Finding("host memory", "ok", text, values)
    if need > have:
        more = "use more hosts, or a smaller state per host"
        return Finding("host memory", "warn", f"{text}, but {size(have)} available; {more}", values)
    return Finding("host memory", "ok", f"{text}, {size(have)} available", values)


def staging_bytes(job: JobSize, config: CheckpointConfig) -> float:
    """Host memory that saving adds on one host: the copies, and two chunks a rank on their way."""
    ranks_here = math.ceil(job.ranks / job.hosts)
    return config.max_pending * job.host_bytes + ranks_here * 2 * config.chunk_bytes


def save_cost(
    job: JobSize, copy_per_s: float, write_per_s: float | None, failures_per_day: float
) -> list[Finding]:
    """What a save blocks, how long it persists, and how often to save."""
    block_s = job.rank_bytes / copy_per_s
    values: dict[str, float | int | None] = {"block_s": round(block_s, 6)}
    text = f"blocks {seconds(block_s)} (copy at {gib_s(copy_per_s)})"
    persist_s = 0.0
    if write_per_s is not None:
        persist_s = job.host_bytes / write_per_s
        values["persist_s"] = round(persist_s, 3)
        text += (
            f", persists in {seconds(persist_s)} if this host's ranks share {gib_s(write_per_s)}"
        )
    findings = [Finding("save", "ok", f"{size(job.state_bytes)}: {text}", values)]
    mtbf_s = DAY_S / failures_per_day
    best_s = math.sqrt(2 * block_s * mtbf_s)
    interval_s = max(best_s, persist_s)
    why = f"sqrt(2 x {seconds(block_s)} x {seconds(mtbf_s)} between failures) = {seconds(best_s)}"
    if persist_s > best_s:
        why += f", but a save takes {seconds(persist_s)} to persist"
    findings.append(
        Finding(
            "interval",
            "ok",
            f"save every {seconds(interval_s)}: {why}",
            {"interval_s": round(interval_s, 3), "failures_per_day": failures_per_day},
        )
    )
    return findings


def _in_thread(attempt: Callable[[], object]) -> str | None:
    """Why an attempt is refused, made in a thread of its own so that nothing else changes."""
    refused: list[str] = []

    def run() -> None:
        try:
            attempt()
        except OSError as e:
            refused.append(e.strerror or str(e))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return refused[0] if refused else None


def available_bytes() -> int | None:
    """Memory that may still be used here: the machine's, or less by this container's limit.

    What caches hold of files counts as free.
    """
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(n for n in lines if n.startswith("MemAvailable:")).split()[1]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())  # "max" is no number: no limit
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(stat["inactive_file"]) + int(stat["active_file"])  # goes where it's needed
        used = int((group / "memory.current").read_text()) - cached
        found.append(max(0, limit - used))
    return min(found, default=None)
