"""How a checkpoint is named to stock DCP: by its step, as the checkpoint's id."""

from __future__ import annotations

import os

from ckpt.errors import BadInputError


def checked_step(step: int | str | os.PathLike[str]) -> int:
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    if isinstance(step, str) and step.isdecimal():
        return int(step)
    raise BadInputError(f"{step!r}: a checkpoint is named by its step, such as 100")
