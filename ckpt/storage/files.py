"""What `LocalStorage` asks of the operating system: whole writes, syncs, exclusive names."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import threading
import time
from contextlib import suppress

from ckpt.storage.keys import HIDDEN
from ckpt.types import Buffer

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_RENAME_NOREPLACE = 1
_ALIGN = 4096
_LEAST_RESERVED_BYTES = 16 << 20
_MOST_RESERVED_BYTES = 256 << 20
_LEAST_DIRECT_BYTES = 256 * 1024  # below, waiting for the disk costs more than the cache does


class NoSpaceError(OSError):
    """A write found no room: `needed_bytes` were still to come, `free_bytes` was the room."""

    needed_bytes = 0
    free_bytes = 0


class TempFile:
    """A new file that no listing shows, in the open folder `folder`, until it is given its name."""

    def __init__(self, folder: int) -> None:
        self.folder = folder
        self._name = f"{HIDDEN[0]}{secrets.token_hex(8)}".encode("ascii")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._name, flags, 0o666, dir_fd=folder)
        self._direct: int | None = None
        self._may_direct = hasattr(os, "O_DIRECT")
        self._may_reserve = True
        self._end = self._reserved = 0
        self._lock = threading.Lock()

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Write all of `data` at `offset`, past the page cache where its alignment allows that.

        The cache would cost a second copy, its pages, and bursts of flushing in a trainer's way.
        Several threads may write, in any order. One system call moves at most 2 GiB, or less.
        """
        view = memoryview(data)
        if not view.nbytes:
            return
        view, done = view.cast("B"), 0
        whole = len(view) - len(view) % _ALIGN
        direct = None
        if whole >= _LEAST_DIRECT_BYTES and offset % _ALIGN == 0 and _is_aligned(view):
            direct = self._open_direct()
            self._reserve(offset + len(view))
        with self._lock:
            self._end = max(self._end, offset + len(view))
        try:
            while done < len(view):
                # A short write may end anywhere, and what is left then isn't aligned any more.
                if direct is not None and done < whole and done % _ALIGN == 0:
                    try:
                        done += os.pwrite(direct, view[done:whole], offset + done)
                        continue
                    except OSError as e:
                        if e.errno != errno.EINVAL:
                            raise
                    # It could be opened so, but wants another alignment, or can't after all.
                    self._may_direct, direct = False, None
                done += os.pwrite(self._fd, view[done:], offset + done)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            full = NoSpaceError(e.errno, e.strerror)
            full.needed_bytes = len(view) - done
            # Now: once the file is dropped, its own bytes are free again.
            full.free_bytes = _free_bytes(self._fd)
            raise full from e

    def _open_direct(self) -> int | None:
        """A second descriptor, for direct writes: its flag can't be another thread's surprise."""
        with self._lock:
            if self._may_direct and self._direct is None:
                flags = os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    self._direct = os.open(self._name, flags, dir_fd=self.folder)
                except OSError:  # EINVAL: a filesystem without it; else: say so at a plain write
                    self._may_direct = False
            return self._direct if self._may_direct else None

    def _reserve(self, end: int) -> None:
        """Have room up to byte `end` and beyond: direct writes that extend a file exclude each other."""
        with self._lock:
            if end <= self._reserved or not self._may_reserve:
                return
            ahead = min(max(end, _LEAST_RESERVED_BYTES), _MOST_RESERVED_BYTES)
            self._may_reserve = _allocate(self._fd, end + ahead)
            if self._may_reserve:
                self._reserved = end + ahead

    def _trim(self) -> None:
        """Give back what was reserved and not needed."""
        if self._reserved > self._end:
            os.ftruncate(self._fd, self._end)
            self._reserved = self._end

    def stamp(self, above_ns: int) -> os.stat_result:
        """Set an mtime above `above_ns`, at whatever resolution the filesystem keeps."""
        self._trim()
        for step_ns in (1, 1_000, 2_000_000_000, 4_000_000_000):
            mtime_ns = max(time.time_ns(), above_ns + step_ns)
            os.utime(self._fd, ns=(mtime_ns, mtime_ns))
            found = os.fstat(self._fd)
            if found.st_mtime_ns > above_ns:
                return found
        raise OSError(errno.EIO, "the filesystem doesn't keep the file times that are set")

    def sync(self) -> None:
        self._trim()
        os.fsync(self._fd)

    def link(self, name: bytes) -> None:
        """Give the file a name that must be free, else FileExistsError."""
        try:
            os.link(self._name, name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except FileExistsError:
            # NFS: the reply was lost and the repeated call met our own link.
            if os.fstat(self._fd).st_nlink < 2:
                raise
        except OSError as e:
            if e.errno not in _NO_LINKS:
                raise
            rename_exclusive(self.folder, self._name, name)

    def rename(self, name: bytes) -> None:
        """Give the file a name, in the place of any file that has it."""
        os.replace(self._name, name, src_dir_fd=self.folder, dst_dir_fd=self.folder)

    def discard(self) -> None:
        """Close the file and drop its hidden name. Never raises: what counts is done by then."""
        if self._direct is not None:
            with suppress(OSError):
                os.close(self._direct)
        with suppress(OSError):
            os.close(self._fd)
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self.folder)


