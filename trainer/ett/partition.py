"""Gives each moment of an attempt to exactly one area.

Spans of the training thread come first, the innermost of them; then training steps; then spans of
other threads, of which the one that ends last is what the others wait for; then what that part
of an attempt is by itself. What training waited for is taken out of the steps around it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.ett.records import Area, Segment
from trainer.ett.timeline import Steps, Timeline

_MAIN, _STEPS, _OTHER, _BASE = range(4)
SHORTEST_S = 1e-5  # a float of seconds since 1970 tells 0.24 microseconds


@dataclass
class _Claim:
    """Something that asks for a stretch of time. The smallest `rank` has it."""

    begin_s: float
    end_s: float
    rank: tuple[float, ...]
    area: Area
    steps: Steps | None = None
    slot_s: float = 0.0
    pieces: list[tuple[float, float]] = field(default_factory=list)


def partition(line: Timeline, fresh: Callable[[int, int], int]) -> tuple[Segment, ...]:
    """Tile [start_s, end_s] with segments.

    fresh: called in order with each stretch of batches (first, last] trained; how many are new.
    """
    claims = list(_claims(line))
    _take_slots([c for c in claims if c.area == "blocked_in_save"], line.steps)
    _sweep(claims, line.start_s, line.end_s)
    segments = [s for c in claims for s in _divided(c, fresh)]
    segments.sort(key=lambda s: (s.begin_s, s.end_s))
    return tuple(merged(segments))


def _claims(line: Timeline) -> Iterator[_Claim]:
    for stage in line.before:
        area: Area = stage.name  # type: ignore[assignment]
        yield _Claim(stage.begin_s, stage.end_s, (_MAIN, 0.0), area)
    for span in line.spans:
        if span.area is not None:
            rank = (_MAIN, -float(span.order)) if span.main else (_OTHER, -span.end_s)
            yield _Claim(span.begin_s, span.end_s, rank, span.area)
    for steps in line.steps:
        yield _Claim(steps.begin_s, steps.end_s, (_STEPS, 0.0), "training_new", steps)
    first_s = min([line.training_s, *(s.begin_s for s in line.spans)])
    bounds: tuple[tuple[float, Area], ...] = (
        (first_s, "imports"),
        (min(line.training_s, line.shutdown_s), "start_up_other"),
        (line.shutdown_s, "unaccounted"),
        (line.end_s, "shutdown"),
    )
    at_s = line.start_s
    for until_s, area in bounds:
        until_s = min(max(until_s, at_s), line.end_s)  # noqa: PLW2901
        yield _Claim(at_s, until_s, (_BASE, 0.0), area)
        at_s = until_s


def _take_slots(blocked: Sequence[_Claim], lines: Sequence[Steps]) -> None:
    """A save that waited for the one before it: its wait is told by the next steps."""
    n = 0
    for steps in lines:
        rest_s = steps.slot_s
        while n < len(blocked) and blocked[n].begin_s < steps.end_s:
            taken_s = min(rest_s, blocked[n].end_s - blocked[n].begin_s)
            blocked[n].slot_s, rest_s, n = taken_s, rest_s - taken_s, n + 1


def _sweep(claims: Sequence[_Claim], start_s: float, end_s: float) -> None:
    """Hand every moment between start and end to the claim of the smallest rank."""
    order = sorted(range(len(claims)), key=lambda n: claims[n].begin_s)
    bounds = {start_s, end_s}
    for c in claims:
        bounds |= {c.begin_s, c.end_s}
    moments = sorted(b for b in bounds if start_s <= b <= end_s)
    active: list[tuple[tuple[float, ...], int]] = []
    following = 0
    for at_s, until_s in itertools.pairwise(moments):
        while following < len(order) and claims[order[following]].begin_s <= at_s:
            n = order[following]
            heapq.heappush(active, (claims[n].rank, n))
            following += 1
        while claims[active[0][1]].end_s <= at_s:
            heapq.heappop(active)
        claims[active[0][1]].pieces.append((at_s, until_s))


def _divided(claim: _Claim, fresh: Callable[[int, int], int]) -> Iterator[Segment]:
    """A claim's time by area, waits first: within a line of steps their moments aren't known."""
    total_s = sum(e - b for b, e in claim.pieces)
    quotas: list[tuple[Area, float]] = []
    steps = claim.steps
    rest_s = total_s
    if steps is not None:
        new, batches = fresh(steps.first, steps.last), steps.last - steps.first
        for area, seconds in (
            ("data_wait", steps.data_s),
            ("overlay_pressure", steps.pressure_s),
        ):
            quotas.append((area, min(seconds, rest_s)))  # type: ignore[arg-type]
            rest_s -= quotas[-1][1]
        # A step on no batch at all trains nothing new.
        again_s = rest_s * (1 - new / batches) if batches else rest_s
        quotas.append(("training_repeated", again_s))
    elif claim.slot_s:
        quotas.append(("overlay_pressure", min(claim.slot_s, rest_s)))
    quotas.append((claim.area, float("inf")))
    n = 0
    left_s = quotas[0][1]
    for begin_s, end_s in claim.pieces:
        at_s = begin_s
        while at_s < end_s:
            while left_s < SHORTEST_S and n + 1 < len(quotas):
                n += 1
                left_s = quotas[n][1]
            until_s = min(end_s, at_s + left_s)
            yield Segment(at_s, until_s, quotas[n][0])
            left_s -= until_s - at_s
            at_s = until_s


def merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Segments of one area that follow each other become one."""
    last: Segment | None = None
    for s in segments:
        if last is not None and last.area == s.area and last.end_s == s.begin_s:
            last = Segment(last.begin_s, s.end_s, s.area)
        else:
            if last is not None:
                yield last
            last = s
    if last is not None:
        yield last
