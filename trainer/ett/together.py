"""Ranks train together: what one of them loses, all lose.

A rank that is blocked makes the others wait for it in their next collective, where their own ledgers say that
they train. So of each stretch of steps the rank counts that lost most of it. Ranks are joined by the numbers
of their steps, not by clocks: hosts' clocks differ by more than a save blocks.

That holds for ranks that wait for each other. One that took another time for the same steps doesn't: of
those the slowest rank alone tells the story, because the run takes as long as it does (`timeline`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trainer.ett.partition import SHORTEST_S, merged
from trainer.ett.records import Area, Segment
from trainer.ett.timeline import Timeline

_TRAINING: frozenset[Area] = frozenset({"training_new", "training_repeated"})
_SLACK_S = 0.1  # by which ranks that wait for each other may differ, besides a step
_WORTH_COUNTING_S = 1e-4  # ledgers are as exact as that

Losses = dict[Area, float]


@dataclass
class _Stretch:
    """A line of steps (first, last]. `once`: lost in the first of them, `each`: evenly in all."""

    first: int
    last: int
    begin_s: float
    end_s: float
    once: Losses = field(default_factory=dict)
    each: Losses = field(default_factory=dict)
    repeated: float = 0.0  # the part of its training that was trained again

    @property
    def once_s(self) -> float:
        return sum(self.once.values())

    def part(self, first: int, last: int) -> tuple[float, Losses]:
        """Seconds, and those of them lost, of its steps that are among (first, last]."""
        count = min(last, self.last) - max(first, self.first)
        if count <= 0:
            return 0.0, {}
        share = count / (self.last - self.first)
        lost = {area: seconds * share for area, seconds in self.each.items()}
        seconds = (self.end_s - self.begin_s - self.once_s) * share
        if first <= self.first:
            seconds += self.once_s
            for area, once_s in self.once.items():
                lost[area] = lost.get(area, 0.0) + once_s
        return seconds, lost


@dataclass(frozen=True)
class Rank:
    """One rank's own account of an attempt."""

    line: Timeline
    segments: Sequence[Segment]


def joined(
    teller: Rank, others: Mapping[int, Rank]
) -> tuple[tuple[Segment, ...], dict[int, Losses]]:
    """The teller's segments with what others lost beyond it, and that by rank and area."""
    mine = _stretches(teller)
    theirs = {r: _like_first(mine, rank, _stretches(rank)) for r, rank in others.items()}
    theirs = {r: s for r, s in theirs.items() if _waits_for(mine, s)}
    beyond: dict[int, Losses] = {}
    rebuilt: dict[int, list[Segment]] = {}
    sweeps = {r: _Sweep(s) for r, s in theirs.items()}
    cuts_at = _cuts([mine, *theirs.values()])
    for n, stretch in enumerate(mine):
        a = bisect.bisect_right(cuts_at, stretch.first)
        b = bisect.bisect_left(cuts_at, stretch.last)
        cuts = [stretch.first, *cuts_at[a:b], stretch.last]
        told: list[tuple[float, Losses]] = []
        changed = False
        for first, last in pairwise(cuts):
            seconds, lost = stretch.part(first, last)
            worst, most = None, lost
            for r, sweep in sweeps.items():
                found = sweep.lost(first, last)
                if sum(found.values()) > sum(most.values()) + _WORTH_COUNTING_S:
                    worst, most = r, found
            if worst is not None:
                changed = True
                most = _within(seconds, most)
                account = beyond.setdefault(worst, {})
                for area, lost_s in most.items():
                    more_s = lost_s - lost.get(area, 0.0)
                    if more_s > 0:
                        account[area] = account.get(area, 0.0) + more_s
            told.append((seconds, most))
        if changed:
            rebuilt[n] = list(_laid_out(stretch, told))
    if not rebuilt:
        return tuple(teller.segments), {}
    return tuple(merged(_replaced(teller.segments, mine, rebuilt))), beyond


def _stretches(rank: Rank) -> list[_Stretch]:
    """Its lines of steps, up to the first one that doesn't go on from the one before."""
    found: list[_Stretch] = []
    n = 0
    for steps in rank.line.steps:
        first = steps.step - steps.count
        if (
            not steps.count
            or steps.end_s <= steps.begin_s
            or (found and (first != found[-1].last or steps.begin_s < found[-1].end_s))
        ):
            break
        stretch = _Stretch(first, steps.step, steps.begin_s, steps.end_s)
        while n and rank.segments[n - 1].end_s > steps.begin_s:
            n -= 1
        sums: Losses = {}
        while n < len(rank.segments) and rank.segments[n].begin_s < steps.end_s:
            s = rank.segments[n]
            here_s = min(s.end_s, steps.end_s) - max(s.begin_s, steps.begin_s)
            if here_s > 0:
                sums[s.area] = sums.get(s.area, 0.0) + here_s
            n += 1
        again_s, new_s = sums.get("training_repeated", 0.0), sums.get("training_new", 0.0)
        stretch.repeated = again_s / (again_s + new_s) if again_s > 0 else 0.0
        waits: Losses = {"data_wait": steps.data_s, "overlay_pressure": steps.pressure_s}
        for area, seconds in sums.items():
            if area in _TRAINING:
                continue
            evenly_s = min(seconds, waits.get(area, 0.0))
            if evenly_s > 0:
                stretch.each[area] = evenly_s
            if seconds - evenly_s > 0:
                stretch.once[area] = seconds - evenly_s
        found.append(stretch)
    return found


