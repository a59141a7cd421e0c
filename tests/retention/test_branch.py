"""Branches: a run that starts from another root's commit, and is a root like any other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer
from ckpt.branch import Branch, create_branch, move_source
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, ConflictError, CorruptError, NotFoundError, StorageError
from ckpt.layout import ATTEMPTS, CODE, DATA, ORIGIN, PINS, RUN, commit_key, description_prefix
from ckpt.pins import PinBoard
from ckpt.restore import CheckpointReader
from ckpt.schema import ServingDescription, encode_description
from ckpt.storage import BranchedStorage, LocalStorage, MemoryStorage, open_storage
from ckpt.types import SystemClock
from ckpt.verify import verify_commit
from tests.faults import FaultyStorage

KEEP_1 = CheckpointConfig(keep_last=1)


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((3000,), value), "n": {"x": value}}


def train(root: Path, *values: float, config: CheckpointConfig | None = None) -> None:
    """Resume if there is something, and save each value as the step of that number."""
    with Checkpointer(str(root), config) as c:
        c.restore(state(0))
        for value in values:
            c.save(int(value), state(value)).committed.result()


def branch(source: Path, step: int, target: Path, **kwargs: Any) -> Branch:
    storage = open_storage(source)
    return create_branch(storage, Catalog(storage).find(step).ref, open_storage(target), **kwargs)


def resumed(root: Path) -> tuple[int, float]:
    live = state(0)
    with Checkpointer(str(root)) as c:
        result = c.restore(live)
    assert result is not None
    assert live["t"].unique().tolist() == [live["n"]["x"]]
    return result.step, live["n"]["x"]


def commits(root: Path) -> list[tuple[int, int, str]]:
    return [(c.ref.epoch, c.ref.step, c.status) for c in Catalog(open_storage(root)).commits()]


def data_files(root: Path) -> list[Path]:
    return [p for p in (root / "data").rglob("*") if p.is_file()]


def holders(root: Path) -> int:
    return len(PinBoard(LocalStorage(root), SystemClock()).holders())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    train(root, 1, 2, 3)
    return root


def test_a_branch_is_a_root_like_any_other_without_a_copy(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    made = branch(source, 2, target)
    assert (made.copied_bytes, made.why_copied) == (0, None)
    storage = open_storage(target)
    assert isinstance(storage, BranchedStorage)
    assert commits(target) == [(1, 2, "latest")]
    assert not (target / "data").exists()
    info = Catalog(storage).latest()
    assert info is not None
    assert info.record is not None
    assert verify_commit(storage, info.record, level="full").ok
    reader = CheckpointReader(storage, info.record)
    assert torch.equal(reader.read("t"), state(2)["t"])
    assert reader.read_rows("t", [5, 7]).tolist() == [2.0, 2.0]
    run = Catalog(storage).run()
    assert run.run_id != Catalog(open_storage(source)).run().run_id
    assert [a.problem for a in Catalog(storage).attempts()] == [None]
    assert resumed(target) == (2, 2.0)


def test_the_branch_goes_on_and_the_source_is_never_touched(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    branch(source, 2, target)
    before = {p: p.stat().st_mtime_ns for p in source.rglob("*") if p.is_file()}
    train(target, 5, 6)
    assert commits(target) == [(1, 2, "ancestor"), (2, 5, "ancestor"), (2, 6, "latest")]
    assert resumed(target) == (6, 6.0)
    with Checkpointer(str(target)) as c:
        live = state(0)
        result = c.restore(live, step=2)
        assert result is not None
        assert live["n"]["x"] == 2.0
    assert {p: p.stat().st_mtime_ns for p in source.rglob("*") if p.is_file()} == before


def test_the_sources_retention_keeps_what_the_branch_needs(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    branch(source, 2, target)
    train(source, 4, 5, config=KEEP_1)
    assert commits(source) == [(1, 2, "ancestor"), (2, 5, "latest")]
    assert resumed(target) == (2, 2.0)


def test_once_the_branch_deletes_its_origin_the_source_may_too(
    source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    branch(source, 2, target)
    train(target, 5, config=CheckpointConfig(keep_last=2))
    assert holders(source) == 1
    train(target, 6, config=CheckpointConfig(keep_last=2))
    assert commits(target) == [(2, 5, "ancestor"), (3, 6, "latest")]
    assert holders(source) == 0
    assert len(commits(source)) == 3, "a branch deletes nothing of its source"
    train(source, 4, config=KEEP_1)
    assert commits(source) == [(2, 4, "latest")]
    assert resumed(target) == (6, 6.0)


def test_a_branch_of_a_branch_reads_on_through_both(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    branch(source, 2, first)
    branch(first, 2, second)
    train(first, 5, config=KEEP_1)
    train(source, 4, config=KEEP_1)
    assert commits(first) == [(1, 2, "ancestor"), (2, 5, "latest")], "pinned by the second"
    assert resumed(second) == (2, 2.0)


def test_with_copy_the_branch_stands_alone(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    seen: list[int] = []
    made = branch(source, 2, target, copy=True, progress=seen.append)
    assert made.copied_bytes == sum(seen) == sum(p.stat().st_size for p in data_files(target))
    assert holders(source) == 0
    shutil.rmtree(source)
    assert isinstance(open_storage(target), LocalStorage)
    assert resumed(target) == (2, 2.0)


def test_a_branch_is_made_independent_later(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    branch(source, 2, target)
    train(target, 5)
    opened = open_storage(target)  # by somebody who reads on in the source
    assert branch(source, 2, target, copy=True).copied_bytes > 0
    assert holders(source) == 0
    shutil.rmtree(source)
    assert commits(target) == [(1, 2, "ancestor"), (2, 5, "latest")]
    for storage in (opened, open_storage(target)):
        info = Catalog(storage).find(2)
        assert info.record is not None
        assert verify_commit(storage, info.record, level="full").ok


def test_a_source_that_cannot_be_pinned_is_copied_from(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    faulty = FaultyStorage(LocalStorage(source))
    faulty.on("create", f"{PINS}*").always().fail(StorageError("read-only"))
    ref = Catalog(faulty).find(2).ref
    made = create_branch(faulty, ref, LocalStorage(target))
    assert made.why_copied == "the source can't be pinned: read-only"
    assert made.origin.pin_id is None
    shutil.rmtree(source)
    assert resumed(target) == (2, 2.0)


@pytest.mark.parametrize("copy", [False, True])
def test_killed_anywhere_it_is_completed_by_the_same_call(
    source: Path, tmp_path: Path, copy: bool
) -> None:
    ref = Catalog(LocalStorage(source)).find(2).ref
    for nth in range(1, 12):
        target = LocalStorage(tmp_path / f"target{nth}")
        faulty = FaultyStorage(target)
        for op in ("create", "finish"):
            faulty.on(op, "*").nth(nth).fail(KeyboardInterrupt())
        try:
            create_branch(LocalStorage(source), ref, faulty, copy=copy)
        except KeyboardInterrupt:
            create_branch(LocalStorage(source), ref, target, copy=copy)
            assert resumed(Path(target.url)) == (2, 2.0)
        else:
            break
    assert nth == 5, "origin, run, attempt and commit records were each missed once"


def test_a_target_in_use_is_refused_and_left_as_it_is(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(other, 7)
    with pytest.raises(ConflictError, match=r"other: isn't empty, it holds RUN\.json|attempts"):
        branch(source, 2, other)
    assert commits(other) == [(1, 7, "latest")]
    with pytest.raises(ConflictError, match="isn't empty"):
        branch(source, 2, source)
    target = tmp_path / "target"
    branch(source, 2, target)
    with pytest.raises(ConflictError, match=r"is a branch of .*source@2 already"):
        branch(source, 3, target)
    with pytest.raises(ConflictError, match="is a branch of"):
        branch(other, 7, target)
    assert holders(source) == 1
    train(target, 5, config=KEEP_1)
    with pytest.raises(ConflictError, match="has deleted step 2 of its origin"):
        branch(source, 2, target, copy=True)


def test_what_cannot_be_branched_from(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    storage = LocalStorage(source)
    ref = Catalog(storage).find(2).ref
    next(source.glob("data/*-000000000002-*/*.objects.json")).unlink()
    with pytest.raises(CorruptError, match="step 2 can't be branched from: .*missing"):
        branch(source, 2, target)
    storage.delete(commit_key(1, 2))
    with pytest.raises(NotFoundError):
        create_branch(storage, ref, LocalStorage(target))
    memory = MemoryStorage()
    with Checkpointer(memory) as c:
        ref = c.save(1, state(1)).committed.result()
    with pytest.raises(BadInputError, match="memory has no address"):
        create_branch(memory, ref, LocalStorage(target))
    assert not target.exists()
    assert create_branch(memory, ref, LocalStorage(target), copy=True).copied_bytes > 0
    assert resumed(target) == (1, 1.0)


def test_a_flipped_bit_is_found_while_copying(source: Path, tmp_path: Path) -> None:
    (data,) = source.glob("data/*-000000000002-*/r00000.bin")
    content = bytearray(data.read_bytes())
    content[5] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptError, match="doesn't match its digest"):
        branch(source, 2, tmp_path / "target", copy=True)
    assert Catalog(LocalStorage(tmp_path / "target")).latest() is None


def test_a_source_that_is_gone_is_named(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    branch(source, 2, target)
    train(target, 5)
    shutil.rmtree(source)
    assert resumed(target) == (5, 5.0)
    info = Catalog(open_storage(target)).find(2)
    assert info.record is not None
    absent = (
        r"source: the parent of .*target isn't there; mount it, or name its new place: ckpt branch"
    )
    with pytest.raises(StorageError, match=absent):
        verify_commit(open_storage(target), info.record, level="quick")
    source.write_text("a file")
    with pytest.raises(
        StorageError, match=r"source: the root that .*target branched from can't be"
    ):
        verify_commit(open_storage(target), info.record, level="quick")


@pytest.mark.parametrize("place", ["gone", "an empty folder", "another run"])
def test_case_e67_a_parent_that_is_not_there_is_not_damage(
    source: Path, tmp_path: Path, place: str
) -> None:
    """Not mounted, or moved: nothing is called corrupt, and nothing is begun from scratch."""
    target, moved = tmp_path / "target", tmp_path / "elsewhere"
    branch(source, 2, target)
    source.rename(moved)
    words = r"source: the parent of .*target isn't there; mount it"
    if place == "an empty folder":
        source.mkdir()
    elif place == "another run":
        train(source, 7)
        words = r"source: is a run, and hasn't step 2 that .*target branched from; mount it"
    live = state(0)
    with Checkpointer(str(target)) as c, pytest.raises(StorageError, match=words):
        c.restore(live)
    assert live["n"]["x"] == 0
    for call in (Catalog(open_storage(target)).latest, Catalog(open_storage(target)).commits):
        with pytest.raises(StorageError, match=words):
            call()
    assert move_source(open_storage(moved), open_storage(target)).source_url == str(moved)
    assert resumed(target) == (2, 2.0)
    assert holders(moved) == 1, "its pin has moved along"


def test_only_the_parent_can_be_named_as_its_new_place(source: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    branch(source, 2, target)
    train(other, 2)
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    with pytest.raises(NotFoundError, match="isn't the parent of .*step 2"):
        move_source(open_storage(other), open_storage(target))
    with pytest.raises(BadInputError, match="is no branch"):
        move_source(open_storage(source), open_storage(other))
    (pin,) = copied.glob("pins/*.json")
    pin.unlink()
    move_source(open_storage(copied), open_storage(target))
    assert holders(copied) == 1, "a copy without the pin is pinned"
    branch(copied, 2, target, copy=True)
    with pytest.raises(BadInputError, match="has a copy of its own"):
        move_source(open_storage(source), open_storage(target))
    next(copied.glob("data/*-000000000002-*/*.objects.json")).unlink()
    branch(source, 2, tmp_path / "third")
    with pytest.raises(CorruptError, match=r"step 2 of .*copied is damaged"):
        move_source(open_storage(copied), open_storage(tmp_path / "third"))


def test_what_a_publisher_needs_comes_along(source: Path, tmp_path: Path) -> None:
    storage = LocalStorage(source)
    program = f"{CODE}{'ab' * 32}.pt2"
    storage.create(program, b"program")
    prefix = description_prefix("d1")
    described = ServingDescription(
        "model", program, "ab" * 32, f"{prefix}golden.safetensors", "x", 0.0, (), (), (), (), ()
    )
    storage.create(f"{prefix}description.json", encode_description(described))
    storage.create(f"{prefix}golden.safetensors", b"golden")
    with Checkpointer(str(source), annotations={"serving_description": "d1"}) as c:
        c.restore(state(0))
        c.save(9, state(9)).committed.result()
    for copy in (False, True):
        target = tmp_path / f"target-{copy}"
        branch(source, 9, target, copy=copy)
        found = open_storage(target)
        assert found.read(program) == b"program"
        assert [o.key for o in found.list("serving/")] == [
            f"{prefix}description.json",
            f"{prefix}golden.safetensors",
        ]
        found.delete(program)  # only ever its own
        assert storage.read(program) == b"program"


def test_only_the_origins_own_keys_are_read_in_the_source(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    branch(source, 2, target)
    storage = open_storage(target)
    third = next(o.key for o in LocalStorage(source).list(DATA) if "-000000000003-" in o.key)
    for key in (third, "attempts/000009.json", "pins/x.json"):
        with pytest.raises(NotFoundError):
            storage.read(key)
    assert {o.key.split("/")[1][:19] for o in storage.list(DATA)} == {"000001-000000000002"}
    assert [o.key for o in storage.list(ATTEMPTS)] == ["attempts/000001.json"]
    mine = next(iter(storage.list(DATA)))
    assert storage.stat(mine.key).size_bytes == mine.size_bytes
    assert storage.read(mine.key, 3, 5) == LocalStorage(source).read(mine.key, 3, 5)


def test_an_origin_that_claims_more_than_data_is_refused(source: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from ckpt.manifest import encode

    target = tmp_path / "target"
    origin = branch(source, 2, target).origin
    for prefix in ("", "commits/", RUN, "serving/live.json"):
        (target / ORIGIN).write_bytes(encode(replace(origin, prefixes=(prefix,))))
        with pytest.raises(CorruptError, match=r"ORIGIN\.json: names"):
            open_storage(target)
