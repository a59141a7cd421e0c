"""Structured events go to an injected sink; the library itself never prints."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("sidestage")

_WARN = frozenset(
    {
        "save_failed",
        "save_skipped",
        "checkpoint_set_aside",
        "not_restored",
        "prune_failed",
        "single_writer_only",
    }
)


class LogSink:
    """Writes each event as one line to the `sidestage` logger; trouble as a warning."""

    def emit(self, name: str, /, **fields: Any) -> None:
        level = logging.WARNING if name in _WARN else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(level, "%s %s", name, " ".join(f"{k}={v}" for k, v in fields.items()))


@dataclass
class ListSink:
    """Keeps events in memory, for tests and for callers that want to look."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def emit(self, name: str, /, **fields: Any) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[dict[str, Any]]:
        return [f for n, f in self.events if n == name]


class TeeSink:
    """Hands each event to several sinks."""

    def __init__(self, *sinks: Any) -> None:
        self._sinks = sinks

    def emit(self, name: str, /, **fields: Any) -> None:
        for sink in self._sinks:
            sink.emit(name, **fields)


class GuardedSink:
    """Passes events on, and keeps a sink that raises from harming a save."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def emit(self, name: str, /, **fields: Any) -> None:
        try:
            self._inner.emit(name, **fields)
        except Exception:
            _log.exception("the event sink failed at %s; the save goes on", name)
