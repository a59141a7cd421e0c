"""A folder that appears whole, or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.errors import ConflictError, NotFoundError, StorageError


@contextmanager
def new_folder(target: Path, replaceable: frozenset[str], *, force: bool) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends well, and is deleted otherwise.

    It lies beside `target` until then. An existing target is replaced with `force`, if it holds
    nothing but files named in `replaceable`: a mistyped path must not cost anybody their files.

    Raises ConflictError if the target exists otherwise, NotFoundError if its parent doesn't,
    StorageError if it can't be written.
    """
    _check(target, replaceable, force)
    try:
        with tempfile.TemporaryDirectory(prefix=".sidestage-", dir=target.parent) as temporary:
            # Below the temporary folder, which only its owner may enter: a server has another user.
            new = Path(temporary) / target.name
            new.mkdir()
            yield new
            _check(target, replaceable, force)  # a view takes minutes to make
            if target.exists():
                target.rename(Path(temporary) / "replaced")
            new.rename(target)
    except OSError as e:
        raise StorageError(f"{target}: can't be written: {e.strerror or e}") from e


def _check(target: Path, replaceable: frozenset[str], force: bool) -> None:
    if not target.parent.is_dir():
        raise NotFoundError(f"{target.parent}: no such folder; make it first")
    if not target.exists():
        return
    if not force:
        raise ConflictError(f"{target}: exists; --force replaces it")
    held = {p.name for p in target.iterdir()} if target.is_dir() else {"(a file)"}
    if foreign := sorted(held - replaceable):
        raise ConflictError(
            f"{target}: is no view, it holds {', '.join(foreign[:3])}; name another folder"
        )


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder, by path relative to it."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.stat().st_size for p in found}
