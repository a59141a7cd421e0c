"""A folder as one archive (tar + zstd), and back. Nothing is ever written outside the folder.

Packing the same files gives the same bytes. Who may unpack what is decided elsewhere.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import zstandard

from ckpt.errors import BadInputError, CorruptError

MAX_ARCHIVE_BYTES = 256 << 20
MAX_UNPACKED_BYTES = 2 << 30
MAX_FILES = 100_000


def pack(folder: Path, without: Collection[Path] = ()) -> bytes:
    """The folder as tar + zstd, the same bytes for the same files. Locks and our own marks stay out.

    without: folders in it that are left out.

    BadInputError if it is larger than would be loaded.
    """
    out = io.BytesIO()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    total = 0
    with (
        zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in files:
            name = path.relative_to(folder)
            if (
                name.name.startswith(".")
                or name.suffix in (".lock", ".tmp")
                or "locks" in name.parts
            ):
                continue
            if any(path.is_relative_to(w) for w in without):
                continue
            content = path.read_bytes()
            total += len(content)
            entry = tarfile.TarInfo(name.as_posix())
            entry.size, entry.mode = len(content), 0o700 if os.access(path, os.X_OK) else 0o600
            tar.addfile(entry, io.BytesIO(content))
    if total > MAX_UNPACKED_BYTES or len(files) > MAX_FILES or out.tell() > MAX_ARCHIVE_BYTES:
        raise BadInputError(
            f"the compiler's folder has {len(files)} files of {total} bytes, packed {out.tell()}: more "
            f"than is ever loaded"
        )
    return out.getvalue()


def unpack(data: bytes, folder: Path, key: str) -> None:
    """Unpack what `pack` made into `folder`, whose own files stay. Only plain files, only inside it.

    CorruptError names `key` where it isn't such an archive or is too large; nothing was written then.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            plain = stream.read(MAX_UNPACKED_BYTES + 1)
        if len(plain) > MAX_UNPACKED_BYTES:
            raise CorruptError(f"{key}: it unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            entries = tar.getmembers()
            if len(entries) > MAX_FILES:
                raise CorruptError(f"{key}: it holds {len(entries)} files, more than {MAX_FILES}")
            for entry in entries:
                path = PurePosixPath(entry.name)
                inside = not path.is_absolute() and ".." not in path.parts and path.parts
                if not (entry.isreg() and inside):
                    raise CorruptError(f"{key}: its entry {entry.name!r} isn't a file inside it")
            for entry in entries:
                content = tar.extractfile(entry)
                assert content is not None, "a regular file"
                _write(folder / entry.name, content.read(), entry.mode & 0o700)
    except (zstandard.ZstdError, tarfile.TarError, EOFError, ValueError) as e:
        raise CorruptError(f"{key}: it can't be unpacked: {e}") from e


def _write(path: Path, content: bytes, mode: int) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    os.chmod(temporary, mode | 0o600)
    os.replace(temporary, path)
