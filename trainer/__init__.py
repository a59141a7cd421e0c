"""Training on the side of checkpoints: a session around any loop, a ledger, a reference trainer.

Names are loaded on first use (PEP 562), so that `trainer --help` starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.loader import LoaderReader
    from trainer.proving import prove_resume
    from trainer.reader import BatchReader
    from trainer.session import Reader, Session

__all__ = ["BatchReader", "LoaderReader", "Reader", "Session", "prove_resume"]

_HOME = {
    "BatchReader": "trainer.reader",
    "LoaderReader": "trainer.loader",
    "Reader": "trainer.session",
    "Session": "trainer.session",
    "prove_resume": "trainer.proving",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
