"""What a host gives a session, or doesn't: a home, a name, a folder, and what earlier runs left there."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

from ckpt.errors import BadInputError, SidestageError, StorageError
from ckpt.layout import EVENTS, RUN, ledger_key
from ckpt.storage import LocalStorage, MemoryStorage
from tests.trainer.test_session import Loop
from trainer import Session
from trainer.ett import read_report
from trainer.ledger import read_ledger


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """E64: a user id without a name and without HOME."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SIDESTAGE_SPOOL_DIR", "SIDESTAGE_TRUST_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 1000660000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def nowhere(tmp_path: Path) -> Path:
    """A folder that can't be made: for root, too, who may write to any."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "folder"


def train(storage: MemoryStorage, until: int = 3, ledger: str | Path | None = None) -> None:
    loop = Loop()
    with Session(storage, loop.state, loop.reader, ledger=ledger) as session:
        loop.run(session, until)


def epochs(storage: MemoryStorage | LocalStorage) -> list[int]:
    return [a.epoch for a in read_report(storage).attempts]


def test_a_user_without_a_name_and_a_home(no_home: None, tmp_path: Path) -> None:
    train(storage := MemoryStorage())
    assert epochs(storage) == [1]
    assert (tmp_path / "sidestage-spool-1000660000").is_dir()


def test_a_home_that_cannot_be_written_to(
    nowhere: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """E11."""
    monkeypatch.delenv("SIDESTAGE_SPOOL_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(nowhere))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, "sidestage"):
        train(storage := MemoryStorage())
    assert epochs(storage) == [1]
    said, begun = [r.getMessage() for r in caplog.records]
    assert begun.startswith("starts from scratch")
    assert str(nowhere / ".cache/sidestage/spool") in said
    assert "set SIDESTAGE_SPOOL_DIR" in said


def test_a_spool_of_somebody_else_is_not_written_to(
    no_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with the name that ours would have, made by another user in the shared /tmp."""
    tmp_path.chmod(0o1777)
    (tmp_path / "sidestage-spool-1000660000").mkdir()  # by root
    with pytest.raises(StorageError, match="belongs to another user.*SIDESTAGE_SPOOL_DIR"):
        train(MemoryStorage())


@pytest.mark.parametrize("case", ["named", "no folder at all", "ledger"])
def test_without_a_folder_for_ledgers_the_setting_is_named_before_anything_is_written(
    case: str, no_home: None, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, words = None, "name one in SIDESTAGE_SPOOL_DIR"
    if case == "named":
        monkeypatch.setenv("SIDESTAGE_SPOOL_DIR", str(nowhere))
    elif case == "ledger":
        ledger, words = nowhere, "name another folder"
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(nowhere))
    storage = MemoryStorage()
    with pytest.raises(StorageError, match=f"{nowhere}.*Not a directory.*{words}"):
        train(storage, ledger=ledger)
    assert not list(storage.list())


def test_what_a_deleted_run_left_on_the_host_is_no_part_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E12: a run in an object store was deleted there, to start over under the same name."""
    monkeypatch.setenv("SIDESTAGE_SPOOL_DIR", str(tmp_path))
    deleted = MemoryStorage("bucket/run")
    for until in (3, 5, 7):
        train(deleted, until)
    assert epochs(deleted) == [1, 2, 3]
    again = MemoryStorage("bucket/run")
    train(again)
    assert epochs(again) == [1]
    assert read_report(again).attempts[0].batches_new == 3
    train(again, 4)
    assert epochs(again) == [1, 2]
    assert len(list(tmp_path.glob(f"*/*/{EVENTS}*/*.jsonl"))) == 5


def test_a_ledger_folder_belongs_to_one_run(tmp_path: Path) -> None:
    """The same with a folder of the user's: `trainer ett` reads it as one run."""
    storage = MemoryStorage()
    train(storage, 3, tmp_path)
    train(storage, 5, str(tmp_path))
    assert epochs(LocalStorage(tmp_path)) == [1, 2]
    ledgers = [read_ledger(tmp_path / ledger_key(n, 0)) for n in (1, 2)]
    other = MemoryStorage()
    with pytest.raises(BadInputError, match=f"ledger = '{tmp_path}': has the ledgers of run "):
        train(other, 3, tmp_path)
    assert not list(other.list())
    assert [read_ledger(tmp_path / ledger_key(n, 0)) for n in (1, 2)] == ledgers
    (tmp_path / EVENTS).rename(tmp_path / "before")
    (tmp_path / RUN).unlink()
    train(other, 3, tmp_path)
    assert epochs(LocalStorage(tmp_path)) == [1]


def test_a_session_takes_a_path(tmp_path: Path) -> None:
    """E10."""
    loop = Loop()
    with Session(tmp_path / "run", loop.state, loop.reader) as session:
        loop.run(session, 3)
    assert read_report(tmp_path / "run").attempts[0].batches_new == 3


@pytest.mark.parametrize("place", ["commits", "data/run", "events"])
def test_a_session_in_a_part_of_a_run_writes_nothing(tmp_path: Path, place: str) -> None:
    loop = Loop()
    with Session(tmp_path, loop.state, loop.reader) as session:
        loop.run(session, 3)
    before = sorted(tmp_path.rglob("*"))
    loop = Loop()
    with (
        pytest.raises(SidestageError, match="is a part of the run"),
        Session(tmp_path / place, loop.state, loop.reader),
    ):
        pass
    assert sorted(tmp_path.rglob("*")) == before
