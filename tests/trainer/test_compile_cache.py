"""The compile cache's rules, on files that stand for what a compiler makes."""

import hashlib
import io
import logging
import os
import tarfile
from pathlib import Path

import pytest
import torch
import zstandard
from torch import nn

from ckpt.errors import CorruptError, StorageError
from ckpt.layout import compile_cache_key, compile_cache_prefix
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from trainer import archive, compile_cache
from trainer.compile_cache import CompileCache, cache_key
from trainer.compile_folder import CompilerFolder

KEY = "0123456789abcdef" * 2
FILES = {"ab/kernel.so": b"\x7fELF" + bytes(5000), "fxgraph/x/graph": b"pickle" * 40}


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def trust(tmp_path: Path) -> TrustList:
    return TrustList(tmp_path / "trusted")


@pytest.fixture
def saved(storage: MemoryStorage, trust: TrustList, tmp_path: Path) -> str:
    """The sha256 of an archive of FILES, saved and trusted."""
    made = folder_in(tmp_path, "made")
    for name, content in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    (made / "ab/kernel.so").chmod(0o755)
    (made / "locks").mkdir()
    (made / "locks/x.lock").touch()
    sha256 = CompileCache(storage, trust, KEY, made).save()
    assert sha256 is not None
    return sha256


def folder_in(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith(".")
    }


def test_another_host_that_trusts_it_gets_the_same_files(
    storage: MemoryStorage, trust: TrustList, saved: str, tmp_path: Path
) -> None:
    there = folder_in(tmp_path, "there")
    loaded = CompileCache(storage, trust, KEY, there).load()
    assert (loaded.found, loaded.reason) == ("loaded", saved)
    assert files_in(there) == FILES
    assert os.access(there / "ab/kernel.so", os.X_OK)
    # A second rank of that host finds it done, and asks the store for nothing.
    second = CompileCache(MemoryStorage(), trust, KEY, there)
    assert second.load().found == "loaded"
    # What was loaded packs to the same archive, so nobody stores it twice.
    assert CompileCache(storage, trust, KEY, there).save() == saved
    assert len(list(storage.list(compile_cache_prefix(KEY)))) == 1


def test_another_key_has_no_cache(
    storage: MemoryStorage, trust: TrustList, saved: str, tmp_path: Path
) -> None:
    there = folder_in(tmp_path, "there")
    assert CompileCache(storage, trust, "f" * 32, there).load().found == "none"
    assert files_in(there) == {}


