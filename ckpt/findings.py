"""What `ckpt doctor` says: one line a finding, with the numbers beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`fail` is something that checkpoints can't do without; `warn` costs speed or comfort."""

    name: str
    level: Level
    text: str
    values: Mapping[str, float | int | None] = field(default_factory=dict)


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def gib_s(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def seconds(s: float) -> str:
    """A duration for people."""
    if s < 0.1:
        return f"{s * 1000:.1f} ms"
    if s < 120:
        return f"{s:.1f} s"
    return f"{s / 60:.1f} min" if s < 7200 else f"{s / 3600:.1f} h"
