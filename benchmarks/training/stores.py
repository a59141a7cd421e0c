"""Stores with a limit, or without one, around which a persist is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.storage import MemoryStorage, ObjectWriter, Storage
from ckpt.types import Buffer, ObjectInfo

_SLICE_BYTES = 1 << 20


class SlowStorage:
    """A store that takes at most so many bytes a second from all writers of this process."""

    def __init__(self, inner: Storage, bytes_per_s: float) -> None:
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        # Only what is written through the protocol is slowed down, so nothing else may write.
        if name not in (
            "url",
            "probe",
            "replace_if",
            "read",
            "read_into",
            "list",
            "stat",
            "delete",
        ):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        self._take(memoryview(data).nbytes)
        return self._inner.put(key, data)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        self._take(memoryview(data).nbytes)
        return self._inner.create(key, data)

    @contextmanager
    def writer(self, key: str) -> Iterator[ObjectWriter]:
        with self._inner.writer(key) as out:
            yield _SlowWriter(out, self)

    def take(self, size: int) -> None:
        """Wait as long as `size` bytes take at the limit."""
        self._take(size)

    def _take(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        time.sleep(self._free_at - now)


class _SlowWriter:
    def __init__(self, out: ObjectWriter, store: SlowStorage) -> None:
        self._out = out
        self._store = store

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _SLICE_BYTES):
            piece = view[at : at + _SLICE_BYTES]
            self._store.take(len(piece))
            self._out.write(piece)


class DiscardingStorage(MemoryStorage):
    """Keeps small objects in memory and forgets data files: a store without any limit."""

    @contextmanager
    def writer(self, key: str) -> Iterator[Any]:
        yield _Discarded()
        self.create(key, b"")


class _Discarded:
    def write(self, data: Buffer) -> None:
        return
