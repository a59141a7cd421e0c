"""Records and protocols that every layer shares. No torch here: listing must start fast."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

Buffer = bytes | bytearray | memoryview
DigestName = Literal["xxh3-128", "sha256"]
DIGEST_NAMES: tuple[str, ...] = get_args(DigestName)
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

ITEMSIZE: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of each dtype that a checkpoint can hold, by torch's name for it."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object. `etag` changes whenever the content does."""

    key: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file that a commit owns: its key, its length, and its digest as `algorithm:hex`."""

    key: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class CommitRef:
    """Names one commit for good: a key alone could be another object after a restore from backup."""

    epoch: int
    step: int
    digest: str


class Clock(Protocol):
    """Time as a dependency, so that tests never sleep."""

    def time(self) -> float:
        """Wall clock, in seconds since 1970. Only for people and for joining machines."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back. For every duration."""
        ...


class SystemClock:
    """The machine's clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class EventSink(Protocol):
    """Receives what happens, as it happens. Must not raise and must return quickly."""

    def emit(self, name: str, /, **fields: Any) -> None: ...
