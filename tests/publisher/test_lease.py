"""One publisher at a time: taking over, fencing, and the daemon as a standby. No clock runs here."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from publisher import keys
from publisher.daemon import Daemon
from publisher.lease import Lease, LeaseLostError, require_conditions
from publisher.registry import Registry
from tests.faults import FaultyStorage
from tests.publisher.conftest import Bench, FakeClock, make_bench
from tests.publisher.test_registry import WHY, go_live, make_version, source
from tests.publisher.tiny import TinyRun, random_tensors

TTL_S = 20.0


class Rivals:
    """Leases of several publishers on one registry; each has its own clock, as on its own machine."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.registry = Registry(self.storage)
        self.clocks = [FakeClock(1000.0), FakeClock(77.0)]
        self.a, self.b = (Lease(self.registry, ttl_s=TTL_S, clock=c) for c in self.clocks)

    def pass_s(self, seconds: float) -> None:
        for clock in self.clocks:
            clock.now_s += seconds

    def take_over(self) -> None:
        """b watches a stand still and follows it."""
        assert not self.b.acquire()
        self.pass_s(TTL_S)
        assert self.b.acquire()


@pytest.fixture
def rivals() -> Rivals:
    return Rivals()


def in_thread(work: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Start `work`; call the answer to wait for its end and for what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except SidestageError as e:
            raised.append(e)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> BaseException | None:
        thread.join()
        return raised[0] if raised else None

    return end


def test_the_first_one_has_it_and_the_next_gets_it_when_it_leaves(rivals: Rivals) -> None:
    assert rivals.a.acquire()
    assert rivals.a.acquire()  # still
    assert not rivals.b.acquire()
    assert rivals.b.rival is not None
    assert rivals.b.rival.epoch == rivals.a.epoch == 1
    rivals.a.release()
    assert rivals.b.acquire()  # at once
    assert rivals.b.epoch == 2
    rivals.a.release()  # not its own any more: nothing happens
    stored = rivals.registry.lease()
    assert stored is not None
    assert not stored.released


def test_an_owner_that_beats_keeps_it_and_one_that_stands_still_loses_it(rivals: Rivals) -> None:
    assert rivals.a.acquire()
    for _ in range(10):
        assert not rivals.b.acquire()
        rivals.pass_s(TTL_S / 2)
        rivals.a.check()
    rivals.take_over()
    assert rivals.b.epoch == 2
    with pytest.raises(LeaseLostError, match=r"lease 1 was lost to pid \d+ on .* \(lease 2\)"):
        rivals.a.check()
    assert not rivals.a.held
    assert not rivals.a.acquire()  # a candidate again


def test_only_what_a_rival_watched_itself_counts(rivals: Rivals) -> None:
    """However old a record is by anybody's wall clock, a new rival watches it for the whole time."""
    assert rivals.a.acquire()
    rivals.pass_s(1e6)
    assert not rivals.b.acquire()
    rivals.pass_s(TTL_S - 1)
    assert not rivals.b.acquire()
    rivals.pass_s(1)
    assert rivals.b.acquire()


def test_check_costs_nothing_between_beats() -> None:
    faulty = FaultyStorage(MemoryStorage())
    clock = FakeClock()
    lease = Lease(Registry(faulty), ttl_s=TTL_S, clock=clock)
    assert lease.acquire()
    before = len(faulty.calls)
    lease.check()
    assert len(faulty.calls) == before
    clock.now_s += TTL_S / 4
    lease.check()
    assert [op for op, _ in faulty.calls[before:]] == ["stat", "read", "replace_if"]


@pytest.mark.parametrize("op", ["create", "replace_if"])
def test_lost_replies_are_recognised(op: str) -> None:
    faulty = FaultyStorage(MemoryStorage())
    clock = FakeClock()
    lease = Lease(Registry(faulty), ttl_s=TTL_S, clock=clock)
    faulty.on(op, "*lease.json").lose_reply(ConflictError("412"))
    assert lease.acquire()
    clock.now_s += TTL_S
    lease.check()
    assert lease.epoch == 1


def test_a_storage_failure_is_no_loss() -> None:
    faulty = FaultyStorage(MemoryStorage())
    clock = FakeClock()
    lease = Lease(Registry(faulty), ttl_s=TTL_S, clock=clock)
    assert lease.acquire()
    clock.now_s += TTL_S
    faulty.on("replace_if", "*lease.json").fail(StorageError("503"))
    with pytest.raises(StorageError, match="503"):
        lease.check()
    lease.check()
    assert lease.held


def test_an_older_lease_moves_the_pointer_no_more(rivals: Rivals) -> None:
    registry = rivals.registry
    assert rivals.a.acquire()
    first = make_version(registry, source(1))
    registry.release(first, WHY, canary=False, lease_epoch=rivals.a.epoch)
    second = make_version(registry, source(2))
    rivals.take_over()  # before anything is published under the new lease
    with pytest.raises(LeaseLostError, match="under lease 2, this publisher holds 1"):
        registry.release(second, WHY, canary=False, lease_epoch=1)
    assert [m.to_version for m in registry.history()] == [1]
    registry.release(second, WHY, canary=False, lease_epoch=2)
    registry.rollback(None, WHY)  # an operator needs no lease, and takes none away
    assert [m.lease_epoch for m in registry.history()] == [1, 2, 2]
    with pytest.raises(LeaseLostError):
        registry.check_lease(1)
    registry.check_lease(2)


def test_a_move_that_was_under_way_loses_against_the_fence(rivals: Rivals) -> None:
    """The old owner has read the pointer and decided; the new one comes; then it writes."""
    faulty = FaultyStorage(rivals.storage)
    old = Registry(faulty)
    go_live(old, source(1))
    manifest = make_version(old, source(2))
    assert rivals.a.acquire()
    gate = faulty.on("replace_if", "*live.json").block()

    import threading

    raised: list[BaseException] = []

    def release() -> None:
        try:
            old.release(manifest, WHY, canary=False, lease_epoch=1)
        except LeaseLostError as e:
            raised.append(e)

    thread = threading.Thread(target=release)
    thread.start()
    gate.wait_reached()
    rivals.take_over()
    gate.open()
    thread.join()
    assert len(raised) == 1
    live = rivals.registry.live()
    assert live is not None
    assert live.to_version == 1


def test_a_version_of_an_older_lease_is_not_sealed(rivals: Rivals) -> None:
    assert rivals.a.acquire()
    rivals.take_over()
    with pytest.raises(LeaseLostError, match="lease 2 was taken, this publisher holds 1"):
        make_version(rivals.registry, source(1), lease_epoch=1)
    assert rivals.registry.numbers() == []


@pytest.mark.parametrize("killed", [False, True])
def test_a_manifest_that_comes_after_a_takeover_makes_no_version(
    rivals: Rivals, killed: bool
) -> None:
    """The old owner is paused before it; the new one publishes the same commit, and deletes the files."""
    assert rivals.a.acquire()
    faulty = FaultyStorage(rivals.storage)
    fault = faulty.on("create", "*manifest.json")
    if killed:
        fault.lose_reply(StorageError("killed"))
    gate = fault.block()
    raised = in_thread(lambda: make_version(Registry(faulty), source(1), lease_epoch=1))
    gate.wait_reached()
    rivals.take_over()
    registry = rivals.registry
    go_live(registry, source(1))
    registry.prune(1)
    assert sorted(registry.contents()) == [2]
    gate.open()
    assert type(raised()) is (StorageError if killed else LeaseLostError)
    assert registry.numbers() == [2]
    found = registry.find(source(1))
    assert found is not None
    assert found.version == 2
    assert registry.prune(1) == []
    assert sorted(registry.contents()) == [2]


@pytest.mark.parametrize("used", [False, True])
def test_what_was_sealed_during_a_takeover_goes_unless_it_is_live(
    rivals: Rivals, used: bool
) -> None:
    """The manifest is written under the old lease; the new owner finds it before that is noticed."""
    assert rivals.a.acquire()
    faulty = FaultyStorage(rivals.storage)
    gate = faulty.on("read", "*lease.json").nth(2).block()
    raised = in_thread(lambda: make_version(Registry(faulty), source(1), lease_epoch=1))
    gate.wait_reached()
    rivals.take_over()
    registry = rivals.registry
    if used:
        found = registry.find(source(1), whole=True)
        assert found is not None
        registry.release(found, WHY, lease_epoch=2)
    gate.open()
    assert type(raised()) is LeaseLostError
    assert registry.numbers() == ([1] if used else [])
    if not used:  # nothing can move there any more
        assert go_live(registry, source(1)) is not None
        assert registry.numbers() == [2]


def test_the_first_move_of_all_is_fenced_too(rivals: Rivals) -> None:
    """There is no live version yet: the old owner has decided on the first one; a new owner comes."""
    assert rivals.a.acquire()
    assert rivals.registry.live() is None
    first = make_version(rivals.registry, source(1))
    faulty = FaultyStorage(rivals.storage)
    gate = faulty.on("replace_if", "*live.json").block()
    raised = in_thread(lambda: Registry(faulty).release(first, WHY, lease_epoch=1))
    gate.wait_reached()
    rivals.take_over()
    gate.open()
    assert type(raised()) is LeaseLostError
    assert rivals.registry.live() is None
    assert rivals.registry.history() == []
    with pytest.raises(NotFoundError, match="no version is live yet"):
        rivals.registry.rollback(None, WHY)
    move = rivals.registry.release(first, WHY, canary=True, lease_epoch=2)
    assert move is not None
    assert (move.kind, move.sequence, move.from_version, move.lease_epoch) == (
        "publish",
        1,
        None,
        2,
    )


def test_an_owner_that_wakes_up_before_it_told_the_pointer_has_no_lease() -> None:
    storage = MemoryStorage()
    faulty = FaultyStorage(storage)
    old, clock = Lease(Registry(faulty), ttl_s=TTL_S, clock=FakeClock()), FakeClock()
    gate = faulty.on("create", "*live.json").block()
    raised = in_thread(old.acquire)
    gate.wait_reached()
    new = Lease(Registry(storage), ttl_s=TTL_S, clock=clock)
    assert not new.acquire()
    clock.now_s += TTL_S
    assert new.acquire()
    gate.open()
    assert type(raised()) is LeaseLostError
    assert not old.held


def test_a_lease_counts_only_once_the_pointer_was_told() -> None:
    faulty = FaultyStorage(MemoryStorage())
    registry = Registry(faulty)
    go_live(registry, source(1))
    lease = Lease(registry, clock=FakeClock())
    faulty.on("replace_if", "*live.json").fail(StorageError("503"))
    with pytest.raises(StorageError, match="503"):
        lease.acquire()
    assert not lease.held
    assert lease.acquire()
    pointer = registry.pointer()
    assert pointer is not None
    assert lease.epoch == pointer.lease_epoch == 1


def test_a_deleted_lease_file_starts_no_second_count(rivals: Rivals) -> None:
    go_live(rivals.registry, source(1))
    assert rivals.a.acquire()
    rivals.take_over()
    rivals.storage.delete("serving/" + keys.LEASE)
    fresh = Lease(rivals.registry, clock=rivals.clocks[0])
    assert fresh.acquire()
    assert fresh.epoch == 3


def test_a_damaged_lease_says_how_to_mend_it(rivals: Rivals) -> None:
    rivals.storage.put("serving/" + keys.LEASE, b"{")
    with pytest.raises(CorruptError, match=r"lease\.json: .* stop all publishers .* delete it"):
        rivals.a.acquire()


def test_once_names_an_owner_that_lives_and_follows_one_that_is_dead(rivals: Rivals) -> None:
    assert rivals.a.acquire()

    def alive(seconds: float) -> None:
        rivals.pass_s(seconds)
        rivals.a.check()

    with pytest.raises(ConflictError, match=r"pid \d+ on .* publishes into it"):
        rivals.b.acquire_or_fail(alive)
    waited: list[float] = []

    def dead(seconds: float) -> None:
        waited.append(seconds)
        rivals.pass_s(seconds)

    rivals.b.acquire_or_fail(dead)
    assert rivals.b.epoch == 2
    assert sum(waited) == TTL_S


def test_kept_renews_in_a_thread_and_releases(rivals: Rivals) -> None:
    lease = Lease(rivals.registry, ttl_s=0.04)
    seen = set()
    with lease.kept():
        assert lease.acquire()
        while len(seen) < 3:
            stored = rivals.registry.lease()
            assert stored is not None
            seen.add(stored.beats)
    stored = rivals.registry.lease()
    assert stored is not None
    assert stored.released


def test_a_store_without_conditions_is_refused() -> None:
    class Careless(MemoryStorage):
        def probe(self) -> bool:
            return False

    with pytest.raises(BadInputError, match="doesn't honour conditional writes.*--registry"):
        require_conditions(Careless())
    require_conditions(MemoryStorage())


# -- daemons --------------------------------------------------------------------------------


def leased(bench: Bench, clock: FakeClock, sink_of: Bench) -> Daemon:
    publisher = sink_of.publisher(lease=Lease(bench.registry, ttl_s=TTL_S, clock=clock))
    return Daemon(lambda: publisher, lambda _: False, clock=clock, sink=sink_of.sink)


def test_a_standby_takes_over_and_the_paused_owner_stands_by(trust: TrustList) -> None:
    bench = make_bench(MemoryStorage(), trust)
    other = Bench(TinyRun(bench.run.root, trust), bench.registry, bench.clock)
    first, second = leased(bench, bench.clock, bench), leased(bench, bench.clock, other)
    bench.run.commit(1, random_tensors(1))
    assert first.tick() is not None
    for _ in range(3):
        assert second.tick() is None
    (told,) = other.sink.named("standby")
    assert "(lease 1) publishes" in told["reason"]
    bench.run.commit(2, random_tensors(2))
    bench.clock.now_s += TTL_S  # the first one is paused
    outcome = second.tick()
    assert outcome is not None
    assert outcome.live
    bench.run.commit(3, random_tensors(3))
    assert first.tick() is None
    assert len(bench.sink.named("lease_lost")) == 1
    assert first.tick() is None
    assert len(bench.sink.named("standby")) == 1
    assert second.tick() is not None
    assert [(m.to_version, m.lease_epoch) for m in bench.registry.history()] == [
        (1, 1),
        (2, 2),
        (3, 2),
    ]
    assert bench.registry.refusals() == []
