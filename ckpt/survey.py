"""What a root holds, as retention needs to know it: commits with their standing, and data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from ckpt import layout
from ckpt.errors import StorageError
from ckpt.lineage import Place, Tree
from ckpt.retention import Candidate
from ckpt.storage import Storage, owned
from ckpt.types import CommitRef
from ckpt.verify import verify_commit


@dataclass(frozen=True)
class SavedData:
    """The data of one save, which a commit may or may not list."""

    prefix: str
    epoch: int
    step: int
    save_id: int
    files: int
    stored_bytes: int


@runtime_checkable
class KeepsParts(Protocol):
    """A store in which the parts that a killed writer sent stay, listed as no object, and cost money."""

    def unfinished(self, prefix: str = "") -> Iterator[Any]:
        """Such uploads, running ones among them; each has a `key`."""
        ...

    def abort(self, upload: Any) -> None: ...


class Surveyor:
    """Looks at one root, again and again. Remembers which commits it has read and verified.

    Args:
        storage: the run's root.
        verify_newest: so many good commits of the lineage are looked for, newest first, and
            checked by quick verification on the way.
    """

    def __init__(self, storage: Storage, verify_newest: int) -> None:
        self._storage = storage
        self._own = owned(storage)
        self._count = verify_newest
        self._known: dict[tuple[str, str], Candidate] = {}
        self._sound: set[CommitRef] = set()

    def saves(self, scope: str) -> Iterator[SavedData]:
        """The saves that there is data of below a prefix, listed by a commit or not."""
        sizes: dict[tuple[str, int, int, int], list[int]] = {}
        for o in self._own.list(scope):
            if save := layout.parse_data_key(o.key):
                sizes.setdefault(save, []).append(o.size_bytes)
        for upload in unfinished_uploads(self._own, scope):
            if save := layout.parse_data_key(upload.key):
                sizes.setdefault(save, [])
        for (prefix, epoch, step, save_id), found in sizes.items():
            yield SavedData(prefix, epoch, step, save_id, len(found), sum(found))

    def candidates(self, tree: Tree) -> list[Candidate]:
        """All commits. As many of the newest are verified as rules count."""
        lineage = tree.lineage(strict=True)
        found, good = [], 0
        for place in lineage:
            c = self._candidate(tree, place)
            if c is None:
                continue
            if c.problem is None and good < self._count:
                if damage := self._damage(tree, place, c):
                    c = replace(c, status="corrupt", problem=damage)
                else:
                    good += 1
                    c = replace(c, status="latest") if good == 1 else c
            found.append(c)
        found += self._abandoned(tree, {(p.epoch, p.step) for p in lineage})
        self._known = {k: c for k, c in self._known.items() if c.place in tree.stored}
        return found

    def _abandoned(self, tree: Tree, lineage: set[tuple[int, int]]) -> Iterator[Candidate]:
        """Commits outside the lineage. Where nothing says what an attempt continued, who knows?"""
        rest = sorted(set(tree.stored) - lineage)
        for epoch, step in rest:
            c = self._candidate(tree, Place(epoch, step, None))
            if c is not None and c.problem is None:
                c = replace(c, status="abandoned", problem=tree.doubt(epoch))
            if c is not None:
                yield c

    def _candidate(self, tree: Tree, place: Place) -> Candidate | None:
        """A commit, from memory if it's the same object as before; None if it was deleted since."""
        stored = tree.stored[place.epoch, place.step]
        known = self._known.get((stored.key, stored.etag))
        if known is not None:
            return known
        info = tree.commit(place, "ancestor")
        if info is None:
            return None
        if info.record is None:
            return Candidate(info.ref, "corrupt", problem=info.problem)
        r = info.record
        prefixes = {f.key[: f.key.rfind("/") + 1] for f in (*r.receipts, *r.files)}
        c = Candidate(
            info.ref,
            "ancestor",
            r.annotations,
            saved_at_s=r.saved_at_s,
            stored_bytes=r.stored_bytes,
            prefixes=frozenset(prefixes),
        )
        self._known[stored.key, stored.etag] = c
        return c

    def _damage(self, tree: Tree, place: Place, commit: Candidate) -> str | None:
        """What quick verification finds wrong with a commit; each is checked once."""
        if commit.ref in self._sound:
            return None
        info = tree.commit(place, "ancestor")
        if info is None or info.record is None:
            return info.problem if info else "it was deleted a moment ago"
        problems = verify_commit(self._storage, info.record, level="quick").problems
        if problems:
            return problems[0]
        self._sound.add(commit.ref)
        return None


def unfinished_uploads(storage: Storage, prefix: str) -> list[Any]:
    """The unfinished uploads below a prefix, where the store has such and lets us see them."""
    if isinstance(storage, KeepsParts):
        with suppress(StorageError):  # needs a permission that nothing else needs
            return list(storage.unfinished(prefix))
    return []


def unlisted(
    data: list[SavedData], commits: list[Candidate], newest: int, settled: int
) -> tuple[list[SavedData], list[SavedData]]:
    """(garbage, what may still be in flight) among the saves that there is data of."""
    listed = {p for c in commits for p in c.prefixes}
    unreadable = {c.place for c in commits if not c.prefixes}
    saves = (layout.parse_data_key(f"{p}x") for p in listed)
    over = max([settled, *(s[3] for s in saves if s and s[1] == newest)])
    garbage, unsettled = [], []
    for d in data:
        if d.prefix in listed or (d.epoch, d.step) in unreadable:
            continue
        if d.epoch < newest or (d.epoch == newest and d.save_id <= over):
            garbage.append(d)
        elif d.epoch == newest:
            unsettled.append(d)
    return garbage, unsettled
