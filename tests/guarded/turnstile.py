"""A Checkpointer whose persist thread stands before each block until a test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ckpt import Checkpointer
from ckpt.blocks import Block
from ckpt.pump import Pump, Pumped
from ckpt.snapshot import Snapshot
from ckpt.storage.protocol import ObjectWriter
from tests.faults import DEADLINE_S


class Turnstile:
    """Where the persist thread waits. Closed at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = 0
        self._open = False
        self._standing = False

    def go(self, blocks: int) -> None:
        """Let it do so many blocks, if it stands here; return when it stands here again or is through."""
        with self._changed:
            if self._open or not self._standing:
                return
            self._permits += blocks
            self._standing = False
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._standing or not self._permits, DEADLINE_S)

    def wait_standing(self) -> None:
        """Wait until it stands here."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._standing, DEADLINE_S)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._open = False

    def enter(self) -> None:
        """On the persist thread."""
        with self._changed:
            if not self._permits and not self._open:
                self._standing = True
                self._changed.notify_all()
                opened = self._changed.wait_for(lambda: self._permits or self._open, DEADLINE_S)
                assert opened, "the test never opened the turnstile"
                self._standing = False
            self._permits = max(0, self._permits - 1)

    def leave(self) -> None:
        """On the persist thread, after the last block."""
        with self._changed:
            self._permits = 0
            self._changed.notify_all()


class SteppedCheckpointer(Checkpointer):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turnstile = Turnstile()
        super().__init__(*args, **kwargs)

    def _pump(self, snapshot: Snapshot) -> Pump:
        return _SteppedPump(super()._pump(snapshot), self.turnstile)  # type: ignore[return-value]


class _SteppedPump:
    def __init__(self, inner: Pump, turnstile: Turnstile) -> None:
        self._inner = inner
        self._turnstile = turnstile

    def run(self, blocks: Any, out: ObjectWriter) -> Pumped:
        try:
            return self._inner.run(_SteppedBlocks(blocks, self._turnstile), out)
        finally:
            self._turnstile.leave()


class _SteppedBlocks:
    def __init__(self, inner: Any, turnstile: Turnstile) -> None:
        self._inner = inner
        self._turnstile = turnstile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def blocks(self, chunk_bytes: int) -> Iterator[Block]:
        self._turnstile.enter()  # before the dense copies begin
        for block in self._inner.blocks(chunk_bytes):
            yield _SteppedBlock(block, self._turnstile)


class _SteppedBlock:
    def __init__(self, inner: Block, turnstile: Turnstile) -> None:
        self._inner = inner
        self._turnstile = turnstile
        self.pieces = inner.pieces

    def fill(self, views: Sequence[torch.Tensor]) -> None:
        self._turnstile.enter()
        self._inner.fill(views)
