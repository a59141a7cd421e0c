"""Pins: claims on commits that stop retention, honoured by every process. No torch.

A store has no locks, so both sides act in an order that lets one of them notice the other:

    reader   writes its pin, then reads the commit record again: if it's gone, it came too late
    pruner   lists pins, deletes the records of commits that none names, lists pins once more, puts
             back the records of what was pinned meanwhile, and only then deletes data

If the reader still saw the record, its pin was there before the pruner's second listing. For a
moment the record may be missing all the same, so a reader keeps the one that it has.

A pin with a heartbeat counts until its counter has stood still for its time to live on the
observer's own monotonic clock: no clock is compared with another machine's. A pin without one
counts until somebody removes it.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType

from ckpt import layout
from ckpt.digest import digest_of
from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.manifest import PinRecord, decode, encode
from ckpt.storage import Storage
from ckpt.types import Clock, CommitRef, SystemClock

DEFAULT_TTL_S = 300.0
_BEATS_PER_TTL = 4


class Pin:
    """Keeps a commit from being deleted while a `with` block reads it.

        with Pin(storage, ref, "nightly export") as pin:
            ...  # read
            pin.check()  # was it held all the time?

    Entering raises NotFoundError if the commit is gone, StorageError if the store can't be
    written. A daemon thread beats; leaving removes the pin.

    Args:
        storage: the run's root.
        ref: the commit.
        holder: who reads, for people; the host and process id are added.
        ttl_s: how long the pin outlives a holder that died.
    """

    def __init__(
        self,
        storage: Storage,
        ref: CommitRef,
        holder: str,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Clock | None = None,
    ) -> None:
        if not 1 <= ttl_s < math.inf:
            raise BadInputError(f"ttl_s = {ttl_s}: give seconds, 1 or more")
        self._storage = storage
        self._record = _new_record(ref, holder, ttl_s, None, clock or SystemClock())
        self._key = layout.pin_key(self._record.pin_id)
        self._etag = ""
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def pin_id(self) -> str:
        return self._record.pin_id

    def __enter__(self) -> Pin:
        _place(self._storage, self._record)
        try:
            self._etag = self._storage.stat(self._key).etag
        except NotFoundError:
            self._lost = "somebody removed it"
        self._thread = threading.Thread(target=self._beat_on, name="sidestage-pin", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(SidestageError):  # what stays expires
            self._storage.delete(self._key)

    def check(self) -> None:
        """Raise ConflictError if the pin was lost: what was read since may be gone or incomplete."""
        if self._lost is not None:
            raise ConflictError(
                f"{self._key}: the pin on step {self._record.commit.step} was lost: {self._lost}; "
                f"the checkpoint may have been deleted while it was read; start again"
            )

    def beat(self) -> None:
        """Tell observers that the holder is alive. The thread calls it; so may a test."""
        if self._lost is not None:
            return
        following = replace(self._record, beats=self._record.beats + 1)
        try:
            self._etag = self._storage.replace_if(self._key, encode(following), self._etag).etag
            self._record = following
        except NotFoundError:
            self._lost = "it was removed, or expired because no beat arrived in time"
        except ConflictError:
            self._adopt()
        except StorageError:
            return  # the next beat may go through; there are several in a time to live

    def _adopt(self) -> None:
        """Go on from what is stored, if that is our own write whose reply was lost."""
        try:
            stored = decode(PinRecord, self._storage.read(self._key), self._key)
            if stored.token == self._record.token:
                self._record, self._etag = stored, self._storage.stat(self._key).etag
            else:
                self._lost = "another pin took its name"
        except (CorruptError, NotFoundError) as e:
            self._lost = str(e)
        except SidestageError:
            return

    def _beat_on(self) -> None:
        assert self._record.ttl_s is not None
        while not self._stop.wait(self._record.ttl_s / _BEATS_PER_TTL):
            self.beat()


@contextmanager
def pinned(
    storage: Storage, ref: CommitRef, holder: str, *, refused: Callable[[str], None]
) -> Iterator[None]:
    """A Pin for reading that goes on without one where the store can't be written; `refused` is told why.

    Raises NotFoundError if the commit is gone. Should the pin be lost, the reads will say so: every
    byte has a digest.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(Pin(storage, ref, holder))
        except StorageError as e:
            refused(str(e))
        yield


def add_pin(
    storage: Storage,
    ref: CommitRef,
    holder: str,
    *,
    pin_id: str | None = None,
    clock: Clock | None = None,
) -> PinRecord:
    """A pin that stays until it is removed.

    Raises NotFoundError if the commit is gone, ConflictError if the id is taken.
    """
    record = _new_record(ref, holder, None, pin_id, clock or SystemClock())
    if layout.parse_pin_key(layout.pin_key(record.pin_id)) is None:
        raise BadInputError(f"pin id {record.pin_id!r}: use letters, digits, '.', '_' and '-' only")
    _place(storage, record)
    return record


