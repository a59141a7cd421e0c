"""Files and folders that get their name once they are complete and synced, or leave nothing."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import BadInputError, ConflictError, StorageError


@contextmanager
def new_file(target: Path, *, replace: bool) -> Iterator[Path]:
    """A path to write the file to; what is there at the end, synced, becomes `target`.

    Raises ConflictError if `target` is a folder, or exists and not `replace`.
    """
    _check(target)
    if target.is_dir():
        raise ConflictError(f"{target}: is a folder, and those are never replaced; name a file")
    if target.exists() and not replace:
        raise ConflictError(f"{target}: exists already; name another file or pass --force")
    partial = _partial(target)
    try:
        yield partial
        os.replace(partial, target)
        _sync(target.parent)
    except OSError as e:
        raise StorageError(f"{target}: can't be written ({e})") from e
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill with synced files, which becomes `target`.

    Raises ConflictError if anything has that name.
    """
    _check(target)
    if target.exists() or target.is_symlink():
        raise ConflictError(
            f"{target}: exists already, and a folder replaces nothing; name a new one"
        )
    partial = _partial(target)
    try:
        partial.mkdir()
        yield partial
        _sync(partial)
        os.rename(partial, target)
        _sync(target.parent)
    except OSError as e:
        raise StorageError(f"{target}: can't be written ({e})") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Make a file's contents durable."""
    _sync(path)


def _check(target: Path) -> None:
    if not target.parent.is_dir():
        raise BadInputError(f"{target.parent}: no such folder for the output; make it first")


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
