"""Objects as files below one root folder, durable and atomic.

Every object is first a file `.tmp-<random>` in its own folder, written, synced, and only
then given its name: by a hard link, which fails if the name is taken, or by a rename,
which replaces. Then the folder is synced. A killed process leaves at most a hidden file.

Etags are (inode, size, mtime). Every version is a new file, and a replacement gets, under
the root's lock, an mtime above that of the version it replaces, whatever the clock and the
filesystem's resolution say. So no two versions of an object share an etag, and nothing has
to be read to know it. Copying a root elsewhere changes its etags, and nothing else.

Symbolic links below the root are neither listed nor followed: an object can't lie, or be
written, outside the root. The root itself may be a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckpt.errors import (
    BadInputError,
    ConflictError,
    CorruptError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.storage.files import (
    FOLDER_FLAGS,
    TempFile,
    fill,
    read_bytes,
    scan,
    stat_object,
    sync_folder,
    sync_path,
)
from ckpt.storage.keys import check_key, check_prefix
from ckpt.storage.oserrors import explain
from ckpt.types import Buffer, ObjectInfo

_LOCK = b".sidestage-lock"
_Names = list[bytes]


class LocalStorage:
    """The store in folder `root`, which is made at the first write.

    Needs hard links or renameat2(RENAME_NOREPLACE), and flock for `put`, `replace_if` and
    `delete`. Don't remove `.sidestage-lock` while somebody writes. Folders stay when their last
    object is deleted. A key can't be the folder of another: `a` and `a/b` exclude each other here.

    A StorageError of a write leaves open whether the object exists (its name may have been
    given before its folder couldn't be synced): read it back.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.path.abspath(root)
        # Folders whose entry in their parent this object has synced: a folder that was found
        # to exist may have been made a moment ago by a process that hasn't synced it yet.
        self._synced: set[bytes] = set()

    @property
    def url(self) -> str:
        return self._root

    @property
    def upload_bytes(self) -> int:
        return 0

    def probe(self) -> bool:
        return True

    def above(self) -> Iterator[tuple[LocalStorage, str]]:
        """Each folder that the root lies in, the nearest first, and the root's place there."""
        path = os.path.realpath(self._root)
        folder, name = os.path.split(path)
        while name:
            yield LocalStorage(folder), os.path.relpath(path, folder)
            folder, name = os.path.split(folder)

    def put(self, key: str, data: Buffer) -> ObjectInfo:
        return self._replace(key, data, None)

    def replace_if(self, key: str, data: Buffer, etag: str) -> ObjectInfo:
        return self._replace(key, data, etag)

    def create(self, key: str, data: Buffer) -> ObjectInfo:
        folders, name = _split(key)
        with self._errors("create", key), self._folder(folders, make=True) as folder:
            temp = TempFile(folder)
            try:
                temp.write(data)
                return self._finish_new(temp, name, key)
            finally:
                temp.discard()

    @contextmanager
    def writer(self, key: str) -> Iterator[LocalWriter]:
        folders, name = _split(key)
        with ExitStack() as stack:
            with self._errors("create", key):
                temp = TempFile(stack.enter_context(self._folder(folders, make=True)))
            stack.callback(temp.discard)
            writer = LocalWriter(self._root, key, temp)
            # Outside of _errors: what the caller's block raises is none of ours.
            try:
                yield writer
            finally:
                writer.closed = True
            if writer.failed is not None:
                # A caller that swallowed the error of a write must not get half an object.
                raise StorageError(f"{writer.failed} (an earlier write of this object failed)")
            with self._errors("create", key):
                self._finish_new(temp, name, key)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        with self._errors("read", key), self._object(key) as (fd, size):
            end = self._check_range(key, start, length, size)
            data = read_bytes(fd, start, end - start)
        if len(data) != end - start:
            raise CorruptError(f"{self._root}/{key}: was cut at byte {start + len(data)} of {end}")
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        with self.near(key) as found:
            found.read_into(start, buffer)

    def near(self, key: str) -> NearFile:
        with self._errors("read", key):
            return NearFile(self, key, *self._open_object(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        head, _, tail = check_prefix(prefix).rpartition("/")
        return self._walk(f"{head}/" if head else "", tail)

    def stat(self, key: str) -> ObjectInfo:
        folders, name = _split(key)
        with self._errors("read", key), self._folder(folders) as folder:
            return _info(key, stat_object(name, folder))

    def delete(self, key: str) -> None:
        folders, name = _split(key)
        with (
            suppress(NotFoundError),
            self._errors("delete", key),
            self._folder(folders) as folder,
        ):
            stat_object(name, folder)
            with self._lock():
                os.unlink(name, dir_fd=folder)
            sync_folder(folder)

    def drop_folder(self, prefix: str) -> None:
        """Remove the folder of a prefix that ends in `/`, if it's empty.

        Only for prefixes that no writer uses again: one that is about to could be disturbed.
        """
        folders, name = _split(prefix.removesuffix("/"))
        # Whatever keeps it there, an empty folder does no harm.
        with suppress(NotFoundError, StorageError, OSError), self._folder(folders) as folder:
            os.rmdir(name, dir_fd=folder)

    def _replace(self, key: str, data: Buffer, etag: str | None) -> ObjectInfo:
        """Write `data` over `key`; with an etag, only over the version that has it."""
        folders, name = _split(key)
        with self._errors("write", key), self._folder(folders, make=etag is None) as folder:
            temp = TempFile(folder)
            try:
                temp.write(data)
                temp.sync()
                with self._lock():
                    try:
                        old = stat_object(name, folder)
                    except FileNotFoundError:
                        if etag is not None:
                            raise
                        old = None
                    if etag is not None and old is not None and _etag(old) != etag:
                        raise ConflictError(
                            f"{self._root}/{key}: etag is {_etag(old)}, expected {etag}: "
                            f"another client replaced it; read it again"
                        )
                    info = _info(key, temp.stamp(old.st_mtime_ns if old else 0))
                    temp.rename(name)
                sync_folder(folder)
                return info
            finally:
                temp.discard()

    def _finish_new(self, temp: TempFile, name: bytes, key: str) -> ObjectInfo:
        """Sync a file and give it its name, which must be free."""
        info = _info(key, temp.stamp(0))
        temp.sync()
        try:
            temp.link(name)
        except FileExistsError:
            raise ConflictError(
                f"{self._root}/{key}: exists already; it was made by another"
            ) from None
        sync_folder(temp.folder)
        return info

    @contextmanager
    def _folder(self, folders: _Names, *, make: bool = False) -> Iterator[int]:
        """An open descriptor of a folder below the root, with every step synced if `make`."""
        fd = self._open_root(make=make)
        try:
            path = b""
            for name in folders:
                path += name + b"/"
                child = self._open_child(fd, name, path, make=make)
                fd, parent = child, fd
                os.close(parent)
            yield fd
        finally:
            os.close(fd)

    def _open_root(self, *, make: bool) -> int:
        try:
            if make and b"" not in self._synced:
                self._make_root()
                self._synced.add(b"")
            return os.open(self._root, FOLDER_FLAGS)
        except NotADirectoryError:
            raise BadInputError(
                f"{self._root}: it or a folder above it is a file; name a folder"
            ) from None

    def _make_root(self) -> None:
        missing = []
        path = self._root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(path)
            sync_path(os.path.dirname(path))
        if not missing:
            # Another process may have made it a moment ago. Its parent needn't be ours to open.
            with suppress(PermissionError):
                sync_path(os.path.dirname(self._root))

    def _open_child(self, parent: int, name: bytes, path: bytes, *, make: bool) -> int:
        made = False
        try:
            fd = os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            made = True
            fd = os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        if make and (made or path not in self._synced):
            try:
                sync_folder(parent)
            except OSError:
                os.close(fd)
                raise
            self._synced.add(path)
        return fd

    @contextmanager
    def _object(self, key: str) -> Iterator[tuple[int, int]]:
        """(descriptor, size) of an object, open for reading."""
        fd, size = self._open_object(key)
        try:
            yield fd, size
        finally:
            os.close(fd)

    def _open_object(self, key: str) -> tuple[int, int]:
        """The same; the caller closes the descriptor."""
        folders, name = _split(key)
        with self._folder(folders) as folder:
            # O_NONBLOCK: opening somebody's fifo must not wait for its writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=folder)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not an object")
        except BaseException:
            os.close(fd)
            raise
        return fd, found.st_size

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Exclude the other clients of this root, threads and processes, for one rename."""
        with self._folder([]) as root:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(_LOCK, flags, 0o666, dir_fd=root)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _walk(self, head: str, tail: str) -> Iterator[ObjectInfo]:
        """Objects in folder `head` whose names there start with `tail`, and all below them."""
        try:
            with self._errors("list", head), self._folder(head.encode().split(b"/")[:-1]) as folder:
                entries = scan(folder, tail)
        except NotFoundError:
            return
        for name, found in entries:
            if found is None:
                yield from self._walk(f"{head}{name}", "")
            else:
                yield _info(f"{head}{name}", found)

    def _check_range(self, key: str, start: int, length: int | None, size: int) -> int:
        """The end of a range that lies inside an object."""
        if start < 0 or (length is not None and length < 0):
            raise BadInputError(f"{self._root}/{key}: range {start}+{length} is negative")
        end = size if length is None else start + length
        if start > size or end > size:
            raise CorruptError(
                f"{self._root}/{key}: has {size} bytes, but bytes [{start}, {end}) were asked for"
            )
        return end

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Turn the operating system's errors into ours."""
        try:
            yield
        except OSError as e:
            raise explain(e, self._root, verb, key) from e


class NearFile:
    """An object that is open for reading. It isn't mapped: a file that shrinks would end the process."""

    def __init__(self, storage: LocalStorage, key: str, fd: int, size_bytes: int) -> None:
        self._storage = storage
        self._key = key
        self._fd = fd
        self._size_bytes = size_bytes

    def __enter__(self) -> NearFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def ahead(self, start: int, length: int) -> None:
        with suppress(OSError):  # some filesystems know no advice
            os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)

    def read_into(self, start: int, buffer: memoryview) -> None:
        end = self._storage._check_range(self._key, start, buffer.nbytes, self._size_bytes)
        with self._storage._errors("read", self._key):
            done = fill(self._fd, start, buffer)
        if done != buffer.nbytes:
            raise CorruptError(
                f"{self._storage.url}/{self._key}: was cut at byte {start + done} of {end}"
            )

    def read_each(
        self, start: int, buffers: Iterable[memoryview], then: Callable[[memoryview], object]
    ) -> None:
        # Little Python between two reads: threads that read at the same time wait for its lock.
        with self._storage._errors("read", self._key):
            for buffer in buffers:
                if os.preadv(self._fd, [buffer], start) != len(buffer):
                    self.read_into(start, buffer)
                then(buffer)
                start += len(buffer)


class LocalWriter:
    """Streams into a file that nobody sees yet."""

    def __init__(self, root: str, key: str, temp: TempFile) -> None:
        self._root = root
        self._key = key
        self._temp = temp
        self._size_bytes = 0  # only `write` needs it, which is one thread's
        self.closed = False
        self.failed: SidestageError | None = None

    def write(self, data: Buffer) -> None:
        self.write_at(self._size_bytes, data)

    def write_at(self, offset: int, data: Buffer) -> None:
        if self.closed:
            raise BadInputError(f"{self._key}: written to after its block ended")
        if self.failed is not None:
            raise StorageError(f"{self.failed} (an earlier write of this object failed)")
        try:
            self._temp.write(data, offset)
        except OSError as e:
            self.failed = explain(e, self._root, "write", self._key)
            raise self.failed from e
        self._size_bytes = offset + memoryview(data).nbytes


def _split(key: str) -> tuple[_Names, bytes]:
    """A checked key as the names of its folders and its own name."""
    *folders, name = check_key(key).encode().split(b"/")
    return folders, name


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, _etag(found))
