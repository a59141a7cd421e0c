"""The compiler's cache folder of one job on this host: its ranks share it, so each kernel is built once.

It lies in a folder that only this user can write to, other than the compiler's default, whose name under
/tmp anybody can guess. It lives as long as the job: what a restart needs comes from the run's archive, whose
digest is known, not from what a killed process left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import StorageError
from trainer.config import launch_name

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class CompilerFolder:
    """Makes the folder and points the compiler to it, for the life of this process.

    Folders of jobs that have ended are removed on the way.

    Args:
        key: of the cache that is to be in it.
        base: where the folders of all jobs are; by default in the temporary folder of this user.

    Raises StorageError if it can't be made, or another user could write to it.
    """

    def __init__(self, key: str, base: Path | None = None) -> None:
        base = base or Path(tempfile.gettempdir()) / f"sidestage-compile-{os.getuid()}"
        self.path = base / f"{key}-{launch_name()}"
        try:
            _own(base)
            with locked(base):
                for other in base.glob("*.lock"):
                    _remove_if_unused(other)
                self.path.mkdir(mode=0o700, exist_ok=True)
                # Held until the process ends, whatever ends it.
                self._fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
        except OSError as e:
            raise StorageError(
                f"{self.path}: the compiler's folder can't be made: {e.strerror}; check TMPDIR"
            ) from e
        os.environ[_VARIABLE] = str(self.path)

    def close(self) -> None:
        """Let go of it; the next job on this host removes it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if os.environ.get(_VARIABLE) == str(self.path):
                del os.environ[_VARIABLE]


def given_folder() -> str | None:
    """The folder that the user named for the compiler, or None. Torch puts its default there too."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get(_VARIABLE)
    return None if named == default_cache_dir() else named


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone in `folder` among the processes of this host."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _own(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(base)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StorageError(
            f"{base}: it isn't a folder that only this user can write to, and what is in it will be run; "
            f"remove it or set TMPDIR"
        )


def _remove_if_unused(lock: Path) -> None:
    fd = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink()
    finally:
        os.close(fd)
