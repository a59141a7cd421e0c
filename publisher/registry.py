"""The registry: immutable versions, one live pointer, history, and the refused commits.

A version's number is claimed create-only, its files are written below that number, and its
manifest comes last, create-only too. A number whose publisher died stays taken, without a
manifest: such a folder is no version, and nothing is ever written into it again.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt import layout
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError
from ckpt.storage import Storage, open_storage
from ckpt.types import Clock, SystemClock
from publisher import keys
from publisher.pointer import LivePointer, Reason
from publisher.records import (
    Claim,
    Move,
    Refusal,
    Source,
    VersionManifest,
    decode,
    encode,
)


class Registry:
    """The published versions of one model.

    Args:
        storage: the store that holds it.
        prefix: where in that store: empty, or a folder with its final `/`.
        clock: stamps claims and moves.
    """

    def __init__(
        self, storage: Storage, prefix: str = layout.SERVING, *, clock: Clock | None = None
    ) -> None:
        if prefix and not prefix.endswith("/"):
            raise BadInputError(f"registry prefix {prefix!r}: end it with /")
        self.storage = storage
        self.prefix = prefix
        self.clock = clock or SystemClock()
        self._pointer = LivePointer(storage, prefix, self.clock)
        self._manifests: dict[int, VersionManifest] = {}

    @property
    def url(self) -> str:
        return f"{self.storage.url}/{self.prefix}".rstrip("/")

    # -- versions -------------------------------------------------------------------------

    def claim(self, source: Source, who: str) -> int:
        """Take the next free version number for a commit."""
        taken = [n for n, _ in self._version_keys()]
        number = max(taken, default=0) + 1
        while True:
            claim = Claim(number, source, who, self.clock.time())
            try:
                self.storage.create(self.key(number, keys.CLAIM), encode(claim))
            except ConflictError:
                number += 1
            else:
                return number

    def seal(self, manifest: VersionManifest) -> None:
        """Write a version's manifest: from here on the version exists."""
        self.check_files(manifest)
        self.storage.create(self.key(manifest.version, keys.MANIFEST), encode(manifest))

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
        return sorted(n for n, name in self._version_keys() if name == keys.MANIFEST)

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
            self._manifests[number] = manifest
        return self._manifests[number]

    def find(self, source: Source) -> VersionManifest | None:
        """The version made from a commit, or None."""
        for number in reversed(self.numbers()):
            try:
                manifest = self.version(number)
            except CorruptError:
                continue  # nobody can use it: it doesn't count
            if manifest.source == source:
                return manifest
        return None

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
        """The move that made the live version live; None before the first."""
        return self._pointer.read()

    def history(self) -> list[Move]:
        """All moves of the live pointer, oldest first."""
        return self._pointer.history()

    def promote(self, manifest: VersionManifest, reason: Reason) -> Move | None:
        """Make a version live; None if its commit isn't newer than all that were live."""
        return self._pointer.publish(manifest, reason)

    def rollback(self, to: int | None, reason: Reason) -> Move:
        """Make an earlier version live: `to`, or the one that was live before the live one."""
        return self._pointer.rollback(to, self._open_whole, reason)

    def is_newer(self, source: Source, live: Move | None) -> bool:
        """Would this commit go live by itself?"""
        return live is None or all(
            s.run_id != source.run_id or s.order < source.order for s in live.newest
        )

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
        manifest = self.version(number)
        self.check_files(manifest)
        return manifest


def open_registry(root: str, registry: str | None = None, *, must_exist: bool = False) -> Registry:
    """The registry of a root, or the one at a URL of its own."""
    if registry is None:
        return Registry(open_storage(root, must_exist=must_exist))
    return Registry(open_storage(registry, must_exist=must_exist), "")
