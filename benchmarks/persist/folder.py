"""A folder on local disk, against sequential O_DIRECT writes into one file there."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import torch

from benchmarks.persist.target import Target
from benchmarks.report import MIB

_PIECE_BYTES = 16 * MIB


class Folder(Target):
    """Saves into `folder`."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self._file = folder / "limit"
        folder.mkdir(parents=True)
        pages = mmap.mmap(-1, _PIECE_BYTES)
        torch.frombuffer(pages, dtype=torch.float32).normal_()
        self._piece = memoryview(pages)
        super().__init__(str(folder / "run"), size_bytes)

    def limit_bytes_per_s(self) -> float:
        """O_DIRECT and fsync; buffered and fsync where the filesystem refuses O_DIRECT."""
        os.sync()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        began = time.perf_counter()
        try:
            fd = os.open(self._file, flags | os.O_DIRECT, 0o600)
        except OSError:
            fd = os.open(self._file, flags, 0o600)
        try:
            for at in range(0, self.total_bytes, _PIECE_BYTES):
                os.pwritev(fd, [self._piece], at)
            os.fsync(fd)
        finally:
            os.close(fd)
        took_s = time.perf_counter() - began
        written = self._file.stat().st_size
        self._file.unlink()
        return written / took_s
