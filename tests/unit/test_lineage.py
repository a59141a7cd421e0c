"""The lineage of roots that lost something, against a model that knows what was lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.commit import claim_epoch, next_epoch, open_run
from ckpt.errors import ConflictError, CorruptError, NotFoundError
from ckpt.events import ListSink
from ckpt.identity import identify
from ckpt.manifest import OriginRecord, encode
from ckpt.storage import MemoryStorage
from ckpt.types import CommitRef, SystemClock
from tests.fake_run import RUN_ID, FakeRun

Place = tuple[int, int]


@dataclass
class Model:
    """What a run's attempts did: what each continued, and its commits that are left."""

    parents: dict[int, Place | None] = field(default_factory=dict)
    commits: dict[Place, CommitRef] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def lineage(self) -> list[Place]:
        """That of the newest attempt that anything tells of."""
        for epoch in sorted(self.parents, reverse=True):
            if not self._told(epoch):
                continue
            if found := self._lineage(epoch):
                return found
            if self.parents[epoch] is not None:
                return []
        return []

    def _told(self, epoch: int) -> bool:
        return epoch not in self.lost or any(e == epoch for e, _ in self.commits)

    def _lineage(self, epoch: int) -> list[Place]:
        found, below = [], float("inf")
        while True:
            found += sorted(
                (p for p in self.commits if p[0] == epoch and p[1] <= below), reverse=True
            )
            parent = self.parents.get(epoch) if self._told(epoch) else None
            if parent is None:
                return found
            epoch, below = parent


@st.composite
def runs(draw: st.DrawFn) -> tuple[MemoryStorage, Model]:
    """A run with attempts that go on, go back or start afresh, zombies and retention; maybe a branch."""
    storage, model = MemoryStorage(), Model()
    run = FakeRun(storage)
    first = draw(st.integers(1, 3))
    if draw(st.booleans()):
        run.attempt(first)
        ref = run.commit(
            first,
            7,
            CommitRef(first, 5, "xxh3-128:00"),
            run_id="source",
            continues=CommitRef(0, 3, "xxh3-128:00"),
        )
        origin = OriginRecord("/source", "source", ref, (f"data/{first:06d}-",), None, 0.0)
        storage.create(layout.ORIGIN, encode(origin))
        model.parents[first], model.commits[first, 7] = None, ref
        first += 1
    step = st.integers(1, 4)
    for epoch in range(first, first + draw(st.integers(1, 5))):
        lineage = model.lineage()
        parent = draw(st.sampled_from([*lineage[:1], *lineage, None])) if lineage else None
        ref = None if parent is None else model.commits[parent]
        run.attempt(epoch, ref)
        model.parents[epoch] = parent
        at, before = (parent[1] if parent else 0), ref
        for _ in range(draw(st.integers(0, 3))):
            at += draw(step)
            before = model.commits[epoch, at] = run.commit(epoch, at, before)
        older = sorted({e for e, _ in model.commits if first <= e < epoch})
        if older and draw(st.integers(0, 3)) == 0:  # an attempt that doesn't know that it is over
            zombie = draw(st.sampled_from(older))
            at = max(s for e, s in model.commits if e == zombie) + draw(step)
            model.commits[zombie, at] = run.commit(zombie, at)
        if (kept := model.lineage()) and draw(st.booleans()):  # all but the latest may go
            others = sorted(set(model.commits) - {kept[0]})
            for place in draw(st.sets(st.sampled_from(others))) if others else ():
                del model.commits[place]
                storage.delete(layout.commit_key(*place))
    return storage, model


