"""The Prometheus sink: what each event does, and that the documentation lists all of it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ckpt.errors import BadInputError
from ckpt.events import ListSink, chain
from ckpt.metrics import PrometheusSink

ROOT = Path(__file__).parent.parent.parent


class FakeClock:
    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"sidestage_{name}", labels)
    assert found is not None, f"{name} {labels}"
    return found


def test_each_event_feeds_its_metrics() -> None:
    registry, clock = CollectorRegistry(), FakeClock()
    sink = PrometheusSink(registry, clock=clock)
    assert math.isnan(value(registry, "last_committed_age_seconds"))
    sink.emit("save_staged", step=1, blocked_s=0.002, staged_bytes=10, guarded_bytes=90)
    assert value(registry, "pending_saves") == 1
    clock.now_s = 103.0
    sink.emit("save_persisted", step=1, bytes=100, persist_s=2.0, lag_s=2.5)
    sink.emit("save_committed", step=1, epoch=1)
    assert value(registry, "pending_saves") == 0
    assert value(registry, "last_committed_step") == 1
    assert value(registry, "last_committed_age_seconds") == 3.0, "what would be lost now"
    clock.now_s = 110.0
    assert value(registry, "last_committed_age_seconds") == 10.0, "computed when it is read"
    sink.emit("save_staged", step=2, blocked_s=0.2)
    sink.emit("save_failed", step=2, error="no room")
    sink.emit("save_skipped", step=3, error="busy", blocked_s=0.01)  # without a snapshot
    sink.emit("save_skipped", step=4, error="rank 1: busy")  # ends before save() has returned
    sink.emit("save_staged", step=4, blocked_s=0.0)
    sink.emit("trainer_waited", why="overlay", wait_s=0.5)
    sink.emit("trainer_waited", why="fence", wait_s=0.25)
    sink.emit("trainer_waited", why="slot", wait_s=1.0)
    sink.emit("overlay", bytes=77, fraction=0.5)
    sink.emit("untracked_write", step=2, table="t", rows=[3])
    sink.emit("an_event_of_a_later_version", anything=1)
    expected = {
        "save_blocked_seconds_count": 4,
        "save_blocked_seconds_sum": 0.212,
        "save_persist_seconds_sum": 2.0,
        "save_lag_seconds": 2.5,
        "staged_bytes_total": 10,
        "guarded_bytes_total": 90,
        "persisted_bytes_total": 100,
        "overlay_bytes": 77,
        "overlay_fraction": 0.5,
        "pending_saves": 0,
        "saves_committed_total": 1,
        "saves_failed_total": 1,
        "saves_skipped_total": 2,
        "untracked_writes_total": 1,
        "last_committed_step": 1,
    }
    assert {name: value(registry, name) for name in expected} == pytest.approx(expected)
    waits = {w: value(registry, "trainer_wait_seconds_total", why=w) for w in ("overlay", "fence")}
    assert waits == {"overlay": 0.5, "fence": 0.25}
    assert value(registry, "trainer_wait_seconds_total", why="slot") == 1.0


def test_labels_are_on_every_series() -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry, {"run": "a", "rank": "3"})
    sink.emit("save_staged", step=1, blocked_s=0.1)
    samples = [s for metric in registry.collect() for s in metric.samples]
    assert samples
    assert all(s.labels["run"] == "a" and s.labels["rank"] == "3" for s in samples)
    assert b'sidestage_pending_saves{rank="3",run="a"} 1.0' in generate_latest(registry)


def test_a_registry_holds_one_sink() -> None:
    registry = CollectorRegistry()
    PrometheusSink(registry)
    with pytest.raises(BadInputError, match="a registry of its own"):
        PrometheusSink(registry)


class Raising:
    def emit(self, name: str, /, **fields: Any) -> None:
        raise RuntimeError("no")


def test_a_chain_reaches_every_sink_whatever_one_does() -> None:
    first, last = ListSink(), ListSink()
    chain(first, Raising(), last).emit("save_committed", step=1)
    assert first.events == last.events == [("save_committed", {"step": 1})]


def test_the_documented_table_has_each_metric_with_its_type() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    documented = dict(re.findall(r"^\| `(sidestage_\w+)` \| (\w+) \|", text, re.MULTILINE))
    registry = CollectorRegistry()
    PrometheusSink(registry)
    exported = {
        m.name + ("_total" if m.type == "counter" else ""): m.type for m in registry.collect()
    }
    assert documented == exported
