"""The lease: one publisher at a time works on a registry, and a dead one is followed by the next.

One record, `lease.json`, changed by compare-and-set only. Its owner raises a counter while it lives. A
rival that has itself watched the record stand still for its time to live, on its own monotonic
clock, takes over under a higher epoch: no clocks of two machines are compared. A paused owner may
wake up after that, so the new one tells its epoch to the live pointer before it does anything
else, and the pointer takes no move of an older one.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from ckpt.errors import BadInputError, ConflictError, NotFoundError, SidestageError
from ckpt.storage import Storage
from ckpt.types import Clock, SystemClock
from publisher import keys
from publisher.pointer import LeaseLostError
from publisher.records import LeaseOwner, LeaseRecord, encode
from publisher.registry import Registry

DEFAULT_TTL_S = 20.0
_BEATS_PER_TTL = 4

__all__ = ["DEFAULT_TTL_S", "Lease", "LeaseLostError", "require_conditions", "told"]


class Lease:
    """The right to publish into one registry. One process uses an object; its threads may share it.

    Args:
        registry: which one.
        ttl_s: for how long rivals must see this owner stand still before they take over.
        clock: monotonic for what is watched, wall clock for people.
    """

    def __init__(
        self, registry: Registry, *, ttl_s: float = DEFAULT_TTL_S, clock: Clock | None = None
    ) -> None:
        self._registry = registry
        self._key = registry.prefix + keys.LEASE
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._owner = LeaseOwner(socket.gethostname(), os.getpid(), secrets.token_hex(8))
        self._mine: LeaseRecord | None = None
        self._renewed_s = 0.0
        self._rival: LeaseRecord | None = None
        self._rival_since_s = 0.0
        self._lock = threading.RLock()

    @property
    def epoch(self) -> int:
        """The epoch of the lease held, or lost without knowing; 0: none is held."""
        mine = self._mine
        return mine.epoch if mine else 0

    @property
    def held(self) -> bool:
        """Is the lease held, as far as is known here?"""
        return self._mine is not None

    @property
    def rival(self) -> LeaseRecord | None:
        """Who had the lease when `acquire` last failed."""
        return self._rival

    def acquire(self) -> bool:
        """Take the lease if nobody has it, or if its owner stood still for long enough.

        False: somebody else has it; call again, as the watching happens between calls. Holding it
        already is True.
        """
        with self._lock:
            if self._mine is None and not self._take():
                return False
            assert self._mine is not None
            try:
                self._registry.fence(self._mine.epoch)
            except SidestageError:
                self._mine = None  # if the record is ours, the next try goes on from there
                raise
            self._rival = None
            return True

    def acquire_or_fail(self, wait: Callable[[float], object]) -> None:
        """Acquire, or raise ConflictError naming the owner once it has shown that it lives.

        `wait` sleeps so many seconds; a dead owner is waited for until its time to live is over.
        """
        first: LeaseRecord | None = None
        while not self.acquire():
            rival = self._rival
            if rival is None:
                continue
            if first is not None and _watched(first) != _watched(rival):
                raise ConflictError(
                    f"{self._registry.url}: {told(rival)} publishes into it; stop that one first, or "
                    f"let it do this"
                )
            first = first or rival
            wait(rival.ttl_s / (2 * _BEATS_PER_TTL))

    def _take(self) -> bool:
        found, etag = self._read()
        now_s = self._clock.monotonic()
        if found is not None and found.owner == self._owner and not found.released:
            self._mine, self._renewed_s = found, now_s  # our own; the reply was lost
            return True
        if found is not None and not found.released:
            if _watched(self._rival) != _watched(found):
                self._rival, self._rival_since_s = found, now_s
            if now_s - self._rival_since_s < found.ttl_s:
                return False
        mine = LeaseRecord(
            # A lease file that was deleted doesn't start a second count: the pointer knows better.
            epoch=self._registry.lease_epoch() + 1,
            owner=self._owner,
            beats=0,
            ttl_s=self._ttl_s,
            released=False,
            since_s=self._clock.time(),
        )
        try:
            self._write(mine, etag)
        except (ConflictError, NotFoundError):
            found, _ = self._read()
            if found != mine:
                self._rival, self._rival_since_s = found, now_s
                return False
        self._mine, self._renewed_s = mine, now_s
        return True

    def check(self) -> None:
        """Raise LeaseLostError if another has taken over. Renews when that is due; mostly costs nothing."""
        if self._clock.monotonic() - self._renewed_s >= self._ttl_s / _BEATS_PER_TTL:
            self.renew()
        if self._mine is None:
            raise LeaseLostError(f"{self._registry.url}: the lease was lost")

    def renew(self) -> None:
        """Tell rivals that the owner lives. Raises LeaseLostError if one has taken over."""
        with self._lock:
            if self._mine is None:
                return
            following = replace(self._mine, beats=self._mine.beats + 1)
            found, etag = self._read()
            if found is not None and found.owner == self._owner and etag is not None:
                with suppress(ConflictError, NotFoundError):
                    self._write(following, etag)
                    self._mine, self._renewed_s = following, self._clock.monotonic()
                    return
                found, _ = self._read()
            if found == following:  # written, and only the reply was lost
                self._mine, self._renewed_s = following, self._clock.monotonic()
                return
            self._mine = None
            to = f" to {told(found)}" if found else ""
            raise LeaseLostError(f"{self._registry.url}: lease {following.epoch} was lost{to}")

    def forget(self) -> None:
        """Count the lease as lost, as somebody has told; the record is another's by now."""
        with self._lock:
            self._mine = None

    def release(self) -> None:
        """Let the next one in at once. Does nothing if the lease isn't held; failures expire it."""
        with self._lock:
            mine, self._mine = self._mine, None
            if mine is None:
                return
            with suppress(SidestageError):
                found, etag = self._read()
                if found is not None and found.owner == self._owner:
                    self._write(replace(mine, beats=mine.beats + 1, released=True), etag)

    @contextmanager
    def kept(self) -> Iterator[Lease]:
        """Renew in a thread while inside, whenever the lease is held; release it at the end."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self._ttl_s / _BEATS_PER_TTL):
                # What fails here may go through next time; a loss is seen by whoever asks.
                with suppress(SidestageError):
                    self.renew()

        thread = threading.Thread(target=beat, name="publisher-lease", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()
            self.release()

    def _read(self) -> tuple[LeaseRecord | None, str | None]:
        try:
            # The etag first: if the content is newer than it, the compare-and-set loses.
            etag = self._registry.storage.stat(self._key).etag
        except NotFoundError:
            return None, None
        return self._registry.lease(), etag

    def _write(self, record: LeaseRecord, etag: str | None) -> None:
        if etag is None:
            self._registry.storage.create(self._key, encode(record))
        else:
            self._registry.storage.replace_if(self._key, encode(record), etag)


def told(lease: LeaseRecord) -> str:
    """An owner for people."""
    return f"pid {lease.owner.pid} on {lease.owner.host} (lease {lease.epoch})"


def require_conditions(storage: Storage) -> None:
    """BadInputError unless writers of a store can exclude each other, without which a lease is nothing."""
    if not storage.probe():
        raise BadInputError(
            f"{storage.url}: this store doesn't honour conditional writes, so publishers couldn't exclude "
            f"each other; name a registry on another one with --registry, such as a local folder"
        )


def _watched(lease: LeaseRecord | None) -> tuple[str, int, int] | None:
    return (lease.owner.token, lease.epoch, lease.beats) if lease else None
