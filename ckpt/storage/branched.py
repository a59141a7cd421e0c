"""The store of a branch: its own objects first, and its origin commit's from the root it came from.

See docs/design/0004-branches.md. Nothing is ever written to or deleted from the source here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property

from ckpt.errors import NotFoundError, SidestageError, StorageError
from ckpt.manifest import OriginRecord
from ckpt.storage.protocol import ObjectWriter, Storage
from ckpt.types import Buffer, ObjectInfo


class BranchedStorage:
    """A root and the one commit of another root that it starts from, as one store.

    Args:
        own: the branch's root.
        origin: its ORIGIN.json.
        open_source: opens the other root; called at the first read that needs it.
    """

    def __init__(
        self, own: Storage, origin: OriginRecord, open_source: Callable[[], Storage]
    ) -> None:
        self.own = own
        self.origin = origin
        self._open_source = open_source

    @property
    def url(self) -> str:
        return self.own.url

    def probe(self) -> bool:
        return self.own.probe()

    @cached_property
    def source(self) -> Storage:
        """The root that the run branched from."""
        try:
            return self._open_source()
        except SidestageError as e:
            raise StorageError(
                f"{self.origin.source_url}: the root that {self.url} branched from can't be opened: {e}"
            ) from e

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        return self.own.put(key, data)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        return self.own.create(key, data)

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        return self.own.replace_if(key, data, etag)

    def writer(self, key: str) -> AbstractContextManager[ObjectWriter]:
        return self.own.writer(key)

    def delete(self, key: str) -> None:
        self.own.delete(key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return self.own.read(key, start, length)
        except NotFoundError:
            if not self._inherited(key):
                raise
            return self.source.read(key, start, length)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        try:
            self.own.read_into(key, start, buffer)
        except NotFoundError:
            if not self._inherited(key):
                raise
            self.source.read_into(key, start, buffer)

    def stat(self, key: str) -> ObjectInfo:
        try:
            return self.own.stat(key)
        except NotFoundError:
            if not self._inherited(key):
                raise
            return self.source.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not any(p.startswith(prefix) or prefix.startswith(p) for p in self.origin.prefixes):
            return self.own.list(prefix)
        found: dict[str, ObjectInfo] = {}
        for p in self.origin.prefixes:
            if p.startswith(prefix) or prefix.startswith(p):
                found |= {o.key: o for o in self.source.list(max(p, prefix, key=len))}
        found |= {o.key: o for o in self.own.list(prefix)}
        return iter([found[key] for key in sorted(found)])

    def _inherited(self, key: str) -> bool:
        return key.startswith(self.origin.prefixes)


def owned(storage: Storage) -> Storage:
    """The part of a store that is its root's own: what may be listed to be deleted."""
    return storage.own if isinstance(storage, BranchedStorage) else storage
