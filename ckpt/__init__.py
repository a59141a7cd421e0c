"""Asynchronous, atomic, verified checkpoints for PyTorch and TorchRec.

Names are loaded on first use (PEP 562), so that `import ckpt` costs nothing and the
`ckpt` command lists and verifies without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.checkpointer import Checkpointer, RestoreResult, SaveHandle
    from ckpt.config import CheckpointConfig
    from ckpt.dcp import DcpReader, DcpWriter
    from ckpt.rng import RngState
    from ckpt.tree import PerRank

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "DcpReader",
    "DcpWriter",
    "PerRank",
    "RestoreResult",
    "RngState",
    "SaveHandle",
]

_HOME = {
    "CheckpointConfig": "ckpt.config",
    "Checkpointer": "ckpt.checkpointer",
    "DcpReader": "ckpt.dcp",
    "DcpWriter": "ckpt.dcp",
    "PerRank": "ckpt.tree",
    "RestoreResult": "ckpt.checkpointer",
    "RngState": "ckpt.rng",
    "SaveHandle": "ckpt.checkpointer",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
