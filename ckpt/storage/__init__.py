"""Where runs are kept: one small protocol, and the backends behind it."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from ckpt import layout
from ckpt.errors import BadInputError, CorruptError, NotFoundError, StorageError
from ckpt.manifest import OriginRecord, decode
from ckpt.storage.branched import BranchedStorage, owned
from ckpt.storage.local import LocalStorage
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.protocol import ObjectWriter, Storage

__all__ = [
    "BranchedStorage",
    "LocalStorage",
    "MemoryStorage",
    "ObjectWriter",
    "Storage",
    "follow_origin",
    "open_storage",
    "owned",
]

_INHERITED = (layout.DATA, f"{layout.SERVING}descriptions/", layout.CODE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def open_storage(url: str | os.PathLike[str], *, must_exist: bool = False) -> Storage:
    """The store at a path or `file://` URL.

    `~` means the home folder, a relative path is taken from the current one, and a `file://`
    URL is percent-decoded. The folder is made at the first write, unless `must_exist`. The root
    of a branch comes as a BranchedStorage.

    Raises BadInputError for another scheme or a file in the folder's place, NotFoundError
    if the folder must exist and doesn't, StorageError if it can't be entered.
    """
    path = _local_path(os.fspath(url))
    try:
        # Opened, not looked at: only that tells whether this user may read it.
        with os.scandir(path):
            pass
    except FileNotFoundError:
        if must_exist:
            raise NotFoundError(f"{path}: no such folder; check the path") from None
    except NotADirectoryError:
        raise BadInputError(
            f"{path}: it or a folder above it is a file; name the run's root folder"
        ) from None
    except OSError as e:
        raise StorageError(
            f"{path}: can't be read: {e.strerror}; check the owner and mode of that folder "
            f"and of those above it"
        ) from e
    return follow_origin(LocalStorage(path))


def follow_origin(storage: Storage) -> Storage:
    """The store itself; for the root of a branch that wasn't copied, one that also reads the source."""
    try:
        origin = decode(OriginRecord, storage.read(layout.ORIGIN), layout.ORIGIN)
    except NotFoundError:
        return storage
    if origin.pin_id is None:
        return storage
    strange = [p for p in origin.prefixes if not p.startswith(_INHERITED)]
    if strange:
        raise CorruptError(
            f"{storage.url}/{layout.ORIGIN}: names {strange[0]!r} as data of its origin; data lies "
            f"below {', '.join(_INHERITED)}"
        )
    return BranchedStorage(storage, origin, lambda: open_storage(origin.source_url))


def _local_path(url: str) -> str:
    """The absolute path that a URL or path names."""
    path = url
    if m := _SCHEME.fullmatch(url):
        scheme, path = m[1].lower(), m[2]
        if scheme == "memory":
            raise BadInputError(
                f"{url}: memory has no address; pass a ckpt.storage.MemoryStorage() object"
            )
        if scheme != "file":
            raise BadInputError(
                f"{url}: scheme {scheme!r} isn't supported; give a path or file:///path"
            )
        path = unquote(path.removeprefix("localhost"))
        if not path.startswith("/"):
            raise BadInputError(f"{url}: a file URL needs an absolute path: file:///path")
    elif path.startswith("~"):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            raise BadInputError(f"{url}: no such user's home folder; give the whole path")
    if not path or "\0" in path:
        raise BadInputError(f"{url!r}: not a path; give the run's root folder")
    return os.path.abspath(path)
