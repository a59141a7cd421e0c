"""Effective training time: which share of the wall time a run spent on data it had not seen.

ETT% is the time of training steps on new batches, over the time from the first process's
creation to the last event, gaps between attempts included ("Optimizing Effective Training Time
for Large-Scale Recommendation Systems", arXiv 2610.02057). A batch that an earlier attempt had
trained on already is repeated: waste. Launcher and scheduler time before the first process
is not seen from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ckpt.errors import NotFoundError
from ckpt.layout import EVENTS as EVENTS_PREFIX
from ckpt.layout import ledger_key
from ckpt.storage import open_storage
from trainer.ledger import parse_ledger

Part = Literal[
    "start_up",
    "restore",
    "first_batch",
    "training_new",
    "training_repeated",
    "blocked_in_save",
    "evaluation",
    "shutdown",
    "unaccounted",
]
PARTS: tuple[Part, ...] = get_args(Part)

Events = Sequence[Mapping[str, Any]]
_KEY = re.compile(re.escape(EVENTS_PREFIX) + r"(\d{6,})/r(\d{5,})\.jsonl")
_CLOSES: Mapping[str, Part] = {
    "process": "start_up",
    "restored": "restore",
    "first_batch": "first_batch",
    "saved": "blocked_in_save",
    "span_begin": "unaccounted",
    "closed": "shutdown",
}
_SPANS: Mapping[str, Part] = {"evaluation": "evaluation"}


@dataclass(frozen=True)
class AttemptTime:
    """One attempt. `parts` add up to `wall_s`.

    batches_new, batches_repeated: global batches trained here, first time or again.
    lost_batches: batches between what the commit had trained on and where this attempt began.
    """

    epoch: int
    started_at_s: float
    wall_s: float
    parts: Mapping[Part, float]
    resumed_step: int | None
    last_step: int
    batches_new: int
    batches_repeated: int
    lost_batches: int
    commits: int
    failed_saves: int
    skipped_saves: int
    max_blocked_s: float


@dataclass(frozen=True)
class EttReport:
    """The whole run. The attempts' wall times and `between_attempts_s` add up to `wall_s`."""

    attempts: tuple[AttemptTime, ...]
    wall_s: float
    between_attempts_s: float
    ett_percent: float

    @property
    def batches_repeated(self) -> int:
        return sum(a.batches_repeated for a in self.attempts)

    @property
    def lost_batches(self) -> int:
        return sum(a.lost_batches for a in self.attempts)


@dataclass(frozen=True)
class _Interval:
    """Seconds since 1970, and the batches trained in them: (first, last] by position."""

    begin_s: float
    end_s: float
    event: str
    part: Part
    batches: tuple[int, int] | None = None


def read_report(root: str | Path) -> EttReport:
    """Read the ledgers of all attempts and ranks under a root, or under a ledger folder.

    NotFoundError without any, CorruptError naming the file that is broken.
    """
    storage = open_storage(str(root))
    attempts: dict[int, dict[int, Events]] = {}
    for info in storage.list(EVENTS_PREFIX):
        m = _KEY.fullmatch(info.key)
        if m is None or ledger_key(int(m[1]), int(m[2])) != info.key:
            continue
        if events := parse_ledger(storage.read(info.key), f"{storage.url}/{info.key}"):
            attempts.setdefault(int(m[1]), {})[int(m[2])] = events
    if not attempts:
        raise NotFoundError(
            f"{root}: no ledger under {EVENTS_PREFIX}; name the root, or the ledger folder, of a run "
            f"that a trainer.Session has kept"
        )
    return report(attempts)


