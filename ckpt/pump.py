"""Moves a snapshot's blocks through the ring into one object.

The calling thread copies, chooses each chunk's codec and place, and digests the file in order;
the writer threads digest the chunks and write them. The first error of any thread ends it all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import zstandard

from ckpt.blocks import Block, Blocks, Piece
from ckpt.config import CheckpointConfig
from ckpt.digest import new_hasher
from ckpt.index import ChunkEntry, Codec
from ckpt.pace import Pace
from ckpt.ring import Ring, RingBuffer, aligned
from ckpt.storage.protocol import ObjectWriter, OffsetWriter
from ckpt.threads import WriteThreads
from ckpt.types import DigestName

_SAMPLE_BYTES = 64 * 1024
_LEAST_BYTES = 1024  # a shorter chunk isn't worth a look
_PAYS_BELOW = 0.8  # zstd costs more time than it saves unless a sample shrinks at least so far
_PACKED_BYTES = 256 * 1024  # of packed bytes, moved at a time


@dataclass(frozen=True)
class Pumped:
    """What was written: each piece's chunk in the order of the file, the file's size and digest."""

    chunks: list[tuple[Piece, ChunkEntry]]
    size_bytes: int
    digest: str


class Pump:
    """Writes one save at a time.

    Args:
        ring: of 2 buffers or more; each holds a block, or the compressed chunks of one.
        threads: that write; without them the calling thread does.
        pace: when to copy; without it as fast as possible.
    """

    def __init__(
        self,
        ring: Ring,
        config: CheckpointConfig,
        threads: WriteThreads | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._ring = ring
        self._config = config
        self._threads = threads
        self._pace = pace

    def run(self, blocks: Blocks, out: ObjectWriter) -> Pumped:
        """Write all of `blocks` to `out`. When this returns or raises, every buffer is back.

        Raises the first error of copying or writing.
        """
        outlet = _Outlet(self._ring, self._config.digest, out, self._pace)
        packer = _Packer(self._ring, self._config)
        with self._paced():
            try:
                if self._threads is not None:
                    outlet.begin(self._threads)
                self._copy(blocks, packer, outlet)
            except BaseException as e:
                outlet.fail(e)
            finally:
                outlet.finish()
        if outlet.error is not None:
            raise outlet.error
        chunks = [(c.piece, c.entry()) for c in packer.chunks]
        return Pumped(chunks, packer.size_bytes, packer.digest())

    def _copy(self, blocks: Blocks, packer: _Packer, outlet: _Outlet) -> None:
        self._ring.reserve(blocks.largest_row_bytes)
        chunk_bytes = min(self._config.chunk_bytes, self._ring.buffer_bytes)
        done_bytes = 0
        ready: _Batch | None = None
        try:
            for block in blocks.blocks(chunk_bytes):
                if not block.pieces:
                    continue
                if ready is not None:
                    # Only now is it sure that more follows and its end needs padding.
                    outlet.send(packer.placed(ready, last=False))
                    ready = None
                    if self._pace is not None:
                        self._pace.wait(done_bytes)
                outlet.check()
                ready = packer.pack(block)
                done_bytes += sum(p.nbytes for p in block.pieces)
            if ready is not None:
                outlet.send(packer.placed(ready, last=True))
        except BaseException as e:
            outlet.fail(e)
            if ready is not None:
                outlet.send(ready)  # is dropped, and its buffers go back
            raise
        if self._threads is not None:
            self._threads.hurry()  # to write what is left in the ring is short, and ends the save

    def _paced(self) -> contextlib.AbstractContextManager[None]:
        if self._threads is None or self._pace is None:
            return contextlib.nullcontext()
        return self._threads.paced(self._pace)


@dataclass(eq=False)
class _Chunk:
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
class _Run:
    """Bytes [start, stop) of a buffer that lie at `offset` of the file, in one piece."""

    buffer: RingBuffer
    start: int
    stop: int
    offset: int

    @property
    def view(self) -> memoryview:
        return self.buffer.view[self.start : self.stop]


@dataclass(eq=False)
class _Batch:
    """The chunks of one block, the runs of bytes that they make, and the buffers that hold them."""

    chunks: list[_Chunk]
    runs: list[_Run]
    buffers: list[RingBuffer]


class _Packer:
    """Copies blocks into buffers and gives each chunk its codec and its place. One thread's."""

    def __init__(self, ring: Ring, config: CheckpointConfig) -> None:
        self._ring = ring
        self._name: DigestName = config.digest
        self._hasher = new_hasher(config.digest)
        self._compress = config.compression == "auto"
        self._zstd = zstandard.ZstdCompressor(level=1)
        self.chunks: list[_Chunk] = []
        self.size_bytes = 0

    def digest(self) -> str:
        return f"{self._name}:{self._hasher.hexdigest()}"

    def pack(self, block: Block) -> _Batch:
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
            batch = _Batch([], [], [])
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

    def placed(self, batch: _Batch, *, last: bool) -> _Batch:
        """The batch, digested; only the file's last chunk isn't padded."""
        if not last and batch.runs:
            run = batch.runs[-1]
            run.stop = run.start + aligned(run.stop - run.start)
            self.size_bytes = run.offset + run.stop - run.start
        for run in batch.runs:
            self._hasher.update(run.view)
        return batch

    def _add(
        self, batch: _Batch, piece: Piece, buffer: RingBuffer, span: tuple[int, int], codec: Codec
    ) -> None:
        """Give a chunk, `span` (start, length) of a buffer, the next aligned place in the file."""
        start, length = span
        offset = aligned(self.size_bytes)
        end = start + aligned(length)
        if end > start + length:
            # Zeros up to the next chunk belong to the file; what lay there is an older block's.
            buffer.tensor[start + length : end].zero_()
        chunk = _Chunk(piece, offset, buffer.view[start : start + length], codec)
        before = batch.runs[-1] if batch.runs else None
        if before is not None:
            before.stop = before.start + aligned(before.stop - before.start)
        if before is not None and before.buffer is buffer and before.stop == start:
            before.stop = start + length
        else:
            batch.runs.append(_Run(buffer, start, start + length, offset))
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


