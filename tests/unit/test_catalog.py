from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.errors import CorruptError, NotFoundError, StorageError, UnsupportedFormatError
from ckpt.manifest import RunRecord, canonical, encode, seal
from ckpt.storage import LocalStorage, MemoryStorage
from ckpt.types import CommitRef
from tests.fake_run import RUN_ID, FakeRun
from tests.faults import FaultyStorage


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def run(storage: MemoryStorage) -> FakeRun:
    return FakeRun(storage)


@pytest.fixture
def catalog(storage: MemoryStorage) -> Catalog:
    return Catalog(storage)


def statuses(catalog: Catalog) -> dict[str, str]:
    return {f"{c.ref.epoch}/{c.ref.step}": c.status for c in catalog.commits()}


def latest(catalog: Catalog) -> str | None:
    found = catalog.latest()
    return None if found is None else f"{found.ref.epoch}/{found.ref.step}"


def lineage(catalog: Catalog) -> list[str]:
    return [f"{c.ref.epoch}/{c.ref.step}" for c in catalog.lineage()]


def break_data(run: FakeRun, epoch: int, step: int) -> None:
    """Lose a data file of a commit."""
    prefix = layout.data_prefix(epoch, step, "000001")
    run.storage.delete(layout.rank_data_key(prefix, 1))


def other_version(document: bytes) -> bytes:
    return canonical({**json.loads(document), "format": 1})


