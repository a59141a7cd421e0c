"""The account of runs as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from trainer.ett.advice import advise, losses, seconds_text
from trainer.ett.reading import fleet
from trainer.ett.records import AREAS, AttemptTime, RunReport
from trainer.ett.what_if import what_if

_COUNTS: tuple[tuple[str, Callable[[AttemptTime], int]], ...] = (
    ("new batches", lambda a: a.batches_new),
    ("repeated batches", lambda a: a.batches_repeated),
    ("lost batches", lambda a: a.lost_batches),
    ("commits", lambda a: sum(s.outcome == "committed" for s in a.saves)),
    ("failed saves", lambda a: sum(s.outcome == "failed" for s in a.saves)),
    ("skipped saves", lambda a: sum(s.outcome == "skipped" for s in a.saves)),
)
_MOST_ATTEMPTS = 8  # columns; of more, the newest are shown


def show(reports: Sequence[RunReport], changes: Mapping[str, float] | None) -> None:
    """Print each run, and of several a comparison."""
    console = Console()
    for report in reports:
        _show_run(console, report, changes)
    if len(reports) > 1:
        _compare(console, reports)


def _show_run(console: Console, report: RunReport, changes: Mapping[str, float] | None) -> None:
    console.print(_table(report), soft_wrap=True)
    say = _plainly(console)
    stops = f"{report.failures} failures, {report.preemptions} preemptions"
    start, recover = _or_dash(report.time_to_start_s), _or_dash(report.time_to_recover_s)
    say(f"Time to start {start}, time to recover {recover}, {stops}.")
    for outcome in ("failed", "skipped"):
        told = [s for a in report.attempts for s in a.saves if s.outcome == outcome]
        if told:
            say(
                f"{len(told)} saves {outcome}, the last one: {told[-1].error} (step {told[-1].step})."
            )
    for n, loss in enumerate(losses(report), 1):
        name = loss.area.replace("_", " ")
        say(f"{n}. {name}: {loss.points:.1f} points ({loss.seconds:.1f} s). {loss.mend}.")
    if (advice := advise(report)) is not None:
        steps = f" ({advice.interval_steps} steps)" if advice.interval_steps else ""
        now = "" if advice.points_now is None else f" instead of {advice.points_now:.2f} now"
        say(
            f"Save every {seconds_text(advice.interval_s)}{steps}: saving and repeating then cost "
            f"{advice.points_then:.2f} points{now}. {advice.why}."
        )
    else:
        say(
            "No interval to advise: the run shows no failure, or no save; ask --what-if failures=3/day."
        )
    if changes is not None:
        asked = what_if(report, changes)
        say(
            f"What if: the model says {asked.ett_percent_then:.1f}%, and {asked.ett_percent_model:.1f}% "
            f"for the run as it was (it was {report.ett_percent:.1f}%)."
        )
    for note in report.notes:
        say(f"Note: {note}.")


def _table(report: RunReport) -> Table:
    shown = report.attempts[-_MOST_ATTEMPTS:]
    name = f"{report.root}: " if report.root else ""
    left_out = len(report.attempts) - len(shown)
    older = f", {left_out} older attempts not shown" if left_out else ""
    table = Table(title=f"{name}ETT {report.ett_percent:.1f}% of {report.wall_s:.1f} s{older}")
    table.add_column("")
    for attempt in shown:
        table.add_column(f"attempt {attempt.epoch}", justify="right")
    table.add_column("all", justify="right")
    table.add_column("share", justify="right")
    for area in AREAS:
        if report.areas[area] > 0 or area in ("training_new", "unaccounted"):
            own = [f"{a.areas[area]:.2f} s" for a in shown]
            if area == "between_attempts":
                own = ["" for _ in shown]
            total = report.areas[area]
            table.add_row(
                area.replace("_", " "), *own, f"{total:.2f} s", _share(total, report.wall_s)
            )
    table.add_section()
    walls = [f"{a.wall_s:.2f} s" for a in shown]
    table.add_row("wall time", *walls, f"{report.wall_s:.2f} s", "100.0%")
    starts = [_or_dash(a.time_to_start_s) for a in shown]
    table.add_row("time to start", *starts, _or_dash(report.time_to_start_s), "")
    recovers = [_or_dash(a.time_to_recover_s) for a in shown]
    table.add_row("time to recover", *recovers, _or_dash(report.time_to_recover_s), "")
    table.add_row("ended", *(a.ended for a in shown), "", "")
    for label, count in _COUNTS:
        total_count = sum(map(count, report.attempts))
        table.add_row(label, *(str(count(a)) for a in shown), str(total_count), "")
    return table


def _compare(console: Console, reports: Sequence[RunReport]) -> None:
    found = fleet(reports)
    table = Table(
        title=f"{len(reports)} runs: ETT {found.ett_percent:.1f}%, by wall time and ranks"
    )
    names = ("run", "ETT", "wall time", "start", "recover", "failures", "preemptions", "repeated")
    for name in names:
        table.add_column(name, justify="left" if name == "run" else "right")
    table.add_column("largest loss")
    for r in reports:
        worst = losses(r, 1)
        table.add_row(
            r.root,
            f"{r.ett_percent:.1f}%",
            f"{r.wall_s:.1f} s",
            _or_dash(r.time_to_start_s),
            _or_dash(r.time_to_recover_s),
            str(r.failures),
            str(r.preemptions),
            str(r.batches_repeated),
            f"{worst[0].area.replace('_', ' ')}, {worst[0].points:.1f} points" if worst else "",
        )
    console.print(table, soft_wrap=True)


def _plainly(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)


def _share(seconds: float, wall_s: float) -> str:
    return f"{100 * seconds / wall_s:.1f}%" if wall_s > 0 else ""
