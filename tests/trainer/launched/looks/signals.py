"""Handlers, masks and timers."""

import signal
from pathlib import Path

status = Path("/proc/self/status").read_text().splitlines()
seen = {
    "python": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "kernel": [
        line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt", "SigPnd"))
    ],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "timers": [signal.getitimer(t) for t in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)],
    "wakeup": signal.set_wakeup_fd(-1),
}
