"""What must be on the disk before a commit may say so (case D18)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.layout import commit_key
from ckpt.storage import LocalStorage

Call = tuple[str, str, str]


def path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """("fsync", path, "") and ("link", old path, new path) in the order in which they ended."""
    seen: list[Call] = []
    fsync, link = os.fsync, os.link

    def record_fsync(fd: int) -> None:
        fsync(fd)
        seen.append(("fsync", path_of(fd), ""))

    def record_link(src: Any, dst: Any, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        link(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        old, new = os.fsdecode(src), os.fsdecode(dst)
        seen.append(("link", f"{path_of(src_dir_fd)}/{old}", f"{path_of(dst_dir_fd)}/{new}"))

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "link", record_link)
    return seen


def save_two(root: Path) -> None:
    with Checkpointer(str(root)) as c:
        for step in (1, 2):
            c.save(step, {"t": torch.full((5000,), float(step))}).committed.result()


def test_d18_each_file_is_synced_then_named_then_its_folder_synced_before_the_commit(
    tmp_path: Path, calls: list[Call]
) -> None:
    root = tmp_path / "run"
    save_two(root)
    record = Catalog(LocalStorage(root)).find(2).record
    assert record is not None
    commit = str(root / commit_key(1, 2))
    listed = [str(root / f.key) for f in (*record.receipts, *record.files)]
    assert len(listed) == 4
    ends = {}
    for path in [*listed, commit]:
        (linked,) = (n for n, c in enumerate(calls) if c[0] == "link" and c[2] == path)
        temp, folder = calls[linked][1], os.path.dirname(path)
        assert ("fsync", temp, "") in calls[:linked], path
        ends[path] = calls.index(("fsync", folder, ""), linked)
        # The folder's own name, and so on up to the root, is durable too.
        for parent in (os.path.dirname(folder), str(root)):
            assert ("fsync", parent, "") in calls[: ends[path]], (path, parent)
    (committed,) = (n for n, c in enumerate(calls) if c[0] == "link" and c[2] == commit)
    assert max(ends[p] for p in listed) < committed


def test_d18_a_file_that_lost_its_content_is_never_the_latest(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_two(root)
    storage = LocalStorage(root)
    record = Catalog(storage).find(2).record
    assert record is not None
    for key in [*(f.key for f in (*record.receipts, *record.files)), commit_key(1, 2)]:
        content = (root / key).read_bytes()
        (root / key).write_bytes(b"")
        latest = Catalog(storage).latest()
        assert latest is not None
        assert latest.ref.step == 1, key
        (root / key).write_bytes(content)
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.ref.step == 2
