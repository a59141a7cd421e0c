"""The process as the kernel sees it."""

import ctypes
import os
import resource
from pathlib import Path

libc = ctypes.CDLL(None)
reaper = ctypes.c_int()
libc.prctl(37, ctypes.byref(reaper), 0, 0, 0)
parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
umask = os.umask(0)
os.umask(umask)
status = dict(
    line.split(":\t", 1)
    for line in Path("/proc/self/status").read_text().splitlines()
    if ":\t" in line
)
seen = {
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "parent_has_the_command_line": b"--standalone" in parent,
    "names": [
        Path("/proc/self/comm").read_text(),
        Path("/proc/self/cmdline").read_bytes()[:60].hex(),
    ],
    "exe": os.readlink("/proc/self/exe"),
    "folders": [os.getcwd(), os.readlink("/proc/self/root")],
    "umask": umask,
    "limits": {
        n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n[:7] == "RLIMIT_"
    },
    "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.nice(0)],
    "cores": sorted(os.sched_getaffinity(0)),
    "oom": Path("/proc/self/oom_score_adj").read_text(),
    "reaper": reaper.value,
    "dumpable": libc.prctl(3, 0, 0, 0, 0),
    "kernel": [status[k] for k in ("Uid", "Gid", "Groups", "NoNewPrivs", "Threads", "TracerPid")],
    "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "main_thread_is_the_process": os.listdir("/proc/self/task") == [str(os.getpid())],
}
