"""What this machine can do at best: memory copies, writes, reads, digests, compression.

Every figure of a checkpointer is to be read against these.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
import zstandard

from benchmarks.report import MIB, Report, Row, cores, environment, median
from benchmarks.watch import wait_until_calm

PIECE_BYTES = 16 * MIB
_ZSTD_BYTES = 64 * MIB  # about 0.4 GB/s: more would only take longer
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@dataclass
class Limit:
    """One measurement: `once` does it and gives the seconds of wall time and of CPU time."""

    name: str
    size_bytes: int
    once: Callable[[], tuple[float, float]]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    problem: str | None = None


class Stopwatch:
    """Wall and CPU time of a block. CPU time is of all threads of this process."""

    def __enter__(self) -> Stopwatch:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = time.process_time() - self._cpu

    @property
    def both(self) -> tuple[float, float]:
        return self.wall_s, self.cpu_s


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-mib", type=int, help="bytes of each measurement (512)")


def run(args: argparse.Namespace) -> Report:
    size = (args.size_mib or (32 if args.quick else 512)) * MIB
    repeats = args.repeats or (2 if args.quick else 5)
    threads = torch.get_num_threads()
    env = environment(size_mib=size // MIB, repeats=repeats)
    folder = Path(tempfile.mkdtemp(prefix="limits-", dir=args.root))
    try:
        data, into = _embeddings(size), _touched(size)
        limits = [*_memory(data, into), *_files(data, into, folder), *_digests(data), _zstd(data)]
        for n in range(repeats):
            wait_until_calm(args.calm)
            # Both orders, so that no measurement always follows the same other one.
            for limit in limits if n % 2 == 0 else reversed(limits):
                _measure(limit)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)
    rows = [_row(limit) for limit in limits]
    rows[-1]["ratio"] = _zstd_ratio(data)
    return Report(
        env, rows, _ratios(rows), ("name", "gb_per_s", "min", "max", "cpu_s_per_gib", "ratio")
    )


def _measure(limit: Limit) -> None:
    if limit.problem is not None:
        return
    try:
        wall, cpu = limit.once()
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        limit.problem = f"the filesystem refuses it: {e.strerror}"
        return
    limit.wall_s.append(wall)
    limit.cpu_s.append(cpu)


def _row(limit: Limit) -> Row:
    if limit.problem is not None:
        return {"name": limit.name, "status": "skipped", "reason": limit.problem}
    speeds = [limit.size_bytes / s / 1e9 for s in limit.wall_s]
    cpu_s = median(limit.cpu_s)
    assert cpu_s is not None
    return {
        "name": limit.name,
        "status": "ok",
        "size_mib": limit.size_bytes // MIB,
        "gb_per_s": median(speeds),
        "min": min(speeds),
        "max": max(speeds),
        "cpu_s_per_gib": cpu_s / limit.size_bytes * (1 << 30),
    }


def _ratios(rows: list[Row]) -> dict[str, float | None]:
    speed = {r["name"]: r.get("gb_per_s") for r in rows}

    def over(a: str, b: str) -> float | None:
        return speed[a] / speed[b] if speed.get(a) and speed.get(b) else None

    return {
        "memcpy_warm_vs_fresh": over("memcpy 1 thread, warm", "memcpy 1 thread, fresh"),
        "memcpy_all_vs_1_thread": over("memcpy all threads, warm", "memcpy 1 thread, warm"),
        "direct_vs_buffered_fsync": over("write O_DIRECT + fsync", "write buffered + fsync"),
        "xxh3_128_vs_sha256": over("digest xxh3_128", "digest sha256"),
        "xxh3_128_vs_direct_write": over("digest xxh3_128", "write O_DIRECT + fsync"),
        "zstd_ratio": rows[-1].get("ratio"),
    }


def _embeddings(size: int) -> torch.Tensor:
    """Float32 values as a trained table holds: small, around zero. Page-aligned, for O_DIRECT."""
    values = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32)
    return values.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))


def _touched(size: int) -> torch.Tensor:
    """Memory to copy and read into that has its pages already."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float32).fill_(1)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def _memory(source: torch.Tensor, warm: torch.Tensor) -> Iterator[Limit]:
    size = source.nbytes

    def copy(threads: int, advice: int | None, *, fresh: bool) -> tuple[float, float]:
        torch.set_num_threads(threads)
        into = warm
        with Stopwatch() as watch:
            if fresh:
                pages = mmap.mmap(-1, size)
                if advice is not None:
                    pages.madvise(advice)
                into = torch.frombuffer(pages, dtype=torch.float32)
            into.copy_(source)
        return watch.both

    for name, threads in (("1 thread", 1), ("all threads", cores())):
        yield Limit(f"memcpy {name}, warm", size, lambda t=threads: copy(t, None, fresh=False))
        yield Limit(f"memcpy {name}, fresh", size, lambda t=threads: copy(t, None, fresh=True))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            yield Limit(
                f"memcpy {name}, fresh huge pages",
                size,
                lambda t=threads: copy(t, mmap.MADV_HUGEPAGE, fresh=True),
            )


