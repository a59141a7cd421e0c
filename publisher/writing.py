"""One task: read its rows from the checkpoint, check and encode them, write its file.

This runs in any process on any host. Memory is what the reader holds of the checkpoint, one small
block of rows in a few forms, and one buffer of the file, whatever the table.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from ckpt.digest import new_hasher
from ckpt.errors import BadInputError, ConflictError
from ckpt.restore import CheckpointReader
from ckpt.storage import ObjectWriter, Storage, open_storage
from ckpt.types import Buffer, DigestName, FileEntry
from publisher.formats import FP16_MAX, PAGE_BYTES
from publisher.gates import GateError
from publisher.quantise import check_finite, encode_rows
from publisher.reading import ahead
from publisher.sums import RowSums, Tally, row_norms
from publisher.tasks import BuildJob, FileResult, FileTask, Piece

_LEAST_BLOCK_BYTES = 64 << 10
_MOST_BLOCK_BYTES = 2 << 20  # about what stays in a core's cache from check to write
_FORMS = 8  # of a block, at most, that are held at once: values, packed, restored, errors, ...
_BUFFER_BYTES = 1 << 20
_BLOCKS_AHEAD = 3  # about as many as are encoded while a chunk is read
_MOST_WIDENING = 2  # of a block as it is read: float64, and blocks are counted in fp32


class RowSource(Protocol):
    """What is read of a checkpoint for tables; `ckpt.restore.CheckpointReader` is one."""

    def iter_rows(
        self, fqn: str, first: int = 0, rows: int | None = None, *, most_rows: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]: ...


class TableWriter:
    """Writes files of tables.

    Args:
        job: what is worked on; `memory_bytes` is this writer's own.
        source: the checkpoint.
        registry: the store that the files go to.
    """

    def __init__(self, job: BuildJob, source: RowSource, registry: Storage) -> None:
        self.job = job
        self._source = source
        self._registry = registry
        free = job.memory_bytes - job.least_bytes - _BUFFER_BYTES
        # The next chunk is read while this one is encoded, where there is memory for both: those that
        # wait are parts of one more chunk, and if chunks are small, of some that end before it.
        waiting = (_BLOCKS_AHEAD + 1) * _MOST_WIDENING
        block = (free - job.least_bytes) // (_FORMS + waiting)
        self._read_ahead = block >= _LEAST_BLOCK_BYTES
        if not self._read_ahead:
            block = free // _FORMS
        self._block_bytes = max(_LEAST_BLOCK_BYTES, min(_MOST_BLOCK_BYTES, block))

    @classmethod
    def open(cls, job: BuildJob) -> TableWriter:
        """The same from nothing but URLs, as in another process."""
        root = open_storage(job.root_url, must_exist=True)
        reader = CheckpointReader(root, job.record, workers=1)
        return cls(job, reader, open_storage(job.registry_url))

    def write(self, task: FileTask) -> FileResult:
        """Write one file; the same task always gives the same bytes.

        Raises GateError: `coverage` unless each row came exactly once, `finite` for what the format
        can't hold, by row; CorruptError for a damaged checkpoint; StorageError: try again.
        """
        key = self.job.prefix + task.name
        sums = []
        try:
            with _one_thread(), self._registry.writer(key) as raw:
                out = DigestingWriter(raw, self.job.digest)
                for piece in task.pieces:
                    out.fill(piece.offset)
                    sums.append(self._write_piece(out, piece))
                out.fill(task.size_bytes)
                entry = out.finish(task.name)
        except ConflictError:
            # A worker that died wrote it, or one that was given up for dead: the same bytes.
            if self._registry.stat(key).size_bytes != task.size_bytes:
                raise
        return FileResult(entry, task.pieces, tuple(sums), f"{socket.gethostname()}:{os.getpid()}")

    def _write_piece(self, out: DigestingWriter, piece: Piece) -> RowSums:
        table, last = piece.table, piece.first_row + piece.rows
        tally, at = Tally(table), piece.first_row
        with closing(self._blocks(piece)) as blocks:  # else a thread would read on after an error
            for first, block in blocks:
                if first != at or block.shape[1:] != (table.dim,):
                    raise GateError(
                        "coverage",
                        f"{table.fqn}: got rows {first}+ of shape {tuple(block.shape)}, expected row "
                        f"{at} of {table.dim} columns",
                    )
                values = block.float().contiguous()
                at += len(block)
                del block
                norms = row_norms(values)
                # No value is larger than its row is long: only if that proves nothing, each is looked at.
                if len(norms) and not float(norms.max()) <= FP16_MAX:
                    largest = check_finite(values, f"{table.fqn} row", first, table.format)
                    norms = row_norms(values, largest)
                stored = encode_rows(values, table.format)
                tally.add(first, values, norms, stored)
                out.write(memoryview(stored.flatten().numpy().data))
                del values, stored  # they may hold a whole chunk, and the next is about to be read
        if at != last:
            raise GateError(
                "coverage",
                f"{table.fqn}: {at - piece.first_row} of {piece.rows} rows from row "
                f"{piece.first_row} on were read",
            )
        return tally.sums()

    def _blocks(self, piece: Piece) -> Generator[tuple[int, torch.Tensor], None, None]:
        """A piece's rows, a block at a time."""
        table = piece.table
        step = max(1, self._block_bytes // (4 * table.dim))
        read = self._source.iter_rows(table.fqn, piece.first_row, piece.rows, most_rows=step)
        # For less than what may wait, a thread costs more than it saves.
        ahead_of = self._read_ahead and piece.rows > _BLOCKS_AHEAD * step
        yield from ahead(read, _BLOCKS_AHEAD) if ahead_of else read


@contextmanager
def _one_thread() -> Iterator[None]:
    """Blocks are too small to be shared out: on busy cores threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class DigestingWriter:
    """Counts and digests what goes through it to an object, in large pieces that start on a page.

    So a local store can write them past the page cache, as it can those of a checkpoint.
    """

    def __init__(self, out: ObjectWriter, digest: DigestName) -> None:
        self._out = out
        self._digest = digest
        self._hasher = new_hasher(digest)
        self._buffer = _aligned(_BUFFER_BYTES)
        self._used = 0
        self.size_bytes = 0

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        view = memoryview(data)
        self._hasher.update(view)
        self.size_bytes += view.nbytes
        view = view.cast("B") if view.nbytes else memoryview(b"")
        while view:
            taken = min(len(view), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + taken] = view[:taken]
            self._used += taken
            view = view[taken:]
            if self._used == len(self._buffer):
                self._flush()

    def fill(self, size_bytes: int) -> None:
        """Append zeros up to a size, which must not be passed yet."""
        if size_bytes < self.size_bytes:
            raise BadInputError(f"{self.size_bytes} bytes were written, {size_bytes} are planned")
        self.write(bytes(size_bytes - self.size_bytes))

    def finish(self, name: str) -> FileEntry:
        """Write what is left. The manifest's entry of the file `name`."""
        self._flush()
        return FileEntry(name, self.size_bytes, f"{self._digest}:{self._hasher.hexdigest()}")

    def _flush(self) -> None:
        if self._used:
            self._out.write(self._buffer[: self._used])
        self._used = 0


def _aligned(size: int) -> memoryview:
    """A buffer whose address is a multiple of a page's size."""
    whole = bytearray(size + PAGE_BYTES)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % PAGE_BYTES
    return memoryview(whole)[start : start + size]
