"""The registry: immutable versions, one live pointer, history, pins, and the refused commits.

A version's number is claimed create-only, its files are written below that number, and its
manifest comes last, create-only too. A number whose publisher died stays taken, without a
manifest: such a folder is no version, and nothing is ever written into it again. Nor is one
without its claim: it was being deleted when its paused publisher woke up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from ckpt import layout
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError
from ckpt.storage import Root, storage_of
from ckpt.types import Clock, SystemClock
from publisher import keys, retention
from publisher.pointer import LeaseLostError, LivePointer, Reason
from publisher.records import (
    Claim,
    LeaseRecord,
    Move,
    Pin,
    Pointer,
    Refusal,
    Source,
    VersionManifest,
    decode,
    encode,
)


class Registry:
    """The published versions of one model.

    Args:
        root: the store that holds it: a path (text or a pathlib.Path), a URL, or a Storage.
        prefix: where in that store: empty, or a folder with its final `/`.
        clock: stamps claims and moves.
    """

    def __init__(
        self, root: Root, prefix: str = layout.SERVING, *, clock: Clock | None = None
    ) -> None:
        if prefix and not prefix.endswith("/"):
            raise BadInputError(f"registry prefix {prefix!r}: end it with /")
        self.storage = storage_of(root)
        self.prefix = prefix
        self.clock = clock or SystemClock()
        self._pointer = LivePointer(self.storage, prefix, self.clock)
        self._manifests: dict[int, VersionManifest] = {}

    @property
    def url(self) -> str:
        return f"{self.storage.url}/{self.prefix}".rstrip("/")

    # -- versions -------------------------------------------------------------------------

    def claim(self, source: Source, who: str, lease_epoch: int = 0) -> int:
        """Take the next free version number for a commit."""
        taken = [n for n, _ in self._version_keys()]
        number = max(taken, default=0) + 1
        while True:
            claim = Claim(number, source, lease_epoch, who, self.clock.time())
            try:
                self.storage.create(self.key(number, keys.CLAIM), encode(claim))
            except ConflictError:
                number += 1
            else:
                return number

    def seal(self, manifest: VersionManifest) -> None:
        """Write a version's manifest: from here on the version exists.

        Raises LeaseLostError if it was made under a lease that is over. Whoever has that lease by now
        may be deleting the files, so the lease is looked at again once the manifest is there.
        """
        self.check_lease(manifest.lease_epoch)
        self.check_files(manifest)
        self.storage.create(self.key(manifest.version, keys.MANIFEST), encode(manifest))
        try:
            self.check_lease(manifest.lease_epoch)
        except LeaseLostError:
            retention.withdraw(self, manifest.version)
            raise

    def check_files(self, manifest: VersionManifest) -> None:
        """Raise CorruptError unless every file of a version is there with its size."""
        for f in manifest.files:
            key = self.key(manifest.version, f.key)
            try:
                size = self.storage.stat(key).size_bytes
            except NotFoundError:
                raise CorruptError(f"{key}: missing from version {manifest.version}") from None
            if size != f.size_bytes:
                raise CorruptError(
                    f"{key}: has {size} bytes, the manifest of version {manifest.version} says "
                    f"{f.size_bytes}"
                )

    def numbers(self) -> list[int]:
        """Numbers of the versions that exist, ascending."""
        return sorted(n for n, names in self.contents().items() if keys.is_version(names))

    def version(self, number: int) -> VersionManifest:
        """A version's manifest. Raises NotFoundError, naming those that exist, or CorruptError."""
        if number not in self._manifests:
            key = self.key(number, keys.MANIFEST)
            try:
                data = self.storage.read(key)
            except NotFoundError:
                known = ", ".join(map(str, self.numbers()[-10:])) or "none"
                raise NotFoundError(
                    f"{self.url}: no version {number} here; the newest are: {known}"
                ) from None
            manifest = decode(VersionManifest, data, key)
            if manifest.version != number:
                raise CorruptError(f"{key}: is the manifest of version {manifest.version}")
            _check_one_step(manifest, key)
            self._manifests[number] = manifest
        return self._manifests[number]

    def find(self, source: Source, *, whole: bool = False) -> VersionManifest | None:
        """The newest version made from a commit, or None.

        whole: only one that can go live: all files there with their sizes, and not being deleted.
        """
        pointer = self._pointer.read() if whole else None
        for manifest in self._made_from(source):
            if not whole:
                return manifest
            if pointer is not None and manifest.version in pointer.retired:
                continue
            with suppress(CorruptError):
                self.check_files(manifest)
                return manifest
        return None

    def damaged(self, source: Source) -> dict[int, str]:
        """The versions made from a commit whose files are damaged, and what is wrong with each."""
        found = {}
        for manifest in self._made_from(source):
            try:
                self.check_files(manifest)
            except CorruptError as e:
                found[manifest.version] = str(e)
        return found

    def _made_from(self, source: Source) -> Iterator[VersionManifest]:
        """Newest first. A version whose manifest can't be read is left out: nobody can use it."""
        for number in reversed(self.numbers()):
            with suppress(CorruptError, NotFoundError):  # it may have been deleted since
                manifest = self.version(number)
                if manifest.source == source:
                    yield manifest

    def discard(self, number: int) -> None:
        """Delete the files of a number that got no manifest; the number stays taken."""
        for n, name in self._version_keys(number):
            if name == keys.MANIFEST:
                raise ConflictError(f"version {n} exists: it can't be discarded")
        for n, name in self._version_keys(number):
            if name != keys.CLAIM:
                self.storage.delete(self.key(n, name))

    # -- the live pointer -----------------------------------------------------------------

    def live(self) -> Move | None:
        """The newest move: it says which version is live, and which the canary. None before the first."""
        pointer = self._pointer.read()
        return pointer.move if pointer else None

    def pointer(self) -> Pointer | None:
        """The live pointer with what stops older moves; None before the first lease or move."""
        return self._pointer.read()

    def history(self) -> list[Move]:
        """All moves of the live pointer, oldest first."""
        return self._pointer.history()

    def release(
        self,
        manifest: VersionManifest,
        reason: Reason,
        *,
        canary: bool = False,
        lease_epoch: int = 0,
    ) -> Move | None:
        """A publisher's move: the version goes live, or becomes the canary if one is live already.

        None if its commit isn't newer than all that were either. Raises LeaseLostError if a
        publisher with a newer lease was here, CorruptError if the version isn't whole.
        """
        return self._pointer.release(
            manifest, self._open_whole, reason, canary=canary, lease_epoch=lease_epoch
        )

    def promote(
        self, reason: Reason, version: int | None = None, *, expected: int | None = None
    ) -> Move:
        """Make the canary live. `version`, if given, must be the canary still: ConflictError.

        expected: the version that must be live still: ConflictError.
        """
        return self._pointer.promote(version, self._open_whole, reason, expected=expected)

    def rollback(self, to: int | None, reason: Reason, *, expected: int | None = None) -> Move:
        """Make an earlier version live: `to`, or the one that was live before the live one.

        expected: the version that must be live still: ConflictError.
        """
        return self._pointer.rollback(to, self._open_whole, reason, expected=expected)

    def is_newer(self, source: Source, live: Move | None) -> bool:
        """Would this commit go live by itself?"""
        return live is None or all(
            s.run_id != source.run_id or s.order < source.order for s in live.newest
        )

    # -- the lease ------------------------------------------------------------------------

    def lease(self) -> LeaseRecord | None:
        """Who may publish, as stored; CorruptError says how to mend it."""
        key = self.prefix + keys.LEASE
        try:
            return decode(LeaseRecord, self.storage.read(key), key)
        except NotFoundError:
            return None
        except CorruptError as e:
            raise CorruptError(
                f"{e}; stop all publishers of this registry, then delete it"
            ) from None

    def lease_epoch(self) -> int:
        """The newest lease that this registry has seen; 0: there was none."""
        lease, pointer = self.lease(), self._pointer.read()
        return max(lease.epoch if lease else 0, pointer.lease_epoch if pointer else 0)

    def check_lease(self, lease_epoch: int) -> None:
        """LeaseLostError if there is a newer lease than this one."""
        newest = self.lease_epoch()
        if lease_epoch < newest:
            raise LeaseLostError(
                f"{self.url}: lease {newest} was taken, this publisher holds {lease_epoch}: another one "
                f"has taken over"
            )

    def fence(self, lease_epoch: int) -> None:
        """Stop the pointer moves of all older leases, those already decided on included."""
        self._pointer.fence(lease_epoch)

    # -- pins and retention ---------------------------------------------------------------

    def pin(self, number: int, reason: Reason) -> Pin:
        """Keep a version until `unpin`. NotFoundError if there is none, ConflictError if it has a pin."""
        self._open_whole(number)
        return retention.pin(self, number, reason)

    def unpin(self, number: int) -> None:
        """Remove a pin. NotFoundError if there is none."""
        retention.unpin(self, number)

    def pins(self) -> dict[int, Pin]:
        """The pins by version; CorruptError names one that can't be read (it counts all the same)."""
        return retention.pins(self)

    def prune(self, keep: int, *, dry_run: bool = False) -> list[int]:
        """Delete what retention doesn't keep, see `publisher.retention`; the numbers deleted."""
        return retention.prune(self, keep, dry_run=dry_run)

    def previous(self, move: Move) -> int | None:
        """The version that a rollback from this move returns to."""
        earlier = self._pointer.previous(move)
        return earlier.to_version if earlier else None

    def retire(self, choose: Callable[[Pointer], set[int]]) -> set[int]:
        """Tell the pointer which versions are about to be deleted, so that nothing moves there."""
        return self._pointer.retire(choose)

    def keep(self, number: int) -> None:
        """Make retention look for pins again before it retires anything. NotFoundError: it has."""
        self._pointer.keep(number)

    def contents(self) -> dict[int, set[str]]:
        """Number -> the names below it that are stored, manifest or not."""
        found: dict[int, set[str]] = {}
        for number, name in self._version_keys():
            found.setdefault(number, set()).add(name)
        return found

    def claimed(self, number: int) -> Claim | None:
        """Who took a number; None if that can't be told."""
        key = self.key(number, keys.CLAIM)
        try:
            return decode(Claim, self.storage.read(key), key)
        except (NotFoundError, CorruptError):
            return None

    def delete(self, number: int, names: set[str]) -> None:
        """Delete a number's files: manifest and claim first, so that what is left of it is no version.

        Without its claim it becomes none either if its publisher wakes up and writes the manifest.
        """
        self._manifests.pop(number, None)
        for name in sorted(names, key=lambda n: (n != keys.MANIFEST, n != keys.CLAIM, n)):
            self.storage.delete(self.key(number, name))

    # -- refused commits ------------------------------------------------------------------

    def refuse(self, refusal: Refusal) -> Refusal:
        """Record that a commit was refused, under the next free attempt number."""
        attempt = len(self.refusals(refusal.source)) + 1
        while True:
            numbered = replace(refusal, attempt=attempt)
            key = keys.quarantine_key(refusal.source.epoch, refusal.source.step, attempt)
            try:
                self.storage.create(self.prefix + key, encode(numbered))
            except ConflictError:
                attempt += 1
            else:
                return numbered

    def refusals(self, source: Source | None = None) -> list[Refusal]:
        """The recorded refusals, of one commit or of all, in the order of steps and attempts."""
        prefix = keys.quarantine_prefix(source.epoch, source.step) if source else keys.QUARANTINE
        found = []
        for info in self.storage.list(self.prefix + prefix):
            try:
                refusal = decode(Refusal, self.storage.read(info.key), info.key)
            except CorruptError:
                continue  # a note that can't be read stops nobody
            if source is None or refusal.source == source:
                found.append(refusal)
        return found

    # -- keys -----------------------------------------------------------------------------

    def key(self, number: int, name: str) -> str:
        """The storage key of a version's file."""
        return self.prefix + keys.version_key(number, name)

    def _version_keys(self, number: int | None = None) -> list[tuple[int, str]]:
        below = keys.VERSIONS if number is None else keys.version_prefix(number)
        found = (o.key.removeprefix(self.prefix) for o in self.storage.list(self.prefix + below))
        return [parsed for key in found if (parsed := keys.parse_version_key(key)) is not None]

    def _open_whole(self, number: int) -> VersionManifest:
        """A version's manifest as it is stored now, its files looked at."""
        self._manifests.pop(number, None)  # it may have been deleted since it was read
        manifest = self.version(number)
        self.check_files(manifest)
        return manifest


def _check_one_step(manifest: VersionManifest, key: str) -> None:
    """A version is one state of the model: all of its parts are of its commit's step."""
    steps = {
        "its commit": manifest.source.step,
        "the dense part": manifest.dense_step,
        "the tables": manifest.table_step,
        "the id maps": manifest.id_map_step,
    }
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{what} of step {step}" for what, step in steps.items())
        raise CorruptError(f"{key}: its parts don't belong together: {told}; take another version")


def open_registry(
    root: Root, registry: Root | None = None, *, must_exist: bool = False
) -> Registry:
    """The registry of a root, or the one at an address of its own."""
    if registry is None:
        return Registry(storage_of(root, must_exist=must_exist))
    return Registry(storage_of(registry, must_exist=must_exist), "")
