"""Which checkpoints a root holds, and which of them count. No torch: listing must start fast.

`latest` is the first commit of the run's lineage (see `ckpt.lineage`) that passes quick
verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckpt import layout
from ckpt.digest import digest_of
from ckpt.errors import CorruptError, NotFoundError
from ckpt.identity import identify
from ckpt.lineage import AttemptInfo, CommitInfo, CommitStatus, Place, Tree
from ckpt.manifest import CommitRecord, RunRecord, decode
from ckpt.storage import Readable
from ckpt.types import CommitRef
from ckpt.verify import verify_commit

__all__ = ["AttemptInfo", "Catalog", "CommitInfo", "CommitStatus"]

_TRIES = 10  # listings, while commits come and go faster than they are looked at
_MOST_STEPS = 12  # named in an error message


class Catalog:
    """The commits of one run. Each call reads the store afresh; nothing is cached.

    A commit or attempt that can't be read is reported in its place and hides no other. A RUN.json
    of an unknown format raises UnsupportedFormatError: nothing else here can be trusted to mean
    what it seems to.
    """

    def __init__(self, storage: Readable) -> None:
        self._storage = storage

    def run(self) -> RunRecord:
        """The run's own record, or what its commits say where that is lost; see `identify`.

        NotFoundError if no trainer has used this root.
        """
        found = identify(self._storage)
        if found is None:
            raise NotFoundError(
                f"no Sidestage run at {self._storage.url}: it has no {layout.RUN}; check the path"
            )
        return found.record

    def attempts(self) -> list[AttemptInfo]:
        """All attempts, oldest first."""
        tree = self.tree()
        return [tree.attempt(epoch) for epoch in sorted(tree.epochs)]

    def commits(self) -> list[CommitInfo]:
        """All commits, by rising epoch and step."""
        tree = self.tree()
        lineage = {(p.epoch, p.step): p for p in tree.lineage(strict=False)}
        latest, passed = self._newest(tree, list(lineage.values()), strict=False)
        known = {(c.ref.epoch, c.ref.step): c for c in (*passed, latest) if c is not None}
        found = []
        for epoch, step in sorted((e, s) for e, steps in tree.steps.items() for s in steps):
            info = known.get((epoch, step))
            if info is None and (place := lineage.get((epoch, step))):
                info = tree.commit(place, "ancestor")
            elif info is None:
                info = tree.commit(Place(epoch, step, None), "abandoned")
                if info and info.problem is None:
                    info = replace(info, problem=tree.doubt(epoch))
            if info is not None:
                found.append(info)
        return found

    def lineage(self, lost: Callable[[str, str], None] = lambda key, why: None) -> list[CommitInfo]:
        """The run's lineage, newest first, damaged commits included; files aren't checked.

        lost: told of each record that the lineage lacks: its key, and what that means.

        Raises UnsupportedFormatError if another version of the format began the newest attempt, and
        CorruptError if there are commits and none of them can be what the run is to go on from.
        """
        tree = self.tree()
        places = tree.lineage(strict=True)
        if why := tree.lost():
            raise CorruptError(
                f"{self._storage.url}: {why}. Put the missing commit back from a copy, begin a new run "
                f"with `ckpt branch {self._storage.url}@EPOCH/STEP NEWROOT`, or start from scratch with "
                f"restore(state, fresh=True)"
            )
        for key, what in tree.losses(places):
            lost(key, what)
        found = (tree.commit(place, "ancestor") for place in places)
        return [info for info in found if info is not None]

    def latest(self) -> CommitInfo | None:
        """The newest commit of the lineage whose files pass quick verification, if any.

        Raises UnsupportedFormatError rather than go back past a commit of another format version.
        """
        tree = self.tree()
        for _ in range(_TRIES):
            lineage = tree.lineage(strict=True)
            found = self._newest(tree, lineage, strict=True)[0]
            before = set(tree.stored)
            first = lineage[0] if lineage else None
            if found and first and (first.epoch, first.step) == (found.ref.epoch, found.ref.step):
                break
            # Retention may have deleted what was listed, since there is a newer one by now.
            tree = self.tree()
            if set(tree.stored) == before:
                break
        return found

    def find(self, step: int, epoch: int | None = None) -> CommitInfo:
        """The commit of a step in the lineage, or in the given epoch, abandoned or not.

        NotFoundError says which steps there are, and how to name an abandoned one.
        """
        tree = self.tree()
        lineage = tree.lineage(strict=True)
        place = next((p for p in lineage if p.step == step and epoch in (None, p.epoch)), None)
        status: CommitStatus = "ancestor"
        if place is None and epoch is not None and step in tree.steps.get(epoch, ()):
            place, status = Place(epoch, step, None), "abandoned"
        info = None if place is None else tree.commit(place, status, strict=True)
        if info is None:
            raise NotFoundError(self._no_step(tree, lineage, step, epoch))
        if info.status == "ancestor":
            latest, passed = self._newest(tree, lineage, strict=False)
            return next((c for c in (*passed, latest) if c and c.ref == info.ref), info)
        return info

    def read(self, ref: CommitRef) -> CommitRecord:
        """The record of exactly this commit.

        CorruptError if another one is stored in its place, as after a restore from backup.
        """
        key = layout.commit_key(ref.epoch, ref.step)
        data = self._storage.read(key)
        record = decode(CommitRecord, data, key)
        if digest_of(data) != ref.digest:
            raise CorruptError(
                f"{key}: holds another commit than the one asked for: digest is "
                f"{digest_of(data)}, expected {ref.digest}"
            )
        if problem := self.tree().problem(Place(ref.epoch, ref.step, None), record, ref):
            raise CorruptError(problem)
        return record

    def tree(self) -> Tree:
        """Attempts and commits as they are listed now."""
        try:
            run_id = self.run().run_id
        except (NotFoundError, CorruptError):
            run_id = None
        return Tree(self._storage, run_id)

    def _newest(
        self, tree: Tree, lineage: list[Place], *, strict: bool
    ) -> tuple[CommitInfo | None, list[CommitInfo]]:
        """The latest commit, and the damaged ones that had to be passed over for it."""
        passed: list[CommitInfo] = []
        for place in lineage:
            info = tree.commit(place, "latest", strict=strict)
            if info is None:
                continue
            if info.record is not None:
                report = verify_commit(self._storage, info.record, level="quick")
                if report.ok:
                    return info, passed
                info = replace(info, status="corrupt", problem=_several(report.problems))
            passed.append(info)
        return None, passed

    def _no_step(self, tree: Tree, lineage: list[Place], step: int, epoch: int | None) -> str:
        where = self._storage.url
        if epoch is not None:
            steps = sorted(tree.steps.get(epoch, ()))
            return f"{where}: no step {step} in epoch {epoch}; it has {_steps(steps)}"
        abandoned = [
            f"{e}/{step}" for e in sorted(tree.steps, reverse=True) if step in tree.steps[e]
        ]
        if abandoned:
            return (
                f"{where}: step {step} is abandoned, not an ancestor of the latest; "
                f"name it with its epoch: {' or '.join(abandoned)}"
            )
        newest = tree.newest_epoch
        if next(iter(self._storage.list(layout.step_data_prefix(newest, step))), None):
            return (
                f"{where}: step {step} isn't committed: its save in epoch {newest} is in flight, or was "
                f"cut off; wait for its commit, or take another step"
            )
        steps = sorted(p.step for p in lineage)
        return f"{where}: no step {step}; the lineage has {_steps(steps)}"


def _several(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def _steps(steps: list[int]) -> str:
    """Steps for an error message, in the middle left out if there are many."""
    if not steps:
        return "none"
    if len(steps) <= _MOST_STEPS:
        return ", ".join(map(str, steps))
    half = _MOST_STEPS // 2
    head, tail = ", ".join(map(str, steps[:half])), ", ".join(map(str, steps[-half:]))
    return f"{head}, ..., {tail} ({len(steps)} in all)"