class _Outlet:
    """Where batches go: to the writer threads if there are any, else straight to the object."""

    def __init__(
        self, ring: Ring, digest: DigestName, out: ObjectWriter, pace: Pace | None
    ) -> None:
        self._ring = ring
        self._digest = digest
        self._out = out
        self._at_offsets = out if isinstance(out, OffsetWriter) else None
        self._pace = pace
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._writing: list[Future[None]] = []
        self.error: BaseException | None = None

    def begin(self, threads: WriteThreads) -> None:
        """Use writer threads: all of them where order doesn't matter, else one."""
        for _ in range(threads.writers if self._at_offsets is not None else 1):
            self._writing.append(threads.start(self._drain))

    def send(self, batch: _Batch) -> None:
        if self._writing:
            self._queue.put(batch)
        else:
            self._take(batch)

    def check(self) -> None:
        """Raise what any thread has failed with."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Keep the first error; what comes after it is dropped, so that nobody waits for a buffer."""
        if self.error is None:
            self.error = error
        if self._pace is not None:
            self._pace.close()

    def finish(self) -> None:
        """Wait until the threads are through with everything that was sent."""
        for _ in self._writing:
            self._queue.put(None)
        for writing in self._writing:
            error = writing.exception()
            if error is not None:
                self.fail(error)

    def _drain(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._take(batch)

    def _take(self, batch: _Batch) -> None:
        """Write a batch unless something failed already, and give its buffers back in any case."""
        try:
            if self.error is None:
                self._write(batch.chunks, batch.runs)
        except BaseException as e:
            self.fail(e)
        finally:
            for chunk in batch.chunks:
                chunk.stored = memoryview(b"")
            batch.runs.clear()
            for buffer in batch.buffers:
                self._ring.give(buffer)

    def _write(self, chunks: Sequence[_Chunk], runs: Sequence[_Run]) -> None:
        for chunk in chunks:
            hasher = new_hasher(self._digest)
            hasher.update(chunk.stored)
            chunk.digest = hasher.digest().ljust(32, b"\0")
        for run in runs:
            if self._at_offsets is not None:
                self._at_offsets.write_at(run.offset, run.view)
            else:
                self._out.write(run.view)