@given(runs(), st.data())
def test_is_the_same_whatever_records_are_lost_but_the_commits(
    made: tuple[MemoryStorage, Model], data: st.DataObject
) -> None:
    """E35, E36: only an attempt without record and without commits is forgotten."""
    storage, model = made
    catalog = Catalog(storage)
    assert [(c.ref.epoch, c.ref.step) for c in catalog.lineage()] == model.lineage()
    records = [o.key for o in storage.list() if not o.key.startswith((layout.COMMITS, layout.DATA))]
    for key in sorted(data.draw(st.sets(st.sampled_from([*records]))) - {layout.ORIGIN}):
        if data.draw(st.booleans()):
            storage.delete(key)
        else:
            storage.put(key, storage.read(key)[: data.draw(st.sampled_from([0, 40]))])
        if (epoch := layout.parse_attempt_key(key)) is not None:
            model.lost.add(epoch)
    expected = model.lineage()
    found = catalog.lineage()
    assert [(c.ref.epoch, c.ref.step) for c in found] == expected
    assert all(c.record is not None for c in found), "none is taken for another run's"
    latest = catalog.latest()
    assert (None if latest is None else (latest.ref.epoch, latest.ref.step)) == (
        expected[0] if expected else None
    )
    assert bool(expected) == bool(model.commits), "a root with commits never begins from scratch"
    for info in catalog.commits():
        place = (info.ref.epoch, info.ref.step)
        wanted = (
            "latest" if place in expected[:1] else "ancestor" if place in expected else "abandoned"
        )
        assert info.status == wanted
    try:
        run = open_run(storage, SystemClock(), ListSink())
    except CorruptError:  # RUN.json is damaged, and no record tells whose run this is
        assert all(ref.step == 7 for ref in model.commits.values())
        return
    if any(place[1] != 7 for place in model.commits):
        assert run.run_id == RUN_ID
    claimed = claim_epoch(storage, run, 1, None, SystemClock())
    assert claimed.epoch > max((e for e, _ in model.commits), default=0)
    assert [(c.ref.epoch, c.ref.step) for c in catalog.lineage()] == expected


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def run(storage: MemoryStorage) -> FakeRun:
    return FakeRun(storage)


def lineage(storage: MemoryStorage) -> list[str]:
    return [f"{c.ref.epoch}/{c.ref.step}" for c in Catalog(storage).lineage()]


def losses(storage: MemoryStorage) -> dict[str, str]:
    found: dict[str, str] = {}
    Catalog(storage).lineage(lambda key, why: found.update({key: why}))
    return found


class TestLosses:
    def test_of_a_sound_root(self, storage: MemoryStorage, run: FakeRun) -> None:
        run.attempt(1)
        a = run.commit(1, 10)
        run.attempt(2, a)
        run.commit(2, 20, a)
        storage.delete(layout.commit_key(1, 10))  # by retention
        run.attempt(3, None)
        assert losses(storage) == {}

    def test_an_attempt_of_which_nothing_is_left_but_a_damaged_record(
        self, storage: MemoryStorage, run: FakeRun
    ) -> None:
        """It may have gone back to step 10: that 20 is taken is said."""
        run.attempt(1)
        run.commit(1, 10)
        run.commit(1, 20)
        storage.put(layout.attempt_key(2), b"")
        assert lineage(storage) == ["1/20", "1/10"]
        ((key, why),) = losses(storage).items()
        assert key == layout.attempt_key(2)
        assert why.endswith("what it continued isn't known; epoch 1, step 20 is taken")

    def test_a_lineage_that_ends_because_nothing_says_where_it_goes_on(
        self, storage: MemoryStorage, run: FakeRun
    ) -> None:
        run.attempt(1)
        a = run.commit(1, 10)
        run.attempt(2, a)
        b = run.commit(2, 20, a)
        run.attempt(3, b)
        run.commit(3, 30, b)
        storage.delete(layout.commit_key(2, 20))
        assert lineage(storage) == ["3/30", "1/10"]
        storage.delete(layout.attempt_key(2))
        assert lineage(storage) == ["3/30"]
        ((key, why),) = losses(storage).items()
        assert key == layout.attempt_key(2)
        assert why.endswith("what it continued isn't known, so nothing older is used")
        assert {c.ref.step: c.problem is not None for c in Catalog(storage).commits()} == {
            10: True,
            30: False,
        }

    def test_the_commit_that_the_newest_attempt_continues(
        self, storage: MemoryStorage, run: FakeRun
    ) -> None:
        """An older ancestor is taken and that is said; where there is none, nothing abandoned is."""
        run.attempt(1)
        run.commit(1, 5)
        a = run.commit(1, 10)
        run.commit(1, 15)
        run.attempt(2, a)
        storage.delete(layout.commit_key(1, 10))
        assert lineage(storage) == ["1/5"]
        ((key, why),) = losses(storage).items()
        assert key == layout.commit_key(1, 10)
        assert why == "attempts/000002.json continues it, and it is gone; epoch 1, step 5 is taken"
        storage.delete(layout.commit_key(1, 5))
        catalog = Catalog(storage)
        with pytest.raises(
            CorruptError, match=r"is gone with all before it.*`ckpt branch memory://"
        ):
            catalog.lineage()
        assert catalog.latest() is None
        assert [c.status for c in catalog.commits()] == ["abandoned"]


