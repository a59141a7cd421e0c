"""Content digests, written `algorithm:hex`.

xxh3-128 finds accidents at memory speed and promises nothing against a forger;
sha256 also finds tampering, at about a twentieth of the speed.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import xxhash

from ckpt.errors import CorruptError, UnsupportedFormatError
from ckpt.types import DIGEST_NAMES, Buffer


class Hasher(Protocol):
    """The part of hashlib's interface used here."""

    def update(self, data: Buffer, /) -> None: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


def new_hasher(name: str) -> Hasher:
    """An empty hasher, or UnsupportedFormatError for an algorithm we don't know."""
    if name == "xxh3-128":
        hasher: Hasher = xxhash.xxh3_128()
        return hasher
    if name == "sha256":
        return hashlib.sha256()
    raise UnsupportedFormatError(
        f"unknown digest algorithm {name!r}: this version knows {', '.join(DIGEST_NAMES)}"
    )


def digest_of(data: Buffer, name: str = "xxh3-128") -> str:
    """Digest of `data` as `algorithm:hex`."""
    hasher = new_hasher(name)
    hasher.update(data)
    return f"{name}:{hasher.hexdigest()}"


def check_digest(data: Buffer, expected: str, what: str) -> None:
    """Raise CorruptError naming `what` unless `data` has the digest `expected`."""
    got = digest_of(data, expected.partition(":")[0])
    if got != expected:
        raise CorruptError(f"{what}: digest is {got}, expected {expected}; take another copy")