def report(attempts: Mapping[int, Mapping[int, Events]]) -> EttReport:
    """Account for a run. `attempts`: epoch -> rank -> its events."""
    done: list[AttemptTime] = []
    trained_to = 0  # every batch before this position has been trained on at least once
    positions: dict[int, dict[int, int]] = {}  # epoch -> step -> position after it
    cursor_s = between_s = 0.0
    first_s: float | None = None
    for epoch, ranks in sorted(attempts.items()):
        events = ranks[min(ranks)]  # one rank tells the story; the others only how long it lasted
        starts = [e[0]["created_at_s"] for e in ranks.values()]
        ends = [e[0]["created_at_s"] + e[-1]["t"] for e in ranks.values()]
        intervals = list(_intervals(events, min(starts), max(ends)))
        if first_s is None:
            first_s = cursor_s = intervals[0].begin_s
        between_s += max(0.0, intervals[0].begin_s - cursor_s)
        attempt, trained_to = _account(epoch, events, intervals, (cursor_s, trained_to, positions))
        cursor_s = max(cursor_s, intervals[-1].end_s)
        positions[epoch] = {e["step"]: e["position"] for e in _named(events, "step", "restored")}
        done.append(attempt)
    assert first_s is not None, "called with at least one attempt"
    wall_s = cursor_s - first_s
    new_s = sum(a.parts["training_new"] for a in done)
    percent = min(100.0, max(0.0, 100.0 * new_s / wall_s)) if wall_s > 0 else 0.0
    return EttReport(tuple(done), wall_s, between_s, percent)


def _named(events: Events, *names: str) -> Iterator[Mapping[str, Any]]:
    return (e for e in events if e["event"] in names)


def _intervals(events: Events, start_s: float, end_s: float) -> Iterator[_Interval]:
    """Cut an attempt's time at its events; [start_s, end_s] is when any of its ranks lived."""
    created = events[0]["created_at_s"]
    if start_s < created:
        yield _Interval(start_s, created, "process", "start_up")
    at = created
    position = 0
    for e in events:
        name, then = e["event"], max(at, created + e["t"])
        if name == "restored":
            position = int(e["position"])
        if name == "step":
            trained = (position, int(e["position"]))
            position = trained[1]
            yield _Interval(at, then, name, "training_new", trained)
        elif name == "span_end":
            yield _Interval(at, then, name, _SPANS.get(e.get("name", ""), "unaccounted"))
        elif name in _CLOSES:
            yield _Interval(at, then, name, _CLOSES[name])
        else:
            continue  # told by another thread: it ends no interval of the training thread
        at = then
    if at < end_s:
        yield _Interval(at, end_s, "closed", "shutdown")


def _account(
    epoch: int,
    events: Events,
    intervals: Sequence[_Interval],
    before: tuple[float, int, Mapping[int, Mapping[int, int]]],
) -> tuple[AttemptTime, int]:
    """Sum up one attempt. `before`: (end of the attempts before it, batches trained, positions)."""
    floor_s, trained_to, positions = before
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    new = repeated = 0
    reached = trained_to
    for i in intervals:
        # Wall clocks may disagree: time that an earlier attempt has been given isn't given again.
        seconds = max(0.0, i.end_s - max(i.begin_s, floor_s))
        if i.batches is None:
            parts[i.part] += seconds
            continue
        total = i.batches[1] - i.batches[0]
        fresh = max(0, i.batches[1] - max(i.batches[0], trained_to))
        share = fresh / total if total > 0 else 0.0
        parts["training_new"] += seconds * share
        parts["training_repeated"] += seconds * (1 - share)
        new, repeated = new + fresh, repeated + total - fresh
        reached = max(reached, i.batches[1])
    restored = next(_named(events, "restored"), None)
    resumed = restored is not None and restored.get("epoch") is not None
    lost = 0
    if restored is not None and resumed:
        at_commit = positions.get(restored["epoch"], {}).get(restored["step"])
        lost = 0 if at_commit is None else max(0, int(restored["position"]) - at_commit)
    began_s = max(intervals[0].begin_s, floor_s)
    return AttemptTime(
        epoch=epoch,
        started_at_s=began_s,
        wall_s=max(0.0, intervals[-1].end_s - began_s),
        parts=parts,
        resumed_step=int(restored["step"]) if restored is not None and resumed else None,
        last_step=max((e["step"] for e in _named(events, "step", "restored")), default=0),
        batches_new=new,
        batches_repeated=repeated,
        lost_batches=lost,
        commits=len(list(_named(events, "save_committed"))),
        failed_saves=len(list(_named(events, "save_failed"))),
        skipped_saves=len(list(_named(events, "save_skipped"))),
        max_blocked_s=max((e["blocked_s"] for e in _named(events, "saved")), default=0.0),
    ), reached
