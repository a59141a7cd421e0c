"""Is a resume exact? Trains twice from one checkpoint, once interrupted, and compares bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt.branch import create_branch
from ckpt.catalog import Catalog
from ckpt.config import TRACE_VARIABLE, check_joined
from ckpt.equality import Difference, compare
from ckpt.errors import BadInputError, CorruptError, InexactError, NotFoundError, SidestageError
from ckpt.lineage import CommitInfo
from ckpt.manifest import CommitRecord
from ckpt.restore import CheckpointReader
from ckpt.storage import Storage, open_storage
from ckpt.types import CommitRef
from trainer.causes import Cause, Lines, likely_cause, trail

Life = Callable[[str, int, int], object]
"""`life(root, until, save_every)` builds all that a training consists of, trains until that step in a
session on `root` that saves every so many steps, and returns once the last one is committed."""


@dataclass(frozen=True)
class ResumeProof:
    """What a comparison of two lives has found, of which the second resumed at step `at`.

    steps: replayed. losses: compared, of the steps whose loss was told. entries: tensors and values of the
    last checkpoint. first_step: whose loss differs, if any's does. differences: entries that differ, in
    the order of the state.
    """

    at: int
    steps: int
    losses: int
    entries: int
    first_step: int | None
    differences: tuple[Difference, ...]
    cause: Cause | None

    @property
    def exact(self) -> bool:
        return self.cause is None

    def __str__(self) -> str:
        """One line."""
        equal = self.entries - len(self.differences)
        if self.cause is None:
            losses = f"{self.losses} of {self.steps} losses and " if self.losses else ""
            return f"exact: {losses}{equal} of {self.entries} entries are equal"
        parts = []
        if self.first_step is None and not self.differences:
            parts.append("batches differ")
        if self.first_step is not None:
            parts.append(f"step {self.first_step} is the first whose loss differs")
        if self.differences:
            d = self.differences[0]
            parts.append(
                f"{len(self.differences)} of {self.entries} entries differ at step "
                f"{self.at + self.steps}, first {d.key} ({d.said})"
            )
        return (
            f"not exact: {'; '.join(parts)}; likely cause: {self.cause.name}: {self.cause.advice}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"exact": self.exact, **asdict(self)}


def prove_resume(
    life: Life, *, at: int = 20, steps: int = 5, folder: str | os.PathLike[str] | None = None
) -> ResumeProof:
    """Prove that a training of your own resumes exactly, or say why not. Collective, in this process.

    One life trains to step at + steps, another goes on from the checkpoint of step `at` to the same
    step. Their checkpoints, batches, losses, learning rates and generators are compared.

    Args:
        life: called twice. What it leaves in the process, such as a module's global generator, the second
            finds; `trainer prove-resume -- COMMAND` has a fresh process for each.
        at: the step at which the second life begins.
        steps: that are replayed.
        folder: where to keep both; by default a temporary one, deleted where all is equal.

    Raises InexactError, whose message names the first step and key that differ and the likely cause.
    """
    if not (dist.is_available() and dist.is_initialized()):
        check_joined("prove_resume")
    with scratch(folder) as place:

        def run(root: Path, until: int, trace: Path) -> None:
            before = os.environ.get(TRACE_VARIABLE)
            os.environ[TRACE_VARIABLE] = str(trace)
            try:
                life(str(root), until, at)
            finally:
                os.environ.pop(TRACE_VARIABLE)
                if before is not None:
                    os.environ[TRACE_VARIABLE] = before

        return prove(run, at, steps, place)


def prove(run: Callable[[Path, int, Path], None], at: int, steps: int, folder: Path) -> ResumeProof:
    """The same of anything that can run a life: `run(root, until, folder of the traces)`."""
    if at < 1 or steps < 1:
        raise BadInputError(f"at = {at}, steps = {steps}: give at least 1")
    roots = [folder / name for name in ("straight", "resumed")]
    traces = [folder / f"{root.name}-trace" for root in roots]
    run(roots[0], at + steps, traces[0])
    _on_rank_0(lambda: _branch(roots[0], roots[1], at))
    try:
        run(roots[1], at + steps, traces[1])
    except SidestageError as e:
        raise InexactError(f"the life that resumes at step {at} failed: {e}") from e
    told = _on_rank_0(lambda: _compared(roots, traces, at, steps))
    assert isinstance(told, ResumeProof)
    if not told.exact:
        raise InexactError(f"{told}; both lives are in {folder}", told)
    return told


def _branch(straight: Path, resumed: Path, at: int) -> None:
    source = open_storage(str(straight))
    create_branch(source, _found(source, at).ref, open_storage(str(resumed)))


def _compared(roots: list[Path], traces: list[Path], at: int, steps: int) -> ResumeProof:
    stores = [open_storage(str(root)) for root in roots]
    records = [_record_of(_found(s, at + steps)) for s in stores]
    _check_began(records[0].continues, None, "first")
    _check_began(records[1].continues, at, "second")
    a, b = (CheckpointReader(s, r) for s, r in zip(stores, records, strict=True))
    found = compare(a, b)
    seen = trail(at, _read(traces[0]), _read(traces[1]))
    cause = None
    if found.differences or seen.loss is not None or seen.batch is not None:
        cause = likely_cause(found.differences, seen, records[0].world_size)
    return ResumeProof(at, steps, seen.losses, found.entries, seen.loss, found.differences, cause)


def _check_began(continues: CommitRef | None, step: int | None, which: str) -> None:
    """Else two lives that both began from scratch, or were both interrupted, would be found equal."""
    began = None if continues is None else continues.step
    if began != step:
        said, wanted = ("from scratch" if n is None else f"from step {n}" for n in (began, step))
        raise InexactError(
            f"the {which} life's last checkpoint is of a training that began {said}, not {wanted}: it must "
            f"restore what its root has, and not be restarted in between"
        )


def _record_of(found: CommitInfo) -> CommitRecord:
    if found.record is None:
        raise CorruptError(f"step {found.ref.step}: {found.problem}")
    return found.record


def _found(storage: Storage, step: int) -> CommitInfo:
    catalog = Catalog(storage)
    try:
        return catalog.find(step)
    except NotFoundError as e:
        had = [c.ref.step for c in catalog.commits()]
        raise BadInputError(
            f"{storage.url} has no checkpoint of step {step}, but of {had or 'none'}: the training must keep "
            f"its root where it is told, save every so many steps as it is told, end at the step that it is "
            f"told (of --config: run.epochs must be enough for --at and --steps), and delete no checkpoints"
        ) from e


def _read(folder: Path) -> list[Lines]:
    """The traces of all ranks; none were written by a training without a session."""
    found = []
    for path in sorted(folder.glob("trace-r*.jsonl")):
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        found.append(
            Lines(
                {line["position"]: line["batch"] for line in lines if "batch" in line},
                {line["step"]: line for line in lines if "step" in line},
            )
        )
    return found


def _on_rank_0(work: Callable[[], Any]) -> Any:
    """What rank 0 gets, or raises, on all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [work()]
        except Exception as e:  # the other ranks wait for it
            told = [e]
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


@contextmanager
def scratch(folder: str | os.PathLike[str] | None) -> Iterator[Path]:
    """An empty folder, the same on all ranks. A temporary one is kept where the block fails."""
    place = Path(_on_rank_0(lambda: _made(folder)))
    yield place
    if folder is None:
        _on_rank_0(lambda: shutil.rmtree(place))


def _made(folder: str | os.PathLike[str] | None) -> str:
    if folder is None:
        return tempfile.mkdtemp(prefix="prove-resume-")
    place = Path(folder)
    if place.exists() and any(place.iterdir()):
        raise BadInputError(f"{place}: isn't empty; name a new folder for the proof")
    place.mkdir(parents=True, exist_ok=True)
    return str(place)
