"""Publishes checkpoints as versions that a serving host loads, and serves them.

Needs the checkpoint's storage and nothing of the trainer. Names are loaded on first use
(PEP 562), so that `publisher status` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from publisher.loading import Prediction
    from publisher.predictor import Predictor
    from publisher.registry import Registry

__all__ = ["Prediction", "Predictor", "Registry"]

_HOME = {
    "Prediction": "publisher.loading",
    "Predictor": "publisher.predictor",
    "Registry": "publisher.registry",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'publisher' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
