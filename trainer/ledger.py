"""What one rank did in one attempt, and when: a file of JSON lines that survives SIGKILL.

Every event has `t`, seconds since the process was created, from the monotonic clock. The
first event also says when that was by the wall clock, which serves only to lay attempts and
machines side by side. Events and their fields are listed in `EVENTS`.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt.errors import CorruptError, StorageError
from ckpt.types import Clock, SystemClock

EVENTS = {
    "process": "created_at_s, rank, world_size, restarts, batch_size: the session has begun",
    "restored": "step, position, epoch (of the commit; null on an empty root)",
    "first_batch": "the reader has handed out the first batch",
    "step": "step, position: one training step has ended; position is in global batches trained",
    "saved": "step, blocked_s: save() has returned",
    "span_begin": "name, id, main: something other than training begins; main: on the training thread",
    "span_end": "name, id: it has ended",
    "preempted": "step, position, asked (rank), why: all ranks stop here, because one was asked to end",
    "preempt_late": "grace_s: not stopped within the grace",
    "preempt_failed": "error: the ranks could not agree",
    "closed": "the session has ended, all saves drained",
    "save_committed": "step (from the persist thread)",
    "save_failed": "step, error (from the persist thread)",
    "save_skipped": "step, error",
}
"""Each event's fields and meaning. An interval lasts from the event before it to the event."""

_NUMBERS = {
    "process": ("created_at_s",),
    "restored": ("step", "position"),
    "step": ("step", "position"),
    "saved": ("step", "blocked_s"),
}
"""Fields that the account of a run needs, besides `t`."""

_log = logging.getLogger("sidestage")


def process_age_s() -> float:
    """Seconds since the kernel created this process. Linux."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    # The command's name, in parentheses, may hold anything; what follows it is fixed.
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, uptime_s - start_ticks / os.sysconf("SC_CLK_TCK"))


class Ledger:
    """Writes events, one unbuffered append each. Events from before `open` are kept for it.

    It never stops training: when its disk fails it says so once in the log and falls silent.

    Args:
        clock: for tests; the machine's by default.
        age_s: how long ago this process was created; asked from the kernel by default.
    """

    def __init__(self, clock: Clock | None = None, age_s: float | None = None) -> None:
        self._clock = clock or SystemClock()
        age_s = process_age_s() if age_s is None else age_s
        self._zero_s = self._clock.monotonic() - age_s
        self.created_at_s = self._clock.time() - age_s
        self._fd: int | None = None
        self._held: list[bytes] = []
        self._silent = False
        self._ids = itertools.count(1)

    def record(self, event: str, /, **fields: Any) -> None:
        """Append one event. Safe to call on any thread."""
        t = round(self._clock.monotonic() - self._zero_s, 6)
        line = json.dumps({"event": event, "t": t, **fields}, separators=(",", ":")) + "\n"
        data = line.encode("utf-8")
        if self._fd is None:
            self._held.append(data)
        else:
            self._write(self._fd, data)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record that what runs inside is `name`. Spans nest, and overlap on several threads."""
        number = next(self._ids)
        main = threading.current_thread() is threading.main_thread()
        self.record("span_begin", name=name, id=number, main=main)
        try:
            yield
        finally:
            self.record("span_end", name=name, id=number)

    def open(self, path: Path) -> None:
        """Begin the file, which must not exist, and write what was recorded so far.

        StorageError where it can't be made.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as e:
            raise StorageError(f"{path}: the ledger can't be written: {e.strerror}") from e
        held, self._held = self._held, []
        self._write(fd, b"".join(held))
        self._fd = fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, fd: int, data: bytes) -> None:
        if self._silent:
            return
        try:
            short = os.write(fd, data) < len(data)
            problem = "no space left" if short else None
        except OSError as e:
            problem = e.strerror
        if problem:
            self._silent = True  # a line after a torn one would make the file unreadable
            _log.warning("the ledger is incomplete from here on: %s", problem)


class SaveEvents:
    """An event sink that copies the ends of saves into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def emit(self, name: str, /, **fields: Any) -> None:
        if name in ("save_committed", "save_failed", "save_skipped"):
            kept = {k: v for k, v in fields.items() if k in ("step", "error")}
            self._ledger.record(name, **kept)


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """The events of one file; see `parse_ledger`. StorageError if it can't be read."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise StorageError(f"{path}: the ledger can't be read: {e.strerror}") from e
    return parse_ledger(data, str(path))


def parse_ledger(data: bytes, where: str) -> list[dict[str, Any]]:
    """The events of a ledger, in the order they were written. A last line cut short is left out.

    CorruptError names the file and line of anything else that isn't an event.
    """
    events = []
    # What follows the last newline is torn, or empty.
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            events.append(_checked(json.loads(line)))
        except (ValueError, TypeError, KeyError) as e:
            raise CorruptError(f"{where}:{number}: not a ledger event: {e}") from None
    if events and events[0]["event"] != "process":
        raise CorruptError(f"{where}: begins with {events[0]['event']!r}, not with 'process'")
    return events


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if event["event"] not in EVENTS:
        raise ValueError(f"{event['event']!r} is unknown to this version")
    for name in ("t", *_NUMBERS.get(event["event"], ())):
        if not isinstance(event[name], int | float) or not math.isfinite(event[name]):
            raise ValueError(f"{name} is {event[name]!r}")
    return event
