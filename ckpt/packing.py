"""Lays a snapshot's blocks out in a file: the codec of each chunk, its place, the file's digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import zstandard

from ckpt.blocks import Block, Piece
from ckpt.config import CheckpointConfig
from ckpt.digest import new_hasher
from ckpt.index import ChunkEntry, Codec
from ckpt.ring import Ring, RingBuffer, aligned
from ckpt.types import DigestName

_SAMPLE_BYTES = 64 * 1024
_LEAST_BYTES = 1024  # a shorter chunk isn't worth a look
_PAYS_BELOW = 0.8  # zstd costs more time than it saves unless a sample shrinks at least so far
_PACKED_BYTES = 256 * 1024  # of packed bytes, moved at a time


@dataclass(eq=False)
class Chunk:
    """A piece with its place in the file; `digest` is set when it is written."""

    piece: Piece
    offset: int
    stored: memoryview
    codec: Codec
    stored_bytes: int = field(init=False)
    digest: bytes = b""

    def __post_init__(self) -> None:
        self.stored_bytes = len(self.stored)

    def entry(self) -> ChunkEntry:
        p = self.piece
        return ChunkEntry(p.row, p.rows, self.offset, self.stored_bytes, self.codec, self.digest)


@dataclass(eq=False)
class Run:
    """Bytes [start, stop) of a buffer that lie at `offset` of the file, in one piece."""

    buffer: RingBuffer
    start: int
    stop: int
    offset: int

    @property
    def view(self) -> memoryview:
        return self.buffer.view[self.start : self.stop]


@dataclass(eq=False)
class Batch:
    """The chunks of one block, the runs of bytes that they make, and the buffers that hold them."""

    chunks: list[Chunk]
    runs: list[Run]
    buffers: list[RingBuffer]


class Packer:
    """Copies blocks into buffers and gives each chunk its codec and its place. One thread's."""

    def __init__(self, ring: Ring, config: CheckpointConfig) -> None:
        self._ring = ring
        self._name: DigestName = config.digest
        self._hasher = new_hasher(config.digest)
        self._compress = config.compression == "auto"
        self._zstd = zstandard.ZstdCompressor(level=1)
        self.chunks: list[Chunk] = []
        self.size_bytes = 0

    def digest(self) -> str:
        return f"{self._name}:{self._hasher.hexdigest()}"

    def pack(self, block: Block) -> Batch:
        """Copy a block, and compress those of its chunks where that pays."""
        starts, size = [], 0
        for piece in block.pieces:
            starts.append(size)
            size += aligned(piece.nbytes)
        raw = self._ring.take(size)
        packed: RingBuffer | None = None
        try:
            places = list(zip(block.pieces, starts, strict=True))
            block.fill([raw.tensor[at : at + p.nbytes] for p, at in places])
            batch = Batch([], [], [])
            packed_bytes = 0
            for piece, at in places:
                view = raw.view[at : at + piece.nbytes]
                if self._compress and self._pays(view):
                    packed = packed or self._ring.take()
                    length = self._packed(view, packed.view[packed_bytes:])
                    if length is not None:
                        self._add(batch, piece, packed, (packed_bytes, length), "zstd")
                        packed_bytes += aligned(length)
                        continue
                self._add(batch, piece, raw, (at, piece.nbytes), "raw")
        except BaseException:
            for buffer in (raw, packed):
                if buffer is not None:
                    self._ring.give(buffer)
            raise
        for buffer in (raw, packed):
            if buffer is None:
                continue
            if any(run.buffer is buffer for run in batch.runs):
                batch.buffers.append(buffer)
            else:
                self._ring.give(buffer)
        return batch

    def placed(self, batch: Batch, *, last: bool) -> Batch:
        """The batch, digested; only the file's last chunk isn't padded."""
        if not last and batch.runs:
            run = batch.runs[-1]
            run.stop = run.start + aligned(run.stop - run.start)
            self.size_bytes = run.offset + run.stop - run.start
        for run in batch.runs:
            self._hasher.update(run.view)
        return batch

    def _add(
        self, batch: Batch, piece: Piece, buffer: RingBuffer, span: tuple[int, int], codec: Codec
    ) -> None:
        """Give a chunk, `span` (start, length) of a buffer, the next aligned place in the file."""
        start, length = span
        offset = aligned(self.size_bytes)
        end = start + aligned(length)
        if end > start + length:
            # Zeros up to the next chunk belong to the file; what lay there is an older block's.
            buffer.tensor[start + length : end].zero_()
        chunk = Chunk(piece, offset, buffer.view[start : start + length], codec)
        before = batch.runs[-1] if batch.runs else None
        if before is not None:
            before.stop = before.start + aligned(before.stop - before.start)
        if before is not None and before.buffer is buffer and before.stop == start:
            before.stop = start + length
        else:
            batch.runs.append(Run(buffer, start, start + length, offset))
        batch.chunks.append(chunk)
        self.chunks.append(chunk)
        self.size_bytes = offset + length

    def _pays(self, raw: memoryview) -> bool:
        """Try a sample from the middle: heads of tables are often padding or special rows."""
        if len(raw) < _LEAST_BYTES:
            return False
        start = max(0, (len(raw) - _SAMPLE_BYTES) // 2)
        sample = raw[start : start + _SAMPLE_BYTES]
        return len(self._zstd.compress(sample)) < _PAYS_BELOW * len(sample)

    def _packed(self, raw: memoryview, target: memoryview) -> int | None:
        """Compress `raw` into `target` as one frame; its length, or None if it shrinks too little."""
        most, done = int(_PAYS_BELOW * len(raw)), 0
        for part in _parts(self._zstd, raw):
            if done + len(part) >= min(most, len(target)):
                return None
            target[done : done + len(part)] = part
            done += len(part)
        return done


def _parts(zstd: zstandard.ZstdCompressor, raw: memoryview) -> Iterator[bytes]:
    """A frame in bounded parts, so that it never lies in memory twice."""
    chunker = zstd.chunker(size=len(raw), chunk_size=_PACKED_BYTES)
    yield from chunker.compress(raw)
    yield from chunker.finish()  # type: ignore[no-untyped-call]
