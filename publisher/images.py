"""The tables of a version in memory: its files mapped side by side, every byte digested first.

`publisher.formats` has the rule that makes it possible. Files of a local registry are mapped where
they lie; those of an object store are downloaded first, to a cache keyed by their digests.
The maps are read-only and outlive the files' names.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import torch

from ckpt.digest import new_hasher
from ckpt.errors import CorruptError, StorageError, UnsupportedFormatError
from ckpt.parallel import each
from ckpt.schema import ServingDescription
from ckpt.storage import LocalStorage, Storage
from ckpt.types import FileEntry
from publisher.formats import ALIGN_BYTES, PAGE_BYTES, row_bytes
from publisher.records import PublishedTable, TableFormat, VersionManifest

_STEP_BYTES = 16 << 20
_WORKERS = 4
_TABLES = re.compile(r"tables-[0-9]{5,}\.bin")
_DIGEST = re.compile(r"[a-z0-9-]+:[0-9a-f]+")
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_NONE = 0

Placed = dict[str, tuple[int, TableFormat]]
"""Where in the image each table begins, and its format, by checkpoint key."""


def table_files(manifest: VersionManifest) -> list[FileEntry]:
    """The files of a version's image, in their order."""
    found = [f for f in manifest.files if _TABLES.fullmatch(f.key)]
    return sorted(found, key=lambda f: (len(f.key), f.key))


def place_tables(manifest: VersionManifest, description: ServingDescription) -> Placed:
    """Where each table lies in the image, checked: lookups read memory by it and check no bounds.

    Raises CorruptError naming the table and the bytes.
    """
    what = f"version {manifest.version}"
    described = {(fqn, rows, dim) for fqn, (rows, dim) in description.tables().items()}
    listed = [(t.fqn, t.rows, t.dim) for t in manifest.tables]
    features = {(f.table_fqn, f.rows, f.dim) for lk in description.lookups for f in lk.features}
    if set(listed) != described or len(listed) != len(described) or features != described:
        raise CorruptError(f"{what}: the tables of its manifest aren't those of its description")
    starts, size = {}, 0
    for entry in table_files(manifest):
        if size % PAGE_BYTES:
            raise CorruptError(f"{what}: a file before {entry.key} ends inside a page")
        starts[entry.key] = (size, entry.size_bytes)
        size += entry.size_bytes
    return {t.fqn: (_place(t, starts, size, what), t.format) for t in manifest.tables}


def _place(table: PublishedTable, files: dict[str, tuple[int, int]], size: int, what: str) -> int:
    """The byte of the image at which a table begins."""
    what = f"{what}: {table.fqn}"
    if table.row_bytes != row_bytes(table.format, table.dim):
        raise CorruptError(
            f"{what}: rows of {table.row_bytes} bytes, but {table.dim} columns in {table.format} "
            f"have {row_bytes(table.format, table.dim)}"
        )
    begins, row = None, 0
    for part in table.parts:
        start, length = files.get(part.file, (0, -1))
        if part.offset + part.rows * table.row_bytes > length:
            raise CorruptError(
                f"{what}: rows up to byte {part.offset + part.rows * table.row_bytes} of "
                f"{part.file}, which has {length} bytes"
            )
        at = start + part.offset
        begins = at if begins is None else begins
        if part.first_row != row or at != begins + row * table.row_bytes:
            raise CorruptError(
                f"{what}: row {row} should come next, at byte {begins + row * table.row_bytes} of "
                f"the image; a part begins with row {part.first_row} at byte {at}"
            )
        row += part.rows
    if begins is None or row != table.rows:
        raise CorruptError(f"{what}: its parts hold {row} of {table.rows} rows")
    end = begins + max(table.rows, 1) * table.row_bytes
    if begins % ALIGN_BYTES or end > size:
        raise CorruptError(f"{what}: bytes {begins} to {end} of an image of {size} bytes")
    return begins


class TableCache:
    """Gets files of tables onto this host, for mapping.

    Args:
        folder: where downloaded files are kept, by digest; None: they aren't kept.
        prefix: of the registry's keys. Each registry has a folder of its own in there.
    """

    def __init__(self, folder: Path | None = None, prefix: str = "") -> None:
        self._folder = folder
        self._prefix = prefix

    def map(self, storage: Storage, files: Sequence[tuple[str, FileEntry]]) -> torch.Tensor:
        """The image of (key, entry) files, uint8, every byte of it digested.

        Raises CorruptError naming the file that differs from its entry, StorageError.
        """
        if isinstance(storage, LocalStorage):
            found = [(key, Path(storage.url) / key, entry) for key, entry in files]
            return _checked(found)
        with self._folder_for(storage) as folder:
            for again in (False, True):
                found = []
                for key, entry in files:
                    found.append((key, folder / _kept_name(entry.digest, key), entry))
                kept = [path.exists() for _, path, _ in found]
                list(each(lambda f: _fetch(storage, *f), found, _WORKERS))
                try:
                    return _checked(found)
                except CorruptError:
                    if again or not any(kept):
                        raise
                    # A file that lay here may have rotted: the store's copy decides.
                    for (_, path, _), had in zip(found, kept, strict=True):
                        if had:
                            path.unlink(missing_ok=True)
        raise AssertionError

    def keep_only(self, storage: Storage, digests: Collection[str]) -> None:
        """Delete the kept files of this storage that have none of these digests."""
        if self._folder is None or isinstance(storage, LocalStorage):
            return
        names = {_kept_name(d, "a kept file") for d in digests}
        with contextlib.suppress(OSError):
            for path in self._of(storage, self._folder).iterdir():
                if path.name not in names and path.suffix == ".bin":
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _folder_for(self, storage: Storage) -> Iterator[Path]:
        try:
            if self._folder is None:
                with tempfile.TemporaryDirectory(prefix="sidestage-") as name:
                    yield Path(name)
                return
            folder = self._of(storage, self._folder)
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sweep(folder)
        except OSError as e:
            raise StorageError(f"{e.filename}: the cache can't be made: {e.strerror}") from e
        yield folder

    def _of(self, storage: Storage, folder: Path) -> Path:
        name = f"{storage.url}\n{self._prefix}"
        return folder / hashlib.sha256(name.encode()).hexdigest()[:16]


