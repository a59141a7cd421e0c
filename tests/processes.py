"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path


def alive(pid: int) -> bool:
    """False once it has ended, also where nobody has reaped it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
