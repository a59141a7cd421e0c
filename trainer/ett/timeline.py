"""One attempt of a run, laid out in seconds since 1970 from the events of all its ranks.

One rank tells the story: the lowest, or the one whose training ended last where ranks didn't wait for each
other. The others say how long the attempt lived and how it ended; what they lost: trainer.ett.together.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from trainer.ett.records import Area, Ended, Outcome, SaveTime, Stage

Events = Sequence[Mapping[str, Any]]

SPAN_AREAS: frozenset[Area] = frozenset(
    {
        *("imports", "device_init", "process_group_init", "preproc_creation"),
        *("train_module_creation", "init_plugins", "restore", "pre_train"),
        *("get_first_batch_data", "pt2_compilation", "evaluation", "publishing"),
        *("blocked_in_save", "shutdown"),
    }
)
"""Areas that a span can name. Spans of other names are shown, and leave the time to what is around."""

_AREAS: Mapping[str, Area] = {a: a for a in get_args(Area)}
_SKEW_S = 1.0  # ranks leave a restore together; what they then do first may take a moment
_OUTCOMES: Mapping[str, Outcome] = {
    "save_committed": "committed",
    "save_failed": "failed",
    "save_skipped": "skipped",
}


@dataclass(frozen=True)
class Span:
    """`area` is None where the name is none. `main`: on the training thread. `order`: of beginning."""

    name: str
    begin_s: float
    end_s: float
    area: Area | None
    main: bool
    order: int


@dataclass(frozen=True)
class Steps:
    """Training steps in one stretch, on global batches (first, last], and what they waited for.

    step: the number of the newest one.
    """

    begin_s: float
    end_s: float
    count: int
    first: int
    last: int
    data_s: float
    pressure_s: float
    slot_s: float
    step: int


@dataclass(frozen=True)
class Timeline:
    """One attempt. Sorted by time; all of it lies within [start_s, end_s].

    first_event_s: before it there is nothing but the process, which may have had sessions before.
    alive_s: the last sign of training; end_s: the end of the last process.
    training_s: when training began, shutdown_s: when its end began.
    """

    epoch: int
    teller: int
    start_s: float
    first_event_s: float
    alive_s: float
    end_s: float
    training_s: float
    shutdown_s: float
    ended: Ended
    ranks: int
    world_size: int
    restarts: int
    batch_size: int
    before: tuple[Stage, ...]
    spans: tuple[Span, ...]
    steps: tuple[Steps, ...]
    saves: tuple[SaveTime, ...]
    restored: Mapping[str, Any] | None
    at_step: Mapping[int, int]
    last_step: int
    notes: tuple[str, ...]

    def main_spans_in(self, begin_s: float, end_s: float) -> list[Span]:
        """The training thread's spans with an area that touch a stretch of time, by their begin."""
        found: list[Span] = []
        n = bisect.bisect_left(self.spans, end_s, key=lambda s: s.begin_s) - 1
        # Back to one that had ended before: what is around that one isn't looked for.
        while n >= 0 and (self.spans[n].end_s > begin_s or self.spans[n].begin_s >= begin_s):
            if self.spans[n].main and self.spans[n].area:
                found.append(self.spans[n])
            n -= 1
        return found[::-1]

    def moved(self, by_s: float) -> Timeline:
        """The same, so many seconds later."""

        def at(x: Any) -> Any:
            return replace(x, begin_s=x.begin_s + by_s, end_s=x.end_s + by_s)

        names = ("start_s", "first_event_s", "alive_s", "end_s", "training_s", "shutdown_s")
        moments: dict[str, Any] = {n: getattr(self, n) + by_s for n in names}
        return replace(
            self,
            **moments,
            before=tuple(map(at, self.before)),
            spans=tuple(map(at, self.spans)),
            steps=tuple(map(at, self.steps)),
            saves=tuple(_saved_later(s, by_s) for s in self.saves),
        )


