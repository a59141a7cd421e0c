"""Is the state that of the last counted step, whole? An error in the middle of another may have torn it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class LastStep:
    """Knows whether anything of a further step can have begun since the last one was counted.

    A step begins with a batch that is handed out. Where batches are in flight it may begin without: then with
    a forward pass, of which autograd counts the operations, on the training thread. And it has begun
    where any optimizer steps. What begins counts, whether or not it has changed anything yet.
    """

    def __init__(self) -> None:
        self._begun = True
        self._in_flight = False
        self._operations: int | None = None
        self._hook = register_optimizer_step_pre_hook(self._optimizer_steps)

    def counted(self, in_flight: int) -> None:
        """A step has ended, or a state was restored, with so many batches in flight."""
        self._in_flight = in_flight > 0
        self._operations = _operations() if in_flight else None
        self._begun = False

    def begins(self) -> None:
        """A batch is handed out, or something else of a further step may begin."""
        self._begun = True

    @property
    def whole(self) -> bool:
        """Nothing of a further step has begun. On the training thread."""
        if self._begun or not self._in_flight:
            return not self._begun
        return self._operations is not None and self._operations == _operations()

    def close(self) -> None:
        self._hook.remove()

    def _optimizer_steps(self, *_: Any) -> None:
        self._begun = True


def _operations() -> int | None:
    """How many operations autograd has recorded on this thread; None where torch doesn't say."""
    count = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if count is None else int(count())
