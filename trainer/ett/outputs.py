"""Where `trainer ett` writes an account beside the terminal: a page, gauges, scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import BadInputError
from trainer.ett.records import Advice, Loss, RunReport


@dataclass(frozen=True)
class Places:
    """Where to write; None for what isn't wanted.

    html: a file for the page.
    prometheus: a file for node_exporter's textfile collector; its name must end in .prom.
    tensorboard: a folder for event files.
    """

    html: Path | None = None
    prometheus: Path | None = None
    tensorboard: Path | None = None


def add_outputs(
    reports: Sequence[RunReport],
    losses: Callable[[RunReport], tuple[Loss, ...]],
    advise: Callable[[RunReport], Advice | None],
    places: Places,
    *,
    fleet_percent: float | None = None,
) -> tuple[Path, ...]:
    """Write what is asked for, of one run or of several beside each other; returns where it is.

    Args:
        reports: one per root.
        losses: what a run lost most by.
        advise: how often a run should save.
        places: what to write, and where.
        fleet_percent: ETT% of all runs together; the page works it out where it is None.

    Raises:
        BadInputError: a place can't be written, or the package that an output needs is missing.
    """
    html, prometheus, tensorboard = places.html, places.prometheus, places.tensorboard
    if prometheus is not None and prometheus.suffix != ".prom":
        raise BadInputError(
            f"--prometheus {prometheus}: node_exporter reads only files that end in .prom"
        )
    if html is not None:
        from trainer.ett.page import write_page

        told, advice = [losses(r) for r in reports], [advise(r) for r in reports]
        with _option("--html", html):
            html.parent.mkdir(parents=True, exist_ok=True)
            write_page(reports, told, advice, html, fleet_percent=fleet_percent)
    if prometheus is not None:
        from trainer.ett.exports import write_textfile

        with _option("--prometheus", prometheus):
            prometheus.parent.mkdir(parents=True, exist_ok=True)
            write_textfile(reports, prometheus)
    if tensorboard is not None:
        from trainer.ett.exports import write_tensorboard

        with _option("--tensorboard", tensorboard):
            write_tensorboard(reports, tensorboard)
    return tuple(p for p in (html, prometheus, tensorboard) if p is not None)


@contextmanager
def _option(name: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise BadInputError(f"{name} {path}: {e.strerror or e}; name another place") from e
