"""How a checkpoint is named to stock DCP: by its root, and by its step as the checkpoint's id."""

from __future__ import annotations

import os

from ckpt.errors import BadInputError
from ckpt.storage import Storage, open_storage

Root = str | os.PathLike[str] | Storage


def storage_of(root: Root, *, must_exist: bool = False) -> Storage:
    """The store of a root that is given as a path, a URL or a Storage."""
    if isinstance(root, str | os.PathLike):
        return open_storage(root, must_exist=must_exist)
    return root


def checked_step(step: int | str | os.PathLike[str]) -> int:
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    if isinstance(step, str) and step.isdecimal():
        return int(step)
    raise BadInputError(f"{step!r}: a checkpoint is named by its step, such as 100")
