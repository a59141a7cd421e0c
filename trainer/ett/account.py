"""Puts the attempts of a run one after the other, and says where all of the wall time went.

ETT% is the time of training steps on new batches, over all wall time between the job's first sign
and its last, gaps between attempts included ("Optimizing Effective Training Time for Large-Scale
Recommendation Systems", arXiv 2610.02057). A batch that an attempt had trained on before is
repeated: waste.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from trainer.ett.measured import measure
from trainer.ett.partition import partition
from trainer.ett.positions import Trained
from trainer.ett.records import AREAS, Area, AttemptTime, RunReport, Segment, Stage
from trainer.ett.timeline import Events, Timeline, timeline
from trainer.ett.together import Rank, joined

_WORTH_SAYING_S = 0.05
_RECOVERED_FROM = ("failed", "preempted")


def report(attempts: Mapping[int, Mapping[int, Events]], root: str = "") -> RunReport:
    """Account for a run. `attempts`: epoch -> rank -> its events, one attempt at least."""
    newest = max(attempts)
    found = [timeline(e, ranks, newest=e == newest) for e, ranks in sorted(attempts.items())]
    notes = [note for t in found for note in t.notes]
    lines, skew = _one_after_the_other(found)
    notes += skew

    trained = Trained()
    done: list[AttemptTime] = []
    for line in lines:
        last = done[-1] if done else None
        ranks = attempts[line.epoch]
        done.append(_attempt(line, ranks, lines[: len(done)], last, trained))
        notes += _of_other_ranks(done[-1])
    areas = _sums(s for a in done for s in a.segments)
    areas["between_attempts"] += sum(
        max(0.0, b.started_at_s - a.ended_at_s) for a, b in itertools.pairwise(done)
    )
    wall_s = done[-1].ended_at_s - done[0].started_at_s
    failures = sum(a.ended == "failed" for a in done)
    for before, after in itertools.pairwise(lines):
        if (unseen := after.restarts - before.restarts - 1) > 0 and before.ended == "failed":
            failures += unseen
            notes.append(
                f"{unseen} starts between attempts {before.epoch} and {after.epoch} ended before they had "
                f"a ledger; they count as failures, and their time as between attempts"
            )
    preemptions = sum(a.ended == "preempted" for a in done)
    recovered = [
        b.time_to_recover_s
        for a, b in itertools.pairwise(done)
        if a.ended in _RECOVERED_FROM and b.time_to_recover_s is not None
    ]
    share = areas["training_new"] / wall_s if wall_s > 0 else 0.0
    return RunReport(
        root=root,
        attempts=tuple(done),
        wall_s=wall_s,
        areas=areas,
        ett_percent=100 * min(1.0, max(0.0, share)),
        failures=failures,
        preemptions=preemptions,
        time_to_start_s=done[0].time_to_start_s,
        time_to_recover_s=sum(recovered) / len(recovered) if recovered else None,
        measured=measure(done, lines, wall_s, failures + preemptions),
        notes=tuple(notes),
    )


def _one_after_the_other(found: Sequence[Timeline]) -> tuple[list[Timeline], list[str]]:
    """Lay attempts out so that none begins before the one before it has ended."""
    lines: list[Timeline] = []
    notes: list[str] = []
    for line in found:
        if not lines:
            first_s = line.before[0].begin_s if line.before else line.start_s
            lines.append(replace(line, start_s=first_s))
            continue
        before = lines[-1]
        if line.first_event_s < before.end_s:
            # A process may outlive its session, even into the next session that it runs.
            end_s = max(before.alive_s, min(before.end_s, line.first_event_s))
            before = lines[-1] = replace(before, end_s=end_s)
        if line.first_event_s < before.end_s:
            by_s = before.end_s - line.start_s
            line = line.moved(by_s)  # noqa: PLW2901
            if by_s > _WORTH_SAYING_S:
                notes.append(
                    f"attempt {line.epoch} begins {by_s:.1f} s before attempt {before.epoch} ends: their "
                    f"hosts' clocks disagree, or the older one was still alive; it was moved that much later"
                )
        first_s = line.before[0].begin_s if line.before else line.start_s
        lines.append(replace(line, start_s=max(first_s, before.end_s)))
    return lines, notes


def _attempt(
    line: Timeline,
    ranks: Mapping[int, Events],
    earlier: Sequence[Timeline],
    before: AttemptTime | None,
    trained: Trained,
) -> AttemptTime:
    new = repeated = 0

    def fresh(first: int, last: int) -> int:
        nonlocal new, repeated
        count = trained.add(first, last)
        new, repeated = new + count, repeated + last - first - count
        return count

    segments, elsewhere = joined(
        Rank(line, partition(line, fresh)),
        {r: _of_rank(line.epoch, r, events) for r, events in ranks.items() if r != line.teller},
    )
    resumed = line.restored is not None and line.restored.get("epoch") is not None
    lost = 0
    if resumed and line.restored is not None:
        at = {e.epoch: e.at_step for e in earlier}.get(int(line.restored["epoch"]), {})
        step, position = int(line.restored["step"]), int(line.restored["position"])
        lost = max(0, position - at.get(step, position))
    first_step_s = line.steps[0].end_s if line.steps else None
    queued_s = sum(s.end_s - s.begin_s for s in segments if s.area == "scheduling")
    trained_s = _first_new_s(line, segments)
    return AttemptTime(
        epoch=line.epoch,
        started_at_s=line.start_s,
        ended_at_s=line.end_s,
        ended=line.ended,
        ranks=line.ranks,
        world_size=line.world_size,
        areas=_sums(segments),
        segments=segments,
        stages=_stages(line, first_step_s),
        saves=line.saves,
        resumed_step=int(line.restored["step"]) if resumed and line.restored else None,
        last_step=line.last_step,
        batches_new=new,
        batches_repeated=repeated,
        lost_batches=lost,
        samples_repeated=repeated * line.batch_size,
        time_to_start_s=None
        if first_step_s is None
        else max(0.0, first_step_s - line.start_s - queued_s),
        time_to_recover_s=None
        if before is None or trained_s is None
        else max(0.0, trained_s - before.ended_at_s),
        told_by=line.teller,
        lost_elsewhere=elsewhere,
    )


def _of_rank(epoch: int, rank: int, events: Events) -> Rank:
    """One rank's own account."""
    line = timeline(epoch, {rank: events}, newest=False)
    return Rank(line, partition(line, lambda first, last: max(0, last - first)))


