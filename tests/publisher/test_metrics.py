"""The metrics of a serving host: what is documented, and whose series are kept."""

from __future__ import annotations

import math
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from ckpt.events import chain
from publisher.metrics import ServingMetrics

DOCS = Path(__file__).parents[2] / "docs" / "publishing.md"


def test_all_are_documented_and_no_others() -> None:
    registry = CollectorRegistry()
    ServingMetrics(registry)
    kept = {f.name + ("_total" if f.type == "counter" else "") for f in registry.collect()}
    section = DOCS.read_text().split("### Metrics")[1].split("###")[0]
    assert set(re.findall(r"`(sidestage_[a-z_]+)", section)) == kept


def test_loads_and_first_answers_come_as_events() -> None:
    registry = CollectorRegistry()
    sink = chain(metrics := ServingMetrics(registry))
    value = registry.get_sample_value
    assert math.isnan(value("sidestage_loaded_version") or 0)
    for version, loaded in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
        sink.emit("version_loaded", version=version, load_s=2.0, engine="eager", loaded=loaded)
        sink.emit(
            "first_answer",
            version=version,
            commit_to_answer_s=1.5,
            event_to_answer_s=None if version == 2 else 40.0,
            at_start=version == 1,
        )
    sink.emit("version_not_loaded", reason="x")
    sink.emit("clock_skew", version=3, reason="x")
    sink.emit("something_else", whatever=1)
    by_version = [
        value(f"sidestage_{of}_to_first_answer_seconds", {"version": v})
        for of in ("commit", "event")
        for v in ("1", "2", "3")
    ]
    assert by_version == [None, 1.5, 1.5, None, None, 40.0]
    assert value("sidestage_commit_to_first_answer_distribution_seconds_count") == 2
    assert value("sidestage_event_to_first_answer_distribution_seconds_count") == 1
    assert value("sidestage_loaded_version") == 3
    assert value("sidestage_version_load_seconds_sum") == 6
    assert value("sidestage_version_load_failures_total") == 1
    assert value("sidestage_clock_skew_total") == 1
    assert value("sidestage_engine_info", {"engine": "eager"}) == 1
    sink.emit("version_loaded", version=4, load_s=1.0, engine="aot", loaded=[3, 4])
    assert value("sidestage_engine_info", {"engine": "eager"}) is None
    text, media_type = metrics.text()
    assert b'sidestage_engine_info{engine="aot"} 1.0' in text
    assert media_type.startswith("text/plain")