@pytest.mark.parametrize("damage", ["flipped", "cut short", "trusted and cut short", "not trusted"])
def test_a_bad_cache_is_ignored_with_one_message_and_replaced(
    storage: MemoryStorage,
    trust: TrustList,
    saved: str,
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = compile_cache_key(KEY, saved)
    data = bytearray(storage.read(key))
    if damage == "flipped":
        data[len(data) // 2] ^= 1
    elif damage == "not trusted":
        trust = TrustList(tmp_path / "of another host")
    else:
        del data[len(data) // 2 :]
    if damage == "trusted and cut short":
        storage.delete(key)
        key = compile_cache_key(KEY, trust.add(data))
    storage.put(key, data)
    there = folder_in(tmp_path, "there")
    cache = CompileCache(storage, trust, KEY, there)
    with caplog.at_level(logging.WARNING, "sidestage"):
        assert cache.load().found == "ignored"
    assert files_in(there) == {}
    (message,) = [r.getMessage() for r in caplog.records]
    assert "compiling without a cache" in message
    if damage == "not trusted":
        assert saved in message
        assert str(trust.path) in message
    else:
        assert key in message
    # The compiler then makes the same files again, and the next start has a cache.
    for name, content in FILES.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    (there / "ab/kernel.so").chmod(0o755)
    assert cache.save() == saved
    healed = CompileCache(storage, trust, KEY, folder_in(tmp_path, "healed"))
    assert healed.load().found == "loaded"
    assert files_in(tmp_path / "healed") == FILES


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("../outside", tarfile.REGTYPE),
        ("/tmp/sidestage-outside", tarfile.REGTYPE),
        ("a/../../outside", tarfile.REGTYPE),
        ("link", tarfile.SYMTYPE),
        ("hard", tarfile.LNKTYPE),
        ("device", tarfile.CHRTYPE),
    ],
)
def test_nothing_is_written_outside_the_folder(tmp_path: Path, name: str, kind: bytes) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        good = tarfile.TarInfo("good")
        tar.addfile(good, io.BytesIO())
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "../outside"
        tar.addfile(entry, io.BytesIO())
    folder = folder_in(tmp_path, "in")
    with pytest.raises(CorruptError, match="isn't a file inside it"):
        archive.unpack(zstandard.compress(out.getvalue()), folder, "k")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_archives_have_limits(
    storage: MemoryStorage,
    trust: TrustList,
    saved: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = folder_in(tmp_path, "there")
    data = storage.read(compile_cache_key(KEY, saved))
    for limit, value in [("MAX_UNPACKED_BYTES", 1000), ("MAX_FILES", 1)]:
        with monkeypatch.context() as patch:
            patch.setattr(archive, limit, value)
            with pytest.raises(CorruptError, match=f"more than {value}|more than {value} bytes"):
                archive.unpack(data, there, "k")
            # Nor is one written that would be refused.
            assert CompileCache(storage, trust, "e" * 32, tmp_path / "made").save() is None
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "MAX_ARCHIVE_BYTES", 10)
        assert CompileCache(storage, trust, KEY, there).load().found == "ignored"
    monkeypatch.setattr(compile_cache, "MAX_ARCHIVES", 1)
    (tmp_path / "made/more").write_bytes(b"x")
    assert CompileCache(storage, trust, KEY, tmp_path / "made").save() is None
    assert files_in(there) == {}


def test_the_key_covers_code_shapes_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")

    def key(part: nn.Module, **flags: object) -> str:
        return cache_key({"dense": part}, cpu, flags)

    first = key(nn.Linear(3, 4), dynamic=True)
    assert first == key(nn.Linear(3, 4), dynamic=True)
    others = {key(nn.Linear(3, 5), dynamic=True), key(nn.Linear(3, 4), dynamic=False)}
    monkeypatch.setenv("TORCHINDUCTOR_CPP_WRAPPER", "1")
    others.add(key(nn.Linear(3, 4), dynamic=True))
    monkeypatch.delenv("TORCHINDUCTOR_CPP_WRAPPER")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        others.add(key(nn.Linear(3, 4), dynamic=True))
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "_cpu_flags", lambda: "avx512f")
        others.add(key(nn.Linear(3, 4), dynamic=True))
    assert len(others | {first}) == 6


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unset after the test")
    return tmp_path / "base"


def test_a_compilers_folder_is_the_users_own_and_goes_with_its_job(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    first = CompilerFolder(KEY, folders)
    second = CompilerFolder(KEY, folders)  # another rank of the same job
    assert first.path == second.path
    (first.path / "kernel.so").touch()
    first.close()
    monkeypatch.setenv("MASTER_PORT", "2")
    other = CompilerFolder(KEY, folders)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(other.path)
    assert (second.path / "kernel.so").exists(), "it is still in use"
    second.close()
    last = CompilerFolder("f" * 32, folders)
    assert not second.path.exists()
    other.close()
    last.close()
    folders.chmod(0o777)
    with pytest.raises(StorageError, match="only this user can write"):
        CompilerFolder(KEY, folders)


def test_the_same_files_make_the_same_archive(
    storage: MemoryStorage, saved: str, tmp_path: Path
) -> None:
    for path in (tmp_path / "made").rglob("*"):
        os.utime(path, (1, 1))
    assert hashlib.sha256(archive.pack(tmp_path / "made")).hexdigest() == saved


def test_autotuned_kernels_that_lost_stay_out(
    storage: MemoryStorage, trust: TrustList, tmp_path: Path
) -> None:
    made, there = folder_in(tmp_path, "made"), folder_in(tmp_path, "there")
    kept = {
        "ab/k.best_config": b'{"XBLOCK": 64, "triton_cache_hash": "WON"}',
        "ab/broken.best_config": b"{",
        "triton/0/WON/triton_mm.json": b"{}",
        "triton/0/WON/triton_mm.cubin": b"fast",
        "triton/0/UNTUNED/triton_add.json": b"{}",
        "triton/0/UNTUNED/triton_add.cubin": b"only",
    }
    lost = {"triton/0/LOST/triton_mm.json": b"{}", "triton/0/LOST/triton_mm.cubin": b"slow"}
    for name, content in (kept | lost).items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(content)
    assert CompileCache(storage, trust, KEY, made).save()
    assert CompileCache(storage, trust, KEY, there).load().found == "loaded"
    assert files_in(there) == kept
