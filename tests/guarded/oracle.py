"""What a snapshot must be: a whole copy of the state at save(), compared with what was committed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt.canonical import Canonical
from ckpt.canonical.kernels import KERNELS
from ckpt.catalog import Catalog
from ckpt.restore import CheckpointReader
from ckpt.storage import Storage
from ckpt.tree import flatten
from ckpt.values import encode_value


class Oracle:
    """This rank's part of a state as it is now, copied whole."""

    def __init__(self, state: Mapping[str, Any], rank: int = 0) -> None:
        flat = flatten(state, rank, Canonical(rank).look(state).taken)
        self.values = encode_value(flat.values)
        self.boxes = {
            fqn: [(s.offsets, s.tensor.clone().contiguous()) for s in leaf.shards]
            for fqn, leaf in flat.leaves.items()
        }

    def check(self, storage: Storage, step: int, *, alone: bool = True) -> None:
        """Compare with a commit, bit for bit; `alone`: nobody else has a part of it."""
        stored = reader(storage, step)
        if alone:
            assert set(stored.tensors) == set(self.boxes)
            values = {
                k: v for k, v in stored.values().items() if k != KERNELS
            }  # no part of the state
            assert encode_value(values) == self.values
        for fqn, boxes in self.boxes.items():
            for offsets, want in boxes:
                got = torch.empty_like(want)
                stored.read_into(fqn, got, offsets)
                if torch.equal(bits(got), bits(want)):
                    continue
                differ = bits(got) != bits(want)
                rows = differ.reshape(want.shape[0] if want.dim() and want.numel() else 1, -1).any(
                    1
                )
                bad = rows.nonzero().flatten().tolist()
                assert not bad, f"step {step}: {fqn} at {offsets}: rows {bad[:8]} of {len(rows)}"


def reader(storage: Storage, step: int) -> CheckpointReader:
    record = Catalog(storage).find(step).record
    assert record is not None
    return CheckpointReader(storage, record, workers=1)  # on this thread


def bits(t: torch.Tensor) -> torch.Tensor:
    """As numbers that tell NaNs and zeros of both signs apart."""
    return t.reshape(-1).view(torch.uint8)
