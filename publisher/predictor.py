"""The published model for Python hosts: load, answer, swap whole."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping

from ckpt import config
from ckpt.errors import CorruptError, NotFoundError
from ckpt.trust import TrustList
from publisher import keys
from publisher.loading import LoadedVersion, Prediction, ProgramCache, load_version
from publisher.records import VersionManifest
from publisher.registry import Registry, open_registry
from publisher.request import Request


class Predictor:
    """Answers requests from one version at a time. Any number of threads may use it.

    Args:
        registry_or_root: a registry, or the root whose `serving/` is one.
        version: the version to load; None: the live one, followed by `refresh()`.
        trust: the programs that may be loaded on this host; by default the operator's list.

    Raises NotFoundError if there is no such version or none is live, CorruptError if its
    files don't match its manifest, BadInputError if its program isn't trusted.
    """

    def __init__(
        self,
        registry_or_root: Registry | str | os.PathLike[str],
        version: int | None = None,
        *,
        trust: TrustList | None = None,
    ) -> None:
        if isinstance(registry_or_root, Registry):
            self._registry = registry_or_root
        else:
            self._registry = open_registry(os.fspath(registry_or_root), must_exist=True)
        self._programs = ProgramCache(trust or TrustList(config.trust_file()))
        self._pinned = version
        self._refreshing = threading.Lock()
        self._refused: tuple[tuple[object, ...], str] | None = None
        self._counting = threading.Lock()
        self._unknown_ids: Counter[str] = Counter()
        self._current = self._load(self._target())
        self._previous: LoadedVersion | None = None

    @property
    def current(self) -> LoadedVersion:
        """The version that answers now. It stays usable for whoever holds it."""
        return self._current

    @property
    def version(self) -> int:
        return self._current.version

    @property
    def loaded(self) -> Mapping[int, LoadedVersion]:
        """The current version and the one before it, by number."""
        versions = (self._previous, self._current)
        return {v.version: v for v in versions if v is not None}

    @property
    def unknown_ids(self) -> dict[str, int]:
        """How many ids outside their table each feature has had since this object was made."""
        with self._counting:
            return dict(self._unknown_ids)

    def predict(self, request: Request) -> Prediction:
        """Answer a request, wholly from one version; BadInputError says what is wrong with it."""
        return self.predict_with(self._current, request)

    def predict_with(self, loaded: LoadedVersion, request: Request) -> Prediction:
        """The same from a version taken from `current` before."""
        prediction = loaded.predict(request)
        if prediction.unknown_ids:
            with self._counting:
                self._unknown_ids.update(prediction.unknown_ids)
        return prediction

    def refresh(self) -> bool:
        """Follow the live pointer: load its version beside the current one, then swap.

        True if another version answers now. Requests in flight keep the version that they
        began with, and its memory is freed when the last of them is done. A version that
        doesn't verify raises, the current one stays, and its files are read again only when
        one of them has changed.
        """
        with self._refreshing:
            target = self._target()
            if target == self.version:
                return False
            self._previous, self._current = self._current, self._load(target)
            return True

    def _target(self) -> int:
        if self._pinned is not None:
            return self._pinned
        live = self._registry.live()
        if live is None:
            raise NotFoundError(f"{self._registry.url}: no version is live yet; publish one first")
        return live.to_version

    def _load(self, number: int) -> LoadedVersion:
        manifest = self._registry.version(number)
        state = self._file_state(manifest)
        if self._refused is not None and self._refused[0] == state:
            raise CorruptError(self._refused[1])
        try:
            loaded = load_version(self._registry, manifest, self._programs)
        except CorruptError as e:
            self._refused = (state, str(e))
            raise
        self._refused = None
        return loaded

    def _file_state(self, manifest: VersionManifest) -> tuple[object, ...]:
        """Changes when any file of a version does; costs no reading."""
        prefix = self._registry.prefix + keys.version_prefix(manifest.version)
        return tuple((o.key, o.size_bytes, o.etag) for o in self._registry.storage.list(prefix))
