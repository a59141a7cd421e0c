"""The first answer of each version on each host, kept in the registry: freshness as users see it.

    <registry>/answers/<version:06d>/<host>.json    create-only, a sealed `first_answer`

Freshness is measured twice, up to the moment when a host first answers a request from a version:
from its commit, which says how fast publishing is, and from the event time of the newest batch
that it was trained on, which says how old its knowledge is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import ClassVar

from ckpt.errors import ConflictError, CorruptError, NotFoundError
from ckpt.manifest import seal, unseal
from ckpt.typed import decode_stored
from ckpt.types import Buffer
from publisher.records import VersionManifest
from publisher.registry import Registry

ANSWERS = "answers/"
_KEY = re.compile(r"answers/\d{6,}/[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.json")


@dataclass(frozen=True)
class FirstAnswer:
    """When a host first answered from a version.

    commit_to_answer_s, event_to_answer_s: never below 0; the second is None if the trainer named
        no event time.
    at_start: the host loaded the version when it started, so the figures say how long the host
        was away, not how fast publishing is.
    """

    KIND: ClassVar[str] = "first_answer"

    version: int
    host: str
    first_answered_at_s: float
    commit_to_answer_s: float
    event_to_answer_s: float | None
    at_start: bool


def measure(
    manifest: VersionManifest, host: str, at_s: float, *, at_start: bool
) -> tuple[FirstAnswer, float]:
    """The record of a first answer at `at_s`, and by how many seconds clocks disagree.

    A commit or an event from the future gives 0 seconds, and the difference as the disagreement.
    """
    commit_s = at_s - manifest.committed_at_s
    event_s = None if manifest.event_time_s is None else at_s - manifest.event_time_s
    skew_s = max(0.0, -commit_s, 0.0 if event_s is None else -event_s)
    answer = FirstAnswer(
        version=manifest.version,
        host=host,
        first_answered_at_s=at_s,
        commit_to_answer_s=max(0.0, commit_s),
        event_to_answer_s=None if event_s is None else max(0.0, event_s),
        at_start=at_start,
    )
    return answer, skew_s


def host_id(name: str) -> str:
    """A host's name as it may stand in a key: other characters become `-`."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")
    return cleaned[:100] or "host"


def answers_prefix(version: int) -> str:
    return f"{ANSWERS}{version:06d}/"


def answer_key(version: int, host: str) -> str:
    return f"{answers_prefix(version)}{host}.json"


def record_answer(registry: Registry, answer: FirstAnswer) -> None:
    """Keep a first answer, unless this host has given one from this version before."""
    key = registry.prefix + answer_key(answer.version, answer.host)
    with suppress(ConflictError):
        registry.storage.create(key, seal(FirstAnswer.KIND, asdict(answer)))


class AnswerLog:
    """Reads first answers. They never change, so each is read once while this object lives."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._listed: dict[int, list[str]] = {}
        self._read: dict[str, FirstAnswer | None] = {}

    def of(
        self, versions: Iterable[int], *, settled: Collection[int] = (), most: int = 500
    ) -> dict[int, list[FirstAnswer]]:
        """By version, the first of them first; `most` records in all, those of newer versions.

        settled: versions that get no more first answers: listed once. A record that can't be read
        is left out: it stops nobody.
        """
        found: dict[int, list[FirstAnswer]] = {}
        for version in sorted(set(versions), reverse=True):
            keys = self._keys(version, again=version not in settled)[:most]
            most -= len(keys)
            answers = [a for key in keys if (a := self._answer(version, key)) is not None]
            if answers:
                found[version] = sorted(answers, key=lambda a: a.first_answered_at_s)
        return found

    def _keys(self, version: int, *, again: bool) -> list[str]:
        if again or version not in self._listed:
            prefix = self._registry.prefix
            listed = self._registry.storage.list(prefix + answers_prefix(version))
            names = (info.key.removeprefix(prefix) for info in listed)
            self._listed[version] = [prefix + name for name in names if _KEY.fullmatch(name)]
        return self._listed[version]

    def _answer(self, version: int, key: str) -> FirstAnswer | None:
        if key not in self._read:
            try:
                answer = _decode(self._registry.storage.read(key), key)
            except NotFoundError:  # deleted meanwhile
                return None
            except CorruptError:
                self._read[key] = None
                return None
            self._read[key] = answer if answer.version == version else None
        return self._read[key]


def _decode(data: Buffer, key: str) -> FirstAnswer:
    return decode_stored(FirstAnswer, unseal(FirstAnswer.KIND, data, key), key)