def timeline(epoch: int, ranks: Mapping[int, Events], *, newest: bool) -> Timeline:
    """Lay one attempt out. `ranks`: rank -> its events. `newest`: it may still be alive."""
    offsets_s, notes = _offsets(epoch, ranks, min(ranks))
    teller = _teller(ranks, offsets_s)
    if teller != min(ranks):
        offsets_s, notes = _offsets(epoch, ranks, teller)
    events = ranks[teller]
    process = events[0]
    zero_s = float(process["created_at_s"])

    starts = [e[0]["created_at_s"] - offsets_s[r] for r, e in ranks.items()]
    alive_s = max(
        _last(e, "exited") + e[0]["created_at_s"] - offsets_s[r] for r, e in ranks.items()
    )
    end_s = max(_last(e) + e[0]["created_at_s"] - offsets_s[r] for r, e in ranks.items())
    start_s = min(starts)
    steps = tuple(_steps(events, zero_s))
    spans = tuple(sorted(_spans(events, zero_s, end_s), key=lambda s: s.begin_s))
    ended = how_it_ended(ranks, newest=newest)
    training_s = steps[0].begin_s if steps else end_s
    missing = int(process.get("world_size") or len(ranks)) - len(ranks)
    if missing > 0:
        notes.append(f"attempt {epoch}: {missing} of {missing + len(ranks)} ranks left no ledger")
    return Timeline(
        epoch=epoch,
        teller=teller,
        start_s=start_s,
        first_event_s=min(zero_s + float(e["t"]) for e in events),
        alive_s=alive_s,
        end_s=end_s,
        training_s=training_s,
        shutdown_s=_shutdown_s(_closing_s(events, zero_s), spans, steps, ended, end_s),
        ended=ended,
        ranks=len(ranks),
        world_size=max(int(process.get("world_size") or 0), len(ranks)),
        restarts=int(process.get("restarts") or 0),
        batch_size=int(process.get("batch_size") or 0),
        before=_before(process, start_s),
        spans=spans,
        steps=steps,
        saves=tuple(_saves(events, zero_s, ended)),
        restored=next(_named(events, "restored"), None),
        at_step={int(e["step"]): int(e["position"]) for e in _named(events, "steps", "restored")},
        last_step=max((int(e["step"]) for e in _named(events, "steps", "restored")), default=0),
        notes=tuple(notes),
    )


def _named(events: Events, *names: str) -> Iterator[Mapping[str, Any]]:
    return (e for e in events if e["event"] in names)


def _last(events: Events, *but: str) -> float:
    return max(float(e["t"]) for e in events if e["event"] not in but)


def _teller(ranks: Mapping[int, Events], offsets_s: Mapping[int, float]) -> int:
    """The lowest rank, unless another one trained on clearly after it: the run took as long as that."""
    ends_s = {}
    for rank, events in ranks.items():
        if steps := [float(e["t"]) for e in _named(events, "steps")]:
            ends_s[rank] = events[0]["created_at_s"] + max(steps) - offsets_s[rank]
    lowest = min(ranks)
    if not ends_s:
        return lowest
    last = max(ends_s, key=lambda rank: ends_s[rank])
    late = lowest not in ends_s or ends_s[last] > ends_s[lowest] + _SKEW_S
    return last if late else lowest


def _offsets(
    epoch: int, ranks: Mapping[int, Events], teller: int
) -> tuple[dict[int, float], list[str]]:
    """How far each rank's wall clock is ahead of the teller's, where they clearly disagree."""
    left_s = {}
    for rank, events in ranks.items():
        restored = next(_named(events, "restored"), None)
        if restored is not None:
            left_s[rank] = events[0]["created_at_s"] + restored["t"]
    offsets_s = dict.fromkeys(ranks, 0.0)
    if teller not in left_s:
        return offsets_s, []
    for rank, at_s in left_s.items():
        if abs(at_s - left_s[teller]) > _SKEW_S:
            offsets_s[rank] = at_s - left_s[teller]
    if not any(offsets_s.values()):
        return offsets_s, []
    worst = max(offsets_s, key=lambda r: abs(offsets_s[r]))
    by_s = offsets_s[worst]
    side = "ahead of" if by_s > 0 else "behind"
    return offsets_s, [
        f"attempt {epoch}: the clock of rank {worst} is {abs(by_s):.1f} s {side} that of rank {teller}, "
        f"by when their restores ended; its times were moved"
    ]


def _spans(events: Events, zero_s: float, end_s: float) -> Iterator[Span]:
    """A span without an end lasts until the process is gone."""
    ends = {e["id"]: zero_s + e["t"] for e in _named(events, "span_end")}
    for order, e in enumerate(_named(events, "span_begin")):
        name, begin_s = str(e.get("name", "")), zero_s + e["t"]
        area = _AREAS.get(name)
        yield Span(
            name,
            begin_s,
            max(begin_s, ends.get(e["id"], end_s)),
            area if area in SPAN_AREAS else None,
            bool(e.get("main", True)),
            order,
        )


