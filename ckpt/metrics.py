"""Prometheus metrics of a checkpointer, fed by its events. Needs `pip install 'sidestage[metrics]'`.

registry = CollectorRegistry()
sink = chain(LogSink(), PrometheusSink(registry, {"rank": "0"}))
Checkpointer(root, sink=sink)
prometheus_client.start_http_server(9400, addr="127.0.0.1", registry=registry)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ckpt.errors import BadInputError
from ckpt.types import Clock, SystemClock

# Blocking is microseconds with guarded snapshots, seconds with copied ones.
_BLOCKED_S = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)
_PERSIST_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)


class PrometheusSink:
    """An EventSink that counts. `docs/operations.md` lists the metrics.

    Args:
        registry: where they are registered; prometheus_client's own by default.
        labels: of every series, such as the run's name and this rank.

    Raises BadInputError if the registry has such metrics already: give each checkpointer of a
    process a registry of its own, or share the sink.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._saved_at_s: dict[int, float] = {}  # of saves without an end, by step
        self._ended: set[int] = set()  # ended before save() had returned
        self._last_saved_at_s = math.nan
        self._labels = dict(labels or {})
        self._registry = registry or REGISTRY
        try:
            self._define()
        except ValueError as e:
            raise BadInputError(
                f"{e}; give this checkpointer a registry of its own, or share one sink"
            ) from e
        self._handlers: dict[str, Callable[..., None]] = {
            "save_staged": self._staged,
            "save_persisted": self._persisted,
            "save_committed": self._committed,
            "save_failed": self._failed,
            "save_skipped": self._skipped,
            "save_finished": lambda step, **_: self._last_step.set(step),
            "restored": lambda step, **_: self._last_step.set(step),
            "trainer_waited": lambda why, wait_s, **_: self._waited[why].inc(wait_s),
            "overlay": self._overlay,
            "untracked_write": lambda **_: self._untracked.inc(),
            "store_retried": lambda kind, **_: self._retried[kind].inc(),
        }

    def emit(self, name: str, /, **fields: Any) -> None:
        if handler := self._handlers.get(name):
            handler(**fields)

    def _define(self) -> None:
        self._blocked = self._histogram(
            "save_blocked_seconds", "Time that save() kept the trainer waiting.", _BLOCKED_S
        )
        self._persist = self._histogram(
            "save_persist_seconds", "Time to write this rank's part of a save.", _PERSIST_S
        )
        waits = Counter(
            "sidestage_trainer_wait_seconds",
            "Time that open snapshots kept the trainer waiting outside of save(), by what for.",
            [*self._labels, "why"],
            registry=self._registry,
        )
        self._waited = {
            w: waits.labels(**self._labels, why=w) for w in ("overlay", "fence", "slot")
        }
        retries = Counter(
            "sidestage_store_retries",
            "Calls that the store's client has repeated, by why.",
            [*self._labels, "kind"],
            registry=self._registry,
        )
        self._retried = {
            k: retries.labels(**self._labels, kind=k)
            for k in ("throttled", "outage", "credentials")
        }
        self._staged_bytes = self._counter("staged_bytes", "Bytes that save() copied.")
        self._guarded_bytes = self._counter(
            "guarded_bytes", "Bytes that save() left in place under guard."
        )
        self._persisted_bytes = self._counter(
            "persisted_bytes", "Bytes that this rank has written."
        )
        self._overlay_bytes = self._gauge("overlay_bytes", "Bytes of old rows kept for a snapshot.")
        self._overlay_fraction = self._gauge(
            "overlay_fraction", "Used part of the overlay's share."
        )
        self._pending = self._gauge("pending_saves", "Saves that have not ended.")
        self._lag = self._gauge(
            "save_lag_seconds", "Time from the last written save's save() to its receipt."
        )
        self._commits = self._counter("saves_committed", "Saves that have a commit.")
        self._failures = self._counter("saves_failed", "Saves that ended without a commit.")
        self._skips = self._counter("saves_skipped", "Saves given up by policy.")
        self._untracked = self._counter(
            "untracked_writes", "Tables found changed behind the guards."
        )
        self._last_step = self._gauge("last_committed_step", "Step of the last commit.")
        self._last_step.set(math.nan)
        age = self._gauge("last_committed_age_seconds", "Time since that step was saved.")
        age.set_function(lambda: self._clock.monotonic() - self._last_saved_at_s)

    def _staged(
        self, step: int, blocked_s: float, staged_bytes: int = 0, guarded_bytes: int = 0, **_: Any
    ) -> None:
        self._blocked.observe(blocked_s)
        self._staged_bytes.inc(staged_bytes)
        self._guarded_bytes.inc(guarded_bytes)
        with self._lock:
            if step in self._ended:
                self._ended.discard(step)
            else:
                self._saved_at_s[step] = self._clock.monotonic()
            self._pending.set(len(self._saved_at_s))

    def _persisted(self, bytes: int, persist_s: float, lag_s: float, **_: Any) -> None:  # noqa: A002
        self._persisted_bytes.inc(bytes)
        self._persist.observe(persist_s)
        self._lag.set(lag_s)

    def _committed(self, step: int, **_: Any) -> None:
        self._commits.inc()
        self._last_step.set(step)
        self._last_saved_at_s = self._end(step)

    def _failed(self, step: int | None, **_: Any) -> None:
        self._failures.inc()
        if step is not None:
            self._end(step)

    def _skipped(self, step: int, blocked_s: float | None = None, **_: Any) -> None:
        self._skips.inc()
        if blocked_s is None:  # by another rank, or while it was waiting to be written
            self._end(step)
        else:
            self._blocked.observe(blocked_s)

    def _overlay(self, bytes: int, fraction: float, **_: Any) -> None:  # noqa: A002
        self._overlay_bytes.set(bytes)
        self._overlay_fraction.set(fraction)

    def _end(self, step: int) -> float:
        """A save has ended; when it was made."""
        with self._lock:
            saved_at_s = self._saved_at_s.pop(step, None)
            if saved_at_s is None:
                self._ended.add(step)
                saved_at_s = self._clock.monotonic()
            self._pending.set(len(self._saved_at_s))
        return saved_at_s

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"sidestage_{name}", text, [*self._labels], registry=self._registry)
        return metric.labels(**self._labels) if self._labels else metric

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(f"sidestage_{name}", text, [*self._labels], registry=self._registry)
        return metric.labels(**self._labels) if self._labels else metric

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(
            f"sidestage_{name}", text, [*self._labels], registry=self._registry, buckets=buckets
        )
        return metric.labels(**self._labels) if self._labels else metric
