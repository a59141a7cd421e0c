"""Which commits a policy keeps, and why. A pure decision; `ckpt.prune` carries it out. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.config import KeepBest, RetentionPolicy
from ckpt.lineage import CommitStatus
from ckpt.types import CommitRef

Place = tuple[int, int]


@dataclass(frozen=True)
class Candidate:
    """A commit as retention sees it.

    status: "latest" and "ancestor" as in the catalog, "corrupt" if it failed verification or
        can't be read, "abandoned" if it isn't in the lineage.
    problem: what is wrong with it, or why it can't be told whether it is abandoned.
    prefixes: data prefixes that it lists files of.
    """

    ref: CommitRef
    status: CommitStatus
    annotations: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None
    saved_at_s: float = 0.0
    stored_bytes: int = 0
    prefixes: frozenset[str] = frozenset()

    @property
    def place(self) -> Place:
        return self.ref.epoch, self.ref.step


@dataclass(frozen=True)
class Verdict:
    """What becomes of a commit, and why."""

    commit: Candidate
    reason: str


def choose(
    commits: Iterable[Candidate], pins: Mapping[Place, Sequence[str]], policy: RetentionPolicy
) -> tuple[list[Verdict], list[Verdict]]:
    """(what to keep, what to delete), each by rising epoch and step, with the reason.

    The order of `commits` doesn't matter. Kept whatever the policy says: the latest, what is
    pinned, what is damaged (somebody should look at it), and everything while nothing verifies.
    Damaged and abandoned commits take no place of a good one: they aren't counted by any rule,
    and abandoned ones go only when the lineage has as many good ones as `keep_last` wants.
    """
    ordered = sorted(commits, key=lambda c: c.place)
    good = [c for c in reversed(ordered) if c.status in ("latest", "ancestor")]
    why: dict[Place, list[str]] = {c.place: [] for c in ordered}
    if policy.keeps_all:
        _add(why, ordered, "no rule deletes anything")
    elif not any(c.status == "latest" for c in good):
        _add(why, ordered, "no checkpoint of the lineage verifies: nothing is deleted")
    _add(why, (c for c in good if c.status == "latest"), "latest")
    _apply_rules(why, good, policy)
    for c in ordered:
        if c.place in pins:
            why[c.place] += [f"pinned by {text}" for text in pins[c.place]]
        if c.problem is not None:
            why[c.place].append(f"set aside: {c.problem}")
    enough = policy.keep_last or 1
    if len(good) < enough:
        waiting = [c for c in ordered if c.status == "abandoned"]
        _add(why, waiting, f"abandoned, until the lineage has {enough} good ones")
    keep = [Verdict(c, ", ".join(why[c.place])) for c in ordered if why[c.place]]
    delete = [Verdict(c, _unwanted(c)) for c in ordered if not why[c.place]]
    return keep, delete


def _apply_rules(
    why: dict[Place, list[str]], good: Sequence[Candidate], policy: RetentionPolicy
) -> None:
    """Add the reasons of the policy's rules; `good` is the lineage, newest first."""
    if policy.keep_last is not None:
        _add(why, good[: policy.keep_last], f"one of the last {policy.keep_last}")
    if (every := policy.keep_every) is not None:
        _add(why, (c for c in good if c.ref.step % every == 0), f"a multiple of {every}")
    if (best := policy.keep_best) is not None:
        if not any(_measured(c, best) for c in good):
            _add(why, good, f"none has a number for {best.metric} to tell the best {best.count} by")
            return
        chosen = sorted(good, key=lambda c: _badness(c, best))[: best.count]
        _add(why, chosen, f"one of the best {best.count} by {best.metric} ({best.mode})")


def without_metric(commits: Iterable[Candidate], policy: RetentionPolicy) -> str | None:
    """The metric of `keep_best` if more good commits wait for it than the policy would keep, and none has it.

    They all stay: nothing is deleted in the name of a metric that nobody gives.
    """
    best = policy.keep_best
    good = [c for c in commits if c.status in ("latest", "ancestor")]
    if best is None or any(_measured(c, best) for c in good):
        return None
    return best.metric if len(good) > best.count + (policy.keep_last or 0) else None


def _measured(commit: Candidate, best: KeepBest) -> bool:
    return not _badness(commit, best)[0]


def _badness(commit: Candidate, best: KeepBest) -> tuple[bool, float]:
    """Sort key: best first. Of equals, the sort being stable, the newer comes first."""
    try:
        value = float(commit.annotations[best.metric])
    except (KeyError, ValueError):
        value = math.nan
    if math.isnan(value):
        return True, 0.0
    return False, value if best.mode == "min" else -value


def _unwanted(commit: Candidate) -> str:
    return "abandoned" if commit.status == "abandoned" else "no rule keeps it"


def _add(why: dict[Place, list[str]], commits: Iterable[Candidate], reason: str) -> None:
    for c in commits:
        why[c.place].append(reason)