def _of_other_ranks(attempt: AttemptTime) -> Iterator[str]:
    """Who held the others up, the worst three."""
    lost = {r: sum(areas.values()) for r, areas in attempt.lost_elsewhere.items()}
    for rank in sorted(lost, key=lambda r: -lost[r])[:3]:
        if lost[rank] > _WORTH_SAYING_S:
            areas = attempt.lost_elsewhere[rank]
            most = max(areas, key=lambda a: areas[a])
            yield (
                f"attempt {attempt.epoch}: rank {rank} lost {lost[rank]:.1f} s more than rank "
                f"{attempt.told_by}, most of it in {most.replace('_', ' ')}, while the others waited for it"
            )


def _first_new_s(line: Timeline, segments: Sequence[Segment]) -> float | None:
    """When the first step on a new batch had ended."""
    first = next((s for s in segments if s.area == "training_new"), None)
    if first is None:
        return None
    around = next(s for s in line.steps if s.end_s > first.begin_s)
    one_s = (around.end_s - around.begin_s) / max(1, around.count)
    return min(around.end_s, first.begin_s + one_s)


def _stages(line: Timeline, first_step_s: float | None) -> tuple[Stage, ...]:
    until_s = line.end_s if first_step_s is None else first_step_s
    named = [Stage(s.name, s.begin_s, s.end_s) for s in line.spans if s.begin_s < until_s]
    return (*line.before, *named)


def _sums(segments: Iterable[Segment]) -> dict[Area, float]:
    areas: dict[Area, float] = dict.fromkeys(AREAS, 0.0)
    for s in segments:
        areas[s.area] += s.end_s - s.begin_s
    return areas
