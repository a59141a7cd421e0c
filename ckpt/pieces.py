"""What a restore fills: the memory that boxes of a checkpoint's tensors, or several together, go to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ckpt.tree import Shard

_BLOCK_ROWS = 1 << 20


class Piece(NamedTuple):
    """A tensor to be filled: `stored` is its key in the checkpoint, `shards` its boxes and where they go.

    ours: the memory is the restore's own, so it may be filled before all is agreed on.
    """

    key: str
    stored: str
    shards: tuple[Shard, ...]
    ours: bool = False


class Merge(NamedTuple):
    """Memory that gets the mean of several tensors (rows,), weighted by `shares`."""

    key: str
    out: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    shares: tuple[int, ...]

    def fill(self) -> None:
        """In double precision, some rows at a time. The parts are filled by now."""
        with torch.no_grad():
            for a in range(0, len(self.out), _BLOCK_ROWS):
                rows = slice(a, a + _BLOCK_ROWS)
                parts = torch.stack([part[rows].double() for part in self.parts])
                shares = torch.tensor(self.shares, dtype=torch.float64, device=parts.device)
                self.out[rows].copy_((shares @ parts) / shares.sum())
