"""Reading ahead of a restore: nothing is read twice, and nothing is decided otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer, PerRank, prefetch
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, CorruptError, SidestageError, StorageError
from ckpt.events import ListSink
from ckpt.layout import RUN, attempt_key, commit_key
from ckpt.prefetch import Prefetch
from ckpt.storage import LocalStorage, MemoryStorage, Storage
from tests.checkpointer.ranks import on_ranks, values
from tests.faults import DEADLINE_S, FaultyStorage

ALONE = (0, 1, 1)


def state(value: float = 0.0) -> dict[str, Any]:
    return {
        "w": torch.full((64, 8), float(value)),
        "note": PerRank({"n": float(value)}),
        "at": float(value),
    }


def save(storage: Storage, *steps: int) -> None:
    """One attempt that saves these steps."""
    with Checkpointer(storage) as c:
        c.restore(state())
        for step in steps:
            c.save(step, state(step)).committed.result()


def two_attempts() -> MemoryStorage:
    storage = MemoryStorage()
    save(storage, 1, 2)
    save(storage, 3, 4)
    return storage


def ready(storage: Storage, ranks: tuple[int, int, int] = ALONE) -> Prefetch:
    ahead = Prefetch(storage, ranks)
    assert ahead.wait(DEADLINE_S)
    return ahead


def restored(storage: Storage, ahead: Prefetch | None) -> tuple[Any, ...]:
    """What a restore leads to: its result and the state, or its error."""
    found, sink = state(), ListSink()
    with Checkpointer(storage, sink=sink) as c:
        try:
            result = c.restore(found, prefetched=ahead)
        except SidestageError as e:
            return type(e), str(e)
    aside = sink.named("checkpoint_set_aside")
    return result, found["w"].tolist(), found["note"].value, found["at"], aside


def key_of(storage: Storage, suffix: str, step: int) -> str:
    record = Catalog(storage).find(step).record
    assert record is not None
    return next(f.key for f in record.files if f.key.endswith(suffix))


def damage(storage: Storage, key: str) -> None:
    storage.put(key, storage.read(key)[:-3] + b"xxx")


def test_what_was_read_ahead_is_not_read_again_and_nothing_is_written() -> None:
    storage = FaultyStorage(two_attempts())
    ahead = ready(storage)
    assert {op for op, _ in storage.calls} == {"read", "list"}
    assert ahead.error is None
    storage.calls.clear()
    assert restored(storage, ahead)[1:4] == (state(4.0)["w"].tolist(), {"n": 4.0}, 4.0)
    whole = [key for op, key in storage.calls if op == "read"]
    taken = [key for key in whole if key.startswith(("commits/", "data/"))]
    assert taken == [commit_key(2, 4)], "by the pin, which must see that it is still there"
    assert ahead.used == 9, "the run, both attempts, four commits, index and values of the newest"


def test_another_rank_reads_the_newest_commit_only() -> None:
    storage = FaultyStorage(two_attempts())
    ready(storage, (1, 2, 1))
    assert [k for op, k in storage.calls if op == "read" and k.startswith("commits/")] == [
        commit_key(2, 4)
    ]


Change = Callable[[Storage], object]
CHANGES: dict[str, Change] = {
    "a newer commit": lambda s: save(s, 5),
    "the newest was pruned": lambda s: s.delete(commit_key(2, 4)),
    "all of the newest attempt went": lambda s: (
        [s.delete(k) for k in (commit_key(2, 4), commit_key(2, 3), attempt_key(2))]
    ),
    "the newest record was damaged": lambda s: damage(s, commit_key(2, 4)),
    "an older record was damaged": lambda s: damage(s, commit_key(2, 3)),
    "the attempt was damaged": lambda s: damage(s, attempt_key(2)),
    "a record of another run took its place": lambda s: s.put(
        commit_key(2, 4), s.read(commit_key(1, 2))
    ),
    "its data went": lambda s: s.delete(key_of(s, ".bin", 4)),
    "its data was damaged": lambda s: damage(s, key_of(s, ".bin", 4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_meanwhile_is_seen_as_without(change: Change) -> None:
    plain, other = two_attempts(), two_attempts()
    ahead = ready(other)
    for storage in (plain, other):
        change(storage)
    assert told(restored(other, ahead)) == told(restored(plain, None))


BEFORE: dict[str, Change] = {
    "nothing there": lambda s: [s.delete(o.key) for o in list(s.list())],
    "no run record": lambda s: s.delete(RUN),
    "a damaged record": lambda s: damage(s, commit_key(2, 4)),
    "a damaged index": lambda s: damage(s, key_of(s, ".idx", 4)),
    "damaged values": lambda s: damage(s, key_of(s, ".objects.json", 4)),
    "no index": lambda s: s.delete(key_of(s, ".idx", 4)),
    "all damaged": lambda s: [damage(s, key_of(s, ".bin", step)) for step in (1, 2, 3, 4)],
}


@pytest.mark.parametrize("change", BEFORE.values(), ids=BEFORE)
def test_damage_from_before_is_seen_as_without(change: Change) -> None:
    plain, other = two_attempts(), two_attempts()
    for storage in (plain, other):
        change(storage)
    assert told(restored(other, ready(other))) == told(restored(plain, None))


def told(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without digests, which differ with every run's id and clock."""
    result = found[0]
    if isinstance(result, type) or result is None:
        assert result in (None, CorruptError)
        return (str(result), *found[1:-1])
    return (result.step, result.commit.epoch, *found[1:4], [a["step"] for a in found[4]])


