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
        open_source: opens the other root by its URL; NotFoundError if it isn't there.
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
        """The root that the run branched from.

        Raises StorageError where it can't be reached: what lies in it is then neither lost nor damaged.
        """
        assert self.origin is not None
        try:
            source = self._open_source(self.origin.source_url)
        except NotFoundError as e:
            raise StorageError(self._absent()) from e
        except SidestageError as e:
            raise StorageError(
                f"{self.origin.source_url}: the root that {self.url} branched from can't be opened: {e}"
            ) from e
        self._check_source(source)
        return source

    def _check_source(self, source: Storage) -> None:
        """What isn't mounted is an empty folder, or another run's: say that, not that files are missing."""
        assert self.origin is not None
        data = next(p for p in self.origin.prefixes if p.startswith(layout.DATA))
        if any(True for _ in source.list(data)):
            return
        ref = self.origin.commit
        if exists(source, layout.commit_key(ref.epoch, ref.step)):
            return  # what is missing is lost
        if not exists(source, layout.RUN):
            raise StorageError(self._absent())
        raise StorageError(
            f"{source.url}: is a run, and hasn't step {ref.step} that {self.url} branched from; "
            f"{self._advice}"
        )

    def _absent(self) -> str:
        assert self.origin is not None
        return f"{self.origin.source_url}: the parent of {self.url} isn't there; {self._advice}"

    @property
    def _advice(self) -> str:
        return f"mount it, or name its new place: ckpt branch NEWPLACE {self.url} --moved"

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
        try:
            source = self.source
        except StorageError:
            del self.origin  # it may have been copied since, or have got a new place
            if self.origin is None:
                return self.own.list(prefix)
            source = self.source
        found: dict[str, ObjectInfo] = {}
        for p in shared:
            found |= {o.key: o for o in source.list(max(p, prefix, key=len))}
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


def exists(storage: Storage, key: str) -> bool:
    """Is there an object under this key?"""
    try:
        storage.stat(key)
    except NotFoundError:
        return False
    return True


def _overlap(a: str, b: str) -> bool:
    return a.startswith(b) or b.startswith(a)