def _steps(events: Events, zero_s: float) -> Iterator[Steps]:
    step = position = 0
    at_s = zero_s
    for e in _named(events, "restored", "steps"):
        if e["event"] == "steps":
            begin_s = max(at_s, zero_s + e["begin"])
            at_s = max(begin_s, zero_s + e["t"])
            yield Steps(
                begin_s,
                at_s,
                max(0, int(e["step"]) - step),
                min(position, int(e["position"])),
                int(e["position"]),
                max(0.0, e["data_s"]),
                max(0.0, e["overlay_s"]) + max(0.0, e["fence_s"]),
                max(0.0, e["slot_s"]),
                int(e["step"]),
            )
        step, position = int(e["step"]), int(e["position"])


def how_it_ended(ranks: Mapping[int, Events], *, newest: bool) -> Ended:
    """How an attempt ended, by its ranks' last events. `newest`: it may still be alive."""
    events = [e for events in ranks.values() for e in events]
    if any(_named(events, "preempted")):
        return "preempted"
    if any(e.get("error") for e in _named(events, "closing")):
        return "failed"
    if all(any(_named(e, "closed")) for e in ranks.values()):
        return "closed"
    return "unknown" if newest else "failed"


def _shutdown_s(
    closing_s: float | None,
    spans: Sequence[Span],
    steps: Sequence[Steps],
    ended: Ended,
    end_s: float,
) -> float:
    """The end begins when the session's block is left; where that failed, after what it last did."""
    if closing_s is None and steps and ended in ("failed", "preempted"):
        done = [s.end_s for s in spans if s.main and s.area and s.end_s < end_s]
        return min(end_s, max([steps[-1].end_s, *done]))
    return end_s if closing_s is None else closing_s


def _closing_s(events: Events, zero_s: float) -> float | None:
    """When the block was left without an error."""
    closing = next(_named(events, "closing", "closed"), None)
    return None if closing is None or closing.get("error") else zero_s + float(closing["t"])


def _before(process: Mapping[str, Any], start_s: float) -> tuple[Stage, ...]:
    """What came before the process of a job's first start. Moments that contradict it are left out."""
    if process.get("restarts"):
        return ()
    stages: list[Stage] = []
    at_s = start_s
    for name, key in (
        ("launcher_init", "launcher_created_at_s"),
        ("hardware_setup", "allocated_at_s"),
        ("scheduling", "submitted_at_s"),
    ):
        moment = process.get(key)
        if isinstance(moment, int | float) and moment <= at_s:
            stages.insert(0, Stage(name, float(moment), at_s))
            at_s = float(moment)
    return tuple(stages)


def _saves(events: Events, zero_s: float, ended: Ended) -> Iterator[SaveTime]:
    """Each save with its end, by their begin. One that a live attempt is still writing is left out.

    A save's end may come before save() has returned. A step is saved again where it was skipped before.
    """
    found: list[SaveTime] = []
    open_saves: dict[int, Mapping[str, Any]] = {}
    early: dict[int, Mapping[str, Any]] = {}

    def note(saved: Mapping[str, Any], end: Mapping[str, Any] | None) -> None:
        at_s = zero_s + saved["t"] - max(0.0, saved["blocked_s"])
        outcome: Outcome = "lost" if end is None else _OUTCOMES[end["event"]]
        over_s = None if end is None else max(at_s, zero_s + end["t"])
        error = None if end is None else end.get("error")
        done_s = over_s if outcome == "committed" else None
        step, blocked_s = int(saved["step"]), float(saved["blocked_s"])
        found.append(SaveTime(step, at_s, blocked_s, outcome, done_s, error, over_s))

    for e in _named(events, "saved", *_OUTCOMES):
        step = int(e["step"])
        if e["event"] == "saved":
            if (end := early.pop(step, None)) is not None:
                note(e, end)
            else:
                open_saves[step] = e
        elif (
            e["event"] == "save_skipped" and "blocked_s" in e
        ):  # here: this one event has all of it
            note(e, e)
        elif (saved := open_saves.pop(step, None)) is not None:
            note(saved, e)
        else:
            early[step] = e
    if ended != "unknown":
        for saved in open_saves.values():
            note(saved, None)
    return iter(sorted(found, key=lambda s: s.at_s))


def _saved_later(save: SaveTime, by_s: float) -> SaveTime:
    def later(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + by_s

    return replace(
        save,
        at_s=save.at_s + by_s,
        committed_at_s=later(save.committed_at_s),
        over_at_s=later(save.over_at_s),
    )