def _kept_name(digest: str, what: str) -> str:
    """The name of a file in the cache: the manifest's text must not lead out of its folder."""
    if not _DIGEST.fullmatch(digest):
        raise CorruptError(f"{what}: {digest!r} is no digest, written algorithm:hex")
    return f"{digest.replace(':', '-')}.bin"


def _fetch(storage: Storage, key: str, path: Path, entry: FileEntry) -> None:
    """Download a file, unless one of its size lies there already."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == entry.size_bytes:
            return
    part = path.with_name(f"{uuid4().hex}.part")
    try:
        with _sweeping(path.parent, fcntl.LOCK_SH):
            f = open(part, "wb")  # noqa: SIM115  (locked before anybody can sweep it away)
            fcntl.flock(f, fcntl.LOCK_EX)
        with f:
            for at in range(0, entry.size_bytes, _STEP_BYTES):
                f.write(storage.read(key, at, min(_STEP_BYTES, entry.size_bytes - at)))
        os.replace(part, path)
    except OSError as e:
        raise StorageError(f"{part}: can't be written: {e.strerror}; free some space") from e
    finally:
        part.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Delete what downloads left that were killed: nobody holds the lock of such a file."""
    with _sweeping(folder, fcntl.LOCK_EX):
        for part in folder.glob("*.part"):
            with contextlib.suppress(OSError), open(part, "rb") as f:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


@contextlib.contextmanager
def _sweeping(folder: Path, how: int) -> Iterator[None]:
    """While held exclusively, nobody is between making a file and locking it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _checked(files: Sequence[tuple[str, Path, FileEntry]]) -> torch.Tensor:
    image = map_files([path for _, path, _ in files], [e.size_bytes for _, _, e in files])
    view = memoryview(image.numpy().data)
    pieces, at = [], 0
    for key, _, entry in files:
        pieces.append((key, view[at : at + entry.size_bytes], entry))
        at += entry.size_bytes
    list(each(lambda p: _check(*p), pieces, _WORKERS))
    return image


def _check(key: str, data: memoryview, entry: FileEntry) -> None:
    name = entry.digest.partition(":")[0]
    hasher = new_hasher(name)
    for at in range(0, len(data), _STEP_BYTES):
        hasher.update(data[at : at + _STEP_BYTES])
    got = f"{name}:{hasher.hexdigest()}"
    if got != entry.digest:
        raise CorruptError(f"{key}: digest is {got}, expected {entry.digest}; take another version")


def map_files(paths: Sequence[Path], sizes: Sequence[int]) -> torch.Tensor:
    """Files one after another as one uint8 tensor, mapped privately; don't write to it.

    Raises CorruptError if a file has another size, StorageError if it can't be mapped.
    """
    total = sum(sizes)
    if total == 0:  # a model without tables; nothing can be mapped
        return torch.empty(0, dtype=torch.uint8)
    if any(size % mmap.PAGESIZE for size in sizes[:-1]):
        raise UnsupportedFormatError(
            f"{paths[0]}: its files end inside a page of {mmap.PAGESIZE} bytes, this system's"
        )
    libc = _libc()
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _map(libc, None, total, _PROT_NONE, anonymous, -1, str(paths[0]))
    array = (ctypes.c_uint8 * total).from_address(base)
    # The tensor holds the array, and the memory goes with the array.
    freed = weakref.finalize(array, libc.munmap, base, total)
    freed.atexit = False  # threads may be looking up until the very end
    at = base
    for path, size in zip(paths, sizes, strict=True):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise StorageError(f"{path}: can't be opened: {e.strerror}; check its mode") from e
        try:
            if os.fstat(fd).st_size != size:
                raise CorruptError(f"{path}: is not of {size} bytes")
            if size:
                _map(libc, at, size, mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_FIXED, fd, str(path))
        finally:
            os.close(fd)
        at += size
    return torch.frombuffer(array, dtype=torch.uint8)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, size]
    return libc


def _map(  # noqa: PLR0913, PLR0917  (mmap's own arguments)
    libc: ctypes.CDLL, at: int | None, size: int, prot: int, flags: int, fd: int, what: str
) -> int:
    got = libc.mmap(at, size, prot, flags, fd, 0)
    if got is None or got == ctypes.c_void_p(-1).value:
        why = os.strerror(ctypes.get_errno())
        raise StorageError(f"{what}: can't be mapped: {why}; check free memory")
    return int(got)
