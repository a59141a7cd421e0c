"""Tells a ledger when torch.compile compiles on the training thread."""

from __future__ import annotations

import sys
from typing import Any

from trainer.ledger import Ledger

_NAME = "pt2_compilation"


class CompileSpans:
    """Records each compilation, be it of a new frame, a backward pass or a recompile, as a span.

    Dynamo reports them to callbacks. It isn't imported for that: `attach` does nothing until
    something else has, so call it again whenever a compilation may be near.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._handler: Any = None
        self._open: int | None = None

    def attach(self) -> None:
        """Listen to dynamo, if it is there and this doesn't yet. Cheap."""
        module = sys.modules.get("torch._dynamo.callback")
        if self._handler is None and module is not None:
            handler = getattr(module, "callback_handler", None)
            if handler is not None:  # else it is being imported right now
                handler.register_start_callback(self._began)
                handler.register_end_callback(self._ended)
                self._handler = handler

    def detach(self) -> None:
        """Listen no longer."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        # Dynamo's reset() may have emptied the lists.
        if self._began in handler.start_callbacks:
            handler.remove_start_callback(self._began)
        if self._ended in handler.end_callbacks:
            handler.remove_end_callback(self._ended)

    def _began(self, _: Any) -> None:
        # What another thread compiles keeps nobody waiting.
        if self._open is None and self._ledger.on_training_thread:
            self._open = self._ledger.begin_span(_NAME)

    def _ended(self, _: Any) -> None:
        if self._open is not None:
            self._ledger.end_span(_NAME, self._open)
            self._open = None
