"""A disk that fills up, or can't be written (case D44)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointConfig, Checkpointer
from ckpt.catalog import Catalog
from ckpt.cli import cli
from ckpt.command import run_command
from ckpt.errors import StorageError
from ckpt.layout import DATA
from ckpt.storage import LocalStorage

PAGE = 4096
ROWS = 3 * 1024 * 1024 // 4
NOBODY = 65534
CONFIG = CheckpointConfig(keep_last=1, compression="off", chunk_bytes=1 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def state(step: int) -> dict[str, torch.Tensor]:
    return {"t": torch.full((ROWS,), float(step))}


def save(c: Checkpointer, step: int) -> None:
    c.save(step, state(step)).committed.result()
    c.wait()


def pages(path: Path) -> int:
    return -(-path.stat().st_size // PAGE)


def fill(folder: Path, leave_pages: int) -> Path:
    """A file that leaves so many pages of the filesystem."""
    filler = folder / "filler"
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize // PAGE
    with open(filler, "wb") as fh:
        os.posix_fallocate(fh.fileno(), 0, (free - leave_pages) * PAGE)
    return filler


def check_latest_loads(root: Path, out: Path, step: int) -> None:
    storage = LocalStorage(root)
    latest = Catalog(storage).latest()
    assert latest is not None
    assert latest.ref.step == step
    assert run_command(cli, ["verify", str(root)]) == 0
    assert run_command(cli, ["restore", str(root), str(out), "--force"]) == 0


@pytest.mark.parametrize("where", ["shard", "manifest", "commit"])
def test_d44_a_full_disk_costs_one_save_and_nothing_else(
    disk: Path, tmp_path: Path, where: str
) -> None:
    root = disk / "run"
    with Checkpointer(str(root), CONFIG) as c:
        save(c, 1)
        save(c, 2)
        (folder,) = (root / "data").iterdir()
        shard = pages(folder / "r00000.bin")
        rest = sum(pages(p) for p in folder.iterdir() if p.suffix != ".bin")
        leave = {"shard": shard - 1, "manifest": shard, "commit": shard + rest}[where]
        filler = fill(disk, leave)
        handle = c.save(3, state(3))
        error = handle.committed.exception()
        assert isinstance(error, StorageError)
        said = {"shard": "r00000.bin", "manifest": "r00000.idx", "commit": "commits/"}[where]
        assert said in str(error)
        assert "No space left on device" in str(error)
        assert "more bytes needed, " in str(error)
        c.wait()
        check_latest_loads(root, tmp_path / "out", 2)
        left = {o.key.split("/")[1] for o in LocalStorage(root).list(DATA)}
        assert left == {folder.name}, "what the failed save left is swept"
        filler.unlink()
        save(c, 4)
        check_latest_loads(root, tmp_path / "out", 4)
        assert (c.stats.failed, c.stats.prune_failed) == (1, 0)
    with Checkpointer(str(root)) as c:
        live = state(0)
        result = c.restore(live)
        assert result is not None
        assert torch.equal(live["t"], state(4)["t"])


def test_d44_a_read_only_mount(
    disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = disk / "run"
    with Checkpointer(str(root), CONFIG) as c:
        save(c, 1)
        save(c, 2)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        error = c.save(3, state(3)).committed.exception()
        assert isinstance(error, StorageError)
        assert "Read-only file system" in str(error)
        c.wait()
        check_latest_loads(root, tmp_path / "out", 2)
        assert "warning: reading without a pin" in capsys.readouterr().err
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        save(c, 4)
        check_latest_loads(root, tmp_path / "out", 4)


@contextmanager
def as_somebody() -> Iterator[None]:
    """As a user whom file modes concern."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_d44_a_root_without_write_permission(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as parent:
        root = Path(parent) / "run"
        if not os.geteuid():
            os.chown(parent, NOBODY, NOBODY)
        with as_somebody():
            with Checkpointer(str(root), CONFIG) as c:
                save(c, 1)
                save(c, 2)
                folders = [root, *(p for p in root.rglob("*") if p.is_dir())]
                for p in folders:
                    p.chmod(0o555)
                error = c.save(3, state(3)).committed.exception()
                assert isinstance(error, StorageError)
                assert "Permission denied" in str(error)
                c.wait()
                latest = Catalog(LocalStorage(root)).latest()
                assert latest is not None
                assert latest.ref.step == 2
                assert run_command(cli, ["verify", str(root)]) == 0
                for p in folders:
                    p.chmod(0o755)
                save(c, 4)
                latest = Catalog(LocalStorage(root)).latest()
                assert latest is not None
                assert latest.ref.step == 4
            assert {o.key.split("/")[1][:19] for o in LocalStorage(root).list(DATA)} == {
                "000001-000000000004"
            }
