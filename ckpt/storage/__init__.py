"""Where runs are kept: one small protocol, and the backends behind it."""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import unquote

from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.storage.branched import BranchedStorage, exists, owned
from ckpt.storage.local import LocalStorage
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.place import check_place
from ckpt.storage.protocol import NearObject, ObjectWriter, Readable, Storage, near

__all__ = [
    "BranchedStorage",
    "LocalStorage",
    "MemoryStorage",
    "NearObject",
    "ObjectWriter",
    "Readable",
    "Root",
    "Storage",
    "check_place",
    "exists",
    "near",
    "open_storage",
    "owned",
    "storage_of",
]

Root = str | os.PathLike[str] | Storage
"""Where a run is kept, as users say it: a path, a URL, or a Storage."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
# What was meant for a URL: `s3:/bucket/x`, `gs:x`, `s3//bucket/x`. A folder would be made of it silently.
_MEANT_FOR_A_URL = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]|(?:s3[an]?|gs|gcs|file|https?|hdfs|memory|abfss?|az):"
    r"|(?:s3[an]?|gs|gcs|file|https?|hdfs|abfss?)//",
    re.IGNORECASE,
)
_FILE = re.compile(r"file:(/[^/].*)", re.IGNORECASE | re.DOTALL)


def storage_of(root: Root, *, must_exist: bool = False) -> Storage:
    """The store of a root that is given as a path, a URL or a Storage; see `open_storage`."""
    if isinstance(root, Storage):
        return root
    return open_storage(root, must_exist=must_exist)


def open_storage(url: str | os.PathLike[str], *, must_exist: bool = False) -> Storage:
    """The store at a path (text or a pathlib.Path), a `file://` URL or s3://bucket/prefix.

    `~` means the home folder, a relative path is taken from the current one, and a `file://`
    URL is percent-decoded. The folder is made at the first write, unless `must_exist`; a bucket
    is never made. An S3 store is first spoken to by its first call, or here if it `must_exist`;
    its settings are those of `ckpt.config.s3_settings`. The root of a branch comes as a
    BranchedStorage, which also reads the root that it came from.

    Raises BadInputError for another scheme, a URL that is misspelt or a file in the folder's place,
    NotFoundError if it must exist and doesn't, StorageError if it can't be entered.
    """
    url = _spelt(url)
    if url[:5].lower() == "s3://":
        from ckpt.storage.s3 import S3Storage  # slow to import, and most roots are folders

        storage = S3Storage.at(url)
        if must_exist:
            storage.check_exists()
        return BranchedStorage(storage, _open_existing)  # finds out when it matters
    path = _local_path(url)
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
    branched = BranchedStorage(LocalStorage(path), _open_existing)
    return branched if branched.origin else branched.own


def _open_existing(url: str) -> Storage:
    return open_storage(url, must_exist=True)


def _spelt(url: Any) -> str:
    """A root as text; BadInputError for what can only be a mistake."""
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else url
    if not isinstance(text, str):
        raise BadInputError(
            f"root: {text!r} is a {type(text).__name__}; give a path, a URL or a Storage"
        )
    if text != text.strip():
        raise BadInputError(f"root: {text!r} begins or ends with white space; remove it")
    if _MEANT_FOR_A_URL.match(text) and not _SCHEME.fullmatch(text):
        if _FILE.fullmatch(text):
            return text
        scheme, rest = re.split(r"[:/\\]", text, maxsplit=1)
        slashes = {"s3": "s3://", "file": "file:///"}.get(scheme.lower())
        advice = "give a path, file:///path or s3://bucket/path"
        if slashes is not None:
            advice = f"write {slashes}{rest.replace(chr(92), '/').strip('/:')}"
        if isinstance(url, os.PathLike):
            advice += " as text: a pathlib.Path drops slashes of a URL"
        raise BadInputError(
            f"root: {text!r} is neither a path nor a URL; {advice}. A folder of that name is ./{text}"
        )
    return text


def _local_path(url: str) -> str:
    """The absolute path that a URL or path names."""
    path = url
    if m := _FILE.fullmatch(url):
        path = unquote(m[1])
    elif m := _SCHEME.fullmatch(url):
        scheme, path = m[1].lower(), m[2]
        if scheme == "memory":
            raise BadInputError(
                f"{url}: memory has no address; pass a ckpt.storage.MemoryStorage() object"
            )
        if scheme != "file":
            raise BadInputError(
                f"{url}: scheme {scheme!r} isn't supported; give a path, file:///path or s3://bucket/path"
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
