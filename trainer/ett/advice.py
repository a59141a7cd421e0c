"""What a run lost most by, what would mend it, and how often it should save."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainer import interval
from trainer.ett.records import AREAS, Advice, Area, Loss, RunReport
from trainer.interval import SaveCosts

_DAY_S = 86400.0


def losses(report: RunReport, most: int = 3) -> tuple[Loss, ...]:
    """The areas that cost most points of ETT%, largest first, each with what would mend it."""
    if report.wall_s <= 0:
        return ()
    costs = [(report.areas[a], a) for a in AREAS if a != "training_new" and report.areas[a] > 0]
    costs.sort(key=lambda c: -c[0])
    return tuple(
        Loss(area, seconds, 100 * seconds / report.wall_s, _mend(report, area))
        for seconds, area in costs[:most]
    )


def advise(report: RunReport) -> Advice | None:
    """How often to save. None where the run hasn't shown what a save costs, or no failure."""
    m = report.measured
    if m.block_s is None or not m.failures_per_day:
        return None
    apart_s = _DAY_S / m.failures_per_day
    lag_s = m.lag_s or 0.0
    interval_s, why = best_interval_s(m.block_s, lag_s, apart_s)
    now = None if m.interval_s is None else interval_cost(m.interval_s, m.block_s, lag_s, apart_s)
    return Advice(
        interval_s=interval_s,
        interval_steps=max(1, round(interval_s / m.step_s)) if m.step_s else None,
        points_now=now,
        points_then=interval_cost(interval_s, m.block_s, lag_s, apart_s),
        why=why,
    )


def best_interval_s(block_s: float, lag_s: float, apart_s: float) -> tuple[float, str]:
    """The interval between saves that costs least, and why. `apart_s`: time between failures.

    It balances blocking, block / interval, with what a failure loses, interval / 2 + lag.
    """
    best_s = math.sqrt(2 * block_s * apart_s)
    balance = (
        f"sqrt(2 x {seconds_text(block_s)} a save x {seconds_text(apart_s)} between failures) "
        f"= {seconds_text(best_s)}"
    )
    interval_s = interval.best_interval_s(SaveCosts(block_s, lag_s, apart_s))
    if best_s < lag_s:
        return interval_s, f"{balance}, but a save takes {seconds_text(lag_s)} to commit"
    return interval_s, balance


def interval_cost(interval_s: float, block_s: float, lag_s: float, apart_s: float) -> float:
    """Points of ETT% that saving and training again cost."""
    return 100 * interval.cost_share(interval_s, SaveCosts(block_s, lag_s, apart_s))


def seconds_text(seconds: float) -> str:
    """A duration for people: 20 ms, 1.5 s, 4.0 min, 2.5 h."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds / _DAY_S:.1f} d"


def _saves(report: RunReport) -> int:
    return sum(len(a.saves) for a in report.attempts)


def _repeated(report: RunReport) -> str:
    stops = report.failures + report.preemptions
    said = f"{report.batches_repeated} batches were trained again after {stops} failures and preemptions"
    if (advice := advise(report)) is None:
        return f"{said}; save more often"
    every = f" ({advice.interval_steps} steps)" if advice.interval_steps else ""
    return f"{said}; save every {seconds_text(advice.interval_s)}{every}"


def _blocked(report: RunReport) -> str:
    saves = _saves(report)
    each = report.areas["blocked_in_save"] / saves if saves else 0.0
    return (
        f"{saves} saves blocked training for {seconds_text(each)} each; guard all tables "
        f"(`ckpt show STEP` names those that are copied), or save less often"
    )


def _pressure(report: RunReport) -> str:
    block = report.measured.block_s or 0.0
    return (
        f"training waited for open snapshots (a save costs {seconds_text(block)} in all); raise "
        f"[checkpoint] staging_bytes or lower persist_target_s"
    )


def _between(report: RunReport) -> str:
    count = len(report.attempts) - 1
    each = report.areas["between_attempts"] / count if count else 0.0
    return (
        f"{count} restarts took {seconds_text(each)} each until a process was there; let torchrun restart "
        f"in place (--max-restarts), with machines held ready"
    )


def _shutdown(report: RunReport) -> str:
    """From its last whole step on, a failed attempt does nothing that counts, until it is gone."""
    dying = [a.areas["shutdown"] for a in report.attempts if a.ended == "failed"]
    if dying and sum(dying) > report.areas["shutdown"] / 2:
        return (
            f"{len(dying)} failed attempts took {seconds_text(sum(dying) / len(dying))} each from their last "
            f"whole step until they were gone; lower the process group's timeout, so that a lost rank is "
            f"noticed sooner"
        )
    count = len(report.attempts) or 1
    return (
        f"the end took {seconds_text(report.areas['shutdown'] / count)} in each of {count} attempts; publish "
        f"elsewhere, and see why the last commit takes long (`save_persisted` in the log)"
    )


_STAGES: Mapping[Area, tuple[str, str]] = {
    "scheduling": ("waiting for machines", "ask for fewer or smaller ones, or reserve them"),
    "hardware_setup": ("setting machines up", "use images that hold what the job needs"),
    "launcher_init": ("the launcher", "start torchrun on local files, without package installs"),
    "imports": (
        "Python and its packages",
        "start with `trainer launch`, whose restarts import nothing again",
    ),
    "device_init": ("device initialisation", "run it beside other stages of the start"),
    "process_group_init": ("joining the process group", "drop groups that nothing needs"),
    "preproc_creation": ("making the preprocessing", "run it beside other stages of the start"),
    "train_module_creation": (
        "making the model",
        "build it on the meta device and reuse the sharding plan (`plan_for`)",
    ),
    "init_plugins": ("plugins", "keep what they make for restarts (`describe_once`)"),
    "restore": ("restoring", "read ahead while the model is made (`ckpt.prefetch.Prefetch`)"),
    "pre_train": ("preparing to train", "run it beside other stages of the start"),
    "get_first_batch_data": ("the first batch", "warm the reader up while the model is made"),
    "start_up_other": (
        "start-up outside of named stages",
        "name its stages (`with ledger.span(AREA)`) to see which",
    ),
    "pt2_compilation": (
        "compilation",
        "keep the compile cache with the run, and mark dynamic shapes",
    ),
    "data_wait": ("waiting for the reader", "read ahead, or give the reader more processes"),
    "evaluation": ("evaluation", "evaluate less often, on fewer samples, or beside training"),
    "publishing": ("publishing in the trainer", "publish from checkpoints on another machine"),
    "unaccounted": (
        "time that nothing tells of",
        "name it (`with ledger.span(AREA)`) to see what it is",
    ),
}
"""What an area that comes once or more in each attempt is, and what mends it."""

_OTHERS: Mapping[Area, Callable[[RunReport], str]] = {
    "training_repeated": _repeated,
    "blocked_in_save": _blocked,
    "overlay_pressure": _pressure,
    "shutdown": _shutdown,
    "between_attempts": _between,
}


def _mend(report: RunReport, area: Area) -> str:
    if area in _OTHERS:
        return _OTHERS[area](report)
    what, mend = _STAGES[area]
    seconds = [a.areas[area] for a in report.attempts if a.areas[area] > 0]
    each = seconds_text(sum(seconds) / len(seconds)) if seconds else "0 s"
    often = f" in each of {len(seconds)} attempts" if len(seconds) > 1 else ""
    return f"{what} took {each}{often}; {mend}"