def rename_exclusive(folder: int, old: bytes, new: bytes) -> None:
    """Rename within a folder, FileExistsError if `new` exists; where there are no hard links."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library older than the call
        code = errno.ENOSYS
    else:
        if renameat2(folder, old, folder, new, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        raise OSError(
            code,
            "this filesystem has neither hard links nor an exclusive rename, so that two writers "
            "couldn't exclude each other; keep the run on another one",
        )
    raise OSError(code, os.strerror(code))


def read_bytes(fd: int, start: int, length: int) -> bytes:
    """Bytes [start, start + length) of a file, fewer only if it ends before."""
    data = os.pread(fd, length, start)
    if len(data) == length:
        return data
    pieces = [data]
    while pieces[-1] and (length := length - len(pieces[-1])):
        start += len(pieces[-1])
        pieces.append(os.pread(fd, length, start))
    return b"".join(pieces)


def fill(fd: int, start: int, buffer: memoryview) -> int:
    """Fill `buffer` from byte `start` of a file; how many bytes there were."""
    done = 0
    if buffer.nbytes:
        view = buffer.cast("B")
        while done < len(view) and (n := os.preadv(fd, [view[done:]], start + done)):
            done += n
    return done


def sync_folder(fd: int) -> None:
    """Make a folder's entries durable."""
    try:
        os.fsync(fd)
    except OSError as e:
        # Some network filesystems can't sync a folder, and do without.
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def sync_path(path: str) -> None:
    fd = os.open(path, FOLDER_FLAGS)
    try:
        sync_folder(fd)
    finally:
        os.close(fd)


def stat_object(name: bytes, folder: int) -> os.stat_result:
    """Stat a regular file; anything else isn't an object and counts as missing."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not an object")
    return found


def scan(folder: int, start: str) -> list[tuple[str, os.stat_result | None]]:
    """Names in a folder that begin with `start`, in key order: files, and folders with a `/`.

    A folder sorts by its name with the slash, as its keys do: `a-b` comes before `a/b`.
    """
    found: list[tuple[str, os.stat_result | None]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                name = os.fsencode(entry.name).decode("utf-8")
                if name.startswith(HIDDEN) or not name.startswith(start):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    found.append((f"{name}/", None))
                elif entry.is_file(follow_symlinks=False):
                    found.append((name, entry.stat(follow_symlinks=False)))
            except (FileNotFoundError, UnicodeDecodeError):
                continue  # deleted since, or a stray that no key can name
    return sorted(found, key=lambda pair: pair[0])


def _allocate(fd: int, size: int) -> bool:
    """Make a file `size` bytes long with all its blocks; False where that can't be, or has no room.

    Not os.posix_fallocate: the C library replaces what a filesystem lacks by writes of its own.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except AttributeError:
        return False
    return bool(fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0)


def _is_aligned(view: memoryview) -> bool:
    """Does O_DIRECT take this memory? Read-only memory is never made to be aligned."""
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % _ALIGN == 0


def _free_bytes(fd: int) -> int:
    """Bytes that this user may still write to the filesystem of an open file."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize
