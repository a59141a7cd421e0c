"""Read a checkpoint's files once, quantise all of it, write it: `limit.py ROOT OUT`. Prints the seconds."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import fbgemm_gpu  # noqa: F401  (registers the operator)
import torch

from benchmarks.serving.models import DIM

_PIECE_BYTES = 4 << 20


def main(root: Path, out: Path) -> float:
    files = sorted(p for p in (root / "data").rglob("*") if p.stat().st_size > _PIECE_BYTES)
    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    rows = buffer.view(torch.float32).view(-1, DIM)
    began = time.perf_counter()
    with out.open("wb", buffering=0) as target:
        for path in files:
            with path.open("rb", buffering=0) as source:
                while (n := source.readinto(view)) == _PIECE_BYTES:
                    packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 8)
                    target.write(packed.numpy().data)
                assert n >= 0
        os.fsync(target.fileno())
    return time.perf_counter() - began


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2])))
