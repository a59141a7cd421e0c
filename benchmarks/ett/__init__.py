"""Effective training time of five models, each through the same life in three ways.

Measured: a life is launched, killed twice, preempted once and trained to its end, with real processes.
Lived at a level: the same, with as much training as brings the way of today to 60, 80 or 90%.
Replayed: the losses of such lives around another amount of training.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ett.compare import LEVELS, Compared, beside_row, for_fleet, ratios
from benchmarks.ett.job import TECHNIQUES, WAYS, LifeJob, training_for
from benchmarks.ett.life import FAILURES, beside, live, undisturbed
from benchmarks.ett.lives import Lives, Name, called
from benchmarks.ett.pace import write_steps
from benchmarks.report import Report, Row, environment, write
from benchmarks.watch import wait_until_calm
from ckpt.errors import BadInputError, SidestageError

COLUMNS = (
    *("model", "name", "source", "ett", "ett_same", "wall_s", "step_ms", "inflation"),
    *("interval_s", "start_s", "recover_s", "preempt_s", "block_ms", "lag_s", "repeated"),
    *("points", "replay_error", "step_ratio", "save_costs_ms"),
)
NAMES = ("tables", "dense", "many", "sequence", "multitask")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(NAMES), help=" ".join(NAMES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--training", type=float, default=40.0, metavar="S", help="training in a short life (40)"
    )
    parser.add_argument(
        "--lived",
        nargs="+",
        type=int,
        default=[],
        choices=LEVELS,
        metavar="LEVEL",
        help="live with as much training as brings sync to so many percent: "
        + ", ".join(map(str, LEVELS)),
    )
    parser.add_argument(
        "--compiled",
        nargs="*",
        default=list(NAMES),
        help="models whose dense part is compiled (all)",
    )
    parser.add_argument(
        "--ablate",
        metavar="MODEL",
        help="switch each technique of ours off alone, on this one of the models",
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="write what benchmarks fleet reads"
    )


def run(args: argparse.Namespace) -> Report:
    models = args.models[-1:] if args.quick else args.models  # by default the smallest
    training_s = 5.0 if args.quick else args.training
    for option, named in (("models", models), ("compiled", args.compiled)):
        if unknown := sorted(set(named) - set(NAMES)):
            raise BadInputError(f"--{option} {unknown[0]}: there are {', '.join(NAMES)}")
    if args.ablate and (args.ablate not in models or "ours" not in args.ways):
        raise BadInputError(f"--ablate {args.ablate}: it must be one of --models, and ours lived")
    if args.lived and "sync" not in args.ways:
        raise BadInputError("--lived: the amount of training is measured by sync; add it to --ways")
    repeats = args.repeats or 1
    report = Report(
        environment(
            training_s=training_s,
            lived=args.lived,
            repeats=repeats,
            compiled=[m for m in models if m in args.compiled and not args.quick],
            ranks=2,
        ),
        [],
        {},
        COLUMNS,
    )
    folder = Path(tempfile.mkdtemp(prefix="ett-", dir=args.root)).resolve()
    seen: dict[str, Compared] = {}
    try:
        for model in models:
            life = _Life(
                folder / model, compiled=model in args.compiled and not args.quick, calm_s=args.calm
            )
            short = Lives(model, "measured", training_s)
            seen[model] = compared = Compared(short)
            failed = life.live(short, _order(args.ways, 1 if args.lived else repeats))
            for level in args.lived if short.has("sync") else ():
                training = training_for(short.figures("sync"), level)
                lives = Lives(model, f"lived at {level}%", training, level)
                failed += life.live(
                    lives, _order(args.ways, repeats), math.ceil(training / short.step_s)
                )
                if lives.of:
                    compared.lived[level] = lives
            if "ours" in args.ways:
                report.rows += life.beside(model)
            if model == args.ablate:
                longest = compared.longest
                failed += life.live(longest, ablated(compiled=life.compiled))
            for lives in compared.all:
                report.rows += lives.rows() if lives.of else []
            report.rows += [*compared.rows(), *failed]
            report.ratios = ratios(seen, report.rows)
            write(args.json, report)  # what there is, should a later model be interrupted
    finally:
        with undisturbed():
            shutil.rmtree(folder, ignore_errors=True)
    if args.measured is not None:
        args.measured.write_text(json.dumps(for_fleet(seen), indent=1) + "\n")
    return report


def _order(ways: list[str], repeats: int) -> Iterator[Name]:
    """Every other time in reverse order. `async`, which no goal is about, once."""
    for n in range(repeats):
        for way in WAYS if n % 2 == 0 else reversed(WAYS):
            if way in ways and not (n and way == "async"):
                yield way, None


def ablated(*, compiled: bool) -> Iterator[Name]:
    for technique in TECHNIQUES:
        if technique != "compile_cache" or compiled:
            yield "ours", technique


class _Life:
    """Lives of one model.

    Args:
        folder: for the lives' roots, each removed when it is over.
        calm_s: before each life wait at most so long until others leave the machine idle.
    """

    def __init__(self, folder: Path, *, compiled: bool, calm_s: float) -> None:
        self._folder = folder
        self.compiled = compiled
        self._calm_s = calm_s

    def live(self, lives: Lives, names: Iterator[Name], steps: int | None = None) -> list[Row]:
        """Live each; rows of those that failed, which say why.

        steps: of these lives; by default the first of them decides.
        """
        folder = self._folder / str(lives.level or "short")
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / "plan.json"
        if steps is not None:
            write_steps(plan, steps)
        failed: list[Row] = []
        for way, without in names:
            job = LifeJob(
                model=lives.model,
                way=way,
                folder=str(folder / "life"),
                plan=str(plan),
                training_s=lives.training_s,
                failures=FAILURES,
                compiled=self.compiled,
                without=(without,) if without else (),
            )
            name = called((way, without))
            named = {"model": lives.model, "name": name, "source": lives.source}
            with self._alone(job, named, failed):
                report = live(job)
                print(f"{report.ett_percent:.1f}% of {report.wall_s:.0f} s", flush=True)
                lives.of.setdefault((way, without), []).append(report)
        return failed

    def beside(self, model: str) -> list[Row]:
        """One row: plain steps and those of a session, or why they failed."""
        folder = str(self._folder / "beside")
        job = LifeJob(model, "ours", folder, "", 0.0, 0, compiled=self.compiled)
        named = {"model": model, "name": "ours", "source": "beside plain steps"}
        rows: list[Row] = []
        with self._alone(job, named, rows):
            rows.append(beside_row(model, beside(job)))
            print(f"{rows[0]['step_ratio']:.3f} of a plain step", flush=True)
        return rows

    @contextmanager
    def _alone(self, job: LifeJob, named: Row, failed: list[Row]) -> Iterator[None]:
        """Wait for a calm machine; what fails becomes a row; the job's folder is removed."""
        wait_until_calm(self._calm_s)
        print(f"{named['model']}, {named['source']}: {named['name']}", end=" ", flush=True)
        try:
            yield
        except SidestageError as e:
            print("failed", flush=True)
            failed.append({**named, "status": "failed", "reason": str(e)})
        finally:
            with undisturbed():
                shutil.rmtree(job.folder, ignore_errors=True)