def _like_first(mine: Sequence[_Stretch], rank: Rank, theirs: list[_Stretch]) -> list[_Stretch]:
    """A rank whose start took longer begins its first step later: that is lost in the others' first step."""
    if not (mine and theirs) or (mine[0].first, mine[0].last) != (theirs[0].first, theirs[0].last):
        return theirs
    first = theirs[0]
    from_s = first.end_s - (mine[0].end_s - mine[0].begin_s)
    for s in rank.segments:
        seconds = min(s.end_s, first.begin_s) - max(s.begin_s, from_s)
        if seconds > 0 and s.area not in _TRAINING:
            first.once[s.area] = first.once.get(s.area, 0.0) + seconds
            first.begin_s -= seconds
    return theirs


def _waits_for(mine: Sequence[_Stretch], theirs: Sequence[_Stretch]) -> bool:
    """Did two ranks take the same time for the steps that both have?"""
    if not (mine and theirs):
        return False
    first, last = max(mine[0].last, theirs[0].last), min(mine[-1].last, theirs[-1].last)
    if last <= first:  # nothing but the first step: a start is waited for
        return last == first
    took_s = [sum(s.part(first, last)[0] for s in each) for each in (mine, theirs)]
    return abs(took_s[0] - took_s[1]) <= _SLACK_S + took_s[0] / (last - first)


class _Sweep:
    """What one rank lost in stretches of steps that are asked for in their order."""

    def __init__(self, stretches: Sequence[_Stretch]) -> None:
        self._stretches = stretches
        self._firsts = [s.first for s in stretches]

    def lost(self, first: int, last: int) -> Losses:
        n = max(0, bisect.bisect_right(self._firsts, first) - 1)
        found: Losses = {}
        while n < len(self._stretches) and self._firsts[n] < last:
            for area, seconds in self._stretches[n].part(first, last)[1].items():
                found[area] = found.get(area, 0.0) + seconds
            n += 1
        return found


def _cuts(ranks: Iterable[Sequence[_Stretch]]) -> list[int]:
    """Step numbers between which nothing is lost but evenly."""
    with_once = [s.first for each in ranks for s in each if s.once_s > _WORTH_COUNTING_S]
    return sorted({n for first in with_once for n in (first, first + 1)})


def _within(seconds: float, lost: Losses) -> Losses:
    """No more can be lost than there is."""
    total_s = sum(lost.values())
    return lost if total_s <= seconds else {a: s * seconds / total_s for a, s in lost.items()}


def _laid_out(stretch: _Stretch, told: Sequence[tuple[float, Losses]]) -> Iterator[Segment]:
    """Segments of a line, part by part: what was lost, what was trained again, what was new."""
    at_s = stretch.begin_s
    until_s = at_s
    for seconds, lost in told:
        training_s = max(0.0, seconds - sum(lost.values()))
        again_s = training_s * stretch.repeated
        pieces = [
            *lost.items(),
            ("training_repeated", again_s),
            ("training_new", training_s - again_s),
        ]
        for area, piece_s in pieces:
            until_s = min(until_s + piece_s, stretch.end_s)
            if until_s - at_s >= SHORTEST_S:
                yield Segment(at_s, until_s, area)
                at_s = until_s
    if at_s < stretch.end_s:
        yield Segment(at_s, stretch.end_s, "training_new")


def _replaced(
    segments: Sequence[Segment], mine: Sequence[_Stretch], rebuilt: Mapping[int, Sequence[Segment]]
) -> list[Segment]:
    """The segments, with those of some lines in their place."""
    lines = [mine[n] for n in sorted(rebuilt)]
    kept: list[Segment] = []
    n = 0
    for s in segments:
        at_s = s.begin_s
        while n < len(lines) and lines[n].end_s <= at_s:
            n += 1
        for line in lines[n:]:
            if line.begin_s >= s.end_s:
                break
            if at_s < line.begin_s:
                kept.append(Segment(at_s, line.begin_s, s.area))
            at_s = max(at_s, line.end_s)
        if at_s < s.end_s:
            kept.append(Segment(at_s, s.end_s, s.area))
    kept += [s for laid in rebuilt.values() for s in laid]
    return sorted(kept, key=lambda s: s.begin_s)
