"""All tables of a version as tasks: each writes one file, a stretch of the image of
`publisher.formats`. No torch here.

The plan depends on tables, formats and the size of files only, so every engine, on however many
workers, writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckpt.manifest import CommitRecord
from ckpt.types import DigestName, FileEntry
from publisher.formats import ALIGN_BYTES, PAGE_BYTES, row_bytes, tables_file
from publisher.gates import GateError
from publisher.records import PublishedTable, TableFormat, TablePart
from publisher.sums import RowSums

FILE_BYTES = 256 << 20
"""How large a file of tables is, up to a sixteenth or up to 4,096 rows more."""
_CUT_SHARE = 16  # a table is cut in two only if it has this part of a file


@dataclass(frozen=True)
class Table:
    """A table to be published: checkpoint key, shape, format."""

    fqn: str
    rows: int
    dim: int
    format: TableFormat

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.format, self.dim)

    @property
    def size_bytes(self) -> int:
        return max(self.rows, 1) * self.row_bytes


@dataclass(frozen=True)
class Piece:
    """Rows [first_row, first_row + rows) of a table, from byte `offset` of a file on."""

    table: Table
    offset: int
    first_row: int
    rows: int


@dataclass(frozen=True)
class FileTask:
    """One file to write: its pieces by ascending offset, zeros between them and up to its end."""

    name: str
    pieces: tuple[Piece, ...]
    size_bytes: int


@dataclass(frozen=True)
class BuildJob:
    """What any process needs to work on the tasks of a version, on any host.

    root_url, record: the checkpoint. registry_url, prefix: where the files go, by storage URL and
    the key prefix of the version. memory_bytes: what all workers of a host together may hold.
    least_bytes: what one of them needs for a chunk of the checkpoint.
    """

    root_url: str
    record: CommitRecord
    registry_url: str
    prefix: str
    digest: DigestName
    memory_bytes: int
    least_bytes: int

    def shared(self, workers: int) -> tuple[int, BuildJob]:
        """How many of so many workers of a host the memory is enough for, and the share of one."""
        fit = max(1, min(workers, self.memory_bytes // max(self.least_bytes, 1)))
        return fit, replace(self, memory_bytes=self.memory_bytes // fit)


@dataclass(frozen=True)
class FileResult:
    """A file that was written, what its pieces hold: the sums of each, in order; by whom (host:pid)."""

    file: FileEntry
    pieces: tuple[Piece, ...]
    sums: tuple[RowSums, ...]
    worker: str


def plan_files(tables: Iterable[Table], file_bytes: int = FILE_BYTES) -> tuple[FileTask, ...]:
    """Lay all tables out in files of about `file_bytes`, and as few of them as that allows.

    Of tables that may be cut the rows are shared out evenly: a file ends at the first place after
    its share where it may end.
    """
    tables = list(tables)
    cut_bytes = max(file_bytes // _CUT_SHARE, 1)
    starts = [PAGE_BYTES if t.size_bytes >= cut_bytes else ALIGN_BYTES for t in tables]
    total = 0
    for table, start in zip(tables, starts, strict=True):
        total = _up(total, start) + table.size_bytes
    count = max(1, math.ceil(total / file_bytes))
    layout = _Layout(total, count)
    for table, start in zip(tables, starts, strict=True):
        layout.place(table, start)
    return layout.files()


class _Layout:
    """Walks through an image of `total` bytes, closing `count` files at most."""

    def __init__(self, total: int, count: int) -> None:
        self._total, self._count = total, count
        self._pieces: list[list[Piece]] = [[]]
        self._sizes: list[int] = []
        self._begin = self._at = 0  # of the current file, and of what comes next, in the image

    def place(self, table: Table, start: int) -> None:
        at, width = _up(self._at, start), table.row_bytes
        # A file may end after so many rows, if the table begins on a page.
        unit = math.lcm(width, PAGE_BYTES) // width
        first = 0
        while start == PAGE_BYTES and (end := self._next_end(at)) is not None:
            rows = _up(math.ceil((end - at) / width), unit)
            if first + rows >= table.rows:
                break
            self._add(Piece(table, at - self._begin, first, rows))
            first, at = first + rows, at + rows * width
            self._close(at)
        self._add(Piece(table, at - self._begin, first, table.rows - first))
        self._at = at + max(table.rows - first, 1) * width
        end = self._next_end(self._begin)
        if end is not None and end <= (padded := _up(self._at, PAGE_BYTES)):
            self._close(padded)

    def files(self) -> tuple[FileTask, ...]:
        if self._pieces[-1] or not self._sizes:
            self._sizes.append(self._at - self._begin)
        else:
            self._pieces.pop()
        return tuple(
            FileTask(tables_file(n), tuple(pieces), size)
            for n, (pieces, size) in enumerate(zip(self._pieces, self._sizes, strict=True))
        )

    def _add(self, piece: Piece) -> None:
        self._pieces[-1].append(piece)

    def _close(self, at: int) -> None:
        self._sizes.append(at - self._begin)
        self._pieces.append([])
        self._begin = self._at = at

    def _next_end(self, after: int) -> int | None:
        """Where the first file's share ends that ends after a byte; None for that of the last one."""
        n = after * self._count // max(self._total, 1) + 1
        return None if n >= self._count else -(-self._total * n // self._count)


def join_tables(
    tables: Iterable[Table], results: Iterable[FileResult]
) -> tuple[PublishedTable, ...]:
    """The manifest's tables from what was written.

    Raises GateError `coverage` unless the pieces of each table tile its rows exactly.
    """
    pieces: dict[str, list[tuple[Piece, str, RowSums]]] = {}
    for result in results:
        for piece, sums in zip(result.pieces, result.sums, strict=True):
            pieces.setdefault(piece.table.fqn, []).append((piece, result.file.key, sums))
    joined = []
    for table in tables:
        total, at, parts = RowSums(), 0, []
        found = sorted(pieces.get(table.fqn, []), key=lambda p: (p[0].first_row, p[1]))
        for piece, file, sums in found:
            if piece.first_row != at or sums.rows != piece.rows:
                raise GateError(
                    "coverage",
                    f"{table.fqn}: {file} holds {sums.rows} rows from row {piece.first_row} on, "
                    f"expected {piece.rows} from row {at} on",
                )
            parts.append(TablePart(file, piece.offset, piece.first_row, piece.rows))
            total, at = total + sums, at + piece.rows
        if at != table.rows or not parts:
            raise GateError("coverage", f"{table.fqn}: {at} of {table.rows} rows were written")
        joined.append(
            PublishedTable(
                table.fqn,
                table.rows,
                table.dim,
                table.format,
                table.row_bytes,
                tuple(parts),
                total.stats(),
            )
        )
    return tuple(joined)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
