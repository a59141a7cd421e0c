"""Prometheus metrics of a serving host, at `/metrics`. See docs/publishing.md for the list."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_LOAD_S = (0.05, 0.25, 1.0, 5.0, 15.0, 60.0, 300.0)
_FRESHNESS_S = (0.5, 1.0, 2.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class ServingMetrics:
    """Counts requests by being called, and loads and first answers as an EventSink.

    Any thread may call. Series of versions that aren't loaded any more are dropped.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._define()
        self._versions: set[str] = set()
        self._handlers: dict[str, Callable[..., None]] = {
            "version_loaded": self._loaded,
            "version_not_loaded": lambda **_: self._failed_loads.inc(),
            "first_answer": self._first_answer,
            "clock_skew": lambda **_: self._skews.inc(),
        }

    def emit(self, name: str, /, **fields: Any) -> None:
        if handler := self._handlers.get(name):
            handler(**fields)

    def began(self) -> None:
        """An inference request was let in."""
        self._in_flight.inc()

    def ended(self) -> None:
        self._in_flight.dec()

    def answered(self, status: int, elapsed_s: float) -> None:
        """An inference request got its status, refused ones too."""
        self._requests.labels(str(status)).inc()
        if status == 200:
            self._latency.observe(elapsed_s)

    def refused(self, reason: str) -> None:
        """One that wasn't looked at: `busy`, `too_large`, `too_slow` or `unauthorised`."""
        self._refused.labels(reason).inc()

    def unknown_ids(self, counts: Mapping[str, int]) -> None:
        """Ids without a row, by feature."""
        for feature, count in counts.items():
            self._unknown.labels(feature).inc(count)

    def text(self) -> tuple[bytes, str]:
        """What `/metrics` answers, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _define(self) -> None:
        r = self._registry
        self._requests = Counter(
            "sidestage_requests", "Inference requests by HTTP status.", ["status"], registry=r
        )
        self._latency = Histogram(
            "sidestage_request_seconds",
            "From the first byte of a request that was answered to its answer.",
            registry=r,
            buckets=_LATENCY_S,
        )
        self._in_flight = Gauge(
            "sidestage_requests_in_flight", "Inference requests being read or answered.", registry=r
        )
        self._refused = Counter(
            "sidestage_requests_refused",
            "Requests refused unseen: busy, too_large, too_slow or unauthorised.",
            ["reason"],
            registry=r,
        )
        self._unknown = Counter(
            "sidestage_unknown_ids", "Ids without a row, by feature.", ["feature"], registry=r
        )
        self._version = Gauge(
            "sidestage_loaded_version", "The version that answers; NaN before any.", registry=r
        )
        self._version.set(math.nan)
        self._load = Histogram(
            "sidestage_version_load_seconds",
            "Time to load, check and warm up a version.",
            registry=r,
            buckets=_LOAD_S,
        )
        self._failed_loads = Counter(
            "sidestage_version_load_failures", "Versions that couldn't be loaded.", registry=r
        )
        self._engine = Gauge(
            "sidestage_engine_info",
            "What runs the program: its engine is a label.",
            ["engine"],
            registry=r,
        )
        self._freshness = {
            of: (
                Gauge(
                    f"sidestage_{of}_to_first_answer_seconds",
                    f"{text} to this host's first answer, by version.",
                    ["version"],
                    registry=r,
                ),
                Histogram(
                    f"sidestage_{of}_to_first_answer_distribution_seconds",
                    f"{text} to first answer, of versions that came while the host was up.",
                    registry=r,
                    buckets=_FRESHNESS_S,
                ),
            )
            for of, text in (
                ("commit", "From commit"),
                ("event", "From the event time of the newest trained batch"),
            )
        }
        self._skews = Counter(
            "sidestage_clock_skew",
            "First answers before their commit or event time: the clocks of hosts disagree.",
            registry=r,
        )

    def _loaded(
        self, version: int, load_s: float, engine: str, loaded: list[int], **_: Any
    ) -> None:
        self._version.set(version)
        self._load.observe(load_s)
        self._engine.clear()
        self._engine.labels(engine).set(1)
        for gone in self._versions - {str(n) for n in loaded}:
            for gauge, _distribution in self._freshness.values():
                with suppress(KeyError):  # a version without an event time has one series only
                    gauge.remove(gone)
            self._versions.discard(gone)

    def _first_answer(
        self,
        version: int,
        commit_to_answer_s: float,
        event_to_answer_s: float | None,
        *,
        at_start: bool,
        **_: Any,
    ) -> None:
        self._versions.add(str(version))
        figures = {"commit": commit_to_answer_s, "event": event_to_answer_s}
        for of, seconds in figures.items():
            if seconds is None:
                continue
            gauge, distribution = self._freshness[of]
            gauge.labels(str(version)).set(seconds)
            if not at_start:
                distribution.observe(seconds)
