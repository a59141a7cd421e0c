"""What one rank did in one attempt, and when: a file of JSON lines that survives SIGKILL.

Every event has `t`, seconds since the process was created, from the monotonic clock. The
first event also says when that was by the wall clock, which serves only to lay attempts and
machines side by side. Events and their fields are listed in `EVENTS`.

Training steps share one line, which is rewritten in place at each of them, so that a step costs
microseconds, a kill loses none, and the file stays small. In a long silence, such as an evaluation, a
line that says no more than that the process is alive is rewritten in the same way.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

from ckpt.errors import CorruptError, StorageError
from ckpt.forks import forget_in_children
from ckpt.types import Clock, SystemClock

EVENTS = {
    "process": "created_at_s, rank, world_size, restarts, batch_size, host, and what is known of "
    "submitted_at_s, allocated_at_s, launcher_created_at_s (Unix seconds): the session has begun",
    "span_begin": "name, id, main: something with a name begins; main: on the training thread",
    "span_end": "name, id: it has ended",
    "restored": "step, position, epoch (of the commit; null on an empty root)",
    "steps": "begin, step, position, data_s, overlay_s, fence_s, slot_s: all training steps from `begin` to "
    "`t`, the newest step's number, the global batches trained then, and what training waited for",
    "saved": "step, blocked_s: save() has taken a snapshot",
    "save_committed": "step (from the persist thread)",
    "save_failed": "step, error (from the persist thread)",
    "save_skipped": "step, error; blocked_s where save() took no snapshot here, and there is no `saved`",
    "preempted": "step, position, asked (rank), why: all ranks stop here, because one was asked to end",
    "preempt_late": "grace_s: not stopped within the grace",
    "preempt_failed": "error: the ranks could not agree",
    "closing": "error (null: none): the session's block is being left",
    "closed": "the session has ended, all saves drained",
    "exited": "the interpreter is about to end",
    "alive": "nothing but that the process lived at `t`: written after some silence, then rewritten in place",
}
"""Each event's fields and meaning. Events that this version doesn't know are skipped when read."""

Wait = Literal["data", "overlay", "fence", "slot"]
WAITS: tuple[Wait, ...] = get_args(Wait)
_WAIT_NUMBER: Mapping[str, int] = {kind: n for n, kind in enumerate(WAITS)}

_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "process": ("created_at_s",),
    "span_begin": ("id",),
    "span_end": ("id",),
    "restored": ("step", "position"),
    "steps": ("begin", "step", "position", *(f"{kind}_s" for kind in WAITS)),
    "saved": ("step", "blocked_s"),
    **dict.fromkeys(("save_committed", "save_failed", "save_skipped"), ("step",)),
}
"""Fields that the account of a run needs, besides `t`."""

_STEPS = (
    b'{"event":"steps","begin":%15.6f,"t":%15.6f,"step":%12d,"position":%14d,'
    b'"data_s":%13.6f,"overlay_s":%13.6f,"fence_s":%13.6f,"slot_s":%13.6f}\n'
)
_ALIVE = b'{"event":"alive","t":%15.6f}\n'
_LONGEST_S = 10.0  # of steps in one line
_BEAT_S = 5.0
_LONGEST_ERROR = 500

_log = logging.getLogger("sidestage")


def process_age_s(pid: int | None = None) -> float:
    """Seconds since the kernel created a process, by default this one. Linux. OSError: it is gone."""
    stat = Path(f"/proc/{pid or 'self'}/stat").read_text(encoding="utf-8")
    # The command's name, in parentheses, may hold anything; what follows it is fixed.
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, uptime_s - start_ticks / os.sysconf("SC_CLK_TCK"))


class Ledger:
    """Writes events as they happen, unbuffered. Events from before `open` are kept for it.

    Make it on the training thread. Methods may be called on any thread, but not in a signal
    handler. It never stops training: when its disk fails it says so once in the log and falls silent. In a
    child that is forked while the file is open it takes everything and writes nothing.

    Args:
        clock: for tests; the machine's by default.
        age_s: how long ago this process was created; asked from the kernel by default.
        beat_s: seconds of silence after which a sign of life is due.
    """

    def __init__(
        self, clock: Clock | None = None, age_s: float | None = None, *, beat_s: float = _BEAT_S
    ) -> None:
        self._clock = clock or SystemClock()
        age_s = process_age_s() if age_s is None else age_s
        self._zero_s = self._clock.monotonic() - age_s
        self.created_at_s = self._clock.time() - age_s
        self._training_thread = threading.get_ident()
        self._forgotten = False
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._fd: int | None = None
        self._held: list[bytes] = []
        self._size_bytes = 0
        self._silent = False
        self._ids = itertools.count(1)
        self._stepped = False
        self._line_at: int | None = None  # where the line of steps begins that may be rewritten
        self._line_begin_s = 0.0
        self._ended_s = 0.0  # when the last step ended, or what came right before the first one
        self._waits = [0.0] * len(WAITS)  # since the last step, by number
        self._line_waits = self._waits
        # On the training thread: spans that are open and since when any is, and what spans took since the
        # last step.
        self._open_spans: set[int] = set()
        self._spans_begin_s = 0.0
        self._spans_s = 0.0
        self.step_s = 0.0
        """What the last step took, without spans on its thread and waits."""
        self._beat_s = beat_s
        self._told_s = 0.0  # when something was written last
        self._alive_at: int | None = None  # where the last line begins, if it is a sign of life
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None
        forget_in_children(self)

    def forget(self) -> None:
        """In a forked child: the file is the parent's. Without one yet, the child may open its own."""
        self._lock = threading.Lock()
        if self._path is None:
            return
        self._forgotten = True
        self._beating = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def record(self, event: str, /, **fields: Any) -> None:
        """Append one event."""
        with self._lock:
            t = self._now_s()
            if event == "restored" and not self._stepped:
                self._ended_s = t
            line = json.dumps({"event": event, "t": t, **fields}, separators=(",", ":")) + "\n"
            # Stages of a start come before the session, but a reader needs this one first of all.
            self._append(line.encode("utf-8"), first=event == "process")
            self._told_s = t
            self._line_at = None  # what comes next is another line

    def stepped(self, step: int, position: int) -> None:
        """A training step has ended; `position` global batches have been trained. Takes microseconds."""
        with self._lock:
            t = self._clock.monotonic() - self._zero_s
            if self._open_spans:
                self._spans_s += t - self._spans_begin_s
                self._spans_begin_s = t
            # A wait for a slot is inside of save(), which is a span.
            waits_s = sum(self._waits) - self._waits[_WAIT_NUMBER["slot"]]
            self.step_s = max(0.0, t - self._ended_s - self._spans_s - waits_s)
            self._spans_s = 0.0
            told = self._line_at is None and self._told_s > self._ended_s
            if self._line_at is None:
                begin, waits = self._ended_s, self._waits
                if self._fd is not None:
                    self._line_at = self._size_bytes
                    self._line_begin_s, self._line_waits = begin, waits
                self._append(_STEPS % (begin, t, step, position, *waits))
            else:
                begin = self._line_begin_s
                waits = self._line_waits
                for kind, seconds in enumerate(self._waits):
                    waits[kind] += seconds
                self._rewrite(self._line_at, _STEPS % (begin, t, step, position, *waits))
            self._waits = [0.0] * len(WAITS)
            self._ended_s = self._told_s = t
            # The first step has a line of its own: its end is the end of the start. So has one in which
            # something was told, such as a commit: it's neither like those before nor like those after.
            if not self._stepped or told or t - begin >= _LONGEST_S:
                self._line_at = None
            self._stepped = True

    def waited(self, kind: Wait, seconds: float) -> None:
        """Training waited, since the last step: for the reader, or for an open snapshot."""
        with self._lock:
            self._waits[_WAIT_NUMBER[kind]] += seconds

    def beat(self) -> None:
        """Say that the process is alive, if nothing was written for `beat_s`."""
        with self._lock:
            t = self._clock.monotonic() - self._zero_s
            if self._fd is None or t - self._told_s < self._beat_s:
                return
            if self._alive_at is None:
                at = self._size_bytes
                self._append(_ALIVE % t)
                self._alive_at = at
            else:
                self._rewrite(self._alive_at, _ALIVE % t)
            self._told_s = t

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record that what runs inside is `name`. Spans nest, and overlap on several threads."""
        number = self.begin_span(name)
        try:
            yield
        finally:
            self.end_span(name, number)

    def begin_span(self, name: str) -> int:
        """Record that `name` begins, and return its number for `end_span`. Prefer `span`."""
        number = next(self._ids)
        main = self.on_training_thread
        self.record("span_begin", name=name, id=number, main=main)
        if main:
            with self._lock:
                if not self._open_spans:
                    self._spans_begin_s = self._now_s()
                self._open_spans.add(number)
        return number

    def end_span(self, name: str, number: int) -> None:
        self.record("span_end", name=name, id=number)
        with self._lock:
            if number in self._open_spans:  # a compiler may end its span on another thread
                self._open_spans.remove(number)
                if not self._open_spans:
                    self._spans_s += self._now_s() - self._spans_begin_s
            # The first step begins after what comes before it; compilation is inside of it.
            if not self._stepped and self.on_training_thread and name != "pt2_compilation":
                self._ended_s = self._now_s()
                self._spans_s = 0.0

    @property
    def on_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread

    def open(self, path: str | os.PathLike[str], *, beating: bool = False) -> None:
        """Begin the file, which must not exist, and write what was recorded so far.

        beating: give signs of life until `close`, on a thread that wakes every `beat_s`.

        StorageError where it can't be made.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as e:
            raise StorageError(
                f"{path}: the ledger can't be written: {e.strerror}; name another folder in `ledger`, "
                f"or in SIDESTAGE_SPOOL_DIR where the run is in an object store"
            ) from e
        with self._lock:
            held, self._held = self._held, []
            self._path, self._fd = path, fd
            self._append(b"".join(held))
            self._told_s = self._now_s()
        atexit.register(self._at_exit)
        if beating:
            self._beating = threading.Thread(
                target=self._keep_beating, name="sidestage-ledger", daemon=True
            )
            self._beating.start()

    def close(self) -> None:
        self._closed.set()
        if self._beating is not None:
            self._beating.join()
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def _keep_beating(self) -> None:
        while not self._closed.wait(self._beat_s):
            self.beat()

    def _now_s(self) -> float:
        return round(self._clock.monotonic() - self._zero_s, 6)

    def _append(self, data: bytes, *, first: bool = False) -> None:
        if self._fd is None:
            if not self._forgotten:
                self._held.insert(0 if first else len(self._held), data)
            return
        self._size_bytes += len(data)
        self._alive_at = None
        self._write(lambda fd: os.write(fd, data), len(data))

    def _rewrite(self, at: int, line: bytes) -> None:
        self._write(lambda fd: os.pwrite(fd, line, at), len(line))

    def _write(self, write: Callable[[int], int], expected: int) -> None:
        fd = self._fd
        if self._silent or fd is None:
            return
        try:
            problem = "no space left" if write(fd) < expected else None
        except OSError as e:
            problem = e.strerror
        if problem:
            self._silent = True  # a line after a torn one would make the file unreadable
            _log.warning("the ledger is incomplete from here on: %s", problem)

    def _at_exit(self) -> None:
        """The last word, after `close` too."""
        if self._path is None or self._forgotten:
            return
        if self._fd is None:
            with suppress(OSError):  # the folder may be gone
                self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self.record("exited")
        self.close()


