"""Which versions are deleted, and how that stays safe against kills and moves of the pointer.

Kept are the newest so many, the live version, the canary, what a rollback would return to, what is
pinned, and what is in the making under the current lease. Deleting goes in this order:

1. The pointer is told what is to go, by compare-and-set. From here on nothing moves there, and a move
   that was decided before loses. A pin writes the pointer too: one that was set before is seen when
   it is told, as who had looked for pins earlier loses and looks again; a later one is refused.
   What was told once isn't taken back: others may be deleting it.
2. Per number its manifest and its claim, so that the rest is no version, whoever of an older lease
   may still wake up and write the manifest; then its files.

Whoever is killed in between leaves what the pointer was told; the next one deletes that first.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from ckpt.errors import ConflictError, NotFoundError, StorageError
from publisher import keys
from publisher.records import Pin, decode, encode

if TYPE_CHECKING:
    from publisher.pointer import Reason
    from publisher.records import Pointer
    from publisher.registry import Registry


def pin(registry: Registry, number: int, reason: Reason) -> Pin:
    """Set a pin on a version that is there. ConflictError if it has one."""
    made = Pin(number, reason.who, reason.why, registry.clock.time())
    key = registry.prefix + keys.pin_key(number)
    try:
        registry.storage.create(key, encode(made))
    except ConflictError:
        raise ConflictError(f"version {number} is pinned already; unpin it first") from None
    try:
        registry.keep(number)
    except NotFoundError:
        with suppress(StorageError):
            registry.storage.delete(key)
        raise
    return made


def unpin(registry: Registry, number: int) -> None:
    """Remove a pin, readable or not. NotFoundError if there is none."""
    key = registry.prefix + keys.pin_key(number)
    try:
        registry.storage.stat(key)
    except NotFoundError:
        raise NotFoundError(f"{registry.url}: version {number} isn't pinned") from None
    registry.storage.delete(key)


def pins(registry: Registry) -> dict[int, Pin]:
    """The pins by version; CorruptError names one that can't be read."""
    found = {}
    for number in sorted(pinned(registry)):
        with suppress(NotFoundError):
            found[number] = read_pin(registry, number)
    return found


def read_pin(registry: Registry, number: int) -> Pin:
    """One version's pin. NotFoundError, CorruptError."""
    key = registry.prefix + keys.pin_key(number)
    return decode(Pin, registry.storage.read(key), key)


def pinned(registry: Registry) -> set[int]:
    """The versions that have a pin, readable or not."""
    found = registry.storage.list(registry.prefix + keys.PINS)
    names = (keys.parse_pin_key(o.key.removeprefix(registry.prefix)) for o in found)
    return {n for n in names if n is not None}


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
    before = registry.pointer()
    stored = registry.contents()
    versions = {n for n, names in stored.items() if keys.is_version(names)}
    abandoned = _abandoned(registry, stored, versions)
    gone = set(before.retired) - stored.keys() if before else set()

    def choose(pointer: Pointer) -> set[int]:
        kept = _named(registry, pointer) | pinned(registry)
        told = set(pointer.retired) - gone  # by others, who may be deleting them now
        return expendable(versions, keep, kept) | (abandoned - kept) | told

    if dry_run:
        pointer = registry.pointer()
        return sorted(choose(pointer) & versions) if pointer else []
    # Were the highest number cleared away, it would be taken again.
    retired = {n for n in registry.retire(choose) & stored.keys() if n <= max(versions, default=0)}
    for number in sorted(retired):
        registry.delete(number, stored[number])
    return sorted(retired & versions)


def withdraw(registry: Registry, number: int) -> None:
    """Delete the manifest of a version that its publisher shouldn't have made, unless it is used by now."""

    def choose(pointer: Pointer) -> set[int]:
        kept = _named(registry, pointer) | pinned(registry)
        return set(pointer.retired) | ({number} - kept)

    if number in registry.retire(choose):
        registry.delete(number, {keys.MANIFEST})


def _named(registry: Registry, pointer: Pointer) -> set[int]:
    """The live version, the canary, and what a rollback returns to."""
    move = pointer.move
    if move is None:
        return set()
    return {n for n in (move.to_version, move.canary, registry.previous(move)) if n}


def _abandoned(registry: Registry, stored: dict[int, set[str]], versions: set[int]) -> set[int]:
    """Numbers that are no versions and that nobody works on: those of older leases.

    Only below the newest version, as the highest number stays.
    """
    newest, current = max(versions, default=0), registry.lease_epoch()
    found = set()
    for number in stored.keys() - versions:
        claim = registry.claimed(number)
        if number < newest and (claim is None or claim.lease_epoch < current):
            found.add(number)
    return found
