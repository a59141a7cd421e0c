"""A run's account for dashboards: Prometheus gauges, and TensorBoard scalars. No torch.

    sidestage_ett_percent{root}              of wall time, training on new data
    sidestage_ett_area_seconds{root,area}    wall time by area; the areas add up to the wall time
    sidestage_ett_wall_seconds{root}
    sidestage_ett_time_to_start_seconds{root}, sidestage_ett_time_to_recover_seconds{root}
    sidestage_ett_failures{root}, sidestage_ett_preemptions{root}, sidestage_ett_attempts{root}
    sidestage_ett_batches_repeated{root}, sidestage_ett_batches_new{root}
    sidestage_ett_saves_committed{root}, ..._saves_failed, ..._saves_skipped, ..._saves_lost
    sidestage_ett_save_interval_seconds{root}, sidestage_ett_save_blocked_seconds{root}

What a run hasn't shown has no sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import BadInputError
from trainer.ett.records import AREAS, Area, AttemptTime, RunReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_GAUGES: Sequence[tuple[str, str]] = (
    ("percent", "Share of the run's wall time that was training on new data, in percent"),
    ("wall_seconds", "Wall time of the run, from allocation to the end of its newest attempt"),
    ("time_to_start_seconds", "From the start of the first attempt to the end of its first step"),
    ("time_to_recover_seconds", "From the end of an attempt to the next one's first new batch"),
    ("failures", "Attempts that ended by a failure"),
    ("preemptions", "Attempts that ended by a preemption"),
    ("attempts", "Attempts"),
    ("batches_new", "Global batches that were trained for the first time"),
    ("batches_repeated", "Global batches that an earlier attempt had trained already"),
    ("saves_committed", "Saves that have a commit"),
    ("saves_failed", "Saves that failed"),
    ("saves_skipped", "Saves given up by policy, while earlier ones were pending"),
    ("saves_lost", "Saves that had no end when their attempt ended"),
    ("save_interval_seconds", "Training time between saves"),
    ("save_blocked_seconds", "What one save costs training"),
)
_SUFFIX = ".sidestage"  # of the event files that are ours to replace


def prometheus_registry(reports: Iterable[RunReport]) -> CollectorRegistry:
    """Gauges of the runs. BadInputError where prometheus_client isn't installed."""
    try:
        from prometheus_client import CollectorRegistry, Gauge
    except ImportError:
        raise BadInputError(
            "Prometheus gauges need prometheus-client: pip install 'sidestage[metrics]'"
        ) from None
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"sidestage_ett_{name}", text, ["root"], registry=registry)
        for name, text in _GAUGES
    }
    areas = Gauge(
        "sidestage_ett_area_seconds",
        "Wall time of the run by area; all areas together are the wall time",
        ["root", "area"],
        registry=registry,
    )
    for report in reports:
        root = report.root.encode(errors="replace").decode()
        for name, value in _figures(report).items():
            if value is not None:
                gauges[name].labels(root).set(value)
        for area in AREAS:
            areas.labels(root, area).set(report.areas.get(area, 0.0))
    return registry


def _figures(report: RunReport) -> dict[str, float | None]:
    return {
        "percent": report.ett_percent,
        "wall_seconds": report.wall_s,
        "time_to_start_seconds": report.time_to_start_s,
        "time_to_recover_seconds": report.time_to_recover_s,
        "failures": report.failures,
        "preemptions": report.preemptions,
        "attempts": len(report.attempts),
        "batches_new": sum(a.batches_new for a in report.attempts),
        "batches_repeated": report.batches_repeated,
        **{f"saves_{outcome}": count for outcome, count in report.saves.items()},
        "save_interval_seconds": report.measured.interval_s,
        "save_blocked_seconds": report.measured.block_s,
    }


def write_textfile(reports: Iterable[RunReport], path: Path) -> None:
    """Gauges for node_exporter's textfile collector, which reads `*.prom`; replaced as a whole."""
    registry = prometheus_registry(reports)
    from prometheus_client import write_to_textfile

    write_to_textfile(str(path), registry)


def write_tensorboard(reports: Sequence[RunReport], folder: Path) -> list[Path]:
    """Scalars in `folder`, or in a folder of it for each run where there are several.

    By attempt (the step is its epoch): `ett/percent` of the run so far, `ett/time_to_start_s`,
    `ett/time_to_recover_s`, `ett/batches_repeated`, `ett_seconds/<area>`. By training step:
    `save/blocked_s` and `save/lag_s`. What an earlier call wrote there is replaced.

    Returns the folders. BadInputError where tensorboard isn't installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise BadInputError(
            "TensorBoard scalars need tensorboard: pip install 'sidestage[tensorboard]'"
        ) from None
    folders = _folders(reports, folder)
    for report, target in zip(reports, folders, strict=True):
        for old in target.glob(f"events.out.tfevents.*{_SUFFIX}"):
            old.unlink()
        with closing(EventFileWriter(str(target), filename_suffix=_SUFFIX)) as writer:
            for tag, step, at_s, value in _scalars(report):
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.add_event(Event(wall_time=at_s, step=step, summary=summary))
    return folders


def _folders(reports: Sequence[RunReport], folder: Path) -> list[Path]:
    """One for each run, named like the end of its root; numbered where that isn't unique."""
    if len(reports) == 1:
        return [folder]
    names: list[str] = []
    for report in reports:
        end = re.split(r"[/\\]", report.root.rstrip("/\\"))[-1]
        name = re.sub(r"[^\w.-]+", "_", end, flags=re.ASCII).strip(".") or "run"
        taken = sum(n == name or n.startswith(f"{name}-") for n in names)
        names.append(name if name not in names else f"{name}-{taken + 1}")
    return [folder / name for name in names]


def _scalars(report: RunReport) -> Iterator[tuple[str, int, float, float]]:
    """(tag, step, seconds since 1970, value)."""
    new_s = 0.0
    for attempt in report.attempts:
        at_s = attempt.ended_at_s
        new_s += attempt.areas.get("training_new", 0.0)
        wall_s = at_s - report.attempts[0].started_at_s
        for tag, value in _of_attempt(attempt):
            yield tag, attempt.epoch, at_s, value
        if wall_s > 0:
            yield "ett/percent", attempt.epoch, at_s, 100 * new_s / wall_s
        for save in attempt.saves:
            yield "save/blocked_s", save.step, save.at_s, save.blocked_s
            if save.committed_at_s is not None:
                lag_s = save.committed_at_s - save.at_s
                yield "save/lag_s", save.step, save.committed_at_s, lag_s


def _of_attempt(attempt: AttemptTime) -> Iterator[tuple[str, float]]:
    yield "ett/batches_repeated", attempt.batches_repeated
    if attempt.time_to_start_s is not None:
        yield "ett/time_to_start_s", attempt.time_to_start_s
    if attempt.time_to_recover_s is not None:
        yield "ett/time_to_recover_s", attempt.time_to_recover_s
    areas: dict[Area, float] = dict(attempt.areas)
    for area, seconds in areas.items():
        yield f"ett_seconds/{area}", seconds
