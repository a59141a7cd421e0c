"""The published model for Python hosts: load, warm up, answer, swap whole, keep the previous."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ckpt import config
from ckpt.errors import CorruptError, NotFoundError, SidestageError, StorageError
from ckpt.storage import Root
from ckpt.trust import TrustList
from publisher import keys
from publisher.compiled import Packages
from publisher.images import TableCache, table_files
from publisher.loading import LoadedVersion, Prediction, ProgramCache, load_version
from publisher.records import VersionManifest
from publisher.registry import Registry, open_registry
from publisher.request import Request

Follow = Literal["live", "canary"]
_FileState = tuple[object, ...]


class Predictor:
    """Answers requests from one version at a time. Any number of threads may use it.

    Args:
        registry_or_root: a registry, or the root whose `serving/` is one: a path (text or a
            pathlib.Path), a URL, or a Storage.
        version: the version to load; None: what `follow` says, followed by `refresh()`.
        follow: the live version, or the canary, and the live one where there is no canary.
        trust: the code that may be loaded on this host; by default the operator's list.
        cache: where files of an object store's versions are kept, by digest; by default the folder
            of `ckpt.config.cache_folder`. Without one they are downloaded at each load.

    Raises NotFoundError if there is no such version or none is live, CorruptError if its
    files don't match its manifest, BadInputError if its program isn't trusted.
    """

    def __init__(
        self,
        registry_or_root: Registry | Root,
        version: int | None = None,
        *,
        follow: Follow = "live",
        trust: TrustList | None = None,
        cache: Path | None = None,
    ) -> None:
        if isinstance(registry_or_root, Registry):
            self._registry = registry_or_root
        else:
            self._registry = open_registry(registry_or_root, must_exist=True)
        trust = trust or TrustList(config.trust_file())
        self._programs = ProgramCache(trust)
        self._packages = Packages(self._registry, trust)
        self._tables = TableCache(cache or config.cache_folder(), self._registry.prefix)
        self._pinned = version
        self._follow = follow
        self._sequence = 0
        self._refreshing = threading.Lock()
        self._refused: dict[int, tuple[_FileState, str]] = {}
        self._counting = threading.Lock()
        self._unknown_ids: Counter[str] = Counter()
        first = self._load(self._target())
        self._held: tuple[LoadedVersion, ...] = (first,)

    @property
    def current(self) -> LoadedVersion:
        """The version that answers now. It stays usable for whoever holds it."""
        return self._held[0]

    @property
    def loaded(self) -> Mapping[int, LoadedVersion]:
        """The current version and, after a swap, the previous one, by number."""
        return {v.version: v for v in self._held}

    @property
    def version(self) -> int:
        return self.current.version

    @property
    def unknown_ids(self) -> dict[str, int]:
        """How many ids without a row each feature has had since this object was made."""
        with self._counting:
            return dict(self._unknown_ids)

    def predict(self, request: Request) -> Prediction:
        """Answer a request, wholly from one version; BadInputError says what is wrong with it."""
        return self.predict_with(self.current, request)

    def predict_with(self, loaded: LoadedVersion, request: Request) -> Prediction:
        """The same from a version taken from `current` or `loaded` before."""
        prediction = loaded.predict(request)
        if prediction.unknown_ids:
            with self._counting:
                self._unknown_ids.update(prediction.unknown_ids)
        return prediction

    def refresh(self) -> bool:
        """Follow the pointer: load its version beside the current one, warm it up, then swap.

        True if another version answers now. The previous version stays loaded, so that going back
        to it costs one swap; requests in flight keep the version that they began with. A version that
        doesn't verify raises, the current one stays, and its files are read again only when
        one of them has changed.
        """
        with self._refreshing:
            target = self._target()
            if target == self.version:
                return False
            loaded = self.loaded.get(target) or self._load(target)
            self._held = (loaded, self.current)
            self._forget_others()
            return True

    def _target(self) -> int:
        if self._pinned is not None:
            return self._pinned
        move = self._registry.live()
        if move is not None and move.sequence < self._sequence:
            return self.version  # an old copy of the pointer, from a cache on the way: wait
        if move is not None:
            self._sequence = move.sequence
            if self._follow == "canary" and move.canary is not None:
                return move.canary
        if move is None or move.to_version is None:
            raise NotFoundError(f"{self._registry.url}: no version is live yet; publish one first")
        return move.to_version

    def _load(self, number: int) -> LoadedVersion:
        manifest = self._registry.version(number)
        state = self._file_state(manifest)
        refused = self._refused.get(number)
        if refused is not None and refused[0] == state:
            raise CorruptError(refused[1])
        try:
            loaded = self._load_whole(manifest)
        except CorruptError as e:
            self._refused[number] = (state, str(e))
            raise
        self._packages.use(loaded)
        self._refused.pop(number, None)
        return loaded

    def _load_whole(self, manifest: VersionManifest) -> LoadedVersion:
        """Whatever goes wrong with a version's content is CorruptError, which is remembered."""
        try:
            loaded = load_version(self._registry, manifest, self._programs, self._tables)
        except SidestageError:
            raise
        except Exception as e:
            raise CorruptError(
                f"version {manifest.version}: can't be loaded: {type(e).__name__}: {e}"
            ) from e
        try:
            loaded.warm_up()
        except (CorruptError, StorageError):
            raise
        except Exception as e:
            raise CorruptError(
                f"version {manifest.version}: its golden request isn't answered: {e}"
            ) from e
        return loaded

    def _forget_others(self) -> None:
        """Drop what was kept on disk of versions that aren't loaded any more."""
        digests = {f.digest for v in self._held for f in table_files(v.manifest)}
        self._tables.keep_only(self._registry.storage, digests)

    def _file_state(self, manifest: VersionManifest) -> _FileState:
        """Changes when any file of a version does; costs no reading."""
        prefix = self._registry.prefix + keys.version_prefix(manifest.version)
        return tuple((o.key, o.size_bytes, o.etag) for o in self._registry.storage.list(prefix))
