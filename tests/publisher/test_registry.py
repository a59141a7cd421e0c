"""Versions, the live pointer, its history, and refusals."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from ckpt.digest import digest_of
from ckpt.errors import ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from ckpt.types import FileEntry
from publisher import keys
from publisher.lease import Lease
from publisher.pointer import Reason
from publisher.records import Move, Refusal, Source, VersionManifest, decode, encode
from publisher.registry import Registry
from tests.faults import FaultyStorage
from tests.publisher.conftest import FakeClock

WHY = Reason("tester@here", "test")


def source(step: int, epoch: int = 1, run_id: str = "run") -> Source:
    return Source(run_id, epoch, step, f"xxh3-128:{epoch:016x}{step:016x}")


def registry_in(storage: Storage) -> Registry:
    return Registry(storage, clock=FakeClock())


def make_version(registry: Registry, of: Source, lease_epoch: int | None = None) -> VersionManifest:
    """A version with one file and nothing in it; under the newest lease, if not told otherwise."""
    if lease_epoch is None:
        lease_epoch = registry.lease_epoch()
    number = registry.claim(of, WHY.who, lease_epoch)
    registry.storage.create(registry.key(number, "file"), b"content")
    manifest = VersionManifest(
        version=number,
        parent=None,
        source=of,
        dense_step=of.step,
        table_step=of.step,
        id_map_step=of.step,
        saved_at_s=1.0,
        committed_at_s=2.0,
        event_time_s=None,
        model="m",
        description_id="d",
        files=(FileEntry("file", 7, digest_of(b"content")),),
        tables=(),
        gates=(),
        published_by=WHY.who,
        lease_epoch=lease_epoch,
        started_at_s=3.0,
        published_at_s=4.0,
    )
    registry.seal(manifest)
    return manifest


def go_live(registry: Registry, of: Source, *, canary: bool = False) -> Move | None:
    made = make_version(registry, of)
    return registry.release(made, WHY, canary=canary, lease_epoch=made.lease_epoch)


@pytest.fixture
def registry(any_storage: Storage) -> Registry:
    return registry_in(any_storage)


def test_version_round_trip_and_find(registry: Registry) -> None:
    made = make_version(registry, source(3))
    assert registry_in(registry.storage).version(1) == made
    assert registry.find(source(3)) == made
    assert registry.find(source(4)) is None
    assert registry.find(source(3, run_id="other")) is None


def test_numbers_of_dead_publishers_are_never_reused(registry: Registry) -> None:
    dead = registry.claim(source(1), "dead")
    registry.storage.create(registry.key(dead, keys.DENSE), b"half")
    assert make_version(registry, source(1)).version == dead + 1
    assert registry.numbers() == [dead + 1]
    with pytest.raises(NotFoundError, match="no version 1 here; the newest are: 2"):
        registry.version(dead)


def test_racing_claims_get_different_numbers(registry: Registry) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: got.append(registry.claim(source(n), "x")))
        for n in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(got) == list(range(1, 9))


def test_seal_wants_every_file_with_its_size(registry: Registry) -> None:
    made = make_version(registry, source(1))
    number = registry.claim(source(2), "x")
    with pytest.raises(CorruptError, match="missing from version 2"):
        registry.seal(replace(made, version=number, source=source(2)))
    registry.storage.create(registry.key(number, "file"), b"short")
    with pytest.raises(CorruptError, match="has 5 bytes, the manifest of version 2 says 7"):
        registry.seal(replace(made, version=number, source=source(2)))
    assert registry.numbers() == [1]


def test_discard_keeps_the_number_and_refuses_a_version(registry: Registry) -> None:
    make_version(registry, source(1))
    with pytest.raises(ConflictError, match="can't be discarded"):
        registry.discard(1)
    number = registry.claim(source(2), "x")
    registry.storage.create(registry.key(number, keys.TABLES), b"half")
    registry.discard(number)
    left = [o.key for o in registry.storage.list(registry.prefix + keys.version_prefix(number))]
    assert left == [registry.key(number, keys.CLAIM)]
    assert registry.claim(source(2), "x") == number + 1


def test_a_manifest_cut_short_is_no_version(registry: Registry) -> None:
    make_version(registry, source(1))
    key = registry.key(1, keys.MANIFEST)
    registry.storage.put(key, registry.storage.read(key)[:-20])
    fresh = registry_in(registry.storage)
    with pytest.raises(CorruptError, match=r"versions/000001/manifest\.json"):
        fresh.version(1)
    assert fresh.find(source(1)) is None


def test_another_prefix_is_another_registry() -> None:
    storage = MemoryStorage()
    go_live(Registry(storage, "a/"), source(1))
    assert Registry(storage, "b/").live() is None
    assert Registry(storage, "").live() is None
    live = Registry(storage, "a/").live()
    assert live is not None
    assert live.to_version == 1


# -- going live -----------------------------------------------------------------------------


def live_version(registry: Registry) -> int:
    live = registry.live()
    assert live is not None
    return live.to_version


def test_newer_commits_go_live_and_history_tells(registry: Registry) -> None:
    assert registry.live() is None
    assert registry.history() == []
    for step in (1, 2, 3):
        move = go_live(registry, source(step))
        assert move is not None
    assert [(m.from_version, m.to_version) for m in registry.history()] == [
        (None, 1),
        (1, 2),
        (2, 3),
    ]
    assert [m.sequence for m in registry.history()] == [1, 2, 3]
    assert registry.history()[0].who == "tester@here"


def test_d53_an_older_commit_never_goes_live_by_itself(registry: Registry) -> None:
    go_live(registry, source(3))
    assert go_live(registry, source(2)) is None
    assert live_version(registry) == 1
    go_live(registry, source(1, epoch=2))  # a newer attempt that went back to an older step
    assert live_version(registry) == 3
    assert go_live(registry, source(900, epoch=1)) is None  # a zombie of the older attempt
    assert live_version(registry) == 3


def test_d53_rollback_stays_until_a_newer_commit(registry: Registry) -> None:
    made = [make_version(registry, source(step)) for step in (1, 2, 3)]
    for manifest in made:
        registry.release(manifest, WHY)
    move = registry.rollback(None, Reason("op@here", "bad clicks"))
    assert (move.kind, move.from_version, move.to_version, move.why) == (
        "rollback",
        3,
        2,
        "bad clicks",
    )
    assert registry.release(made[2], WHY) is None  # what the daemon would do: nothing
    assert live_version(registry) == 2
    go_live(registry, source(4))
    assert live_version(registry) == 4


def test_d53_rollback_twice_to_a_pruned_one_and_with_none_left(registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="no version is live yet"):
        registry.rollback(None, WHY)
    for step in (1, 2, 3):
        go_live(registry, source(step))
    assert registry.rollback(None, WHY).to_version == 2
    assert registry.rollback(None, WHY).to_version == 1
    with pytest.raises(NotFoundError, match="no version was live before version 1"):
        registry.rollback(None, WHY)
    assert registry.rollback(3, WHY).to_version == 3  # forward again, by name
    with pytest.raises(ConflictError, match="version 3 is live already"):
        registry.rollback(3, WHY)
    with pytest.raises(NotFoundError, match="no version 9"):
        registry.rollback(9, WHY)
    registry.storage.delete(registry.key(2, keys.MANIFEST))
    with pytest.raises(NotFoundError, match="no version 2 here; the newest are: 1, 3"):
        registry_in(registry.storage).rollback(2, WHY)
    assert live_version(registry) == 3
    assert [m.to_version for m in registry.history()] == [1, 2, 3, 2, 1, 3]


def test_after_rollback_and_a_new_version_rollback_goes_to_what_was_live(
    registry: Registry,
) -> None:
    for step in (1, 2, 3):
        go_live(registry, source(step))
    registry.rollback(None, WHY)
    go_live(registry, source(4))
    assert registry.rollback(None, WHY).to_version == 2
    assert registry.rollback(None, WHY).to_version == 1


def test_rollback_to_a_damaged_version_is_refused(registry: Registry) -> None:
    for step in (1, 2):
        go_live(registry, source(step))
    registry.storage.put(registry.key(1, "file"), b"longer than that")
    with pytest.raises(CorruptError, match="version 1 says 7"):
        registry.rollback(None, WHY)
    assert live_version(registry) == 2


def test_two_runs_in_one_registry_keep_their_own_order(registry: Registry) -> None:
    go_live(registry, source(500, epoch=3, run_id="a"))
    go_live(registry, source(10, run_id="b"))
    assert live_version(registry) == 2
    assert go_live(registry, source(400, epoch=3, run_id="a")) is None
    assert live_version(registry) == 2


def test_a_publisher_killed_before_the_history_leaves_it_to_the_next(any_storage: Storage) -> None:
    faulty = FaultyStorage(any_storage)
    go_live(registry_in(any_storage), source(1))
    faulty.on("create", "*history/000000002.json").fail(StorageError("gone"))
    assert go_live(registry_in(faulty), source(2)) is not None
    fresh = registry_in(any_storage)
    assert [m.to_version for m in fresh.history()] == [1, 2]  # the pointer tells its own move
    fresh.rollback(None, WHY)
    stored = [o.key for o in any_storage.list("serving/history/")]
    assert len(stored) == 3
    assert [m.to_version for m in registry_in(any_storage).history()] == [1, 2, 1]


@pytest.mark.parametrize("first", [True, False])
def test_a_lost_reply_is_recognised_as_our_own_move(any_storage: Storage, first: bool) -> None:
    if not first:
        go_live(registry_in(any_storage), source(1))
    faulty = FaultyStorage(any_storage)
    op = "create" if first else "replace_if"
    faulty.on(op, "serving/live.json").lose_reply(ConflictError("412"))
    move = go_live(registry_in(faulty), source(2))
    assert move is not None
    assert registry_in(any_storage).live() == move
    assert len(registry_in(any_storage).history()) == (1 if first else 2)


def test_racing_publishers_make_one_history(any_storage: Storage) -> None:
    made = [make_version(registry_in(any_storage), source(step)) for step in range(1, 9)]
    start = threading.Barrier(len(made))

    def promote(manifest: VersionManifest) -> None:
        start.wait()
        registry_in(any_storage).release(manifest, WHY)

    threads = [threading.Thread(target=promote, args=(m,)) for m in made]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    moves = registry_in(any_storage).history()
    assert [m.sequence for m in moves] == list(range(1, len(moves) + 1))
    assert all(b.from_version == a.to_version for a, b in pairwise(moves))
    assert moves[-1].to_version == 8
    steps = [m.source.step for m in moves]
    assert steps == sorted(steps)


def test_a_damaged_pointer_says_how_to_mend_it(registry: Registry) -> None:
    for step in (1, 2):
        go_live(registry, source(step))
    key = registry.prefix + keys.LIVE
    registry.storage.put(key, registry.storage.read(key)[:40])
    with pytest.raises(CorruptError, match=r"live\.json: .*rollback ROOT --to N"):
        registry.live()
    registry.storage.delete(key)
    with pytest.raises(NotFoundError, match="name the version with --to"):
        registry.rollback(None, WHY)
    move = registry.rollback(2, WHY)
    assert (move.sequence, move.from_version, move.to_version) == (3, None, 2)
    assert go_live(registry, source(1)) is None  # the history still knows what was live
    assert go_live(registry, source(3)) is not None


# -- canary ---------------------------------------------------------------------------------


def state(registry: Registry) -> tuple[int, int | None]:
    """(live, canary)"""
    live = registry.live()
    assert live is not None
    return live.to_version, live.canary


def test_a_canary_is_promoted_and_rollback_undoes_it(registry: Registry) -> None:
    go_live(registry, source(1), canary=True)
    assert state(registry) == (
        1,
        None,
    )  # with nothing live there is nothing to compare a canary with
    go_live(registry, source(2), canary=True)
    go_live(registry, source(3), canary=True)
    assert state(registry) == (1, 3)  # a new one replaces the old one
    with pytest.raises(ConflictError, match="the canary is version 3, not 2"):
        registry.promote(WHY, 2)
    move = registry.promote(Reason("op@here", "looks good"), 3)
    assert (move.kind, move.from_version, move.to_version) == ("promote", 1, 3)
    assert state(registry) == (3, None)
    assert registry.rollback(None, WHY).to_version == 1
    with pytest.raises(NotFoundError, match="no version was live before version 1"):
        registry.rollback(None, WHY)
    with pytest.raises(NotFoundError, match="there is no canary to promote"):
        registry.promote(WHY)
    assert [(m.kind, m.to_version, m.canary, m.source.step) for m in registry.history()] == [
        ("publish", 1, None, 1),
        ("canary", 1, 2, 2),
        ("canary", 1, 3, 3),
        ("promote", 3, None, 3),
        ("rollback", 1, None, 1),
    ]


def test_d53_a_canary_neither_comes_back_nor_goes_live_by_itself(registry: Registry) -> None:
    go_live(registry, source(1))
    canary = make_version(registry, source(3))
    registry.release(canary, WHY, canary=True)
    assert registry.release(canary, WHY, canary=True) is None
    assert registry.release(canary, WHY, canary=False) is None
    assert go_live(registry, source(2)) is None
    assert not registry.is_newer(source(3), registry.live())
    assert state(registry) == (1, canary.version)


def test_rollback_leaves_the_canary_unless_it_goes_live(registry: Registry) -> None:
    for step in (1, 2):
        go_live(registry, source(step))
    go_live(registry, source(3), canary=True)
    registry.rollback(None, WHY)
    assert state(registry) == (1, 3)
    registry.rollback(3, WHY)  # by name
    assert state(registry) == (3, None)
    registry.rollback(None, WHY)
    assert state(registry) == (1, None)


def test_a_newer_version_that_goes_live_directly_ends_the_canary(registry: Registry) -> None:
    go_live(registry, source(1))
    go_live(registry, source(2), canary=True)
    go_live(registry, source(3))
    assert state(registry) == (3, None)
    assert registry.rollback(None, WHY).to_version == 1


# -- pins and retention ---------------------------------------------------------------------


def test_pins_tell_who_and_why_and_stay_until_removed(registry: Registry) -> None:
    go_live(registry, source(1))
    made = registry.pin(1, Reason("op@here", "audit"))
    assert registry_in(registry.storage).pins() == {1: made}
    assert (made.who, made.why, made.at_s) == ("op@here", "audit", 1000.0)
    with pytest.raises(ConflictError, match="version 1 is pinned already"):
        registry.pin(1, WHY)
    with pytest.raises(NotFoundError, match="no version 9 here"):
        registry.pin(9, WHY)
    registry.unpin(1)
    assert registry.pins() == {}
    with pytest.raises(NotFoundError, match="version 1 isn't pinned"):
        registry.unpin(1)


def stored_numbers(registry: Registry) -> list[int]:
    return sorted(registry.contents())


def test_retention_keeps_what_may_be_needed(registry: Registry) -> None:
    for step in range(1, 9):
        go_live(registry, source(step))
    registry.pin(2, WHY)
    registry.rollback(4, WHY)  # live 4, and rollback from there leads to 3
    go_live(registry, source(9), canary=True)
    go_live(registry, source(10, run_id="other"), canary=True)
    assert registry.prune(0) == []
    assert registry.prune(1, dry_run=True) == [1, 5, 6, 7, 8, 9]
    assert registry.numbers() == list(range(1, 11))
    assert registry.prune(1) == [1, 5, 6, 7, 8, 9]
    assert registry.numbers() == stored_numbers(registry) == [2, 3, 4, 10]
    assert state(registry) == (4, 10)
    assert registry.rollback(None, WHY).to_version == 3
    with pytest.raises(NotFoundError, match="no version 1 here; the newest are: 2, 3, 4, 10"):
        registry.rollback(1, WHY)
    assert registry.claim(source(11), "x") == 11  # numbers aren't reused


def test_d53_rollback_to_a_version_that_retention_deleted(registry: Registry) -> None:
    for step in (1, 2, 3):
        go_live(registry, source(step))
    other = registry_in(registry.storage)
    assert other.version(1).version == 1  # it has read the manifest before
    assert registry.prune(1) == [1]
    other.rollback(None, WHY)
    with pytest.raises(
        NotFoundError, match="version 1 was live before, but is gone: .*; name one with --to"
    ):
        other.rollback(None, WHY)
    with pytest.raises(NotFoundError, match="no version 1 here"):
        other.rollback(1, WHY)
    assert live_version(registry) == 2


def test_retention_killed_anywhere_is_finished_by_the_next(any_storage: Storage) -> None:
    faulty = FaultyStorage(any_storage)
    for step in range(1, 5):
        go_live(registry_in(any_storage), source(step))
    for n in range(1, 4):
        faulty.on("delete", "*versions/*").nth(n).fail(StorageError("killed"))
        with pytest.raises(StorageError, match="killed"):
            registry_in(faulty).prune(1)
        fresh = registry_in(any_storage)
        assert set(fresh.numbers()) >= {3, 4}
        assert all(fresh.check_files(fresh.version(v)) is None for v in fresh.numbers())
    registry_in(any_storage).prune(1)
    assert stored_numbers(registry_in(any_storage)) == [3, 4]


def test_nothing_moves_to_a_version_that_is_being_deleted(any_storage: Storage) -> None:
    """A rollback that had looked at the version before retention told the pointer loses, and is told."""
    faulty = FaultyStorage(any_storage)
    for step in (1, 2, 3):
        go_live(registry_in(any_storage), source(step))
    gate = faulty.on("replace_if", "*live.json").block()
    raised: list[BaseException] = []

    def roll_back() -> None:
        try:
            registry_in(faulty).rollback(1, WHY)
        except NotFoundError as e:
            raised.append(e)

    thread = threading.Thread(target=roll_back)
    thread.start()
    gate.wait_reached()
    stuck = FaultyStorage(any_storage)
    stuck.on("delete", "*manifest.json").fail(StorageError("killed"))
    with pytest.raises(StorageError):
        registry_in(stuck).prune(1)
    gate.open()
    thread.join()
    assert "version 1 is being deleted by retention" in str(raised[0])
    with pytest.raises(NotFoundError, match="version 1 is being deleted"):
        registry_in(any_storage).pin(1, WHY)
    assert registry_in(any_storage).pins() == {}
    assert live_version(registry_in(any_storage)) == 3


def test_the_pointer_never_has_the_same_content_twice(registry: Registry) -> None:
    """Else an etag that is a digest of it would let a move through that was decided long ago."""
    for step in (1, 2, 3):
        go_live(registry, source(step))
    seen = {registry.storage.read("serving/live.json")}
    registry.prune(1)
    seen.add(registry.storage.read("serving/live.json"))
    registry.prune(1)  # nothing is being deleted any more, as before the first one
    seen.add(registry.storage.read("serving/live.json"))
    assert len(seen) == 3
    pointer = registry.pointer()
    assert pointer is not None
    assert (pointer.retired, pointer.changes) == ((), 4)


def test_a_pin_set_while_retention_begins_is_honoured(any_storage: Storage) -> None:
    faulty = FaultyStorage(any_storage)
    for step in (1, 2, 3):
        go_live(registry_in(any_storage), source(step))
    gate = faulty.on("replace_if", "*live.json").block()
    deleted: list[int] = []
    thread = threading.Thread(target=lambda: deleted.extend(registry_in(faulty).prune(1)))
    thread.start()
    gate.wait_reached()  # it has looked for pins, and not told the pointer yet
    registry_in(any_storage).pin(1, WHY)
    gate.open()
    thread.join()
    assert deleted == []
    registry = registry_in(any_storage)
    assert registry.numbers() == [1, 2, 3]
    assert registry.rollback(1, WHY).to_version == 1  # nothing is held against it


def test_a_pin_between_two_prunes_is_refused_or_honoured(any_storage: Storage) -> None:
    """The first has told the pointer and is about to delete; the pin is set; a second one comes."""
    for step in (1, 2, 3):
        go_live(registry_in(any_storage), source(step))
    first, pinning = FaultyStorage(any_storage), FaultyStorage(any_storage)
    deletes = first.on("delete", "*manifest.json").block()
    looks = pinning.on("stat", "*live.json").block()  # the pin is there, the pointer not looked at
    refused: list[BaseException] = []

    def pin() -> None:
        try:
            registry_in(pinning).pin(1, WHY)
        except NotFoundError as e:
            refused.append(e)

    threads = [threading.Thread(target=registry_in(first).prune, args=(1,))]
    threads.append(threading.Thread(target=pin))
    threads[0].start()
    deletes.wait_reached()
    threads[1].start()
    looks.wait_reached()
    registry_in(any_storage).prune(1)
    looks.open()
    threads[1].join()
    deletes.open()
    threads[0].join()
    registry = registry_in(any_storage)
    assert "version 1 is being deleted by retention" in str(refused[0])
    assert (registry.numbers(), registry.pins()) == ([2, 3], {})


@pytest.mark.parametrize("kind", ["rollback", "promote"])
def test_an_operator_moves_only_what_was_seen(any_storage: Storage, kind: str) -> None:
    """Another version goes live after the move was decided on and before it is written."""
    for step in (1, 2):
        go_live(registry_in(any_storage), source(step))
    go_live(registry_in(any_storage), source(3), canary=True)
    faulty = FaultyStorage(any_storage)
    gate = faulty.on("replace_if", "*live.json").block()
    raised: list[BaseException] = []

    def move() -> None:
        try:
            if kind == "promote":
                registry_in(faulty).promote(WHY, 3, expected=2)
            else:
                registry_in(faulty).rollback(None, WHY, expected=2)
        except ConflictError as e:
            raised.append(e)

    thread = threading.Thread(target=move)
    thread.start()
    gate.wait_reached()
    registry_in(any_storage).rollback(1, WHY)  # leaves the canary
    gate.open()
    thread.join()
    assert "version 1 is live by now, not 2" in str(raised[0])
    assert live_version(registry_in(any_storage)) == 1
    assert registry_in(any_storage).promote(WHY, 3, expected=1).to_version == 3


def test_what_dead_publishers_left_is_cleared_away(registry: Registry) -> None:
    """Half a version goes once its lease is over; what is in the making under the current one stays."""
    for epoch in (1, 2):
        half = registry.claim(source(epoch), "x", epoch)
        registry.storage.create(registry.key(half, keys.DENSE), b"half")
    lease = Lease(registry)
    assert lease.acquire()
    lease.release()
    assert lease.acquire()  # lease 2
    go_live(registry, source(9))
    high = registry.claim(source(10), "x", 1)
    assert registry.prune(5) == []
    assert stored_numbers(registry) == [2, 3, high]


# -- D52 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["dense_step", "table_step", "id_map_step"])
def test_d52_a_version_of_two_steps_is_refused(registry: Registry, part: str) -> None:
    made = make_version(registry, source(200))
    number = registry.claim(source(100), "x")
    registry.storage.create(registry.key(number, "file"), b"content")
    mixed = replace(made, version=number, source=source(100), dense_step=100, table_step=100)
    mixed = replace(replace(mixed, id_map_step=100), **{part: 200})  # type: ignore[arg-type]
    registry.storage.create(registry.key(number, keys.MANIFEST), encode(mixed))
    with pytest.raises(CorruptError, match=r"don't belong together: .* of step 200"):
        registry.version(number)
    with pytest.raises(CorruptError, match="don't belong together"):
        registry.release(mixed, WHY)
    assert registry.live() is None


# -- refusals -------------------------------------------------------------------------------


def test_every_refusal_is_kept(registry: Registry) -> None:
    def refuse(of: Source) -> Refusal:
        return registry.refuse(Refusal(of, 0, "finite", "NaN", (), 1, "x", 5.0))

    assert [refuse(source(7)).attempt for _ in range(3)] == [1, 2, 3]
    other_run = replace(source(7), run_id="other")
    assert refuse(other_run).attempt == 4  # the keys are shared, the counts are not
    assert len(registry.refusals(source(7))) == 3
    assert len(registry.refusals(other_run)) == 1
    assert registry.refusals(source(70)) == []
    assert len(registry.refusals()) == 4


def test_documents_are_read_strictly() -> None:
    move = Move(1, "publish", None, 1, None, source(1), 0, "w", "y", 1.0, None, (source(1),), "t")
    data = encode(move)
    assert decode(Move, data, "k") == move
    for bad in (
        data[:-10],
        data.replace(b'"to_version":1', b'"to_version":2'),
        encode(replace(move, to_version=-1)),
        encode(replace(move, kind="delete")),  # type: ignore[arg-type]
        encode(replace(move, newest=({"run_id": "x"},))),  # type: ignore[arg-type]
        encode(replace(move, who=3)),  # type: ignore[arg-type]
        encode(Refusal(source(1), 1, "finite", "", (), None, "w", 1.0)),
    ):
        with pytest.raises(CorruptError, match="k: "):
            decode(Move, bad, "k")


def test_open_local_registry_elsewhere(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from publisher.registry import open_registry

    registry = open_registry(str(tmp_path / "root"), str(tmp_path / "registry"))
    go_live(registry, source(1))
    assert isinstance(registry.storage, LocalStorage)
    assert (tmp_path / "registry/live.json").exists()


def test_a_pointer_that_was_lost_and_mended_rolls_back_to_what_was_live_before(
    registry: Registry,
) -> None:
    for step in (1, 2, 3):
        go_live(registry, source(step))
    registry.storage.delete(f"{registry.prefix}live.json")
    assert registry.rollback(3, WHY).to_version == 3
    assert registry.rollback(None, WHY).to_version == 2