def test_two_jobs_in_one_epoch_are_never_mixed(storage: MemoryStorage, run: FakeRun) -> None:
    """As on a store that can't keep writers apart, of which the record is then lost."""
    run.commit(1, 10)
    run.commit(1, 20, attempt_token="another")
    assert Catalog(storage).latest() is not None
    infos = Catalog(storage).commits()
    assert [(c.ref.step, c.status) for c in infos] == [(10, "corrupt"), (20, "latest")]
    assert str(infos[0].problem).endswith("isn't by the attempt in the newest commit of its epoch")


class TestIdentity:
    def test_of_a_root_that_nobody_has_used(self, storage: MemoryStorage) -> None:
        assert identify(storage) is None

    def test_is_that_of_the_attempts_where_there_is_no_commit(
        self, storage: MemoryStorage, run: FakeRun
    ) -> None:
        run.attempt(1)
        storage.delete(layout.RUN)
        found = identify(storage)
        assert found is not None
        assert found.record.run_id == RUN_ID
        assert "taken from its 1 attempts" in str(found.lost)

    def test_of_several_runs_is_refused(self, storage: MemoryStorage, run: FakeRun) -> None:
        run.attempt(1)
        run.commit(1, 10)
        run.commit(1, 20, run_id="other")
        run.commit(1, 30, run_id="other")
        assert identify(storage) is not None  # by RUN.json
        storage.delete(layout.RUN)
        words = r"commits are of 2 runs \(run run-1: 1, as commits/000001/000000000010\.json; run other: 2"
        for call in (
            Catalog(storage).run,
            Catalog(storage).latest,
            lambda: open_run(storage, SystemClock()),
        ):
            with pytest.raises(ConflictError, match=words):
                call()

    def test_that_nothing_tells(self, storage: MemoryStorage, run: FakeRun) -> None:
        storage.put(layout.RUN, b"")
        with pytest.raises(CorruptError, match="or remove it if a new run is to begin here"):
            identify(storage)
        run.commit(1, 10)
        key = layout.commit_key(1, 10)
        storage.put(key, storage.read(key)[:50])
        with pytest.raises(CorruptError, match="1 of its commits can't be read"):
            identify(storage)

    def test_of_a_branch_that_lost_where_it_is_from(
        self, storage: MemoryStorage, run: FakeRun
    ) -> None:
        """Its own commits name the one of another run by its digest."""
        run.attempt(1)
        begun = run.commit(1, 10, run_id="source")
        run.attempt(2, begun)
        run.commit(2, 20, begun)
        for gone in (layout.attempt_key(1), layout.attempt_key(2), layout.RUN):
            storage.delete(gone)
            assert lineage(storage) == ["2/20", "1/10"]
            assert Catalog(storage).find(10).record is not None
        assert Catalog(storage).run().run_id == RUN_ID


def test_an_epoch_that_has_left_anything_is_never_claimed_again(
    storage: MemoryStorage, run: FakeRun
) -> None:
    run.attempt(1)
    run.commit(3, 10)
    storage.put(f"{layout.data_prefix(4, 20, '000001')}r00000.bin", b"x")
    storage.put(layout.ledger_key(5, 1), b"x")
    assert next_epoch(storage) == 4
    mine = Catalog(storage).run()
    assert claim_epoch(storage, mine, 1, None, SystemClock()).epoch == 6
    storage.delete(layout.attempt_key(6))
    assert claim_epoch(storage, mine, 1, None, SystemClock(), epoch=4).epoch == 4
    assert claim_epoch(storage, mine, 1, None, SystemClock(), epoch=4).epoch == 6
    with pytest.raises(NotFoundError):
        storage.read(layout.attempt_key(5))
