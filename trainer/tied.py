"""A process that ends with its parent, however that ended: a killed launcher leaves no trainer behind."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, so that it may be called between fork and exec


def end_with_parent() -> None:
    """SIGTERM for this process once its parent is gone. Linux; not handed on to children."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
