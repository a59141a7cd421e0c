"""What the passes over a loader have in common, whatever kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

END: Any = object()


class Pass(Protocol):
    """An epoch that has begun. `begins`: the position of its first batch."""

    epoch: int
    begins: int
    ended: bool

    def next(self) -> Any: ...
    def state(self, batches: int) -> dict[str, Any]: ...
    def leave(self, batches: int) -> Mapping[str, Any] | None:
        """Nobody takes further batches for now; what to resume from if somebody does, else it goes on."""


class Passes(Protocol):
    """The kind of a loader."""

    def fresh(self, epoch: int, begins: int) -> Pass: ...
    def resumed(self, state: Mapping[str, Any], begins: int) -> Pass: ...
    def check(self, state: Mapping[str, Any]) -> None: ...


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers, such as DistributedSampler, which epoch they shuffle for."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ):
        if callable(tell := getattr(sampler, "set_epoch", None)):
            tell(epoch)


def length(loader: Any) -> int | None:
    """Batches of an epoch, where that is sure."""
    if isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
