"""What a restore fills: tensors of a checkpoint, and the memory that their boxes go to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ckpt.errors import BadInputError
from ckpt.tree import Shard


class Spread(NamedTuple):
    """An expanded tensor, whose elements share memory, and values for each of its elements.

    target: of the state. values: of its shape, filled by the restore.
    """

    target: torch.Tensor
    values: torch.Tensor

    def check(self, key: str) -> None:
        """BadInputError if elements that share memory have different values."""
        one = self._one(self.values)
        if not _same_bytes(one.expand(self.values.shape), self.values):
            raise BadInputError(
                f"{key}: is an expanded view here, whose elements share memory, and the checkpoint has "
                f"different values for them; clone it before restore()"
            )

    def copy(self) -> None:
        self._one(self.target).copy_(self._one(self.values))

    def _one(self, tensor: torch.Tensor) -> torch.Tensor:
        """Those elements of the shape that have memory of their own."""
        at = tuple(
            slice(0, 1) if not stride and n else slice(None)
            for stride, n in zip(self.target.stride(), self.target.shape, strict=True)
        )
        return tensor[at]


class Piece(NamedTuple):
    """A tensor to be filled: `stored` is its key in the checkpoint, `shards` its boxes and where they go.

    ours: the memory is the restore's own, so it may be filled before all is agreed on.
    into: where it goes in the end, if the state has an expanded view there.
    """

    key: str
    stored: str
    shards: tuple[Shard, ...]
    ours: bool = False
    into: Spread | None = None


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, on the host: NaNs of one kind are the same, and 0.0 and -0.0 aren't."""
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(a, b))
