"""What a spawned process runs: apart, so that it imports little."""

from __future__ import annotations

from typing import Any


def add_one(table: Any) -> None:
    table[-5] += 1
