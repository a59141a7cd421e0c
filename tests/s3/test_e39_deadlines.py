"""E39: a store that answered 503 for ever held a save far beyond its deadline, and training with it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from ckpt import CheckpointConfig, Checkpointer
from ckpt.config import MIB
from ckpt.errors import DeadlineError, SaveSkippedError, StorageError
from ckpt.events import ListSink, chain
from ckpt.metrics import PrometheusSink
from ckpt.storage.limits import limited
from tests.s3.fake import FakeS3

SOON_S = 10.0
"""What no wait of these tests comes near; the client's own patience is 30 s at least."""


def state(step: int, mib: int = 0) -> dict[str, Any]:
    return {"w": torch.randn(1 + mib * MIB // 4), "step": step}


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("method", "text", "mib", "hangs"),
    [
        ("PUT", "", 0, False),
        ("PUT", "partNumber=", 12, False),
        ("PUT", "partNumber=", 12, True),
        ("POST", "uploads", 12, True),
    ],
)
def test_case_e39_training_and_saves_keep_their_deadlines(
    method: str, text: str, mib: int, hangs: bool
) -> None:
    """It answers 503 for ever, or not at all: to small objects, to parts (of writer threads), at a begin."""
    sink, registry = ListSink(), CollectorRegistry()
    config = CheckpointConfig(commit_timeout_s=2.0, stall_limit_s=0.2, compression="off")
    with FakeS3() as server:
        events = chain(sink, PrometheusSink(registry))
        with Checkpointer(server.storage("run"), config, sink=events) as c:
            c.restore(state(0, mib))
            rule = server.on(method, text).always()
            if hangs:
                rule.block()
            else:
                rule.answer(503, "SlowDown")
            began_s = time.monotonic()
            first = c.save(1, state(1, mib))
            skipped = [c.save(step, state(step, mib)) for step in (2, 3, 4)]
            for handle in skipped:
                assert isinstance(handle.committed.exception(SOON_S), SaveSkippedError)
            waited = [e["wait_s"] for e in sink.named("trainer_waited") if e["why"] == "slot"]
            assert 0.15 < sum(waited) < SOON_S
            assert len(waited) == 1, "once: later saves wait no more before one commits"
            error = first.committed.exception(SOON_S)
            assert time.monotonic() - began_s < SOON_S
            assert isinstance(error, DeadlineError)
            assert "the time that its caller gave it is over" in str(error)
            assert hangs or "503" in str(error) or "SlowDown" in str(error)
            server.rules.clear()
            if rule.gate is not None:
                rule.gate.open()
            c.wait()
            assert c.save(5, state(5, mib)).committed.result(60).step == 5
            assert (c.stats.commits, c.stats.failed, c.stats.skipped) == (1, 1, 3)
        retried = sink.named("store_retried")
        assert c.stats.store_retries == len(retried)
        count = registry.get_sample_value("sidestage_store_retries_total", {"kind": "throttled"})
        if not hangs:
            assert count == len(retried) > 0
            assert {e["kind"] for e in retried} == {"throttled"}
            assert retried[0]["key"].startswith("s3://fake/run/data/")
            assert "throttles (SlowDown" in retried[0]["error"]
            assert retried[0]["pause_s"] > 0


@pytest.mark.usefixtures("credentials")
def test_a_call_without_a_limit_has_the_patience_of_the_client() -> None:
    told: list[tuple[str, str, str, float]] = []
    with FakeS3() as server:
        storage = server.storage()
        storage.create("a", b"1")
        server.on("PUT", "/b").times(2).answer(503, "SlowDown")
        with limited(None, lambda *retried: told.append(retried)):
            storage.create("b", b"2")
        assert [(key, kind) for key, kind, _, _ in told] == [("s3://fake/b", "throttled")] * 2
        with limited(0.0), pytest.raises(DeadlineError, match="s3://fake/c: no answer; the time"):
            storage.create("c", b"3")
        storage.create("d", b"3")  # what was cut off may have arrived
        server.on("GET", "/a").answer(403, "AccessDenied")
        with limited(60.0), pytest.raises(StorageError, match="access denied"):
            storage.read("a")
