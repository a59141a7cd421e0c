"""Local folders that ledgers are written to: they can be appended to, and outlive the process."""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path

from ckpt.config import spool_folders
from ckpt.digest import digest_of
from ckpt.errors import BadInputError, ConflictError, NotFoundError, StorageError
from ckpt.layout import EVENTS, RUN
from ckpt.manifest import RunRecord, decode
from ckpt.storage import LocalStorage, Storage

_log = logging.getLogger("sidestage")


def spool_of(url: str) -> Path:
    """This host's folder for ledgers on their way to a root. Each of its runs has one of its own below.

    Raises StorageError naming the setting, if there is no folder that can be written to.
    """
    problems = []
    for folder in spool_folders():
        try:
            _take(folder)
        except OSError as e:
            problems.append(f"{folder}: {e.strerror}")
            continue
        if problems:
            _log.warning(
                "ledgers of %s are kept in %s until they are copied there (%s); to keep them elsewhere "
                "set SIDESTAGE_SPOOL_DIR",
                *(url, folder, "; ".join(problems)),
            )
        return folder / digest_of(url.encode()).rpartition(":")[2]
    raise StorageError(
        f"no folder for the ledgers of {url} until they are copied there "
        f"({'; '.join(problems) or 'this user has none'}); name one in SIDESTAGE_SPOOL_DIR"
    )


def check_own(folder: Path, storage: Storage) -> None:
    """Refuse a folder for a run's ledgers that can't be written to, or that has those of another run.

    Raises StorageError or BadInputError naming the setting.
    """
    try:
        _take(folder)
    except OSError as e:
        raise StorageError(
            f"ledger = {str(folder)!r}: can't be written to: {e.strerror}; name another folder"
        ) from e
    if (theirs := _run_id(LocalStorage(folder))) not in (None, _run_id(storage)):
        raise BadInputError(
            f"ledger = {str(folder)!r}: has the ledgers of run {theirs}, which isn't the run of "
            f"{storage.url}; name another folder, or move {EVENTS} and {RUN} in it away"
        )


def mark_own(folder: Path, storage: Storage) -> None:
    """Say in the folder whose ledgers it has."""
    with suppress(ConflictError):
        LocalStorage(folder).create(RUN, storage.read(RUN))


def _run_id(storage: Storage) -> str | None:
    try:
        return decode(RunRecord, storage.read(RUN), RUN).run_id
    except NotFoundError:
        return None


def _take(folder: Path) -> None:
    """Make a folder if need be; OSError unless it can be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    shared = os.stat(folder.parent).st_mode & stat.S_IWOTH
    if shared and os.lstat(folder).st_uid != os.getuid():  # somebody else's, or a link of theirs
        raise PermissionError(errno.EACCES, "belongs to another user")
