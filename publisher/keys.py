"""The only builder of registry keys. See docs/publishing.md for the tree."""

from __future__ import annotations

import re
from collections.abc import Collection

LIVE = "live.json"
LEASE = "lease.json"
VERSIONS = "versions/"
HISTORY = "history/"
QUARANTINE = "quarantine/"
PINS = "pins/"
PACKAGES = "packages/"

CLAIM = "claim.json"
MANIFEST = "manifest.json"
DESCRIPTION = "description.json"
PROGRAM = "program.pt2"
DENSE = "dense.safetensors"
ID_MAPS = "idmaps.safetensors"
TABLES = "tables-00000.bin"
GOLDEN = "golden.safetensors"
REFERENCE = "reference.safetensors"

_VERSION = re.compile(r"versions/(\d{6,12})/(.+)")
_PIN = re.compile(r"pins/(\d{6,})\.json")
_HISTORY = re.compile(r"history/(\d{9,})\.json")


def version_prefix(number: int) -> str:
    return f"{VERSIONS}{number:06d}/"


def version_key(number: int, name: str) -> str:
    return f"{version_prefix(number)}{name}"


def parse_version_key(key: str) -> tuple[int, str] | None:
    """(number, file name) of a key below a version, or None for a stray."""
    m = _VERSION.fullmatch(key)
    if m and version_key(int(m[1]), m[2]) == key:
        return int(m[1]), m[2]
    return None


def is_version(names: Collection[str]) -> bool:
    """Is a number with these names stored below it a version?"""
    return MANIFEST in names and CLAIM in names


def history_key(sequence: int) -> str:
    return f"{HISTORY}{sequence:09d}.json"


def parse_history_key(key: str) -> int | None:
    """The sequence number of a history entry's key, or None for a stray."""
    m = _HISTORY.fullmatch(key)
    return int(m[1]) if m and history_key(int(m[1])) == key else None


def pin_key(number: int) -> str:
    return f"{PINS}{number:06d}.json"


def parse_pin_key(key: str) -> int | None:
    """The version that a pin's key names, or None for a stray."""
    m = _PIN.fullmatch(key)
    return int(m[1]) if m and pin_key(int(m[1])) == key else None


def quarantine_prefix(epoch: int, step: int) -> str:
    return f"{QUARANTINE}{epoch:06d}-{step:012d}-"


def quarantine_key(epoch: int, step: int, attempt: int) -> str:
    """One refusal of one commit; every attempt has its own object, so none is overwritten."""
    return f"{quarantine_prefix(epoch, step)}{attempt:04d}.json"


def package_record_key(name: str) -> str:
    """Which compiled package fits a program, instruction set and torch."""
    return f"{PACKAGES}{name}.json"


def package_key(sha256: str) -> str:
    """A compiled package, named by its content."""
    return f"{PACKAGES}{sha256}.pt2"
