"""Stores with a limit, or without one, around which a persist is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.storage import MemoryStorage, ObjectWriter, Storage
from ckpt.storage.protocol import OffsetWriter
from ckpt.types import Buffer, ObjectInfo

_SLICE_BYTES = 1 << 20
_PASSED_ON = {
    *("url", "upload_bytes", "probe", "replace_if"),
    *("read", "read_into", "list", "stat", "delete"),
}


class SlowStorage:
    """A store that takes at most so many bytes a second from all writers of this process."""

    def __init__(self, inner: Storage, bytes_per_s: float) -> None:
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        # Only what is written through the protocol is slowed down, so nothing else may write.
        if name not in _PASSED_ON:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        self.take(memoryview(data).nbytes)
        return self._inner.put(key, data)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        self.take(memoryview(data).nbytes)
        return self._inner.create(key, data)

    @contextmanager
    def writer(self, key: str) -> Iterator[ObjectWriter]:
        with self._inner.writer(key) as out:
            yield (_SlowAnywhere if isinstance(out, OffsetWriter) else _Slow)(out, self)

    def take(self, size: int) -> None:
        """Wait as long as `size` bytes take at the limit."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)


class _Slow:
    """An object being written in order."""

    def __init__(self, out: Any, store: SlowStorage) -> None:
        self._out = out
        self._store = store

    def write(self, data: Buffer) -> None:
        for _, piece in self._pieces(data):
            self._out.write(piece)

    def _pieces(self, data: Buffer) -> Iterator[tuple[int, memoryview]]:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _SLICE_BYTES):
            piece = view[at : at + _SLICE_BYTES]
            self._store.take(len(piece))
            yield at, piece


class _SlowAnywhere(_Slow):
    """An object whose parts may come in any order."""

    def write_at(self, offset: int, data: Buffer) -> None:
        for at, piece in self._pieces(data):
            self._out.write_at(offset + at, piece)


class DiscardingStorage(MemoryStorage):
    """Keeps small objects in memory and forgets data files: a store without any limit."""

    @contextmanager
    def writer(self, key: str) -> Iterator[Any]:
        yield _Discarded()
        self.create(key, b"")


class _Discarded:
    def write(self, data: Buffer) -> None:
        return

    def write_at(self, offset: int, data: Buffer) -> None:
        return
