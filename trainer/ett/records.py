"""What the account of a run says: plain records, written as JSON by `trainer ett --json`.

All moments are seconds since 1970; all durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Area = Literal[
    # before the process
    "scheduling",
    "hardware_setup",
    "launcher_init",
    # the trainer's start
    "imports",
    "device_init",
    "process_group_init",
    "preproc_creation",
    "train_module_creation",
    "init_plugins",
    "restore",
    "pre_train",
    "get_first_batch_data",
    "start_up_other",
    "pt2_compilation",
    # training
    "training_new",
    "training_repeated",
    "blocked_in_save",
    "overlay_pressure",
    "data_wait",
    "evaluation",
    "publishing",
    # the end
    "shutdown",
    "between_attempts",
    "unaccounted",
]
"""Where wall time goes. Each moment of a run belongs to exactly one area.

The L2 areas and trainer-init stages of arXiv 2610.02057, and ours:

    imports             from the process's creation to the first stage: Python and its packages
    start_up_other      in the session's start, outside of all named stages
    blocked_in_save     save() had not returned
    overlay_pressure    training waited for an open snapshot: overlay, fence or slot
    data_wait           training waited for the reader
    shutdown            from when the session's block was left; where an attempt failed, from the end of
                        the last whole step
    between_attempts    from the end of an attempt's last process to the next one's first
    unaccounted         none of these
"""
AREAS: tuple[Area, ...] = get_args(Area)

START_UP: tuple[Area, ...] = AREAS[: AREAS.index("training_new")]
"""Areas of the time to start; all of them are losses."""

Ended = Literal["closed", "preempted", "failed", "unknown"]
"""How an attempt ended. `unknown`: the newest attempt, which may still run."""


@dataclass(frozen=True)
class Segment:
    """A stretch of one attempt's time in one area."""

    begin_s: float
    end_s: float
    area: Area


@dataclass(frozen=True)
class Stage:
    """A named stage of the start. Stages may overlap; `segments` say which one was waited for."""

    name: str
    begin_s: float
    end_s: float


Outcome = Literal["committed", "failed", "skipped", "lost"]
"""How a save ended. `skipped`: given up by policy. `lost`: it had no end when its attempt ended."""


@dataclass(frozen=True)
class SaveTime:
    """One save of an attempt. A step that was skipped may have been saved again.

    over_at_s: when it was committed, had failed or was skipped; None where it was lost.
    """

    step: int
    at_s: float
    blocked_s: float
    outcome: Outcome
    committed_at_s: float | None = None
    error: str | None = None
    over_at_s: float | None = None


@dataclass(frozen=True)
class AttemptTime:
    """One attempt. `areas` add up to `wall_s`; `segments` tile [started_at_s, ended_at_s].

    batches_new, batches_repeated: global batches trained here, first time or again.
    told_by: the rank whose ledger this is made from: the lowest, or the one that trained on after it.
    lost_elsewhere: what other ranks lost beyond it and made it wait for, by rank and area; in `areas`.
    lost_batches: batches between what the commit had trained on and where this attempt began.
    time_to_start_s: from the attempt's start, without waiting for the scheduler, to the end of its first
        step; None without a step.
    saves: without those that a live attempt is still writing.
    time_to_recover_s: from the end of the attempt before it to the first new batch trained; None
        for the first attempt, and where there was no new batch.
    """

    epoch: int
    started_at_s: float
    ended_at_s: float
    ended: Ended
    ranks: int
    world_size: int
    areas: Mapping[Area, float]
    segments: tuple[Segment, ...]
    stages: tuple[Stage, ...]
    saves: tuple[SaveTime, ...]
    resumed_step: int | None
    last_step: int
    batches_new: int
    batches_repeated: int
    lost_batches: int
    samples_repeated: int
    time_to_start_s: float | None
    time_to_recover_s: float | None
    told_by: int = 0
    lost_elsewhere: Mapping[int, Mapping[Area, float]] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return self.ended_at_s - self.started_at_s


@dataclass(frozen=True)
class Measured:
    """What advice is made from; None where the run doesn't show it.

    block_s: one save's cost to training: time in save(), waits for its snapshot, and slower steps
        while it is written. lag_s: from save() to its commit, the shortest interval that makes
        sense. interval_s: training time between saves. step_s: one step. failures_per_day: of wall
        time, preemptions included. recover_s: time to recover without what is trained again.
    """

    block_s: float | None
    lag_s: float | None
    interval_s: float | None
    step_s: float | None
    failures_per_day: float | None
    recover_s: float | None


@dataclass(frozen=True)
class RunReport:
    """A whole run. `areas` add up to `wall_s`, time between attempts included.

    notes: what a reader must know, such as clocks of hosts that disagree.
    """

    root: str
    attempts: tuple[AttemptTime, ...]
    wall_s: float
    areas: Mapping[Area, float]
    ett_percent: float
    failures: int
    preemptions: int
    time_to_start_s: float | None
    time_to_recover_s: float | None
    measured: Measured
    notes: tuple[str, ...] = ()

    @property
    def batches_repeated(self) -> int:
        return sum(a.batches_repeated for a in self.attempts)

    @property
    def lost_batches(self) -> int:
        return sum(a.lost_batches for a in self.attempts)

    @property
    def saves(self) -> dict[Outcome, int]:
        """How many saves ended in each way."""
        ends = [s.outcome for a in self.attempts for s in a.saves]
        return {o: ends.count(o) for o in get_args(Outcome)}


@dataclass(frozen=True)
class Loss:
    """Points of ETT% that one area costs, and what would mend it."""

    area: Area
    seconds: float
    points: float
    mend: str


@dataclass(frozen=True)
class Advice:
    """How often to save. points: of ETT% that saving and repeating cost, now and then."""

    interval_s: float
    interval_steps: int | None
    points_now: float | None
    points_then: float
    why: str


@dataclass(frozen=True)
class WhatIf:
    """The model's ETT% of the run as it was and as it would be, with the changed settings."""

    changes: Mapping[str, float]
    ett_percent_model: float
    ett_percent_then: float


@dataclass(frozen=True)
class FleetReport:
    """Several runs. ett_percent is weighted by wall time times ranks."""

    runs: tuple[RunReport, ...]
    ett_percent: float
    notes: tuple[str, ...] = field(default=())
