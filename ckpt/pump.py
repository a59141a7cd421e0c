"""Moves a snapshot's blocks through the ring into one object.

The calling thread copies, chooses each chunk's codec and place, and digests the file in order;
the writer threads digest the chunks and write them. The first error of any thread ends it all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from ckpt.blocks import Blocks, Piece
from ckpt.config import CheckpointConfig
from ckpt.digest import new_hasher
from ckpt.index import ChunkEntry
from ckpt.pace import Pace
from ckpt.packing import Batch, Chunk, Packer, Run
from ckpt.ring import Ring
from ckpt.storage.protocol import ObjectWriter, OffsetWriter
from ckpt.threads import WriteThreads
from ckpt.types import DigestName


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
        packer = Packer(self._ring, self._config)
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
            error, outlet.error = outlet.error, None
            try:
                raise error
            finally:
                del error  # kept here it would be a cycle with this frame, and hold the snapshot
        chunks = [(c.piece, c.entry()) for c in packer.chunks]
        return Pumped(chunks, packer.size_bytes, packer.digest())

    def _copy(self, blocks: Blocks, packer: Packer, outlet: _Outlet) -> None:
        self._ring.reserve(blocks.largest_row_bytes)
        chunk_bytes = min(self._config.chunk_bytes, self._ring.buffer_bytes)
        done_bytes = 0
        ready: Batch | None = None
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
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._writing: list[Future[None]] = []
        self.error: BaseException | None = None

    def begin(self, threads: WriteThreads) -> None:
        """Use writer threads: all of them where order doesn't matter, else one."""
        for _ in range(threads.writers if self._at_offsets is not None else 1):
            self._writing.append(threads.start(self._drain))

    def send(self, batch: Batch) -> None:
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

    def _take(self, batch: Batch) -> None:
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

    def _write(self, chunks: Sequence[Chunk], runs: Sequence[Run]) -> None:
        for chunk in chunks:
            hasher = new_hasher(self._digest)
            hasher.update(chunk.stored)
            chunk.digest = hasher.digest().ljust(32, b"\0")
        for run in runs:
            if self._at_offsets is not None:
                self._at_offsets.write_at(run.offset, run.view)
            else:
                self._out.write(run.view)
