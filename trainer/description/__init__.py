"""The serving description of a live model: what a publisher needs besides checkpoints.

`request` takes the golden request apart, `embeddings` recognises collections, `shadow` copies the
model with stand-ins in their place and records their calls, `lookups` and `collisions` say what
they look up, `proof` proves it on the live tables, `rawids` proves id maps, `inputs` and `program`
export what is left, `description` writes it all down, `export` stores it. `fingerprint` says what all
of that depends on, and `reuse` finds what an earlier start with the same fingerprint has stored.

Names are loaded on first use (PEP 562): a start that reuses a description imports no exporter.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.description.export import export_description
    from trainer.description.reuse import Reused, describe_once
    from trainer.description.served import ServedModel

__all__ = ["Reused", "ServedModel", "describe_once", "export_description"]

_HOME = {
    "Reused": "trainer.description.reuse",
    "ServedModel": "trainer.description.served",
    "describe_once": "trainer.description.reuse",
    "export_description": "trainer.description.export",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trainer.description' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
