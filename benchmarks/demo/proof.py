"""Is the restored file, bit for bit, what the trainer's ranks had in memory at their last step?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Comparison:
    """`equal` only if every element of every tensor was compared and none differs."""

    tensors: int
    elements: int
    differing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.tensors > 0 and not self.differing


def compare(restored: Path, proofs: Path) -> Comparison:
    """Compare a `ckpt restore` file with the `state-r*.safetensors` that the ranks wrote."""
    differing: set[str] = set()
    elements = 0
    with safe_open(restored, "pt") as whole:
        keys = set(whole.keys())
        covered = {k: torch.zeros(whole.get_slice(k).get_shape(), dtype=torch.bool) for k in keys}
        for path in sorted(proofs.glob("state-r*.safetensors")):
            with safe_open(path, "pt") as rank:
                for name, text in rank.metadata().items():
                    meta, mine = json.loads(text), rank.get_tensor(name)
                    key = meta["key"]
                    if key not in keys:
                        differing.add(f"{key}: not restored")
                        continue
                    box = tuple(
                        slice(o, o + n) for o, n in zip(meta["offsets"], mine.shape, strict=True)
                    )
                    stored = whole.get_tensor(key)[box]
                    if stored.dtype != mine.dtype or _bits(stored) != _bits(mine):
                        differing.add(f"{key}: differs")
                    covered[key][box] = True
                    elements += mine.numel()
    differing |= {f"{k}: no rank had all of it" for k, seen in covered.items() if not seen.all()}
    return Comparison(len(keys), elements, tuple(sorted(differing)))


def _bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
