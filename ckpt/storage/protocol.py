"""The small storage protocol that everything durable goes through. No rename, no append.

Keys are relative, `/`-separated and never start or end with `/`. Every call raises
only errors of `ckpt.errors`: NotFoundError, ConflictError, StorageError, BadInputError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from ckpt.types import Buffer, ObjectInfo


class ObjectWriter(Protocol):
    """An object being written. It becomes visible, whole, when its `with` block ends normally."""

    def write(self, data: Buffer) -> None:
        """Append all of `data` (short writes are looped)."""
        ...


@runtime_checkable
class OffsetWriter(ObjectWriter, Protocol):
    """A writer that takes an object's parts in any order, and from several threads at a time.

    A caller uses `write_at` or `write` for an object, not both, and leaves no byte out.
    """

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at byte `offset`. A failed call makes the whole object fail."""
        ...


class Readable(Protocol):
    """What listing and restoring need of a store."""

    @property
    def url(self) -> str:
        """Where this store is, for messages."""
        ...

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length) of an object, to its end if `length` is None.

        A range that passes the end of the object is a CorruptError: nobody asks for bytes
        that no manifest promised.
        """
        ...

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on; CorruptError if there are fewer."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, in key order, never from a cache."""
        ...


class NearObject(AbstractContextManager["NearObject"], Protocol):
    """An object that is open for reading. Any number of threads may read."""

    def ahead(self, start: int, length: int) -> None:
        """Say that these bytes will be asked for next. Returns at once, and promises nothing."""
        ...

    def read_into(self, start: int, buffer: memoryview) -> None:
        """As `Readable.read_into`."""
        ...

    def read_each(
        self, start: int, buffers: Iterable[memoryview], then: Callable[[memoryview], object]
    ) -> None:
        """Fill one buffer after the other with the bytes from `start` on, and call `then` with each."""
        ...


@runtime_checkable
class NearStorage(Readable, Protocol):
    """A store on this machine: to read bytes twice costs little more than to read them once."""

    def near(self, key: str) -> NearObject | None:
        """An object, opened; NotFoundError if there is none. None where it isn't near after all."""
        ...


def near(storage: Readable, key: str) -> NearObject | None:
    """An object of a store that is near, opened; None of a store to which each byte has to travel."""
    return storage.near(key) if isinstance(storage, NearStorage) else None


@runtime_checkable
class Storage(Readable, Protocol):
    """A flat, strongly consistent store of immutable-by-convention objects.

    After `put`, `create`, `replace_if` or a writer's end returns, the object is durable
    (data, then its directory entries, are synced) and visible to every later call of any client.
    """

    @property
    def upload_bytes(self) -> int:
        """The most memory that one writer of this store holds back, beside its caller's buffers."""
        ...

    def probe(self) -> bool:
        """Does the store honour `create` and `replace_if`, so that writers can exclude each other?

        An object store is asked, once, with a scratch object. Where the answer is False, only one
        process may write: these calls then look before they write, and races go unseen.
        """
        ...

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        """Write `data`, replacing any object of that key atomically."""
        ...

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        """Write `data` only if `key` doesn't exist, else ConflictError. One of many racers wins."""
        ...

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        """Write `data` only if the object's etag is still `etag`, else ConflictError.

        NotFoundError if there is no such object.
        """
        ...

    def writer(self, key: str) -> AbstractContextManager[ObjectWriter]:
        """Stream a new object. Create-only: ConflictError at the end if `key` exists by then.

        An exception inside the block, or the death of the process, leaves no object.
        """
        ...

    def stat(self, key: str) -> ObjectInfo:
        """Size and etag of an object; NotFoundError if there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object. No error if there is none."""
        ...
