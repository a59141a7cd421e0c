"""Reading checkpoints: any part of any tensor, at any sharding, every byte checked.

A tensor is a set of boxes, each a run of row chunks; whatever layout saved it, a region
is read by copying the parts of the chunks that overlap it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ckpt.chunks import ChunkReader, Kept, Piece
from ckpt.config import launched_ranks
from ckpt.digest import check_digest
from ckpt.errors import BadInputError, CorruptError, NotFoundError
from ckpt.index import (
    Box,
    ChunkEntry,
    Index,
    IndexReader,
    ShardEntry,
    TensorEntry,
    TensorInfo,
    find_overlap,
    row_bytes,
)
from ckpt.layout import DATA_SUFFIX, INDEX_SUFFIX, OBJECTS_SUFFIX
from ckpt.machine import available_bytes
from ckpt.manifest import OBJECTS_KIND, CommitRecord, unseal
from ckpt.parallel import each
from ckpt.placing import Target, memory_of, place_of, shared_dims
from ckpt.storage import Readable
from ckpt.tree import host_bytes, torch_dtype
from ckpt.types import FileEntry
from ckpt.united import UnitedValues
from ckpt.values import decode_value

_KEEP_SHARE = 4  # one part in so many of the available memory may hold checked bytes


class _Stored(NamedTuple):
    """A shard and the file that holds it."""

    shard: ShardEntry
    data_key: str
    digest: str


class _Rows(NamedTuple):
    """A chunk by the rows [row, stop) of the tensor that it holds its columns of."""

    row: int
    stop: int
    stored: _Stored
    chunk: ChunkEntry


class _Held(NamedTuple):
    """A chunk that was read."""

    rows: _Rows
    data: torch.Tensor


class CheckpointReader:
    """One committed checkpoint, open for reading. Any number of threads may read.

    Opening reads and checks the indexes and value trees, not the data. Raises CorruptError
    naming the object that is damaged.

    Args:
        storage: the run's root.
        record: the commit to read.
        workers: parallel reads.
    """

    def __init__(self, storage: Readable, record: CommitRecord, *, workers: int = 4) -> None:
        self.record = record
        self._storage = storage
        self._workers = workers
        self._shards: dict[str, list[_Stored]] = {}
        self._chunks = ChunkReader(storage, workers)
        files = {f.key: f for f in record.files}
        indexes = [f for k, f in files.items() if k.endswith(INDEX_SUFFIX)]
        known = self._read_indexes(files, indexes)
        self.tensors = {
            fqn: TensorInfo(fqn, e.kind, e.dtype, e.shape, _boxes(self._shards[fqn]))
            for fqn, e in known.items()
        }
        self._check_coverage()
        objects = [f for k, f in sorted(files.items()) if k.endswith(OBJECTS_SUFFIX)]
        read = each(self._whole, objects, workers)
        self._objects = [
            unseal(OBJECTS_KIND, data, f.key) for f, data in zip(objects, read, strict=True)
        ]

    def _read_indexes(
        self, files: dict[str, FileEntry], indexes: list[FileEntry]
    ) -> dict[str, TensorEntry]:
        """Take in what all ranks have. Returns the tensors as the first rank that has them says."""
        known: dict[str, TensorEntry] = {}
        reader = IndexReader()
        for index, data in zip(indexes, each(self._whole, indexes, self._workers), strict=True):
            file = files.get(index.key.removesuffix(INDEX_SUFFIX) + DATA_SUFFIX)
            if file is None:
                raise CorruptError(f"{index.key}: the commit lists no data file beside it")
            self._add(reader.read(data, index.key), file, known)
        return known

    def values(self) -> Any:
        """The tree of values that all ranks share, with TensorRef and PerRankRef in it."""
        trees = [
            decode_value(body.get("values"), f"objects of rank {rank}")
            for rank, body in enumerate(self._objects)
        ]
        if len(trees) == 1:
            return trees[0]
        united = UnitedValues()
        for rank, tree in enumerate(trees):
            united.add(rank, tree)
        return united.tree

    def per_rank_keys(self) -> list[str]:
        """Keys of the parts that ranks had for themselves, those of any rank."""
        return sorted({k for body in self._objects for k in body.get("per_rank") or ()})

    def per_rank_values(self, rank: int) -> dict[str, Any]:
        """The value trees that rank `rank` of the saver had for itself, by key."""
        if not 0 <= rank < len(self._objects):
            raise NotFoundError(
                f"rank {rank}: this checkpoint has ranks 0 to {len(self._objects) - 1}"
            )
        trees = self._objects[rank].get("per_rank")
        if not isinstance(trees, dict):
            raise CorruptError(f"objects of rank {rank}: no per_rank trees")
        return {k: decode_value(v, f"objects of rank {rank}: {k}") for k, v in trees.items()}

    def info(self, fqn: str) -> TensorInfo:
        """A tensor's shape and dtype; NotFoundError names near misses."""
        if fqn not in self.tensors:
            import difflib

            near = difflib.get_close_matches(fqn, self.tensors, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise NotFoundError(f"{fqn}: no such tensor in step {self.record.step}{hint}")
        return self.tensors[fqn]

    def same_chunks(self, one: str, other: str, of: CheckpointReader | None = None) -> bool:
        """Are two tensors known to be equal, since they are cut alike and their chunks have one digest?

        of: the checkpoint that has the other, by default this one.
        """
        of = of or self
        a, b = self.info(one), of.info(other)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return self._digests(one) == of._digests(other)

    def _digests(self, fqn: str) -> list[Any]:
        return sorted(
            (s.shard.offsets, s.shard.sizes, s.digest, c.row, c.rows, c.codec, c.digest)
            for s in self._shards[fqn]
            for c in s.shard.chunks
        )

    def read(self, fqn: str) -> torch.Tensor:
        """A whole tensor, in host memory."""
        info = self.info(fqn)
        out = torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="cpu")
        self.read_into(fqn, out, (0,) * len(info.shape))
        return out

    def read_into(self, fqn: str, out: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fill `out` with the box of the tensor that starts at `offsets` and has out's shape.

        `out` may be any strided view on any device; it must have the stored dtype. Raises
        BadInputError for another dtype, or a box that isn't inside the tensor; CorruptError, with a part
        of `out` filled already.
        """
        self._fill([Target(fqn, out, tuple(offsets))])

    def check(self, targets: Sequence[Target]) -> None:
        """See that `fill` of the same targets will succeed: every byte that it needs is read and checked.

        Nothing is changed. From a store that isn't near, what there is room for is kept in memory until
        then: a quarter of what is available on this host, shared by its ranks. Raises BadInputError as
        `read_into`, and for memory that elements share although they are stored with different values;
        CorruptError naming the object.
        """
        self._chunks.kept = Kept(self._keep_bytes())
        self._chunks.check(self._pieces(targets, place=False))
        for target in targets:
            if shared_dims(target.out):
                self._check_alike(target)

    def fill(self, targets: Sequence[Target]) -> None:
        """Fill all targets, which `check` has passed. Every byte is checked once more.

        Raises CorruptError if a byte has changed since: a part of the targets is then filled already.
        """
        self._fill(targets, checked=True)

    def load(self, targets: Sequence[Target]) -> None:
        """Fill memory of our own, which nobody else has a use for yet: no `check` comes before."""
        self._fill(targets)

    def _fill(self, targets: Sequence[Target], *, checked: bool = False) -> None:
        self._chunks.fill(self._pieces(targets, place=True), checked=checked)
        # Memory is written under torch; its versions tell row guards and autograd that it was.
        torch.autograd.graph.increment_version([t.out for t in targets])

    def _pieces(self, targets: Sequence[Target], *, place: bool) -> list[Piece]:
        """The chunks that hold something of the targets, each once; where it goes, if that is asked."""
        pieces: dict[tuple[int, int], Piece] = {}
        for target in targets:
            info = self._fits(target)
            fqn, out, offsets = memory_of(target)
            for stored in self._shards[fqn]:
                shard = stored.shard
                box = _overlap(shard.offsets, shard.sizes, offsets, out.shape)
                for chunk in _chunks_of(shard, box) if box is not None else ():
                    piece = pieces.get((id(stored), chunk.row))
                    if piece is None:
                        piece = pieces[id(stored), chunk.row] = _piece(info, stored, chunk)
                    if place:
                        at = (
                            (shard.offsets[0] + chunk.row, *shard.offsets[1:])
                            if shard.sizes
                            else ()
                        )
                        piece.places.append(place_of(out, offsets, at, piece.shape))
        return list(pieces.values())

    def _fits(self, target: Target) -> TensorInfo:
        info, out = self.info(target.fqn), target.out
        if not len(info.shape) == len(target.offsets) == out.dim() or any(
            o < 0 or o + n > size
            for o, n, size in zip(target.offsets, out.shape, info.shape, strict=True)
        ):
            raise BadInputError(
                f"{target.fqn}: no box at {tuple(target.offsets)} of {tuple(out.shape)} in shape "
                f"{info.shape}"
            )
        if out.dtype != torch_dtype(info.dtype):
            raise BadInputError(f"{target.fqn}: stored as {info.dtype}, the target is {out.dtype}")
        return info

    def _check_alike(self, target: Target) -> None:
        """Elements that share memory can take only one value."""
        stored = torch.empty(target.out.shape, dtype=target.out.dtype, device="cpu")
        self.read_into(target.fqn, stored, target.offsets)
        one = stored
        for dim in shared_dims(target.out):
            one = one.narrow(dim, 0, 1)
        if host_bytes(one.expand(stored.shape).contiguous()) != host_bytes(stored):
            raise BadInputError(
                f"{target.fqn}: is an expanded view, whose elements share memory, and is stored with "
                f"different values; clone it"
            )

    def _keep_bytes(self) -> int:
        return (available_bytes() or 0) // _KEEP_SHARE // launched_ranks()[2]

    def iter_rows(
        self,
        fqn: str,
        first: int = 0,
        rows: int | None = None,
        *,
        most_rows: int | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, block of rows) of rows [first, first + rows), each row once, in order.

        A block has at most `most_rows` rows, and may be a view of a chunk: drop it before the next
        one is asked for. Memory is then `held_bytes(fqn)`, whatever the size of the table.
        """
        info = self.info(fqn)
        if not info.shape:
            yield 0, self.read(fqn)
            return
        last = info.shape[0] if rows is None else first + rows
        if not 0 <= first <= last <= info.shape[0]:
            raise BadInputError(f"{fqn}: no rows [{first}, {last}) in [0, {info.shape[0]})")
        if first == last or 0 in info.shape:
            return
        coming = self._chunks_between(fqn, first, last)
        stops = sorted({min(c.stop, last) for c in coming})
        held: list[_Held] = []
        row = first
        for stop in stops:
            # Those that ended go first: a new chunk then takes their place in memory.
            held = [h for h in held if h.rows.stop > row]
            while coming and coming[-1].row < stop:
                held.append(self._load(info, coming.pop()))
            step = most_rows or stop - row
            for at in range(row, stop, step):
                yield at, _rows_of(held, info, at, min(at + step, stop))
            row = stop

    def held_bytes(self, fqn: str) -> int:
        """The most memory that `iter_rows` and `read_rows` need for chunks of a tensor at once."""
        info = self.info(fqn)
        columns: dict[Any, int] = {}
        unpacking = 0
        for shard in (s.shard for s in self._shards[fqn]):
            for chunk in shard.chunks:
                raw = chunk.rows * row_bytes(shard.sizes, info.dtype)
                columns[shard.offsets[1:]] = max(columns.get(shard.offsets[1:], 0), raw)
                if chunk.codec != "raw":
                    unpacking = max(unpacking, chunk.stored_bytes + raw)
        return sum(columns.values()) + unpacking

    def _load(self, info: TensorInfo, rows: _Rows) -> _Held:
        return _Held(rows, self.load_chunk(info, rows.stored, rows.chunk))

    def _chunks_between(self, fqn: str, first: int, last: int) -> list[_Rows]:
        """The chunks that hold rows of [first, last), the first of them at the end."""
        found = []
        for stored in self._shards[fqn]:
            shard = stored.shard
            start, stop = max(first, shard.offsets[0]), min(last, shard.offsets[0] + shard.sizes[0])
            if start < stop:
                for chunk in _chunks_of(shard, ((start, stop),)):
                    row = shard.offsets[0] + chunk.row
                    found.append(_Rows(row, row + chunk.rows, stored, chunk))
        return sorted(found, key=lambda c: c.row, reverse=True)

    def read_rows(self, fqn: str, rows: Sequence[int]) -> torch.Tensor:
        """Chosen rows, in the order asked for, reading only the chunks that hold them."""
        info = self.info(fqn)
        if not info.shape:
            raise BadInputError(f"{fqn}: a scalar has no rows")
        bad = [r for r in rows if not 0 <= r < info.shape[0]]
        if bad:
            raise BadInputError(f"{fqn}: row {bad[0]} is outside [0, {info.shape[0]})")
        out = torch.empty((len(rows), *info.shape[1:]), dtype=torch_dtype(info.dtype), device="cpu")
        cache = _ChunkCache(
            self, info, max(1, len({s.shard.offsets[1:] for s in self._shards[fqn]}))
        )
        # Sorted, so that each chunk is read once.
        for position in sorted(range(len(rows)), key=lambda p: rows[p]):
            self._gather(info, out[position : position + 1], rows[position], cache)
        return out

    def _gather(self, info: TensorInfo, out: torch.Tensor, row: int, cache: _ChunkCache) -> None:
        at = (row, *(0 for _ in info.shape[1:]))
        for stored in self._shards[info.fqn]:
            box = _overlap(stored.shard.offsets, stored.shard.sizes, at, tuple(out.shape))
            if box is not None:
                for chunk in _chunks_of(stored.shard, box):
                    _place(cache.chunk(stored, chunk), stored.shard, chunk, out, at)

    def load_chunk(self, info: TensorInfo, stored: _Stored, chunk: ChunkEntry) -> torch.Tensor:
        """One chunk's rows, checked and decompressed."""
        piece = _piece(info, stored, chunk)
        out = torch.empty(piece.shape, dtype=torch_dtype(info.dtype), device="cpu")
        zeros = (0,) * out.dim()
        piece.places.append(place_of(out, zeros, zeros, piece.shape))
        self._chunks.fill([piece])
        return out

    def _whole(self, file: FileEntry) -> bytes:
        try:
            data = self._storage.read(file.key)
        except NotFoundError:
            raise CorruptError(f"{file.key}: the commit lists it but it is gone") from None
        if len(data) != file.size_bytes:
            raise CorruptError(f"{file.key}: {len(data)} bytes, the commit says {file.size_bytes}")
        check_digest(data, file.digest, file.key)
        return data

    def _add(self, index: Index, file: FileEntry, known: dict[str, TensorEntry]) -> None:
        """Take in what one rank has. `known` are tensors as the first rank that has them says."""
        if index.data_bytes > file.size_bytes:
            fqn = next(
                t.fqn
                for t in index.tensors
                if any(
                    c.offset + c.stored_bytes > file.size_bytes for s in t.shards for c in s.chunks
                )
            )
            raise CorruptError(
                f"{file.key}: {fqn} ends at byte {index.data_bytes}, the file has {file.size_bytes}"
            )
        for entry in index.tensors:
            first = known.setdefault(entry.fqn, entry)
            if (first.kind, first.dtype, first.shape) != (entry.kind, entry.dtype, entry.shape):
                raise CorruptError(
                    f"{file.key}: {entry.fqn} is {entry.dtype} {entry.shape} here only"
                )
            self._shards.setdefault(entry.fqn, []).extend(
                [_Stored(s, file.key, index.digest) for s in entry.shards]
            )

    def _check_coverage(self) -> None:
        for fqn, info in self.tensors.items():
            volume = sum(math.prod(sizes) for _, sizes in info.boxes)
            if volume != math.prod(info.shape):
                raise CorruptError(
                    f"{fqn}: shards hold {volume} of {math.prod(info.shape)} elements of {info.shape}"
                )
            if pair := find_overlap(info.boxes):
                raise CorruptError(f"{fqn}: two shards overlap: {pair[0]} and {pair[1]}")


class _ChunkCache:
    """The last few chunks read, so that column shards with other row boundaries are read once."""

    def __init__(self, reader: CheckpointReader, info: TensorInfo, size: int) -> None:
        self._reader, self._info, self._size = reader, info, size
        self._held: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()

    def chunk(self, stored: _Stored, chunk: ChunkEntry) -> torch.Tensor:
        key = (stored.data_key, chunk.offset)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        while len(self._held) >= self._size:
            self._held.popitem(last=False)
        self._held[key] = self._reader.load_chunk(self._info, stored, chunk)
        return self._held[key]


def _piece(info: TensorInfo, stored: _Stored, chunk: ChunkEntry) -> Piece:
    sizes = stored.shard.sizes
    return Piece(
        stored.data_key,
        f"{info.fqn} rows {chunk.row}+{chunk.rows}",
        stored.digest,
        chunk,
        (chunk.rows, *sizes[1:]) if sizes else (),
        chunk.rows * row_bytes(sizes, info.dtype),
    )


def _overlap(
    a_offsets: Sequence[int],
    a_sizes: Sequence[int],
    b_offsets: Sequence[int],
    b_sizes: Sequence[int],
) -> tuple[tuple[int, int], ...] | None:
    """[start, stop) per dimension of the common box, or None if there is none."""
    box = []
    for ao, an, bo, bn in zip(a_offsets, a_sizes, b_offsets, b_sizes, strict=True):
        start, stop = max(ao, bo), min(ao + an, bo + bn)
        if start >= stop:
            return None
        box.append((start, stop))
    return tuple(box)


def _boxes(shards: list[_Stored]) -> tuple[Box, ...]:
    return tuple([(s.shard.offsets, s.shard.sizes) for s in shards])


def _chunks_of(shard: ShardEntry, box: tuple[tuple[int, int], ...]) -> Sequence[ChunkEntry]:
    """The chunks of a shard that hold rows of `box`."""
    if not box:
        return shard.chunks
    first, last = box[0][0] - shard.offsets[0], box[0][1] - shard.offsets[0]
    start = bisect_right(shard.chunks, first, key=lambda c: c.row) - 1
    stop = bisect_left(shard.chunks, last, key=lambda c: c.row)
    return [shard.chunks[n] for n in range(max(start, 0), stop)]


def _rows_of(held: list[_Held], info: TensorInfo, first: int, last: int) -> torch.Tensor:
    """Rows [first, last) out of chunks that all hold them, each its own columns."""
    if len(held) == 1:
        ((rows, data),) = held
        return data[first - rows.row : last - rows.row]
    out = torch.empty((last - first, *info.shape[1:]), dtype=torch_dtype(info.dtype), device="cpu")
    for rows, data in held:
        _place(data, rows.stored.shard, rows.chunk, out, (first, *(0 for _ in info.shape[1:])))
    return out


def _place(
    data: torch.Tensor,
    shard: ShardEntry,
    chunk: ChunkEntry,
    out: torch.Tensor,
    offsets: Sequence[int],
) -> None:
    """Copy what a chunk and a target box at `offsets` have in common."""
    if not shard.sizes:
        out.copy_(data)
        return
    at = (shard.offsets[0] + chunk.row, *shard.offsets[1:])
    box = _overlap(at, data.shape, offsets, out.shape)
    if box is None:
        return
    source = tuple(slice(a - o, b - o) for (a, b), o in zip(box, at, strict=True))
    target = tuple(slice(a - o, b - o) for (a, b), o in zip(box, offsets, strict=True))
    out[target].copy_(data[source])