def _files(source: torch.Tensor, target: torch.Tensor, folder: Path) -> Iterator[Limit]:
    data, into, size = _bytes(source), _bytes(target), source.nbytes

    def write(flags: int, *, sync: bool) -> tuple[float, float]:
        path = folder / "written"
        with Stopwatch() as watch, _opened(path, _NEW | flags) as fd:
            for at in range(0, size, PIECE_BYTES):
                _write_whole(fd, data[at : at + PIECE_BYTES])
            if sync:
                os.fsync(fd)
        path.unlink()
        return watch.both

    def read(flags: int) -> tuple[float, float]:
        path = folder / "read"
        if not path.exists():
            path.write_bytes(data)
        forget(path)
        with Stopwatch() as watch, _opened(path, os.O_RDONLY | flags) as fd:
            for at in range(0, size, PIECE_BYTES):
                os.readv(fd, [into[at : at + PIECE_BYTES]])
        return watch.both

    yield Limit("write buffered", size, lambda: write(0, sync=False))
    yield Limit("write buffered + fsync", size, lambda: write(0, sync=True))
    yield Limit("write O_DIRECT + fsync", size, lambda: write(os.O_DIRECT, sync=True))
    yield Limit("read cold", size, lambda: read(0))
    yield Limit("read cold, O_DIRECT", size, lambda: read(os.O_DIRECT))


def forget(path: Path) -> None:
    """Drop a file, or all files of a folder, from the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with _opened(file, os.O_RDONLY) as fd:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def direct_read_s(path: Path, threads: int) -> float:
    """Seconds to read a file past the page cache, by threads that take pieces in turn.

    Raises OSError where the filesystem refuses O_DIRECT.
    """
    pieces = iter(range(0, path.stat().st_size, PIECE_BYTES))
    with _opened(path, os.O_RDONLY | os.O_DIRECT) as fd:

        def read(into: mmap.mmap) -> None:
            for at in pieces:
                os.preadv(fd, [into], at)

        buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(threads)]
        with ThreadPoolExecutor(threads) as pool, Stopwatch() as watch:
            deque(pool.map(read, buffers), 0)
    return watch.wall_s


def _digests(source: torch.Tensor) -> Iterator[Limit]:
    data, size = _bytes(source), source.nbytes

    def digest(new: Callable[[], object]) -> tuple[float, float]:
        hasher = new()
        with Stopwatch() as watch:
            for at in range(0, size, PIECE_BYTES):
                hasher.update(data[at : at + PIECE_BYTES])
            hasher.digest()
        return watch.both

    makers = {
        "xxh3_64": xxhash.xxh3_64,
        "xxh3_128": xxhash.xxh3_128,
        "sha256": hashlib.sha256,
        "blake2b": hashlib.blake2b,
    }
    for name, new in makers.items():
        yield Limit(f"digest {name}", size, lambda new=new: digest(new))


def _zstd(source: torch.Tensor) -> Limit:
    data = _bytes(source)[:_ZSTD_BYTES]
    packer = zstandard.ZstdCompressor(level=1)

    def compress() -> tuple[float, float]:
        with Stopwatch() as watch:
            for at in range(0, len(data), PIECE_BYTES):
                packer.compress(data[at : at + PIECE_BYTES])
        return watch.both

    return Limit("zstd level 1, float32 embeddings", len(data), compress)


def _zstd_ratio(source: torch.Tensor) -> float:
    """How many times smaller embeddings become."""
    data = _bytes(source)[:PIECE_BYTES]
    return len(data) / len(zstandard.ZstdCompressor(level=1).compress(data))


def _write_whole(fd: int, piece: memoryview) -> None:
    if os.write(fd, piece) != len(piece):
        raise OSError(errno.ENOSPC, "the disk took a part only")


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)