class TestRun:
    def test_a_root_without_a_run(self, catalog: Catalog, storage: MemoryStorage) -> None:
        with pytest.raises(
            NotFoundError, match=r"no Sidestage run at memory://memory: .*RUN\.json"
        ):
            catalog.run()
        assert (catalog.commits(), catalog.lineage(), catalog.attempts()) == ([], [], [])
        assert catalog.latest() is None

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        catalog = Catalog(LocalStorage(tmp_path / "missing"))
        with pytest.raises(NotFoundError, match=f"no Sidestage run at {tmp_path}/missing"):
            catalog.run()
        assert catalog.latest() is None
        assert not (tmp_path / "missing").exists()

    def test_a_run_without_commits(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        assert catalog.run() == RunRecord(RUN_ID, 0.0, "test")
        assert catalog.latest() is None
        assert (catalog.commits(), catalog.lineage()) == ([], [])

    def test_of_another_format_is_said_by_every_call(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        ref = run.commit(1, 10)
        storage.put(layout.RUN, other_version(storage.read(layout.RUN)))
        for call in (
            catalog.run,
            catalog.commits,
            catalog.lineage,
            catalog.latest,
            catalog.attempts,
            lambda: catalog.find(10),
            lambda: catalog.read(ref),
        ):
            with pytest.raises(UnsupportedFormatError, match=r"RUN\.json: format version 1"):
                call()

    def test_a_damaged_one_hides_no_commit(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        storage.put(layout.RUN, b"{")
        assert catalog.run().run_id == RUN_ID
        assert latest(catalog) == "1/10"


class TestLineage:
    def test_of_one_attempt(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        for step in (100, 1000, 200):
            run.commit(1, step)
        assert lineage(catalog) == ["1/1000", "1/200", "1/100"]
        assert latest(catalog) == "1/1000"
        assert statuses(catalog) == {"1/100": "ancestor", "1/200": "ancestor", "1/1000": "latest"}

    def test_a_new_attempt_without_commits_stands_where_it_continues(
        self, catalog: Catalog, run: FakeRun
    ) -> None:
        run.attempt(1)
        run.commit(1, 100)
        second = run.commit(1, 200)
        run.attempt(2, second)
        assert lineage(catalog) == ["1/200", "1/100"]
        assert latest(catalog) == "1/200"

    def test_a_run_taken_back_passes_the_same_steps_again(
        self, catalog: Catalog, run: FakeRun
    ) -> None:
        run.attempt(1)
        first = run.commit(1, 100)
        run.commit(1, 200)
        run.commit(1, 300)
        run.attempt(2, first)
        assert latest(catalog) == "1/100"  # before its first commit: not 300
        run.commit(2, 200, first)
        assert lineage(catalog) == ["2/200", "1/100"]
        assert statuses(catalog) == {
            "1/100": "ancestor",
            "1/200": "abandoned",
            "1/300": "abandoned",
            "2/200": "latest",
        }

    def test_a_zombie_of_an_older_attempt_never_becomes_latest(
        self, catalog: Catalog, run: FakeRun
    ) -> None:
        run.attempt(1)
        first = run.commit(1, 100)
        run.attempt(2, first)
        run.commit(2, 150, first)
        run.commit(1, 9000)
        assert latest(catalog) == "2/150"
        assert statuses(catalog)["1/9000"] == "abandoned"

    def test_over_several_attempts(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        run.commit(1, 1)
        a = run.commit(1, 2)
        run.commit(1, 3)
        run.attempt(2, a)  # lived too short to commit
        run.attempt(3, a)
        b = run.commit(3, 3, a)
        run.commit(3, 4, b)
        run.attempt(5, b)  # 4 was claimed by nobody that is left
        run.commit(5, 7, b)
        assert lineage(catalog) == ["5/7", "3/3", "1/2", "1/1"]

    def test_a_fresh_start_abandons_all_before_it(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        run.commit(1, 100)
        run.attempt(2, None)
        assert latest(catalog) == "1/100"  # until it has something better
        run.commit(2, 10)
        assert lineage(catalog) == ["2/10"]
        assert statuses(catalog) == {"1/100": "abandoned", "2/10": "latest"}

    def test_order_is_of_numbers_and_not_of_keys(self, catalog: Catalog, run: FakeRun) -> None:
        """999999 and 1000000 sort the other way round as text, as do long steps."""
        run.attempt(999_999)
        a = run.commit(999_999, 999_999_999_999)
        run.commit(999_999, 1_000_000_000_000)
        assert latest(catalog) == "999999/1000000000000"
        run.attempt(1_000_000, a)
        run.commit(1_000_000, 1)
        assert latest(catalog) == "1000000/1"
        assert list(statuses(catalog)) == [
            "999999/999999999999",
            "999999/1000000000000",
            "1000000/1",
        ]

    def test_file_times_mean_nothing(self, tmp_path: Path) -> None:
        run = FakeRun(LocalStorage(tmp_path))
        run.attempt(1)
        run.commit(1, 20)
        run.commit(1, 10)
        os.utime(tmp_path / layout.commit_key(1, 10), (4e9, 4e9))
        os.utime(tmp_path / layout.commit_key(1, 20), (0, 0))
        assert latest(Catalog(run.storage)) == "1/20"

    def test_strays_are_ignored(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        for key in ("commits/README", "commits/000001/11.json", "attempts/9.json", "attempts/x"):
            storage.create(key, b"stray")
        assert statuses(catalog) == {"1/10": "latest"}
        assert [a.epoch for a in catalog.attempts()] == [1]

    def test_is_read_afresh(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        run.commit(1, 10)
        assert latest(catalog) == "1/10"
        run.commit(1, 20)
        assert latest(catalog) == "1/20"


class TestDamage:
    def test_latest_steps_back_over_missing_data(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        for step in (10, 20, 30):
            run.commit(1, step)
        break_data(run, 1, 30)
        assert latest(catalog) == "1/20"
        assert statuses(catalog) == {"1/10": "ancestor", "1/20": "latest", "1/30": "corrupt"}
        problem = catalog.commits()[-1].problem
        assert problem is not None
        assert "r00001.bin: missing" in problem
        assert lineage(catalog) == ["1/30", "1/20", "1/10"]

    def test_latest_steps_back_into_the_parents_epoch(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        run.commit(1, 10)
        parent = run.commit(1, 20)
        run.commit(1, 30)
        run.attempt(2, parent)
        run.commit(2, 40, parent)
        break_data(run, 2, 40)
        assert latest(catalog) == "1/20"
        break_data(run, 1, 20)
        assert latest(catalog) == "1/10"
        break_data(run, 1, 10)
        assert latest(catalog) is None  # 1/30 is no ancestor, however sound

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"not json", b'{"some": "other file"}', seal("run", {}), b"\xff\x00"],
    )
    def test_what_is_no_record_is_corrupt_and_hides_nothing(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage, content: bytes
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        key = layout.commit_key(1, 20)
        storage.create(key, content)
        assert latest(catalog) == "1/10"
        assert statuses(catalog) == {"1/10": "latest", "1/20": "corrupt"}
        damaged = catalog.commits()[-1]
        assert damaged.record is None
        assert damaged.problem is not None
        assert damaged.problem.startswith(key)
        assert catalog.find(20) == damaged
        with pytest.raises(CorruptError, match=key):
            catalog.read(damaged.ref)

    def test_a_truncated_record(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        run.commit(1, 20)
        key = layout.commit_key(1, 20)
        storage.put(key, storage.read(key)[:-20])
        assert latest(catalog) == "1/10"

    def test_a_record_under_another_ones_key(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        run.commit(1, 10)
        run.commit(1, 15, key=layout.commit_key(1, 20))
        assert latest(catalog) == "1/10"
        [damaged] = [c for c in catalog.commits() if c.status == "corrupt"]
        assert damaged.problem == f"{layout.commit_key(1, 20)}: is the record of epoch 1, step 15"
        with pytest.raises(CorruptError, match="is the record of"):
            catalog.read(damaged.ref)

    @pytest.mark.parametrize(
        ("change", "words"),
        [({"run_id": "other"}, "belongs to run other"), ({"attempt_token": "x"}, "isn't by the")],
    )
    def test_a_commit_of_another_life_of_the_root(
        self, catalog: Catalog, run: FakeRun, change: dict[str, Any], words: str
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        ref = run.commit(1, 20, **change)
        assert latest(catalog) == "1/10"
        problem = catalog.commits()[-1].problem
        assert problem is not None
        assert words in problem
        with pytest.raises(CorruptError, match=words):
            catalog.read(ref)

    def test_a_parent_that_is_another_commit_than_the_one_continued(
        self, catalog: Catalog, run: FakeRun
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        parent = run.commit(1, 20)
        run.attempt(2, parent)
        run.commit(1, 20, committed_at_s=3.0)  # as after a restore from backup
        assert latest(catalog) == "1/10"
        problem = catalog.commits()[-1].problem
        assert problem is not None
        assert "isn't the commit that the next attempt continued" in problem
        with pytest.raises(CorruptError, match="holds another commit"):
            catalog.read(parent)

    def test_a_commit_of_another_format_is_not_gone_back_past(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        """Older software must not continue, unasked, from before what newer software saved."""
        run.attempt(1)
        run.commit(1, 10)
        ref = run.commit(1, 20)
        key = layout.commit_key(1, 20)
        storage.put(key, other_version(storage.read(key)))
        for call in (catalog.latest, lambda: catalog.find(20), lambda: catalog.read(ref)):
            with pytest.raises(UnsupportedFormatError, match=f"{key}: format version 1"):
                call()
        assert statuses(catalog) == {"1/10": "latest", "1/20": "corrupt"}
        assert lineage(catalog) == ["1/20", "1/10"]
        assert catalog.find(10).status == "latest"

    def test_a_failing_store_is_no_damage(self, run: FakeRun, storage: MemoryStorage) -> None:
        """A checkpoint that can't be read just now must not be passed over for an older one."""
        run.attempt(1)
        run.commit(1, 10)
        run.commit(1, 20)
        faulty = FaultyStorage(storage)
        for op, pattern in [
            ("read", "commits/000001/*20.json"),
            ("read", "*-000000000020-*.idx"),
            ("list", "data/*"),
            ("read", "attempts/*"),
            ("list", "commits/"),
        ]:
            faulty.on(op, pattern).fail(StorageError("down"))
            with pytest.raises(StorageError, match="down"):
                Catalog(faulty).latest()
        assert latest(Catalog(faulty)) == "1/20"

    def test_a_commit_deleted_while_listing_is_left_out(
        self, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        run.commit(1, 20)
        faulty = FaultyStorage(storage)
        faulty.on("read", "commits/*20.json").always().fail(NotFoundError("gone"))
        catalog = Catalog(faulty)
        assert statuses(catalog) == {"1/10": "latest"}
        assert lineage(catalog) == ["1/10"]
        assert latest(catalog) == "1/10"
        with pytest.raises(NotFoundError):
            catalog.find(20)


class TestAttempts:
    def test_are_listed_oldest_first(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(2)
        run.attempt(1)
        run.attempt(10)
        infos = catalog.attempts()
        assert [a.epoch for a in infos] == [1, 2, 10]
        assert all(a.record and a.problem is None for a in infos)

    def test_a_damaged_one_without_commits_is_skipped(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        storage.create(layout.attempt_key(2), b"{")
        assert latest(catalog) == "1/10"
        damaged = catalog.attempts()[-1]
        assert damaged.record is None
        assert damaged.problem is not None
        assert damaged.problem.startswith("attempts/000002.json: not a whole JSON document")

    @pytest.mark.parametrize("damaged", [False, True])
    def test_a_lost_ones_lineage_goes_on_where_its_commits_say(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage, damaged: bool
    ) -> None:
        run.attempt(1)
        a = run.commit(1, 10)
        run.commit(1, 20)
        run.attempt(2, a)
        b = run.commit(2, 30, a)
        run.commit(2, 40, b)
        storage.put(layout.attempt_key(2), b"{")
        if not damaged:
            storage.delete(layout.attempt_key(2))
        assert lineage(catalog) == ["2/40", "2/30", "1/10"]
        storage.delete(layout.commit_key(2, 30))  # by retention: the others say it, too
        assert lineage(catalog) == ["2/40", "1/10"]
        assert statuses(catalog) == {"1/10": "ancestor", "1/20": "abandoned", "2/40": "latest"}
        lost: list[str] = []
        catalog.lineage(lambda key, why: lost.append(f"{key}: {why}"))
        (line,) = lost
        assert line.startswith(layout.attempt_key(2))
        assert line.endswith("its commits say what it continued")

    @pytest.mark.parametrize("epoch", [2, 3])
    def test_parents_that_are_not_older_make_no_cycle(
        self, catalog: Catalog, run: FakeRun, epoch: int
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        run.attempt(2, CommitRef(epoch, 5, "xxh3-128:00"))
        run.attempt(3, CommitRef(2, 50, "xxh3-128:00"))
        run.commit(3, 60)
        assert latest(catalog) == "3/60"
        assert lineage(catalog) == ["3/60"]
        problem = catalog.attempts()[1].problem
        assert problem == f"attempts/000002.json: continues epoch {epoch}, which isn't older"

    def test_a_record_under_another_ones_key(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        run.attempt(2, epoch=7)
        run.attempt(3, run_id="other")
        problems = [a.problem for a in catalog.attempts()]
        assert problems == [
            None,
            "attempts/000002.json: is the record of epoch 7",
            "attempts/000003.json: belongs to run other, this is run run-1",
        ]

    def test_of_another_format(
        self, catalog: Catalog, run: FakeRun, storage: MemoryStorage
    ) -> None:
        run.attempt(1)
        run.commit(1, 10)
        run.attempt(2)
        key = layout.attempt_key(2)
        storage.put(key, other_version(storage.read(key)))
        for call in (catalog.latest, catalog.lineage, lambda: catalog.find(10)):
            with pytest.raises(UnsupportedFormatError, match=key):
                call()
        assert statuses(catalog) == {"1/10": "latest"}
        assert "format version 1" in str(catalog.attempts()[1].problem)

    def test_commits_without_any_attempt_are_a_lineage(
        self, catalog: Catalog, run: FakeRun
    ) -> None:
        run.commit(1, 10)
        assert latest(catalog) == "1/10"


class TestFind:
    @pytest.fixture
    def branched(self, run: FakeRun) -> FakeRun:
        run.attempt(1)
        first = run.commit(1, 100)
        run.commit(1, 200)
        run.commit(1, 300)
        run.attempt(2, first)
        run.commit(2, 200, first)
        return run

    def test_prefers_the_lineage(self, catalog: Catalog, branched: FakeRun) -> None:
        found = catalog.find(200)
        assert (found.ref.epoch, found.status) == (2, "latest")
        assert found.record == branched.record(2, 200)
        assert catalog.find(100).status == "ancestor"

    def test_takes_an_epoch(self, catalog: Catalog, branched: FakeRun) -> None:
        found = catalog.find(200, epoch=1)
        assert (found.ref.epoch, found.status) == (1, "abandoned")
        assert catalog.find(200, epoch=2).status == "latest"
        assert catalog.find(300, 1).status == "abandoned"

    def test_an_abandoned_step_must_be_named_by_epoch(
        self, catalog: Catalog, branched: FakeRun
    ) -> None:
        with pytest.raises(NotFoundError, match=r"step 300 is abandoned.*with its epoch: 1/300"):
            catalog.find(300)

    def test_says_which_steps_there_are(self, catalog: Catalog, branched: FakeRun) -> None:
        with pytest.raises(NotFoundError, match=r"no step 7; the lineage has 100, 200$"):
            catalog.find(7)
        with pytest.raises(NotFoundError, match=r"no step 7 in epoch 1; it has 100, 200, 300$"):
            catalog.find(7, epoch=1)
        with pytest.raises(NotFoundError, match=r"no step 7 in epoch 9; it has none$"):
            catalog.find(7, epoch=9)

    def test_shortens_a_long_list(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        for step in range(1, 31):
            run.commit(1, step, rows=0)
        with pytest.raises(NotFoundError) as caught:
            catalog.find(99)
        assert str(caught.value).endswith(
            "has 1, 2, 3, 4, 5, 6, ..., 25, 26, 27, 28, 29, 30 (30 in all)"
        )

    def test_reports_damaged_files(self, catalog: Catalog, branched: FakeRun) -> None:
        break_data(branched, 2, 200)
        assert catalog.find(200).status == "corrupt"
        assert catalog.find(100).status == "latest"


class TestRead:
    def test_gives_the_record(self, catalog: Catalog, run: FakeRun) -> None:
        run.attempt(1)
        ref = run.commit(1, 10)
        assert catalog.read(ref) == run.record(1, 10)

    def test_of_nothing(self, catalog: Catalog, run: FakeRun) -> None:
        with pytest.raises(NotFoundError, match=r"commits/000001/000000000010\.json"):
            catalog.read(CommitRef(1, 10, "xxh3-128:00"))


def test_listing_reads_no_data(run: FakeRun, storage: MemoryStorage) -> None:
    run.attempt(1)
    for step in range(5):
        run.commit(1, step)
    faulty = FaultyStorage(storage)
    Catalog(faulty).commits()
    read = [key for op, key in faulty.calls if op in ("read", "read_into")]
    assert not [key for key in read if key.endswith(".bin")]
    # Only the latest commit has its small files read: 2 ranks x (receipt, index, values).
    assert len([key for key in read if key.startswith("data/")]) == 6


def test_a_new_run_record_is_not_needed_to_list(storage: MemoryStorage) -> None:
    run = FakeRun(storage)
    run.attempt(1)
    run.commit(1, 10)
    storage.delete(layout.RUN)
    assert latest(Catalog(storage)) == "1/10"
    storage.create(layout.RUN, encode(RunRecord("other", 0.0, "test")))
    assert latest(Catalog(storage)) is None
    assert statuses(Catalog(storage)) == {"1/10": "corrupt"}
