"""Which versions are deleted, and how that stays safe against kills and moves of the pointer.

Kept are the newest so many, the live version, the canary, what a rollback would return to, what is
pinned, and what is in the making under the current lease. Deleting goes in this order:

1. The pointer is told what is to go, by compare-and-set. From here on nothing moves there, and a move
   that was decided before loses; pins that were set before are found now, later ones are refused.
2. Per version the manifest, so that the rest is no version; then its files; its claim last.

Whoever is killed in between leaves what the pointer was told; the next one deletes that first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from publisher import keys

if TYPE_CHECKING:
    from publisher.records import Pointer
    from publisher.registry import Registry


def expendable(versions: Collection[int], keep: int, protected: Collection[int]) -> set[int]:
    """The versions that are neither among the newest `keep` nor protected; none if `keep` is 0."""
    if keep == 0:
        return set()
    return set(sorted(versions)[:-keep]) - set(protected)


def prune(registry: Registry, keep: int, *, dry_run: bool = False) -> list[int]:
    """Delete what isn't kept; `keep` 0 keeps all. The versions deleted, or that would be.

    A number whose publisher died without a manifest is cleared away too, but isn't counted.
    """
    if keep == 0:
        return []
    stored = registry.contents()
    versions = {n for n, names in stored.items() if keys.MANIFEST in names}

    def choose(pointer: Pointer) -> set[int]:
        move = pointer.move
        named = {n for n in (move.to_version, move.canary, registry.previous(move)) if n}
        doomed = expendable(versions, keep, named | registry.pinned())
        # What an earlier one didn't get through with.
        return doomed | {n for n in pointer.retired if n in stored}

    if dry_run:
        pointer = registry.pointer()
        return sorted(choose(pointer)) if pointer else []
    retired = registry.retire(choose)
    if pinned := retired & registry.pinned():  # set between the choice and the telling
        retired = registry.retire(lambda pointer: set(pointer.retired) - pinned) - pinned
    for number in sorted(retired):
        registry.delete(number, stored[number])
    for number in _abandoned(registry, stored, versions):
        registry.delete(number, stored[number])
    return sorted(retired & versions)


def _abandoned(registry: Registry, stored: dict[int, set[str]], versions: set[int]) -> list[int]:
    """Numbers without a manifest that nobody works on: those of older leases.

    Only below the newest version: were the highest number cleared away, it would be taken again.
    """
    newest, current = max(versions, default=0), registry.lease_epoch()
    found = []
    for number in sorted(stored.keys() - versions):
        claim = registry.claimed(number)
        if number < newest and (claim is None or claim.lease_epoch < current):
            found.append(number)
    return found
