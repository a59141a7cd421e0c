"""The live pointer and its history: who made which version live, when and why.

`live.json` holds the newest move, whole. It is changed only by compare-and-set, and before
another move its move has been copied to `history/<sequence>.json`. So whenever a publisher
dies, the pointer is either the old one or the new one, and the history, with the pointer's
own move, has every move that happened and none that did not.

Two things are told to the pointer without moving it, so that whoever decided on a move before loses
the compare-and-set and looks again: the epoch of a new lease, and versions about to be deleted.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpt.errors import ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.storage import Storage
from ckpt.types import Clock, SystemClock
from publisher import keys
from publisher.records import (
    Move,
    MoveKind,
    Pointer,
    Source,
    VersionManifest,
    decode,
    encode,
)

_RACES = 20


class LeaseLostError(ConflictError):
    """Another publisher has taken over since: this one may publish nothing more under its lease."""


@dataclass(frozen=True)
class Reason:
    """Who moves the pointer, and why; for the history."""

    who: str
    why: str


@dataclass(frozen=True)
class _Target:
    """Where a move leads. `live`, `canary`: the versions after it."""

    kind: MoveKind
    live: int
    canary: int | None
    source: Source
    falls_back_to: int | None
    newest: tuple[Source, ...]
    lease_epoch: int = 0


_Decide = Callable[[Pointer | None, Move | None], _Target | None]
"""(the pointer, the newest known move) -> where to go, or None to leave it.

