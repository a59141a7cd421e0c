"""A storage wrapper in which a test decides what goes wrong, and when.

    faulty = FaultyStorage(MemoryStorage())
    faulty.on("create", "commits/*").nth(2).fail(StorageError("no room"))  # nothing was done
    faulty.on("put", "current.json").lose_reply()  # it was done, and fails all the same
    gate = faulty.on("write", "data/*").block()  # gate.wait_reached(), then gate.open()

Operations are the protocol's: put, create, replace_if, read, read_into, list, stat, delete; a
writer has three: writer (opening it), write (each piece) and finish (making it visible).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ckpt.errors import StorageError
from ckpt.storage.protocol import NearObject, ObjectWriter, Storage, near
from ckpt.types import Buffer, ObjectInfo

OPS = frozenset(
    (
        *("put", "create", "replace_if", "read", "read_into", "list", "stat", "delete"),
        *("writer", "write", "finish"),
    )
)
DEADLINE_S = 60.0
T = TypeVar("T")


class Gate:
    """Where a call is held until the test opens it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait_reached(self) -> None:
        """Wait until a call stands at the gate."""
        assert self._reached.wait(DEADLINE_S), "no call came to the gate"

    def open(self) -> None:
        self._opened.set()

    def hold(self) -> None:
        self._reached.set()
        assert self._opened.wait(DEADLINE_S), "the test never opened the gate"


class Fault:
    """One rule: which calls it meets, and what it does to them."""

    def __init__(self, op: str, pattern: str) -> None:
        assert op in OPS, f"unknown operation {op!r}: one of {sorted(OPS)}"
        self._op = op
        self._pattern = pattern
        self._first = 1
        self._count: int | None = 1
        self._seen = 0
        self._lock = threading.Lock()
        self.before: BaseException | None = None
        self.after: BaseException | None = None
        self.gate: Gate | None = None

    def nth(self, n: int) -> Fault:
        """Begin with the nth matching call, counted from 1."""
        self._first = n
        return self

    def times(self, count: int) -> Fault:
        """Meet so many calls instead of one."""
        self._count = count
        return self

    def always(self) -> Fault:
        self._count = None
        return self

    def fail(self, error: BaseException) -> Fault:
        """Raise before the call has any effect."""
        self.before = error
        return self

    def lose_reply(self, error: BaseException | None = None) -> Fault:
        """Let the call take effect, and raise."""
        self.after = error or StorageError("injected: the reply was lost")
        return self

    def block(self) -> Gate:
        """Hold the call, before it has any effect, until the gate is opened."""
        self.gate = Gate()
        return self.gate

    def meets(self, op: str, key: str) -> bool:
        """Count this call; is it one that the rule is for?"""
        if op != self._op or not fnmatchcase(key, self._pattern):
            return False
        with self._lock:
            self._seen += 1
            nth = self._seen - self._first
        return nth >= 0 and (self._count is None or nth < self._count)


class FaultyStorage:
    """A store around another one, with faults; `calls` lists all (operation, key) so far."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        self._faults: list[Fault] = []

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def upload_bytes(self) -> int:
        return self.inner.upload_bytes

    def probe(self) -> bool:
        return self.inner.probe()

    def on(self, op: str, pattern: str = "*") -> Fault:
        """A new rule for calls of `op` on keys that match a shell pattern."""
        fault = Fault(op, pattern)
        self._faults.append(fault)
        return fault

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        return self._call("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        return self._call("create", key, lambda: self.inner.create(key, data))

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        return self._call("replace_if", key, lambda: self.inner.replace_if(key, data, etag))

    @contextmanager
    def writer(self, key: str) -> Iterator[ObjectWriter]:
        opened = self._call("writer", key, lambda: self.inner.writer(key))
        after: list[BaseException] = []
        with opened as inner:
            yield _FaultyWriter(self, key, inner)
            # Raised in here, an error keeps the object from appearing; after it, it's a lost reply.
            after += self._before("finish", key)
        for error in after:
            raise error

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self._call("read", key, lambda: self.inner.read(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._call("read_into", key, lambda: self.inner.read_into(key, start, buffer))

    def near(self, key: str) -> NearObject | None:
        """What is read of an object that is near is met by rules for `read_into`."""
        found = near(self.inner, key)
        return None if found is None else _FaultyObject(self, key, found)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def stat(self, key: str) -> ObjectInfo:
        return self._call("stat", key, lambda: self.inner.stat(key))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.inner.delete(key))

    def _call(self, op: str, key: str, effect: Callable[[], T]) -> T:
        after = self._before(op, key)
        result = effect()
        for error in after:
            raise error
        return result

    def _before(self, op: str, key: str) -> tuple[BaseException, ...]:
        """Hold or fail a call; the errors to raise once it took effect."""
        self.calls.append((op, key))
        met = [fault for fault in self._faults if fault.meets(op, key)]
        for fault in met:
            if fault.gate is not None:
                fault.gate.hold()
            if fault.before is not None:
                raise fault.before
        return tuple(fault.after for fault in met if fault.after is not None)


class _FaultyObject:
    def __init__(self, storage: FaultyStorage, key: str, inner: NearObject) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner

    def __enter__(self) -> _FaultyObject:
        return self

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)

    def ahead(self, start: int, length: int) -> None:
        self._inner.ahead(start, length)

    def read_into(self, start: int, buffer: memoryview) -> None:
        self._storage._call("read_into", self._key, lambda: self._inner.read_into(start, buffer))

    def read_each(
        self, start: int, buffers: Iterable[memoryview], then: Callable[[memoryview], object]
    ) -> None:
        for buffer in buffers:
            self.read_into(start, buffer)
            then(buffer)
            start += buffer.nbytes


class _FaultyWriter:
    def __init__(self, storage: FaultyStorage, key: str, inner: ObjectWriter) -> None:
        self._storage = storage
        self._key = key
        self._inner = inner

    def write(self, data: Buffer) -> None:
        self._storage._call("write", self._key, lambda: self._inner.write(data))
