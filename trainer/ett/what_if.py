"""What the ETT% would be with other settings, by a closed-form model of the run.

    W = (P + P / interval x block + other) / (1 - f x (recover + interval / 2 + lag))

W: wall time; P: training on new batches; f: failures per second of wall time; other: all that comes
once, such as the first start, evaluation and the end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt.errors import BadInputError
from trainer.ett.records import RunReport, WhatIf

_DAY_S = 86400.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": _DAY_S}
_PER_DAY = {"hour": 24.0, "h": 24.0, "day": 1.0, "d": 1.0, "week": 1 / 7}
_DURATIONS = ("block", "interval", "start", "recover", "lag")
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")
_EXAMPLE = "block=0.1s,interval=5m,failures=3/day"


@dataclass(frozen=True)
class _Model:
    """Seconds, and failures per second. An infinite interval: no saves."""

    productive_s: float
    other_s: float
    start_s: float
    block_s: float
    interval_s: float
    failures_per_s: float
    recover_s: float
    lag_s: float

    def ett_percent(self) -> float:
        """BadInputError where failures take up all time."""
        saving_s = self.productive_s / self.interval_s * self.block_s
        once_s = self.productive_s + saving_s + self.other_s + self.start_s
        # Without saves each failure would lose all; a run that shows none has no interval to lose.
        lost_s = self.recover_s + self.lag_s + (self.interval_s / 2 if self.failures_per_s else 0.0)
        left = 1 - (self.failures_per_s * lost_s if self.failures_per_s else 0.0)
        if left <= 0:
            raise BadInputError(
                f"what-if: {self.failures_per_s * _DAY_S:g} failures a day of {lost_s:.1f} s each (recover + "
                f"interval / 2 + lag) take up all time: the run would never end; lower one of them"
            )
        return 100 * self.productive_s * left / once_s if once_s > 0 else 0.0


def parse_changes(text: str) -> dict[str, float]:
    """Read "block=0.1s,interval=5m,failures=3/day" into seconds, and failures a day.

    BadInputError names the key, and the units that it takes.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        key, _equals, value = (p.strip() for p in part.partition("="))
        if key not in (*_DURATIONS, "failures"):
            raise BadInputError(
                f"what-if: {key!r} is no setting; give {', '.join(_DURATIONS)} or failures, as in {_EXAMPLE}"
            )
        if key in found:
            raise BadInputError(f"what-if: {key} is given twice; give it once")
        m = _NUMBER.fullmatch(value)
        if key == "failures":
            unit = m[2].removeprefix("/") if m and m[2].startswith("/") else ""
            if m is None or unit not in _PER_DAY:
                raise BadInputError(
                    f"what-if: failures={value!r}: give a number per time, such as 3/day; per "
                    f"{', '.join(_PER_DAY)}"
                )
            found[key] = float(m[1]) * _PER_DAY[unit]
            continue
        if m is None or m[2] not in _UNITS_S:
            raise BadInputError(
                f"what-if: {key}={value!r}: give a duration such as 0.5s; units: {', '.join(_UNITS_S)}"
            )
        found[key] = float(m[1]) * _UNITS_S[m[2]]
        if key == "interval" and found[key] <= 0:
            raise BadInputError(f"what-if: interval={value!r}: give more than 0")
    return found


def what_if(report: RunReport, changes: Mapping[str, float]) -> WhatIf:
    """The run as it was and with `changes`, whose keys are those of `parse_changes`.

    BadInputError if the model lacks a number that the run doesn't show and `changes` doesn't give.
    """
    now = _model_of(report)
    fields = {"failures" if k == "failures" else k: v for k, v in changes.items()}
    then = replace(
        now,
        **{f"{k}_s": v for k, v in fields.items() if k in _DURATIONS},
        failures_per_s=fields.get("failures", now.failures_per_s * _DAY_S) / _DAY_S,
    )
    if math.isinf(then.interval_s) and (then.failures_per_s or "block" in changes):
        raise BadInputError(
            "what-if: the run shows no saves to measure; give interval=DURATION too"
        )
    if then.failures_per_s and report.measured.recover_s is None and "recover" not in changes:
        # It has shown no recovery: one takes a start, at least.
        then = replace(then, recover_s=then.start_s)
    return WhatIf(dict(changes), now.ett_percent(), then.ett_percent())


def _model_of(report: RunReport) -> _Model:
    m = report.measured
    productive_s = report.areas["training_new"]
    start_s = report.time_to_start_s or 0.0
    recover_s = m.recover_s or 0.0
    failures = report.failures + report.preemptions
    told_s = (
        productive_s
        + report.areas["training_repeated"]
        + report.areas["blocked_in_save"]
        + report.areas["overlay_pressure"]
        + failures * recover_s
        + start_s
    )
    return _Model(
        productive_s=productive_s,
        other_s=max(0.0, report.wall_s - told_s),
        start_s=start_s,
        block_s=m.block_s or 0.0,
        interval_s=m.interval_s or math.inf,
        failures_per_s=(m.failures_per_day or 0.0) / _DAY_S if m.interval_s else 0.0,
        recover_s=recover_s,
        lag_s=m.lag_s or 0.0,
    )
