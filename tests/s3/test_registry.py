"""The registry on an object store: one owner at a time, fenced moves, and retention."""

from __future__ import annotations

import pytest

from ckpt.storage.s3 import S3Storage
from publisher.lease import Lease, LeaseLostError, require_conditions
from publisher.registry import Registry
from tests.publisher.conftest import FakeClock
from tests.publisher.test_registry import WHY, go_live, make_version, source


def test_takeover_fencing_rollback_and_retention(storage: S3Storage) -> None:
    require_conditions(storage)
    registry, clock = Registry(storage), FakeClock()
    old, new = (Lease(registry, clock=clock) for _ in range(2))
    assert old.acquire()
    for step in (1, 2, 3):
        go_live(registry, source(step))
    late = make_version(registry, source(4))
    assert not new.acquire()
    clock.now_s += 20
    assert new.acquire()
    with pytest.raises(LeaseLostError):
        registry.release(late, WHY, lease_epoch=old.epoch)
    with pytest.raises(LeaseLostError):
        old.check()
    assert registry.release(late, WHY, lease_epoch=new.epoch) is not None
    assert registry.rollback(None, WHY).to_version == 3
    registry.pin(1, WHY)
    assert registry.prune(1) == []  # 4 is the newest, 3 live, 2 what was live before, 1 pinned
    registry.unpin(1)
    assert registry.prune(1) == [1]
    assert sorted(registry.contents()) == [2, 3, 4]
    new.release()
    assert old.acquire()
    assert [m.lease_epoch for m in registry.history()] == [1, 1, 1, 2, 2]