def test_an_index_damaged_since_counts_as_it_was_read() -> None:
    storage = two_attempts()
    ahead = ready(storage)
    damage(storage, key_of(storage, ".idx", 4))
    assert restored(storage, ahead)[0].step == 4, "its chunks are checked by their own digests"


def test_a_store_that_fails_is_told_and_left_to_the_restore() -> None:
    storage = FaultyStorage(two_attempts())
    storage.on("list").fail(StorageError("down"))
    ahead = ready(storage)
    assert ahead.error == "down"
    sink = ListSink()
    with Checkpointer(storage, sink=sink) as c:
        result = c.restore(state(), prefetched=ahead)
    assert result is not None
    assert result.step == 4
    assert sink.named("prefetched") == [{"objects": 1, "warmed_bytes": 0, "error": "down"}]


def test_nobody_waits_for_a_read_that_hangs() -> None:
    storage = FaultyStorage(two_attempts())
    gate = storage.on("read", "commits/*").block()
    with Prefetch(storage, ALONE) as ahead:
        gate.wait_reached()
        assert restored(storage, ahead)[0].step == 4
        storage.calls.clear()
    gate.open()
    assert ahead.wait(DEADLINE_S)
    assert storage.calls == [], "it ended with the restore"
    assert ahead.read(RUN) == storage.inner.read(RUN)
    assert storage.calls == [("read", RUN)], "and holds nothing any more"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = two_attempts()
    size = len(storage.read(RUN)) + len(storage.read(commit_key(2, 4))) + 10
    monkeypatch.setattr(prefetch, "MOST_HELD_BYTES", size)
    ahead = ready(storage)
    assert restored(storage, ahead)[0].step == 4
    assert ahead.used == 2


@pytest.mark.parametrize(
    ("ranks", "warmed"), [(ALONE, True), ((1, 2, 1), False), ((0, 1, 1 << 40), False)]
)
def test_this_ranks_chunks_come_into_the_page_cache(
    tmp_path: Path, ranks: tuple[int, int, int], warmed: bool
) -> None:
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    size = storage.stat(key_of(storage, ".bin", 1)).size_bytes
    ahead = ready(storage, ranks)
    assert ahead.warmed_bytes == (size if warmed else 0)
    assert ahead.error is None


def test_each_rank_reads_ahead_for_itself(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def body(rank: int, kwargs: dict[str, Any], *, first: bool) -> tuple[float, int, int]:
        mine = {"w": torch.full((64,), 3.0 if first else 0.0), "own": PerRank(rank if first else 9)}
        ahead = ready(storage, (rank, 2, 2))
        with Checkpointer(storage, **kwargs) as c:
            c.restore(mine, prefetched=ahead)
            if first:
                c.save(1, mine).committed.result()
        return float(mine["w"].sum()), mine["own"].value, ahead.used

    values(on_ranks(2, lambda rank, kwargs: body(rank, kwargs, first=True)))
    found = values(on_ranks(2, lambda rank, kwargs: body(rank, kwargs, first=False)))
    # The run, the attempt, the commit, two indexes and the values of two ranks.
    assert found == [(192.0, 0, 7), (192.0, 1, 7)]


def test_another_root_is_refused(tmp_path: Path) -> None:
    ahead = ready(LocalStorage(tmp_path / "a"))
    with Checkpointer(str(tmp_path / "b")) as c, pytest.raises(BadInputError, match="prefetched"):
        c.restore(state(), prefetched=ahead)
