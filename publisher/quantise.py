"""Tables as rowwise int8, streamed block by block, in the layout that fbgemm's lookup reads.

A row is [fp16 scale, fp16 bias, dim x uint8]; a value is scale * byte + bias. Rows follow
one another without gaps, tables start on 128 bytes, and a table without rows keeps one row
of zeros, so that no lookup can read its neighbour's. Memory is one block, whatever the table.
"""

from __future__ import annotations

from collections.abc import Iterable

import fbgemm_gpu  # noqa: F401  (registers the operators)
import torch

from ckpt.digest import new_hasher
from ckpt.storage import ObjectWriter
from ckpt.types import Buffer, DigestName, FileEntry
from publisher.gates import GateError
from publisher.records import PublishedTable, TablePart, TableStats

ALIGN_BYTES = 128
ROW_HEAD_BYTES = 4
FP16_MAX = 65504.0
_STEP_BYTES = 4 << 20


def row_bytes(dim: int) -> int:
    """Bytes of one quantised row."""
    return ROW_HEAD_BYTES + dim


class DigestingWriter:
    """Counts and digests what goes through it to an object."""

    def __init__(self, out: ObjectWriter, digest: DigestName) -> None:
        self._out = out
        self._digest = digest
        self._hasher = new_hasher(digest)
        self.size_bytes = 0

    def write(self, data: Buffer) -> None:
        self._out.write(data)
        self._hasher.update(data)
        self.size_bytes += len(data)

    def entry(self, name: str) -> FileEntry:
        """The manifest's entry of what was written."""
        return FileEntry(name, self.size_bytes, f"{self._digest}:{self._hasher.hexdigest()}")


def write_table(
    out: DigestingWriter,
    file: str,
    fqn: str,
    shape: tuple[int, int],
    blocks: Iterable[tuple[int, torch.Tensor]],
) -> PublishedTable:
    """Append one table, (rows, dim), to `out`, whose object is called `file`.

    `blocks` gives (first row, rows of any float dtype), in order. Raises GateError: `coverage`
    unless each row came exactly once, `finite` for what int8 rows can't hold, by row.
    """
    rows, dim = shape
    out.write(bytes(-out.size_bytes % ALIGN_BYTES))
    offset, at = out.size_bytes, 0
    step = max(1, _STEP_BYTES // (4 * dim))
    for first, block in blocks:
        if first != at or block.shape[1:] != (dim,):
            raise GateError(
                "coverage",
                f"{fqn}: got rows {first}+ of shape {tuple(block.shape)}, expected row {at} of "
                f"{dim} columns",
            )
        for piece in torch.split(block, step):
            values = piece.float()
            check_finite(values, f"{fqn} row", at)
            out.write(memoryview(pack_rows(values).flatten().numpy().data))
            at += len(piece)
    if at != rows:
        raise GateError("coverage", f"{fqn}: {at} of {rows} rows were read")
    if rows == 0:
        out.write(bytes(row_bytes(dim)))
    part = TablePart(file, offset, 0, rows)
    stats = TableStats(0.0, 0.0, (), 0.0, 0.0, 0.0)
    return PublishedTable(fqn, rows, dim, "int8_rowwise", row_bytes(dim), (part,), stats)


def pack_rows(values: torch.Tensor) -> torch.Tensor:
    """fp32 (rows, dim) as uint8 (rows, dim + 4)."""
    dim = values.shape[1]
    if dim % 2:
        # The operator wants even rows; a repeated value changes neither scale nor bias.
        values = torch.cat([values, values[:, -1:]], 1)
    packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(values.contiguous(), 8)
    out = torch.empty(len(values), row_bytes(dim), dtype=torch.uint8)
    out[:, :ROW_HEAD_BYTES] = packed[:, -ROW_HEAD_BYTES:]
    out[:, ROW_HEAD_BYTES:] = packed[:, :dim]
    return out


def check_finite(values: torch.Tensor, what: str, first: int = 0, limit: float = FP16_MAX) -> None:
    """Raise GateError `finite`, naming the first bad row, unless all |values| are at most `limit`.

    Quantising turns a NaN into an ordinary number, and a row with a value below fp16's range into
    zeros, so this comes before it. One pass for minimum and maximum finds all of it: both
    are NaN if any value is, and unlike a sum they can't overflow.
    """
    if values.numel() == 0:
        return
    low, high = (x.item() for x in torch.aminmax(values))
    if low >= -limit and high <= limit:
        return
    rows = values.reshape(len(values), -1)
    bad = ~torch.isfinite(rows)
    why = "NaN or infinite"
    if not bad.any():
        bad, why = (
            rows.abs() > limit,
            f"beyond {limit:g}, the most that an int8 row's scale can hold",
        )
    row = int(bad.any(1).nonzero()[0])
    value = rows[row][bad[row]][0].item()
    raise GateError(
        "finite", f"{what} {first + row}: {int(bad[row].sum())} of its values are {why}: {value:g}"
    )
