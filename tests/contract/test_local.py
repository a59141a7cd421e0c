"""What only the local backend promises: durability, links, and what the system's errors become."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    StorageError,
)
from ckpt.storage import LocalStorage, files

DEADLINE_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(root: Path) -> LocalStorage:
    return LocalStorage(root)


def keys(storage: LocalStorage) -> list[str]:
    return [info.key for info in storage.list()]


def all_files(root: Path) -> list[str]:
    """Every file below root, hidden ones too."""
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


class Calls:
    """Records the system calls that matter for durability, in order, by file name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        for name in ("fsync", "pwrite"):
            monkeypatch.setattr(os, name, self._by_descriptor(name, getattr(os, name)))
        for name in ("link", "replace"):
            monkeypatch.setattr(os, name, self._by_names(name, getattr(os, name)))
        monkeypatch.setattr(os, "mkdir", self._mkdir(os.mkdir))

    def _by_descriptor(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(fd: int, *args: Any) -> Any:
            target = Path(os.readlink(f"/proc/self/fd/{fd}")).name
            self.log.append((name, "TEMP" if target.startswith(".tmp-") else target))
            return call(fd, *args)

        return recorded

    def _by_names(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(old: bytes, new: bytes, **kwargs: Any) -> Any:
            self.log.append((name, new.decode()))
            return call(old, new, **kwargs)

        return recorded

    def _mkdir(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.log.append(("mkdir", Path(os.fsdecode(path)).name))
            return call(path, *args, **kwargs)

        return recorded


class TestDurability:
    def test_create_syncs_data_then_links_then_syncs_the_folder(
        self, storage: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = Calls(monkeypatch)
        storage.create("a/b/key", b"data")
        assert calls.log == [
            ("mkdir", "root"),
            ("fsync", tmp_path.name),
            ("mkdir", "a"),
            ("fsync", "root"),
            ("mkdir", "b"),
            ("fsync", "a"),
            ("pwrite", "TEMP"),
            ("fsync", "TEMP"),
            ("link", "key"),
            ("fsync", "b"),
        ]

    def test_a_writer_does_the_same(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.create("first", b"")
        calls = Calls(monkeypatch)
        with storage.writer("key") as out:
            out.write(b"one")
            out.write(b"two")
        assert calls.log == [
            ("pwrite", "TEMP"),
            ("pwrite", "TEMP"),
            ("fsync", "TEMP"),
            ("link", "key"),
            ("fsync", "root"),
        ]

    def test_put_syncs_data_then_replaces_then_syncs_the_folder(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        etag = storage.put("key", b"old").etag
        replaced = [("pwrite", "TEMP"), ("fsync", "TEMP"), ("replace", "key"), ("fsync", "root")]
        calls = Calls(monkeypatch)
        etag = storage.put("key", b"new").etag
        assert calls.log == replaced
        storage.replace_if("key", b"newer", etag)
        assert calls.log == replaced * 2

    def test_a_folder_that_another_made_is_synced_once(
        self, storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its maker may not have come to syncing it, and our object would be lost with it."""
        storage.create("first", b"")
        (root / "a").mkdir()
        calls = Calls(monkeypatch)
        storage.create("a/1", b"")
        storage.create("a/2", b"")
        assert [c for c in calls.log if c[0] == "fsync"] == [
            ("fsync", "root"),
            ("fsync", "TEMP"),
            ("fsync", "a"),
            ("fsync", "TEMP"),
            ("fsync", "a"),
        ]

    def test_a_failed_data_sync_leaves_nothing(
        self, storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.create("first", b"")

        def broken(fd: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(StorageError, match="Input/output error"):
            storage.create("key", b"data")
        assert all_files(root) == ["first"]

    def test_a_folder_that_cannot_be_synced_is_accepted(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fsync = os.fsync

        def files_only(fd: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", files_only)
        storage.create("a/key", b"data")
        assert storage.read("a/key") == b"data"


class TestShortCalls:
    """One system call may move less than asked for (pytorch#717)."""

    def test_writes_are_looped(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:1000]), at))
        data = os.urandom(12_345)
        storage.create("created", data)
        storage.put("put", data)
        with storage.writer("streamed") as out:
            out.write(data[:5000])
            out.write(data[5000:])
        monkeypatch.undo()
        for key in ("created", "put", "streamed"):
            assert storage.read(key) == data

    def test_reads_are_looped(self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
        data = os.urandom(12_345)
        storage.create("k", data)
        pread, preadv = os.pread, os.preadv
        monkeypatch.setattr(os, "pread", lambda fd, n, at: pread(fd, min(n, 1000), at))
        monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [bufs[0][:1000]], at))
        assert storage.read("k") == data
        assert storage.read("k", 3, 5000) == data[3:5003]
        buffer = bytearray(12_000)
        storage.read_into("k", 300, memoryview(buffer))
        assert buffer == data[300:12_300]

    def test_a_file_that_shrinks_under_a_read_is_corrupt(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.create("k", b"0123456789")
        monkeypatch.setattr(os, "pread", lambda fd, n, at: b"012"[at : at + n])
        monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: 0)
        with pytest.raises(CorruptError, match="cut at byte 3 of 10"):
            storage.read("k")
        with pytest.raises(CorruptError, match="cut at byte 0 of 10"):
            storage.read_into("k", 0, memoryview(bytearray(10)))


class TestDirectWrites:
    """O_DIRECT where the filesystem, the memory and the place allow it, and whole files in any case."""

    PART = 1 << 20

    @pytest.fixture
    def data(self) -> memoryview:
        memory = mmap.mmap(-1, 2 * self.PART + 1000)
        memory[:] = os.urandom(len(memory))
        return memoryview(memory)

    def direct_bytes(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
        """Counts from now on the bytes that are written past the page cache."""
        counts: list[int] = []
        pwrite = os.pwrite

        def counted(fd: int, data: memoryview, at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                counts.append(len(data))
            return pwrite(fd, data, at)

        monkeypatch.setattr(os, "pwrite", counted)
        return lambda: sum(counts)

    def test_aligned_memory_goes_past_the_cache_and_the_tail_through_it(
        self, storage: LocalStorage, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = self.direct_bytes(monkeypatch)
        with storage.writer("k") as out:
            out.write(data)
        assert storage.read("k") == data
        if count() == 0:
            pytest.skip("this filesystem has no direct writes")
        assert count() == len(data) - len(data) % 4096

    def test_what_is_not_aligned_goes_through_the_cache(
        self, storage: LocalStorage, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = self.direct_bytes(monkeypatch)
        with storage.writer("memory") as out:
            out.write(data[1:])
        with storage.writer("offset") as out:
            out.write(b"x")
            out.write(data)
        with storage.writer("small") as out:
            out.write(data[:8192])
        with storage.writer("read-only") as out:
            out.write(data.toreadonly())
        assert count() == 0
        assert storage.read("memory") == data[1:]
        assert storage.read("offset") == b"x" + bytes(data)

    def test_a_filesystem_that_refuses_to_open_so(
        self, storage: LocalStorage, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return opened(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        with storage.writer("k") as out:
            out.write(data)
        assert storage.read("k") == data

    def test_a_filesystem_that_refuses_to_write_so(
        self, storage: LocalStorage, root: Path, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pwrite = os.pwrite
        refused: list[int] = []

        def refuse(fd: int, data: memoryview, at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(at)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return pwrite(fd, data, at)

        monkeypatch.setattr(os, "pwrite", refuse)
        with storage.writer("k") as out:
            out.write(data[: self.PART])
            out.write(data[self.PART :])
        assert len(refused) <= 1  # asked once, and not at all where it can't be opened so
        assert storage.read("k") == data

    def test_short_ones_are_completed(
        self, storage: LocalStorage, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call that stops at a place that isn't aligned leaves the rest to the cache (pytorch#717)."""
        pwrite = os.pwrite

        def short(fd: int, data: memoryview, at: int) -> int:
            most = 512 * 1024 if at == 0 else len(data) - 1
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and at:
                fd, most = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), 70_001
                try:
                    return pwrite(fd, data[:most], at)
                finally:
                    os.close(fd)
            return pwrite(fd, data[: max(1, most)], at)

        monkeypatch.setattr(os, "pwrite", short)
        with storage.writer("k") as out:
            out.write(data)
        monkeypatch.undo()
        assert storage.read("k") == data

    def test_no_room_is_named_as_for_any_write(
        self, storage: LocalStorage, root: Path, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(fd: int, data: memoryview, at: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def write() -> None:
            with storage.writer("k") as out:
                out.write(data)

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=f"{len(data)} more bytes needed, .* make room"):
            write()
        assert all_files(root) == []

    def test_room_that_was_reserved_and_not_needed_is_given_back(
        self, storage: LocalStorage, root: Path, data: memoryview
    ) -> None:
        with storage.writer("k") as out:
            out.write(data)
        found = (root / "k").stat()
        assert storage.stat("k").size_bytes == found.st_size == len(data)
        assert found.st_blocks * 512 < len(data) + 64 * 4096

    def test_a_filesystem_that_reserves_nothing(
        self, storage: LocalStorage, data: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "_allocate", lambda fd, size: False)
        with storage.writer("k") as out:
            out.write(data)
        assert storage.read("k") == data


class TestNames:
    def test_a_filesystem_without_hard_links_falls_back_to_an_exclusive_rename(
        self, storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_links(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", no_links)
        storage.create("k", b"first")
        with pytest.raises(ConflictError):
            storage.create("k", b"second")
        assert storage.read("k") == b"first"
        assert all_files(root) == ["k"]

    def test_neither_links_nor_exclusive_rename_is_refused(
        self, storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unsupported(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        class OldLibrary:
            def __init__(self, name: None, *, use_errno: bool) -> None:
                pass

        monkeypatch.setattr(os, "link", unsupported)
        monkeypatch.setattr(ctypes, "CDLL", OldLibrary)
        with pytest.raises(StorageError, match="neither hard links nor an exclusive rename"):
            storage.create("k", b"first")
        assert all_files(root) == []

    def test_the_own_link_after_a_lost_reply_is_a_success(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS repeats a call whose reply was lost, and then reports EEXIST for its own work."""
        link = os.link

        def lost(*args: Any, **kwargs: Any) -> None:
            link(*args, **kwargs)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

        monkeypatch.setattr(os, "link", lost)
        storage.create("k", b"mine")
        assert storage.read("k") == b"mine"

    def test_hidden_files_and_strays_are_not_objects(
        self, storage: LocalStorage, root: Path
    ) -> None:
        storage.put("a/k", b"x")
        (root / "a" / ".tmp-0123").write_bytes(b"left by a killed process")
        (root / ".tmp-folder").mkdir()
        (root / ".tmp-folder" / "k").write_bytes(b"")
        os.mkfifo(root / "a" / "fifo")
        Path(os.fsdecode(os.fsencode(root) + b"/a/latin-\xe9")).write_bytes(b"no key can name it")
        assert (root / ".sidestage-lock").exists()
        assert keys(storage) == ["a/k"]
        with pytest.raises(NotFoundError):
            storage.read("a/fifo")  # and doesn't wait for its writer

    def test_a_key_cannot_be_anothers_folder(self, storage: LocalStorage) -> None:
        storage.create("a", b"x")
        for write in (storage.create, storage.put):
            with pytest.raises(BadInputError, match="a part of its path is a file"):
                write("a/b", b"y")
        storage.create("c/d", b"x")
        with pytest.raises(BadInputError):
            storage.put("c", b"y")
        assert keys(storage) == ["a", "c/d"]

    def test_a_key_longer_than_the_systems_longest_path(self, storage: LocalStorage) -> None:
        deep = "/".join(["d" * 200] * 25)  # each part is opened from the one above
        storage.create(deep, b"x")
        assert keys(storage) == [deep]


class TestLinks:
    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "secret").write_bytes(b"secret")
        return folder

    def test_below_the_root_are_neither_listed_nor_followed(
        self, storage: LocalStorage, root: Path, outside: Path
    ) -> None:
        storage.create("real", b"x")
        (root / "file").symlink_to(outside / "secret")
        (root / "folder").symlink_to(outside)
        assert keys(storage) == ["real"]
        assert list(storage.list("folder/")) == []
        for key in ("file", "folder/secret"):
            with pytest.raises(NotFoundError):
                storage.read(key)
            with pytest.raises(NotFoundError):
                storage.stat(key)
        storage.delete("folder/secret")
        with pytest.raises(BadInputError, match="symbolic link"):
            storage.create("folder/new", b"x")
        with pytest.raises(ConflictError):
            storage.create("file", b"x")
        assert sorted(p.name for p in outside.iterdir()) == ["secret"]
        assert (outside / "secret").read_bytes() == b"secret"

    def test_put_replaces_a_link_and_not_its_target(
        self, storage: LocalStorage, root: Path, outside: Path
    ) -> None:
        storage.create("real", b"x")
        (root / "file").symlink_to(outside / "secret")
        storage.put("file", b"mine")
        assert storage.read("file") == b"mine"
        assert (outside / "secret").read_bytes() == b"secret"

    def test_the_root_may_be_one(self, tmp_path: Path, outside: Path) -> None:
        (tmp_path / "link").symlink_to(outside)
        storage = LocalStorage(tmp_path / "link")
        storage.create("k", b"x")
        assert keys(storage) == ["k", "secret"]
        assert (outside / "k").read_bytes() == b"x"


class TestRoot:
    def test_is_made_at_the_first_write_only(self, storage: LocalStorage, root: Path) -> None:
        assert keys(storage) == []
        with pytest.raises(NotFoundError):
            storage.read("k")
        storage.delete("k")
        assert not root.exists()
        storage.create("k", b"x")
        assert root.is_dir()

    def test_with_missing_parents(self, tmp_path: Path) -> None:
        storage = LocalStorage(tmp_path / "x" / "y" / "z")
        storage.create("k", b"x")
        assert (tmp_path / "x" / "y" / "z" / "k").read_bytes() == b"x"

    @pytest.mark.parametrize("below", ["", "/sub"])
    def test_a_file_in_its_place_is_bad_input(self, tmp_path: Path, below: str) -> None:
        (tmp_path / "file").write_bytes(b"")
        storage = LocalStorage(f"{tmp_path}/file{below}")
        with pytest.raises(BadInputError, match="is a file"):
            storage.create("k", b"x")
        with pytest.raises(BadInputError, match="is a file"):
            list(storage.list())
        with pytest.raises(BadInputError, match="is a file"):
            storage.read("k")

    def test_removed_while_in_use_is_made_again(self, storage: LocalStorage, root: Path) -> None:
        storage.create("a/k", b"x")
        shutil.rmtree(root / "a")
        storage.create("a/k", b"y")
        assert storage.read("a/k") == b"y"


class TestEtags:
    def test_differ_although_clock_and_file_times_stand_still(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        utime = os.utime

        def whole_seconds(fd: int, ns: tuple[int, int]) -> None:
            utime(fd, ns=(ns[0] // 10**9 * 10**9, ns[1] // 10**9 * 10**9))

        monkeypatch.setattr(os, "utime", whole_seconds)
        monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000 * 10**9)
        etags = [storage.put("k", b"same size").etag for _ in range(20)]
        assert len({etag.rpartition("-")[2] for etag in etags}) == 20  # by the time alone

    def test_times_that_cannot_be_set_are_an_error(
        self, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage.put("k", b"old")
        monkeypatch.setattr(os, "utime", lambda fd, ns: None)
        fstat = os.fstat
        monkeypatch.setattr(os, "fstat", lambda fd: _Frozen(fstat(fd)))
        with pytest.raises(StorageError, match="file times"):
            storage.put("k", b"new")
        monkeypatch.undo()
        assert storage.read("k") == b"old"


class _Frozen:
    """A stat result of the year 1970."""

    st_mtime_ns = 0

    def __init__(self, found: os.stat_result) -> None:
        self.st_mode = found.st_mode


class TestSystemErrors:
    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (errno.EACCES, "check the owner and mode"),
            (errno.EPERM, "check the owner and mode"),
            (errno.EROFS, "mounted writable"),
            (errno.EIO, "check the disk"),
            (errno.EDQUOT, "raise the quota"),
            (errno.ENOSPC, r"\(4 more bytes needed, \d+ free\); make room"),
            (errno.EMFILE, "Too many open files"),
        ],
    )
    def test_of_a_write_name_the_path_and_the_next_step(
        self,
        storage: LocalStorage,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        code: int,
        words: str,
    ) -> None:
        def fail(fd: int, data: memoryview, at: int) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "pwrite", fail)
        for write in (storage.create, storage.put):
            with pytest.raises(StorageError, match=f"{root}/some/key: can't .*{words}") as caught:
                write("some/key", b"data")
            assert "\n" not in str(caught.value)
        assert all_files(root) == []

    def test_a_swallowed_write_error_still_fails_the_object(
        self, storage: LocalStorage, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pwrite = os.pwrite
        failing = iter([False, True])

        def second_fails(fd: int, data: memoryview, at: int) -> int:
            if next(failing):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(fd, data, at)

        monkeypatch.setattr(os, "pwrite", second_fails)

        def swallow() -> None:
            with storage.writer("k") as out:
                out.write(b"one")
                for _ in range(2):
                    with pytest.raises(StorageError, match="No space left"):
                        out.write(b"two")

        with pytest.raises(StorageError, match="an earlier write of this object failed"):
            swallow()
        assert all_files(root) == []


KILLED = """
import sys
from ckpt.storage import LocalStorage
with LocalStorage(sys.argv[1]).writer("data/big.bin") as out:
    out.write(bytes(3_000_000))
    print("half", flush=True)
    sys.stdin.read()
"""


@pytest.mark.crash
def test_a_killed_writer_leaves_nothing_visible(storage: LocalStorage, root: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
    assert keys(storage) == []
    with pytest.raises(NotFoundError):
        storage.stat("data/big.bin")
    storage.create("data/big.bin", b"free")


@pytest.mark.crash
def test_a_killed_lock_holder_blocks_nobody(storage: LocalStorage, root: Path) -> None:
    code = """
import sys
from ckpt.storage import LocalStorage
with LocalStorage(sys.argv[1])._lock():
    print("locked", flush=True)
    sys.stdin.read()
"""
    storage.put("k", b"old")
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    writer = threading.Thread(target=lambda: storage.put("k", b"new"))
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        writer.start()
        assert storage.read("k") == b"old"  # readers never wait
        child.send_signal(signal.SIGKILL)
        writer.join(DEADLINE_S)
        assert not writer.is_alive()
    finally:
        child.kill()
        child.communicate()
    assert storage.read("k") == b"new"


IN_MOUNT = """
import sys
from ckpt.errors import SidestageError
from ckpt.storage import LocalStorage, open_storage
storage = LocalStorage(sys.argv[1])
{body}
"""


def in_mount(folder: Path, options: str, body: str) -> str:
    """Run code on a fresh tmpfs that only a child process sees, and that ends with it."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare command here to mount a tmpfs with")
    own = ["unshare", "--mount"] + ([] if os.geteuid() == 0 else ["--map-root-user"])
    folder.mkdir()
    script = f'mount -t tmpfs -o {options} tmpfs "$0" || exit 77; exec "$@"'
    python = [sys.executable, "-c", IN_MOUNT.format(body=body), str(folder)]
    ended = subprocess.run(
        [*own, "sh", "-c", script, str(folder), *python],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip(f"can't mount a tmpfs here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_full_disk_is_named_with_its_numbers_and_harms_nothing(tmp_path: Path) -> None:
    body = """
storage.create("kept", b"x" * 1000)
for write in (storage.create, storage.put):
    try:
        write("big", bytes(3 << 20))
    except SidestageError as e:
        print(type(e).__name__, e)
try:
    with storage.writer("streamed") as out:
        for _ in range(48):
            out.write(bytes(1 << 16))
except SidestageError as e:
    print(type(e).__name__, e)
print([o.key for o in storage.list()], storage.read("kept") == b"x" * 1000)
storage.create("after", bytes(1 << 19))
print(storage.stat("after").size_bytes)
"""
    *errors, listed, after = in_mount(tmp_path / "disk", "size=1m", body).splitlines()
    assert len(errors) == 3
    for error, key in zip(errors, ["big", "big", "streamed"], strict=True):
        assert error.startswith(f"StorageError {tmp_path}/disk/{key}: can't ")
        assert "No space left on device" in error
        assert " more bytes needed, 0 free); make room" in error
    assert listed == "['kept'] True"
    assert after == str(1 << 19)


def test_a_read_only_root_is_a_storage_error(tmp_path: Path) -> None:
    body = """
print(list(open_storage(sys.argv[1], must_exist=True).list()))
for call in (storage.create, storage.put):
    try:
        call("k", b"x")
    except SidestageError as e:
        print(type(e).__name__, e)
"""
    listed, *errors = in_mount(tmp_path / "disk", "ro", body).splitlines()
    assert listed == "[]"
    assert len(errors) == 2
    for error in errors:
        assert error.startswith(f"StorageError {tmp_path}/disk/k: can't ")
        assert "Read-only file system" in error


def test_no_permission_is_a_storage_error(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.create("a/k", b"x")

    def refuse(*args: Any, **kwargs: Any) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    for call in (
        lambda: storage.read("a/k"),
        lambda: storage.stat("a/k"),
        lambda: storage.create("a/j", b""),
        lambda: list(storage.list("a/")),
        lambda: storage.delete("a/k"),
    ):
        with pytest.raises(StorageError, match="Permission denied"):
            call()


def test_keys_need_no_locale() -> None:
    """Keys are UTF-8 on disk whatever the locale says."""
    code = """
import os, sys, tempfile
from ckpt.storage import LocalStorage
with tempfile.TemporaryDirectory() as folder:
    LocalStorage(folder).create("\\xe9/\\xfc", b"x")
    assert [o.key for o in LocalStorage(folder).list()] == ["\\xe9/\\xfc"]
    assert os.listdir(os.fsencode(folder)) == ["\\xe9".encode("utf-8")]
"""
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
