"""The live pointer and its history: who made which version live, when and why.

`live.json` holds the newest move, whole. It is changed only by compare-and-set, and before
it changes again its content has been copied to `history/<sequence>.json`. So whenever a
publisher dies, the pointer is either the old one or the new one, and the history, with the
pointer's own move, has every move that happened and none that did not.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ckpt.errors import ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.storage import Storage
from ckpt.types import Clock, SystemClock
from publisher import keys
from publisher.records import Move, MoveKind, Source, VersionManifest, decode, encode

_RACES = 20


@dataclass(frozen=True)
class Reason:
    """Who moves the pointer, and why; for the history."""

    who: str
    why: str


@dataclass(frozen=True)
class _Target:
    """Where a move leads."""

    kind: MoveKind
    version: int
    source: Source
    falls_back_to: int | None
    newest: tuple[Source, ...]


_Decide = Callable[[Move | None, Move | None], _Target | None]
"""(the pointer's move, the newest known move) -> where to go, or None to leave it."""


class LivePointer:
    """One pointer below a registry's prefix.

    Args:
        storage, prefix: where the registry is.
        clock: stamps the moves.
    """

    def __init__(self, storage: Storage, prefix: str, clock: Clock | None = None) -> None:
        self._storage = storage
        self._prefix = prefix
        self._clock = clock or SystemClock()
        self._moves: dict[int, Move] = {}

    @property
    def url(self) -> str:
        return f"{self._storage.url}/{self._prefix}{keys.LIVE}"

    def read(self) -> Move | None:
        """The newest move, or None if nothing went live yet; CorruptError says how to mend it."""
        return self._read()[0]

    def history(self) -> list[Move]:
        """Every move, oldest first."""
        moves = {m.sequence: m for m in map(self._move, self._sequences())}
        newest = self.read()
        if newest is not None:
            moves[newest.sequence] = newest
        return [moves[n] for n in sorted(moves)]

    def publish(self, manifest: VersionManifest, reason: Reason) -> Move | None:
        """Make a version live unless its commit is older than, or is, one that was live before.

        So neither a late job nor a restarted publisher undoes a rollback.
        """

        def target(now: Move | None, known: Move | None) -> _Target | None:
            newest = {s.run_id: s for s in (known.newest if known else ())}
            before = newest.get(manifest.source.run_id)
            if before is not None and manifest.source.order <= before.order:
                return None
            newest[manifest.source.run_id] = manifest.source
            return _Target(
                "publish",
                manifest.version,
                manifest.source,
                known.sequence if known else None,
                tuple(newest[run] for run in sorted(newest)),
            )

        return self._change(target, reason)

    def rollback(
        self, to: int | None, open_version: Callable[[int], VersionManifest], reason: Reason
    ) -> Move:
        """Move to version `to`, else to what was live before the live one; again: one further back.

        `open_version` gives a version's manifest, and raises if it isn't whole. Raises
        NotFoundError if there is no such version, ConflictError if it is live already.
        """

        def target(now: Move | None, known: Move | None) -> _Target:
            if known is None:
                raise NotFoundError(f"{self.url}: no version is live yet: nothing to roll back")
            if now is not None and to == now.to_version:
                raise ConflictError(f"version {to} is live already")
            if now is None and to is None:
                raise NotFoundError(f"{self.url}: is missing; name the version with --to")
            earlier = self._earlier(known, to)
            number = earlier.to_version if earlier else to
            if number is None:
                raise NotFoundError(
                    f"no version was live before version {known.to_version}; name one with --to"
                )
            fallback = earlier.falls_back_to if earlier else known.sequence
            source = open_version(number).source
            return _Target("rollback", number, source, fallback, known.newest)

        move = self._change(target, reason)
        assert move is not None
        return move

    def _change(self, target: _Decide, reason: Reason) -> Move | None:
        """Compare-and-set: decide from the current move, try; again if another was first."""
        for _ in range(_RACES):
            now, etag = self._read()
            if now is not None:
                self._record(now)
            # A pointer that was lost is rebuilt on what the history says.
            known = now or self._last_recorded()
            aim = target(now, known)
            if aim is None:
                return None
            move = Move(
                sequence=known.sequence + 1 if known else 1,
                kind=aim.kind,
                from_version=now.to_version if now else None,
                to_version=aim.version,
                canary=None,
                source=aim.source,
                lease_epoch=0,
                who=reason.who,
                why=reason.why,
                at_s=self._clock.time(),
                falls_back_to=aim.falls_back_to,
                newest=aim.newest,
                token=uuid.uuid4().hex,
            )
            try:
                if etag is None:
                    self._storage.create(self._prefix + keys.LIVE, encode(move))
                else:
                    self._storage.replace_if(self._prefix + keys.LIVE, encode(move), etag)
            except (ConflictError, NotFoundError):
                # The reply to our own move may have been lost, and a retry refused.
                found = self.read()
                if found is None or found.token != move.token:
                    continue
            # The pointer has moved whatever happens here; the next move records this one first.
            with suppress(StorageError):
                self._record(move)
            return move
        raise ConflictError(f"{self.url}: lost {_RACES} races against other publishers; try again")

    def _read(self) -> tuple[Move | None, str | None]:
        key = self._prefix + keys.LIVE
        try:
            # The etag first: if the content is newer than it, the compare-and-set loses.
            etag = self._storage.stat(key).etag
            data = self._storage.read(key)
        except NotFoundError:
            return None, None
        try:
            return decode(Move, data, self.url), etag
        except CorruptError as e:
            raise CorruptError(
                f"{e}; delete it and name the live version: publisher rollback ROOT --to N"
            ) from None

    def _record(self, move: Move) -> None:
        """Copy a move to the history; it may be there already, then it is the same."""
        if move.sequence not in self._moves:
            with suppress(ConflictError):
                self._storage.create(self._prefix + keys.history_key(move.sequence), encode(move))
            self._moves[move.sequence] = move

    def _sequences(self) -> list[int]:
        found = self._storage.list(self._prefix + keys.HISTORY)
        names = (o.key.removeprefix(self._prefix) for o in found)
        return sorted(n for name in names if (n := keys.parse_history_key(name)) is not None)

    def _move(self, sequence: int) -> Move:
        if sequence not in self._moves:
            key = self._prefix + keys.history_key(sequence)
            self._moves[sequence] = decode(Move, self._storage.read(key), key)
        return self._moves[sequence]

    def _last_recorded(self) -> Move | None:
        sequences = self._sequences()
        return self._move(sequences[-1]) if sequences else None

    def _earlier(self, now: Move, to: int | None) -> Move | None:
        """The move that a rollback returns to: the last one, or the one that made `to` live."""
        at = now
        while at.falls_back_to is not None:
            if at.falls_back_to >= at.sequence:
                raise CorruptError(f"{self.url}: move {at.sequence} falls back to a later one")
            at = self._move(at.falls_back_to)
            if to is None or at.to_version == to:
                return at
        return None
