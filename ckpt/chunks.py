"""Reads stored chunks, each byte compared with its digest: to see that all is well, or into place.

The work is cut by bytes, whatever the tensors are like: a large chunk is read in pieces that stay in a
core's cache until they are digested, and small chunks that follow each other in a file are read at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import NamedTuple

import zstandard

from ckpt.digest import new_hasher
from ckpt.errors import CorruptError, NotFoundError
from ckpt.index import ChunkEntry
from ckpt.parallel import each
from ckpt.placing import Place, Scratch
from ckpt.storage import NearObject, Readable, near

PIECE_BYTES = 1 << 20
"""Read at once of a chunk that is near: it is digested, and copied, while it is in a cache.

Smaller ones would save little there, and threads would wait for Python's lock more often.
"""
RUN_BYTES = 4 << 20
"""Of small chunks that a thread takes at once, and that are fetched at once from afar."""
_GAP_BYTES = 4096  # between two chunks of a run: chunks begin at multiples of it

OTHER = "use another checkpoint"
CHANGED = (
    "they were right a moment ago, and a part of the state is already overwritten: restore another "
    "checkpoint before it's used"
)


@dataclass(slots=True, eq=False)
class Piece:
    """A stored chunk and what is wanted of it.

    key: of its data file. rows: names them in errors. algorithm: of its digest. shape: of its rows,
    () for a 0-d tensor; raw_bytes: what they take. places: of a piece that is to be filled.
    """

    key: str
    rows: str
    algorithm: str
    chunk: ChunkEntry
    shape: tuple[int, ...]
    raw_bytes: int
    places: list[Place] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.chunk.offset + self.chunk.stored_bytes

    @property
    def what(self) -> str:
        return f"{self.key}: {self.rows}"


class ChunkReader:
    """Reads the chunks of one checkpoint, `workers` at a time. `kept` is what needn't travel twice."""

    def __init__(self, storage: Readable, workers: int) -> None:
        self._storage = storage
        self._workers = workers
        self.kept = Kept(0)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Read every byte, and keep what there is room for; CorruptError about a chunk that is damaged."""

        def check(run: _Run, found: NearObject | None, scratch: Scratch) -> None:
            if found is None:
                data = memoryview(bytearray(run.nbytes))
                self._fetch(run, data)
                _compare(run, data, OTHER)
                self.kept.keep(run, data)
                return
            found.ahead(run.start, run.nbytes)
            for part in _parts(run):
                if part.nbytes > PIECE_BYTES:
                    source = _Stream(found, part.pieces[0], scratch, OTHER)
                    source.skip(part.nbytes)
                    source.finish()
                else:
                    _read(found, part, scratch, OTHER)

        self._each(check, _runs(pieces))

    def fill(self, pieces: Sequence[Piece], *, checked: bool = False) -> None:
        """Give every byte to its places, compared with its digest on the way.

        checked: `check` has just read them, so they are in the page cache, and damage is news.
        """
        advice = CHANGED if checked else OTHER

        def fill(run: _Run, found: NearObject | None, scratch: Scratch) -> None:
            if (held := self.kept.take(run.pieces[0])) is not None:
                _place(run.pieces[0], held, scratch)
                return
            if found is None:
                data = scratch.bytes(run.nbytes)
                self._fetch(run, data)
                _compare(run, data, advice)
                for piece, stored in _cut(run, data):
                    _place(piece, stored, scratch)
                return
            if not checked:
                found.ahead(run.start, run.nbytes)
            for part in _parts(run):
                piece = part.pieces[0]
                if part.nbytes > PIECE_BYTES and piece.chunk.codec == "raw":
                    source = _Stream(found, piece, scratch, advice)
                    scratch.place(piece.places, piece.shape, source)
                    source.finish()
                    continue
                for piece, stored in _read(found, part, scratch, advice):
                    _place(piece, stored, scratch)

        held: list[Piece] = []
        others: list[Piece] = []
        for piece in pieces:
            (held if self.kept.has(piece) else others).append(piece)
        # Backwards: where the page cache can't hold all that was read, it has the end of it.
        self._each(fill, [*[_Run([p]) for p in held], *reversed(_runs(others))])

    def _each(
        self, work: Callable[[_Run, NearObject | None, Scratch], None], runs: Sequence[_Run]
    ) -> None:
        """Do the work for all runs, whose file is opened where it is near. The first error ends it."""
        left = iter(runs)

        def drain(_: int) -> None:
            scratch = Scratch()
            with closing(scratch), closing(_Files(self._storage)) as files:
                try:
                    while (run := next(left, None)) is not None:
                        work(run, files.of(run), scratch)
                except BaseException:
                    deque(left, 0)
                    raise

        workers = min(self._workers, len(runs))
        deque(each(drain, range(workers), workers), 0)

    def _fetch(self, run: _Run, data: memoryview) -> None:
        try:
            self._storage.read_into(run.pieces[0].key, run.start, data)
        except NotFoundError:
            raise _gone(run) from None


class _Run(NamedTuple):
    """Chunks that follow each other in a file."""

    pieces: list[Piece]

    @property
    def start(self) -> int:
        return self.pieces[0].chunk.offset

    @property
    def nbytes(self) -> int:
        return max([p.stop for p in self.pieces]) - self.start


class _Files:
    """The file that a worker reads, open: its next run is mostly of the same."""

    def __init__(self, storage: Readable) -> None:
        self._storage = storage
        self._key = ""
        self._found: NearObject | None = None
        self._opened = ExitStack()

    def of(self, run: _Run) -> NearObject | None:
        """The run's file, if it's near."""
        if (key := run.pieces[0].key) != self._key:
            self.close()
            try:
                found = near(self._storage, key)
                self._found = None if found is None else self._opened.enter_context(found)
            except NotFoundError:
                raise _gone(run) from None
            self._key = key
        return self._found

    def close(self) -> None:
        self._opened.close()
        self._key, self._found = "", None


class Kept:
    """Checked bytes of chunks that came from afar, as many as there is room for."""

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._held: dict[tuple[str, int, int], memoryview] = {}
        self._lock = threading.Lock()

    def keep(self, run: _Run, data: memoryview) -> None:
        """Hold the chunks of a run, whose bytes are `data`, if there is room."""
        with self._lock:
            if run.nbytes <= self._room_bytes:
                self._room_bytes -= run.nbytes
                self._held |= {_name(piece): stored for piece, stored in _cut(run, data)}

    def has(self, piece: Piece) -> bool:
        return _name(piece) in self._held

    def take(self, piece: Piece) -> memoryview | None:
        """The bytes of a chunk, which are then held no longer."""
        return self._held.pop(_name(piece), None)


class _Stream:
    """The bytes of one large uncompressed chunk that is near, digested as they are read."""

    def __init__(self, found: NearObject, piece: Piece, scratch: Scratch, advice: str) -> None:
        self._found = found
        self._piece = piece
        self._scratch = scratch
        self._advice = advice
        self._hasher = new_hasher(piece.algorithm)
        self._at = piece.chunk.offset

    def fill(self, memory: memoryview) -> None:
        starts = range(0, len(memory), PIECE_BYTES)
        self._read([memory[start : start + PIECE_BYTES] for start in starts], len(memory))

    def skip(self, nbytes: int) -> None:
        memory = self._scratch.bytes(min(nbytes, PIECE_BYTES))
        self._read([memory[: nbytes - at] for at in range(0, nbytes, PIECE_BYTES)], nbytes)

    def _read(self, parts: list[memoryview], nbytes: int) -> None:
        self._found.read_each(self._at, parts, self._hasher.update)
        self._at += nbytes

    def finish(self) -> None:
        if self._hasher.digest().ljust(32, b"\0") != self._piece.chunk.digest:
            raise _damaged(self._piece, self._advice)


class _Held:
    """The bytes of an uncompressed chunk in memory."""

    def __init__(self, stored: memoryview) -> None:
        self._stored = stored
        self._at = 0

    def fill(self, memory: memoryview) -> None:
        memory[:] = self._stored[self._at : self._at + len(memory)]
        self._at += len(memory)

    def skip(self, nbytes: int) -> None:
        self._at += nbytes


class _Unpacked:
    """The bytes of a compressed chunk in memory, decompressed as they are asked for."""

    def __init__(self, stored: memoryview, piece: Piece) -> None:
        self._piece = piece
        try:
            # A frame's own word about its size would overrule what the index says.
            size = zstandard.frame_content_size(stored)
            if size != piece.raw_bytes:
                raise CorruptError(f"{piece.what}: holds {size} bytes, expected {piece.raw_bytes}")
            self._reader = zstandard.ZstdDecompressor().stream_reader(stored)
        except zstandard.ZstdError as e:
            raise self._broken(e) from None

    def fill(self, memory: memoryview) -> None:
        done = 0
        try:
            while done < len(memory):
                # At the end of what is there it returns nothing.
                n = self._reader.readinto(memory[done:])
                if not n:
                    raise self._broken("it ends too early")
                done += n
        except zstandard.ZstdError as e:
            raise self._broken(e) from None

    def skip(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
        for start in range(0, nbytes, PIECE_BYTES):
            self.fill(scratch[: nbytes - start])

    def _broken(self, why: object) -> CorruptError:
        return CorruptError(f"{self._piece.what}: can't be decompressed: {why}")


def _runs(pieces: Sequence[Piece]) -> list[_Run]:
    """Chunks in the order of their files: one large one, or small ones that lie side by side."""
    runs: list[_Run] = []
    ordered = sorted(pieces, key=lambda p: (p.key, p.chunk.offset))
    key, start, stop = "", 0, 0
    for piece in ordered:
        chunk = piece.chunk
        beside = key == piece.key and 0 <= chunk.offset - stop < _GAP_BYTES
        if beside and piece.stop - start <= RUN_BYTES:
            runs[-1].pieces.append(piece)
        else:
            runs.append(_Run([piece]))
            key, start = piece.key, chunk.offset
        stop = piece.stop
    return runs


def _parts(run: _Run) -> Iterator[_Run]:
    """A run in parts of at most PIECE_BYTES, or one chunk."""
    part: list[Piece] = []
    for piece in run.pieces:
        if part and piece.stop - part[0].chunk.offset > PIECE_BYTES:
            yield _Run(part)
            part = []
        part.append(piece)
    yield _Run(part)


def _cut(run: _Run, data: memoryview) -> Iterator[tuple[Piece, memoryview]]:
    """Each chunk of a run, whose bytes are `data`, with its own bytes."""
    start = run.start
    for piece in run.pieces:
        yield piece, data[piece.chunk.offset - start : piece.stop - start]


def _read(
    found: NearObject, run: _Run, scratch: Scratch, advice: str
) -> Iterator[tuple[Piece, memoryview]]:
    """Chunks that are near, read at once and all of them checked before there is one."""
    data = scratch.bytes(run.nbytes)
    found.read_into(run.start, data)
    _compare(run, data, advice)
    return _cut(run, data)


def _compare(run: _Run, data: memoryview, advice: str) -> None:
    for piece, stored in _cut(run, data):
        hasher = new_hasher(piece.algorithm)
        hasher.update(stored)
        if hasher.digest().ljust(32, b"\0") != piece.chunk.digest:
            raise _damaged(piece, advice)


def _place(piece: Piece, stored: memoryview, scratch: Scratch) -> None:
    """Give checked bytes to their places."""
    packed = piece.chunk.codec == "zstd"
    source = _Unpacked(stored, piece) if packed else _Held(stored)
    scratch.place(piece.places, piece.shape, source)


def _name(piece: Piece) -> tuple[str, int, int]:
    return piece.key, piece.chunk.offset, piece.chunk.stored_bytes


def _damaged(piece: Piece, advice: str) -> CorruptError:
    return CorruptError(f"{piece.what}: bytes don't match their digest; {advice}")


def _gone(run: _Run) -> CorruptError:
    return CorruptError(f"{run.pieces[0].what}: the file is gone; {OTHER}")