class SaveEvents:
    """An event sink that copies saves, their ends, and what training waited for, into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def emit(self, name: str, /, **fields: Any) -> None:
        if name in ("save_committed", "save_failed", "save_skipped"):
            kept = {k: v for k, v in fields.items() if k == "step"}
            if "error" in fields:
                kept["error"] = str(fields["error"])[:_LONGEST_ERROR]
            if "blocked_s" in fields:
                kept["blocked_s"] = round(fields["blocked_s"], 6)
            self._ledger.record(name, **kept)
        elif name == "save_staged":
            blocked_s = round(fields["blocked_s"], 6)
            self._ledger.record("saved", step=fields["step"], blocked_s=blocked_s)
        elif name == "trainer_waited":
            self._ledger.waited(fields["why"], fields["wait_s"])


def read_ledger(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of one file; see `parse_ledger`. StorageError if it can't be read."""
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise StorageError(f"{path}: the ledger can't be read: {e.strerror}") from e
    return parse_ledger(data, str(path))


def parse_ledger(data: bytes, where: str, *, tail: bool = False) -> list[dict[str, Any]]:
    """The events of a ledger, in the order they were written.

    A last line cut short is left out, and so are events that only later versions know. `tail`: of
    this ledger only the end was read, from anywhere within a line.
    CorruptError names the file and line of anything else that isn't an event.
    """
    events = []
    if tail:
        data = data.partition(b"\n")[2]
    # What follows the last newline is torn, or empty.
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
            if event["event"] in EVENTS:
                events.append(_checked(event))
        except (ValueError, TypeError, KeyError) as e:
            raise CorruptError(f"{where}:{number}: not a ledger event: {e}") from None
    if events and not tail and events[0]["event"] != "process":
        raise CorruptError(f"{where}: begins with {events[0]['event']!r}, not with 'process'")
    return events


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    optional = ("blocked_s",) if "blocked_s" in event else ()
    for name in ("t", *_NUMBERS.get(event["event"], ()), *optional):
        if not isinstance(event[name], int | float) or not math.isfinite(event[name]):
            raise ValueError(f"{name} is {event[name]!r}")
    return event
