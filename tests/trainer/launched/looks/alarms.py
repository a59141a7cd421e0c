"""Signals that come while it computes and sleeps."""

import signal
import time

came = []
signal.signal(signal.SIGALRM, lambda *_: came.append("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.05)
deadline = time.monotonic() + 20
while not came and time.monotonic() < deadline:
    time.sleep(0.01)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    came.append("interrupt")
seen = {"came": came}
