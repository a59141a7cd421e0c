"""Objects in this process's memory, under the same contract as every other backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError
from ckpt.storage.keys import check_key, check_prefix
from ckpt.types import Buffer, ObjectInfo


class MemoryStorage:
    """A store for tests and for trying things out; safe to share between threads.

    Hand the object itself to whatever needs it: it has no address that another process,
    or `open_storage`, could find it by.
    """

    def __init__(self, name: str = "memory") -> None:
        self._url = f"memory://{name}"
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}
        self._versions = 0

    @property
    def url(self) -> str:
        return self._url

    @property
    def upload_bytes(self) -> int:
        return 0

    def probe(self) -> bool:
        return True

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        check_key(key)
        with self._lock:
            return self._store(key, bytes(data))

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise ConflictError(f"{self._url}/{key}: exists already; it was made by another")
            return self._store(key, bytes(data))

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        check_key(key)
        with self._lock:
            found = self._get(key)[1].etag
            if found != etag:
                raise ConflictError(
                    f"{self._url}/{key}: etag is {found}, expected {etag}: "
                    f"another client replaced it; read it again"
                )
            return self._store(key, bytes(data))

    @contextmanager
    def writer(self, key: str) -> Iterator[MemoryWriter]:
        check_key(key)
        writer = MemoryWriter(f"{self._url}/{key}")
        try:
            yield writer
        finally:
            writer.closed = True
        self.create(key, writer.data)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        check_key(key)
        with self._lock:
            data = self._get(key)[0]
        if start < 0 or (length is not None and length < 0):
            raise BadInputError(f"{self._url}/{key}: range {start}+{length} is negative")
        end = len(data) if length is None else start + length
        if start > len(data) or end > len(data):
            raise CorruptError(
                f"{self._url}/{key}: has {len(data)} bytes, but [{start}, {end}) were asked for"
            )
        return data[start:end]

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        data = self.read(key, start, buffer.nbytes)
        if data:
            buffer.cast("B")[:] = data

    def near(self, key: str) -> _NearBytes:
        check_key(key)
        with self._lock:
            return _NearBytes(self._get(key)[0], f"{self._url}/{key}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = [info for key, (_, info) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found, key=lambda info: info.key))

    def stat(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._lock:
            return self._get(key)[1]

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _store(self, key: str, data: bytes) -> ObjectInfo:
        self._versions += 1
        info = ObjectInfo(key, len(data), f"v{self._versions}")
        self._objects[key] = (data, info)
        return info

    def _get(self, key: str) -> tuple[bytes, ObjectInfo]:
        try:
            return self._objects[key]
        except KeyError:
            raise NotFoundError(f"{self._url}/{key}: no such object") from None


class _NearBytes:
    """An object as it was when it was opened."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data = memoryview(data)
        self._what = what

    def __enter__(self) -> _NearBytes:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def ahead(self, start: int, length: int) -> None:
        return

    def read_into(self, start: int, buffer: memoryview) -> None:
        end = start + buffer.nbytes
        if end > len(self._data):
            raise CorruptError(
                f"{self._what}: has {len(self._data)} bytes, but [{start}, {end}) were asked for"
            )
        if buffer.nbytes:
            buffer.cast("B")[:] = self._data[start:end]

    def read_each(
        self, start: int, buffers: Iterable[memoryview], then: Callable[[memoryview], object]
    ) -> None:
        for buffer in buffers:
            self.read_into(start, buffer)
            then(buffer)
            start += buffer.nbytes


class MemoryWriter:
    """Collects the pieces of one object."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self.data = bytearray()
        self.closed = False

    def write(self, data: Buffer) -> None:
        self.write_at(len(self.data), data)

    def write_at(self, offset: int, data: Buffer) -> None:
        if self.closed:
            raise BadInputError(f"{self._what}: written to after its block ended")
        view = memoryview(data)
        with self._lock:
            end = offset + view.nbytes
            self.data += bytes(max(0, end - len(self.data)))
            if view.nbytes:
                self.data[offset:end] = view.cast("B")
