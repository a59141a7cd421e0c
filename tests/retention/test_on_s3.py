"""Retention and the doctor on a real S3 server."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer
from ckpt.branch import create_branch
from ckpt.catalog import Catalog
from ckpt.config import MIB, RetentionPolicy, S3Settings
from ckpt.doctor import Probe, examine_store
from ckpt.layout import DATA, PINS
from ckpt.prune import Pruner
from ckpt.storage import open_storage
from ckpt.storage.s3 import S3Storage
from ckpt.storage.s3client import S3Client
from ckpt.types import SystemClock
from tests.retention.test_prune import Run
from tests.s3.server import BUCKET, SeaweedFS

KEEP_1 = CheckpointConfig(keep_last=1)


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((3000,), value)}


@pytest.fixture
def url(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SIDESTAGE_S3_ENDPOINT", seaweedfs.endpoint)
    monkeypatch.setenv("SIDESTAGE_S3_REGION", "us-east-1")
    return f"s3://{BUCKET}/retention/{secrets.token_hex(6)}"


def test_a_branch_and_retention_on_both_sides(url: str) -> None:
    with Checkpointer(f"{url}/source", KEEP_1) as c:
        ref = c.save(1, state(1)).committed.result()
        create_branch(open_storage(f"{url}/source"), ref, open_storage(f"{url}/target"))
        for step in (2, 3):
            c.save(step, state(step)).committed.result()
        c.wait()
        assert c.stats.prune_failed == 0
    live = state(0)
    with Checkpointer(f"{url}/target", KEEP_1) as c:
        result = c.restore(live)
        assert result is not None
        assert live["t"].unique().tolist() == [1.0]
        c.save(5, state(5)).committed.result()
        c.wait()
        assert (c.stats.pruned, c.stats.prune_failed) == (1, 0)
    source = open_storage(f"{url}/source")
    assert [c.ref.step for c in Catalog(source).commits()] == [1, 3]
    assert not list(source.list(PINS))


def test_parts_of_killed_writers_are_dropped_with_their_save(seaweedfs: SeaweedFS) -> None:
    settings = S3Settings(seaweedfs.endpoint, "us-east-1", part_bytes=5 * MIB)
    client = S3Client(BUCKET, settings)
    storage = S3Storage(client, f"retention/{secrets.token_hex(6)}")
    run = Run(storage, 1)
    for step in (2, 7):  # of the dead attempt; of one that may be running
        key = storage._key(f"{DATA}00000{1 + step // 5}-{step:012d}-000002/r00000.bin")
        client.run(client.call("create_multipart_upload", {"Key": key}))
    run.attempt(2, run.refs[1])
    pruner = Pruner(storage, RetentionPolicy(), SystemClock())
    plan = pruner.plan()
    assert [s.step for s in plan.strays] == [2]
    assert pruner.apply(plan).problems == []
    assert ["-000000000007-" in u.key for u in storage.unfinished()] == [True]
    found = {f.name: f for f in examine_store(storage, SystemClock(), Probe(1 << 20, 5.0))[0]}
    assert found["uploads"].values == {"unfinished": 1}
    for upload in storage.unfinished():
        storage.abort(upload)


def test_the_doctor(url: str) -> None:
    storage = open_storage(url)
    findings, speeds = examine_store(storage, SystemClock(), Probe(6 << 20, 5.0))
    found = {f.name: f for f in findings}
    assert {f.level for f in findings} == {"ok"}, findings
    assert abs(found["clock"].values["skew_s"] or 0) <= 2
    assert speeds.write
    assert speeds.read
    assert list(storage.list()) == []
