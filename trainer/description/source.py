"""Which line of the user's code an exception of a library comes from."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import fbgemm_gpu
import torch
import torchrec

_OWN = Path(__file__).parent
_STANDARD = Path(traceback.__file__).parent
_LIBRARIES = (*(Path(m.__file__ or "").parent for m in (torch, torchrec, fbgemm_gpu)), _OWN)


def user_line(error: BaseException) -> str | None:
    """`file:line in function` of the innermost frame that is no library's, or None."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        for frame in reversed(traceback.extract_tb(at.__traceback__)):
            if _is_users(frame.filename):
                return _named(frame.filename, frame.lineno, frame.name)
        at = at.__cause__ or at.__context__
    # Where torch.export has swallowed the frames, its message may tell them.
    for path, line, function in reversed(
        re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error))
    ):
        if _is_users(path):
            return _named(path, line, function)
    return None


def _is_users(filename: str) -> bool:
    path = Path(filename)
    standard = _STANDARD in path.parents and "site-packages" not in path.parts
    return not (filename.startswith("<") or standard or any(p in path.parents for p in _LIBRARIES))


def _named(filename: str, line: int | str | None, function: str) -> str:
    return f"{Path(filename).name}:{line} in {function}"