The move is the pointer's, or the history's newest where the pointer was lost.
"""
_Open = Callable[[int], VersionManifest]
"""A version's manifest, its files looked at; raises if it isn't whole."""


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

    def read(self) -> Pointer | None:
        """The pointer, or None if there is none yet; CorruptError says how to mend it."""
        return self._read()[0]

    def history(self) -> list[Move]:
        """Every move, oldest first."""
        moves = {m.sequence: m for m in map(self._move, self._sequences())}
        move = _move_of(self.read())
        if move is not None:
            moves[move.sequence] = move
        return [moves[n] for n in sorted(moves)]

    def previous(self, now: Move) -> Move | None:
        """The move that a rollback without a number returns to."""
        return self._earlier(now, None)

    # -- moves ----------------------------------------------------------------------------

    def release(
        self,
        manifest: VersionManifest,
        open_version: _Open,
        reason: Reason,
        *,
        canary: bool,
        lease_epoch: int,
    ) -> Move | None:
        """Make a version live, or the canary if another one is live.

        None, and nothing moves, if its commit is older than, or is, one that was either before: so
        neither a late job nor a restarted publisher undoes a rollback. Raises LeaseLostError if a
        newer lease was seen.
        """

        def target(now: Pointer | None, known: Move | None) -> _Target | None:
            seen = max(now.lease_epoch if now else 0, known.lease_epoch if known else 0)
            if lease_epoch < seen:
                raise LeaseLostError(
                    f"{self.url}: was moved under lease {seen}, this publisher holds {lease_epoch}: "
                    f"another one has taken over"
                )
            newest = {s.run_id: s for s in (known.newest if known else ())}
            before = newest.get(manifest.source.run_id)
            if before is not None and manifest.source.order <= before.order:
                return None
            newest[manifest.source.run_id] = manifest.source
            open_version(manifest.version)
            self._check_kept(now, manifest.version)
            live = _move_of(now)
            as_canary = canary and live is not None
            return _Target(
                kind="canary" if as_canary else "publish",
                live=live.to_version if as_canary and live else manifest.version,
                # What goes live directly is newer than the canary, whose trial is over.
                canary=manifest.version if as_canary else None,
                source=manifest.source,
                falls_back_to=_falls_back(known, moved=not as_canary),
                newest=tuple(newest[run] for run in sorted(newest)),
                lease_epoch=lease_epoch,
            )

        return self._change(target, reason)

    def promote(
        self,
        version: int | None,
        open_version: _Open,
        reason: Reason,
        *,
        expected: int | None = None,
    ) -> Move:
        """Make the canary live. `version`, if given, must be the canary still: ConflictError.

        expected: the version that must be live still: ConflictError.
        """

        def target(now: Pointer | None, known: Move | None) -> _Target:
            live = _move_of(now)
            _check_expected(live, expected)
            canary = live.canary if live else None
            if known is None or canary is None:
                raise NotFoundError(f"{self.url}: there is no canary to promote")
            if version not in (None, canary):
                raise ConflictError(f"the canary is version {canary}, not {version}; look again")
            source = open_version(canary).source
            return _Target("promote", canary, None, source, known.sequence, known.newest)

        return self._moved(target, reason)

    def rollback(
        self,
        to: int | None,
        open_version: _Open,
        reason: Reason,
        *,
        expected: int | None = None,
    ) -> Move:
        """Move to version `to`, else to what was live before the live one; again: one further back.

        expected: the version that must be live still. Raises NotFoundError if there is no such
        version, ConflictError if it is live already or another one than was expected is.
        """

        def target(now: Pointer | None, known: Move | None) -> _Target:
            live = _move_of(now)
            _check_expected(live, expected)
            if known is None:
                raise NotFoundError(f"{self.url}: no version is live yet: nothing to roll back")
            if live is not None and to == live.to_version:
                raise ConflictError(f"version {to} is live already")
            if live is None and to is None:
                raise NotFoundError(f"{self.url}: is missing; name the version with --to")
            earlier = self._earlier(known, to)
            number = earlier.to_version if earlier else to
            if number is None:
                raise NotFoundError(
                    f"no version was live before version {known.to_version}; name one with --to"
                )
            fallback = earlier.falls_back_to if earlier else known.sequence
            if earlier is None and known.to_version == number:
                fallback = known.falls_back_to  # it was live already, before the pointer was lost
            canary = None if known.canary == number else known.canary
            try:
                source = open_version(number).source
            except NotFoundError as e:
                was = "" if to else f"version {number} was live before, but is gone: "
                raise NotFoundError(f"{was}{e}; name one with --to") from None
            self._check_kept(now, number)
            return _Target("rollback", number, canary, source, fallback, known.newest)

        return self._moved(target, reason)

    def _check_kept(self, now: Pointer | None, number: int) -> None:
        if now is not None and number in now.retired:
            raise NotFoundError(
                f"{self.url}: version {number} is being deleted by retention; take another one"
            )

    # -- what stops moves -----------------------------------------------------------------

    def fence(self, lease_epoch: int) -> None:
        """No publisher with an older lease moves the pointer from here on.

        LeaseLostError if a newer one was here. Before the first move it makes a pointer without one.
        """

        def fenced(now: Pointer | None) -> Pointer:
            if now is None:
                return Pointer(None, lease_epoch, (), 0)
            if now.lease_epoch > lease_epoch:
                raise LeaseLostError(
                    f"{self.url}: lease {now.lease_epoch} was here, this publisher holds {lease_epoch}"
                )
            return replace(now, lease_epoch=lease_epoch)

        self._amend(fenced)

    def retire(self, choose: Callable[[Pointer], set[int]]) -> set[int]:
        """Say which versions are to be deleted; no move that was decided before leads to them.

        `choose` gives them by the pointer as it is when they are told; none while there is no pointer.
        """

        def retiring(now: Pointer | None) -> Pointer | None:
            return replace(now, retired=tuple(sorted(choose(now)))) if now else None

        told = self._amend(retiring)
        return set(told.retired) if told else set()

    def keep(self, number: int) -> None:
        """Whoever has chosen what to retire, and not told it yet, chooses again, and sees a new pin.

        NotFoundError if the version was retired before.
        """

        def kept(now: Pointer | None) -> Pointer | None:
            self._check_kept(now, number)
            return now

        self._amend(kept, always=True)

    def _amend(
        self, amended: Callable[[Pointer | None], Pointer | None], *, always: bool = False
    ) -> Pointer | None:
        """Compare-and-set what isn't the move. Can be done twice: a lost reply harms nothing.

        always: write even if nothing changes, so that who has read the pointer must read it again.
        """
        key = self._prefix + keys.LIVE
        for _ in range(_RACES):
            now, etag = self._read()
            wanted = amended(now)
            if wanted is None or (wanted == now and not always):
                return wanted
            with suppress(ConflictError, NotFoundError):
                if now is None or etag is None:
                    self._storage.create(key, encode(wanted))
                else:
                    wanted = replace(wanted, changes=now.changes + 1)
                    self._storage.replace_if(key, encode(wanted), etag)
                return wanted
        raise self._outrun()

    # -- the change itself ----------------------------------------------------------------

    def _moved(self, target: _Decide, reason: Reason) -> Move:
        move = self._change(target, reason)
        assert move is not None
        return move

    def _change(self, target: _Decide, reason: Reason) -> Move | None:
        """Compare-and-set: decide from the current move, try; again if another was first."""
        for _ in range(_RACES):
            now, etag = self._read()
            at = _move_of(now)
            if at is not None:
                self._record(at)
            # A pointer that was lost is rebuilt on what the history says.
            known = at or self._last_recorded()
            aim = target(now, known)
            if aim is None:
                return None
            lease_epoch = max(
                aim.lease_epoch,
                now.lease_epoch if now else 0,
                known.lease_epoch if known else 0,
            )
            move = Move(
                sequence=known.sequence + 1 if known else 1,
                kind=aim.kind,
                from_version=at.to_version if at else None,
                to_version=aim.live,
                canary=aim.canary,
                source=aim.source,
                lease_epoch=lease_epoch,
                who=reason.who,
                why=reason.why,
                at_s=self._clock.time(),
                falls_back_to=aim.falls_back_to,
                newest=aim.newest,
                token=uuid.uuid4().hex,
            )
            retired, changes = (now.retired, now.changes + 1) if now else ((), 0)
            data = encode(Pointer(move, lease_epoch, retired, changes))
            try:
                if etag is None:
                    self._storage.create(self._prefix + keys.LIVE, data)
                else:
                    self._storage.replace_if(self._prefix + keys.LIVE, data, etag)
            except (ConflictError, NotFoundError):
                # The reply to our own move may have been lost, and a retry refused.
                found = _move_of(self.read())
                if found is None or found.token != move.token:
                    continue
            # The pointer has moved whatever happens here; the next move records this one first.
            with suppress(StorageError):
                self._record(move)
            return move
        raise self._outrun()

    def _outrun(self) -> ConflictError:
        return ConflictError(f"{self.url}: lost {_RACES} races against other publishers; try again")

    def _read(self) -> tuple[Pointer | None, str | None]:
        key = self._prefix + keys.LIVE
        try:
            # The etag first: if the content is newer than it, the compare-and-set loses.
            etag = self._storage.stat(key).etag
            data = self._storage.read(key)
        except NotFoundError:
            return None, None
        try:
            return decode(Pointer, data, self.url), etag
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


def _move_of(pointer: Pointer | None) -> Move | None:
    return pointer.move if pointer else None


def _check_expected(live: Move | None, expected: int | None) -> None:
    now = live.to_version if live else None
    if expected not in (None, now):
        raise ConflictError(f"version {now} is live by now, not {expected}: look again")


def _falls_back(known: Move | None, *, moved: bool) -> int | None:
    """Where a rollback after this move returns to: a canary alone changes nothing about that."""
    if known is None:
        return None
    return known.sequence if moved else known.falls_back_to
