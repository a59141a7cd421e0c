"""The operating system's errors in this project's terms."""

from __future__ import annotations

import errno

from ckpt.errors import (
    BadInputError,
    ConflictError,
    NotFoundError,
    SidestageError,
    StorageError,
)
from ckpt.storage.files import NoSpaceError

_BLOCKED = "a part of its path is a file, or a symbolic link, which isn't followed below the root"
_READING = ("read", "list", "delete")


def explain(e: OSError, root: str, verb: str, key: str) -> SidestageError:
    """The error of ours that says the same as `e`, with the path and what to do next.

    `verb` is what was being done to the object: read, list, delete, write or create.
    """
    what = f"{root}/{key}"
    text = e.strerror or str(e)
    if e.errno == errno.ENOENT:
        return NotFoundError(f"{what}: no such object")
    if e.errno in (errno.ENOTDIR, errno.ELOOP):
        if verb in _READING:
            return NotFoundError(f"{what}: no such object: {_BLOCKED}")
        return BadInputError(f"{what}: can't {verb}: {_BLOCKED}; choose another key")
    if e.errno == errno.EEXIST:
        return ConflictError(f"{what}: can't {verb}: {text}")
    if e.errno in (errno.EISDIR, errno.ENAMETOOLONG):
        return BadInputError(f"{what}: can't {verb}: {text}; choose another key")
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        room = ""
        if isinstance(e, NoSpaceError):
            room = f" ({e.needed_bytes} more bytes needed, {e.free_bytes} free)"
        return StorageError(f"{what}: can't {verb}: {text}{room}; make room or raise the quota")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(
            f"{what}: can't {verb}: {text}; check the owner and mode of that path and of "
            f"its folders, and that the filesystem is mounted writable"
        )
    return StorageError(f"{what}: can't {verb}: {text}; check the disk, then try again")
