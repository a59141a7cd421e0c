"""The store of a branch: its own objects first, and its origin commit's from the root it came from.

See docs/design/0004-branches.md. Nothing is ever written to or deleted from the source here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property

from ckpt import layout
from ckpt.errors import CorruptError, NotFoundError, SidestageError, StorageError
from ckpt.manifest import OriginRecord, decode
from ckpt.storage.protocol import NearObject, ObjectWriter, Storage, near
from ckpt.types import Buffer, ObjectInfo

_INHERITED = (layout.DATA, layout.DESCRIPTIONS, layout.CODE)


class BranchedStorage:
    """A root and, if it is a branch, the one commit of another root that it starts from, as one store.

    Whether it is one is found out at the first read that its own objects don't satisfy.

    Args:
        own: the root.
        open_source: opens the other root by its URL.
    """

    def __init__(self, own: Storage, open_source: Callable[[str], Storage]) -> None:
        self.own = own
        self._open_source = open_source

    @cached_property
    def origin(self) -> OriginRecord | None:
        """Where the first commit is read from; None for no branch, or one that has its own copy."""
        try:
            found = decode(OriginRecord, self.own.read(layout.ORIGIN), layout.ORIGIN)
        except NotFoundError:
            return None
        strange = [p for p in found.prefixes if not p.startswith(_INHERITED)]
        if strange:
            raise CorruptError(
                f"{self.url}/{layout.ORIGIN}: names {strange[0]!r} as data of its origin; data lies "
                f"below {', '.join(_INHERITED)}"
            )
        return found if found.pin_id is not None else None

    @cached_property
    def source(self) -> Storage:
        """The root that the run branched from."""
        assert self.origin is not None
        try:
            return self._open_source(self.origin.source_url)
        except SidestageError as e:
            raise StorageError(
                f"{self.origin.source_url}: the root that {self.url} branched from can't be opened: {e}"
            ) from e

    @property
    def url(self) -> str:
        return self.own.url

    @property
    def upload_bytes(self) -> int:
        return self.own.upload_bytes

    def probe(self) -> bool:
        return self.own.probe()

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
            if not self._inherits(key):
                raise
            return self.source.read(key, start, length)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        try:
            self.own.read_into(key, start, buffer)
        except NotFoundError:
            if not self._inherits(key):
                raise
            self.source.read_into(key, start, buffer)

    def near(self, key: str) -> NearObject | None:
        try:
            return near(self.own, key)
        except NotFoundError:
            if not self._inherits(key):
                raise
            return near(self.source, key)

    def stat(self, key: str) -> ObjectInfo:
        try:
            return self.own.stat(key)
        except NotFoundError:
            if not self._inherits(key):
                raise
            return self.source.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        shared = [p for p in self._prefixes(prefix) if _overlap(p, prefix)]
        if not shared:
            return self.own.list(prefix)
        found: dict[str, ObjectInfo] = {}
        for p in shared:
            found |= {o.key: o for o in self.source.list(max(p, prefix, key=len))}
        found |= {o.key: o for o in self.own.list(prefix)}
        return iter([found[key] for key in sorted(found)])

    def _inherits(self, key: str) -> bool:
        return key.startswith(self._prefixes(key))

    def _prefixes(self, asked: str) -> tuple[str, ...]:
        """What inherited keys begin with, if any key like this can be inherited."""
        if not any(_overlap(p, asked) for p in _INHERITED) or self.origin is None:
            return ()
        return self.origin.prefixes


def owned(storage: Storage) -> Storage:
    """The part of a store that is its root's own: what may be listed to be deleted."""
    return storage.own if isinstance(storage, BranchedStorage) else storage


def _overlap(a: str, b: str) -> bool:
    return a.startswith(b) or b.startswith(a)
