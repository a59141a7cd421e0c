"""Accounts of runs that never were: for the pictures of docs/images, and for tests of the page."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainer.ett.records import (
    AREAS,
    Advice,
    Area,
    AttemptTime,
    Ended,
    Loss,
    Measured,
    RunReport,
    SaveTime,
    Segment,
    Stage,
)

STEP_S = 0.25
INTERVAL_S = 600.0
SAMPLES = 8192  # a global batch
_BEGAN_S = 1_790_000_000.0
_BEFORE: Sequence[tuple[Area, float]] = (
    ("scheduling", 212.0),
    ("hardware_setup", 94.0),
    ("launcher_init", 11.5),
)


def made_attempt(
    epoch: int,
    started_at_s: float,
    parts: Iterable[tuple[Area, float]],
    *,
    ended: Ended = "closed",
    stages: Sequence[Stage] = (),
    saves: Sequence[SaveTime] = (),
    resumed_step: int | None = None,
    time_to_recover_s: float | None = None,
) -> AttemptTime:
    """An attempt whose segments follow each other as `parts` say: (area, seconds)."""
    segments: list[Segment] = []
    areas: dict[Area, float] = dict.fromkeys(AREAS, 0.0)
    at_s, first_s = started_at_s, None
    for area, seconds in parts:
        segments.append(Segment(at_s, at_s + seconds, area))
        at_s += seconds
        areas[area] += seconds
        if first_s is None and area.startswith("training"):
            first_s = segments[-1].begin_s + STEP_S
    new, again = (round(areas[a] / STEP_S) for a in ("training_new", "training_repeated"))
    return AttemptTime(
        epoch=epoch,
        started_at_s=started_at_s,
        ended_at_s=at_s,
        ended=ended,
        ranks=64,
        world_size=64,
        areas=areas,
        segments=tuple(segments),
        stages=tuple(stages),
        saves=tuple(saves),
        resumed_step=resumed_step,
        last_step=(resumed_step or 0) + new + again,
        batches_new=new,
        batches_repeated=again,
        lost_batches=0,
        samples_repeated=again * SAMPLES,
        time_to_start_s=None if first_s is None else first_s - started_at_s,
        time_to_recover_s=time_to_recover_s,
    )


def made_run(
    root: str, attempts: Sequence[AttemptTime], *, failures: int = 0, preemptions: int = 0
) -> RunReport:
    """The run of these attempts; what lies between them is time between attempts."""
    wall_s = attempts[-1].ended_at_s - attempts[0].started_at_s
    areas: dict[Area, float] = {a: sum(t.areas[a] for t in attempts) for a in AREAS}
    areas["between_attempts"] += wall_s - sum(a.wall_s for a in attempts)
    saves = [s for a in attempts for s in a.saves]
    lags = sorted(s.committed_at_s - s.at_s for s in saves if s.committed_at_s is not None)
    blocks = sorted(s.blocked_s for s in saves)
    recovers = [a.time_to_recover_s for a in attempts if a.time_to_recover_s is not None]
    return RunReport(
        root=root,
        attempts=tuple(attempts),
        wall_s=wall_s,
        areas=areas,
        ett_percent=100 * areas["training_new"] / wall_s,
        failures=failures,
        preemptions=preemptions,
        time_to_start_s=attempts[0].time_to_start_s,
        time_to_recover_s=sum(recovers) / len(recovers) if recovers else None,
        measured=Measured(
            block_s=blocks[len(blocks) // 2] if blocks else None,
            lag_s=lags[len(lags) // 2] if lags else None,
            interval_s=INTERVAL_S if saves else None,
            step_s=STEP_S,
            failures_per_day=86400 * (failures + preemptions) / wall_s,
            recover_s=recovers[0] if recovers else None,
        ),
    )


# -- a run like a real one ------------------------------------------------------------------


def sample_run(root: str = "s3://ads-train/feed-ranking", seed: int = 7) -> RunReport:
    """A day on 64 ranks: a cold start, a failure, a preemption, a failed save."""
    rng = random.Random(seed)
    lives: list[AttemptTime] = []
    at_s, step = _BEGAN_S, 0
    plan: tuple[tuple[float, Ended], ...] = ((5.9, "failed"), (2.6, "preempted"), (4.3, "closed"))
    for epoch, (hours, ended) in enumerate(plan):
        life = _life(epoch + 1, at_s, (hours, ended), step, rng)
        lives.append(life)
        step = max((s.step for s in life.saves if s.outcome == "committed"), default=step)
        at_s = life.ended_at_s + (95.0, 640.0, 0.0)[epoch]
    report = made_run(root, lives, failures=1, preemptions=1)
    note = "clocks of trainer-03 and trainer-17 differ by 0.8 s; times between attempts may be off by that"
    return replace(report, notes=(note,))


def _life(
    epoch: int, began_s: float, life: tuple[float, Ended], step: int, rng: random.Random
) -> AttemptTime:
    (hours, ended), cold = life, epoch == 1
    parts: list[tuple[Area, float]] = list(_BEFORE) if cold else [("launcher_init", 9.0)]
    base_s = began_s + sum(s for _, s in parts)
    parts += [("imports", 9.2), ("process_group_init", 4.1)]
    parts += [("train_module_creation", 21.0)] if cold else [("restore", 38.0)]
    parts += [("pt2_compilation", 148.0 if cold else 12.0), ("get_first_batch_data", 3.2)]
    parts += [("start_up_other", 2.4)]
    lengths = (
        ("imports", 0.0, 9.2),
        ("device_init", 9.2, 10.6),
        ("process_group_init", 9.2, 13.3),
        ("preproc_creation", 9.4, 12.0),
        ("train_module_creation", 10.6, 34.3),
        ("restore", 13.3, 13.5 if cold else 51.3),
        ("get_first_batch_data", 12.0, 30.0),
        ("pt2_compilation", 34.3 if cold else 48.0, 182.3 if cold else 63.3),
    )
    stages = [Stage(name, base_s + begin, base_s + end) for name, begin, end in lengths]
    at_s = began_s + sum(s for _, s in parts)
    first_s, again_s = at_s, 0.0 if cold else 310.0 if epoch == 2 else 3.0
    saves: list[SaveTime] = []
    end_s = began_s + hours * 3600
    turn, blocked_s = 0, 0.35
    now = step
    while at_s < end_s:
        turn += 1
        fit_s = min(INTERVAL_S, end_s - at_s)
        pieces: list[tuple[Area, float]] = [("training_repeated", again_s)] if again_s else []
        wait_s = fit_s * rng.uniform(0.01, 0.07)
        pieces += [("training_new", fit_s * 0.6 - again_s), ("data_wait", wait_s)]
        pieces += [("training_new", fit_s * 0.4 - wait_s)]
        now += round(fit_s / STEP_S)
        again_s = 0.0
        if turn % 9 == 0:
            pieces.append(("evaluation", 96.0))
        pieces.append(("blocked_in_save", blocked_s))
        parts += pieces
        at_s += sum(s for _, s in pieces)
        lag_s, bad = rng.uniform(24, 41), rng.random() < 0.02
        error = "PUT data/000002: 503 SlowDown after 5 tries over 31 s" if bad else None
        saves.append(
            SaveTime(
                now,
                at_s - blocked_s,
                blocked_s,
                "failed" if bad else "committed",
                None if bad else at_s + lag_s,
                error,
            )
        )
        blocked_s = rng.uniform(0.2, 0.5) if rng.random() > 0.04 else rng.uniform(1, 3)
    if ended == "failed":
        parts.append(("training_new", 310.0))
    else:
        parts.append(("shutdown", 21.0 if ended == "preempted" else 47.0))
    parts.append(("unaccounted", 1.4))
    return made_attempt(
        epoch,
        began_s,
        parts,
        ended=ended,
        stages=stages,
        saves=saves,
        resumed_step=None if cold else step,
        time_to_recover_s=None if cold else first_s - began_s + (405.0 if epoch == 2 else 343.0),
    )


def sample_losses(report: RunReport) -> tuple[Loss, ...]:
    said: dict[Area, str] = {
        "data_wait": "more reader workers, or prefetch further ahead",
        "training_repeated": "save more often: every 2.1 min instead of every 10 min",
        "evaluation": "evaluate less often, or on a smaller sample",
        "pt2_compilation": "keep the compile cache with the run: the next cold start takes 12 s",
    }
    ranked = sorted(said, key=lambda a: -report.areas[a])[:3]
    return tuple(
        Loss(a, report.areas[a], 100 * report.areas[a] / report.wall_s, said[a]) for a in ranked
    )


def sample_advice() -> Advice:
    why = (
        "block 0.35 s, commit after 33 s, 3.7 interruptions a day; the best interval, "
        "sqrt(2 x 0.35 s x 6.5 h), is 2.1 min"
    )
    return Advice(128.0, 512, 1.49, 0.69, why)