def remove_pin(storage: Storage, pin_id: str) -> None:
    """Remove a pin, whoever's it is. NotFoundError if there is none of that id."""
    key = layout.pin_key(pin_id)
    if layout.parse_pin_key(key) is None:
        raise BadInputError(f"pin id {pin_id!r}: use letters, digits, '.', '_' and '-' only")
    storage.stat(key)
    storage.delete(key)


@dataclass(frozen=True)
class SeenPin:
    """A pin as found. `record` is None where it can't be read; `problem` says why.

    `still_s` is how long this observer has seen its counter stand still.
    """

    pin_id: str
    record: PinRecord | None
    problem: str | None
    still_s: float

    @property
    def expired(self) -> bool:
        ttl_s = self.record.ttl_s if self.record else None
        return ttl_s is not None and self.still_s >= ttl_s


class PinBoard:
    """An observer of a root's pins. The longer it lives, the more it knows about who is alive."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._seen: dict[str, tuple[str, SeenPin, float]] = {}

    def look(self) -> list[SeenPin]:
        """All pins now, expired ones included."""
        seen = {}
        for o in self._storage.list(layout.PINS):
            pin_id = layout.parse_pin_key(o.key)
            if pin_id is None:
                continue
            now = self._clock.monotonic()
            etag, pin, since = self._seen.get(pin_id, ("", None, now))
            if pin is None or etag != o.etag:
                found = self._read(pin_id, o.key)
                if found is None:
                    continue
                if pin is None or _beats(found) != _beats(pin):
                    since = now
                pin = found
            seen[pin_id] = (o.etag, pin, since)
        self._seen = seen
        return self._aged(self._clock.monotonic())

    def _aged(self, now: float) -> list[SeenPin]:
        return [replace(pin, still_s=now - since) for _, pin, since in self._seen.values()]

    def expired(self) -> list[str]:
        """Ids of the pins that nobody holds any more, as of the last look."""
        return [p.pin_id for p in self._aged(self._clock.monotonic()) if p.expired]

    def holders(self) -> dict[tuple[int, int], list[str]]:
        """(epoch, step) of each commit that a live pin names -> what the pins say.

        Raises CorruptError for a pin that can't be read: nobody knows what it protects.
        """
        found: dict[tuple[int, int], list[str]] = {}
        for pin in self.look():
            if pin.record is None:
                raise CorruptError(
                    f"{pin.problem} (it may protect any checkpoint, so nothing is deleted; `ckpt pins "
                    f"{self._storage.url} remove {pin.pin_id}` removes it)"
                )
            if not pin.expired:
                at = (pin.record.commit.epoch, pin.record.commit.step)
                found.setdefault(at, []).append(f"{pin.pin_id}: {pin.record.holder}")
        return found

    def _read(self, pin_id: str, key: str) -> SeenPin | None:
        try:
            return SeenPin(pin_id, decode(PinRecord, self._storage.read(key), key), None, 0.0)
        except NotFoundError:
            return None
        except (CorruptError, UnsupportedFormatError) as e:
            return SeenPin(pin_id, None, str(e), 0.0)


def _beats(pin: SeenPin) -> tuple[str, int] | None:
    return (pin.record.token, pin.record.beats) if pin.record else None


def _new_record(
    ref: CommitRef, holder: str, ttl_s: float | None, pin_id: str | None, clock: Clock
) -> PinRecord:
    token = secrets.token_hex(8)
    return PinRecord(
        pin_id=pin_id or token,
        token=token,
        commit=ref,
        holder=f"{holder} ({socket.gethostname()}, pid {os.getpid()})",
        ttl_s=ttl_s,
        beats=0,
        created_at_s=clock.time(),
    )


def _place(storage: Storage, record: PinRecord) -> None:
    """Write a pin, then make sure that the commit is still there."""
    ref, key = record.commit, layout.pin_key(record.pin_id)
    storage.create(key, encode(record))
    try:
        commit_key = layout.commit_key(ref.epoch, ref.step)
        if digest_of(storage.read(commit_key)) != ref.digest:
            raise CorruptError(f"{commit_key}: holds another commit than the one to be pinned")
    except NotFoundError:
        _forget(storage, key)
        raise NotFoundError(
            f"step {ref.step} of epoch {ref.epoch} was deleted before it could be pinned; "
            f"see `ckpt ls` for what there is"
        ) from None
    except SidestageError:
        _forget(storage, key)
        raise


def _forget(storage: Storage, key: str) -> None:
    with suppress(SidestageError):
        storage.delete(key)
