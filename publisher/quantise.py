"""Rows of a table in the formats of `publisher.formats`, and what a format can't hold.

The bits of int8 and int4 rows are fbgemm's; its inference lookup wants a row's head in front, its
quantising operators put it behind.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (registers the operators)
import torch

from publisher.formats import FP16_MAX, ROW_HEAD_BYTES, row_bytes
from publisher.gates import GateError
from publisher.records import TableFormat

LIMITS: dict[TableFormat, float] = {
    "int8_rowwise": FP16_MAX,
    "int4_rowwise": FP16_MAX,
    "fp16": FP16_MAX,
    "fp32": torch.finfo(torch.float32).max,
}
"""The largest |value| of each format: scale and bias of a row within fp16's range are so too."""


def encode_rows(values: torch.Tensor, table_format: TableFormat) -> torch.Tensor:
    """uint8 (rows, row_bytes) of fp32 (rows, dim), contiguous and within the format's limit."""
    if table_format == "fp32":
        return values.view(torch.uint8)
    if table_format == "fp16":
        return values.half().view(torch.uint8)
    bits = 8 if table_format == "int8_rowwise" else 4
    dim = values.shape[1]
    if past := -dim % (16 // bits):
        # The operator wants whole words; a value once more changes neither scale nor bias.
        values = torch.cat([values, values[:, -1:].expand(-1, past)], 1)
    packed = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(values, bits)
    stored = torch.empty(len(values), row_bytes(table_format, dim), dtype=torch.uint8)
    stored[:, :ROW_HEAD_BYTES] = packed[:, -ROW_HEAD_BYTES:]
    stored[:, ROW_HEAD_BYTES:] = packed[:, : stored.shape[1] - ROW_HEAD_BYTES]
    return stored


def decode_rows(stored: torch.Tensor, table_format: TableFormat) -> torch.Tensor:
    """fp32 (rows, dim) of uint8 (rows, row_bytes), as a host reads them."""
    if table_format in ("fp16", "fp32"):
        dtype = torch.float16 if table_format == "fp16" else torch.float32
        return _packed(stored).view(dtype).float()
    head = _packed(stored[:, :ROW_HEAD_BYTES]).view(torch.float16).float()
    body = stored[:, ROW_HEAD_BYTES:]
    if table_format == "int4_rowwise":
        body = torch.stack([body & 15, body >> 4], 2).flatten(1)
    return (body * head[:, :1]).add_(head[:, 1:])


def _packed(stored: torch.Tensor) -> torch.Tensor:
    """A copy without gaps. To `contiguous` a single row has none, and its odd stride would stay."""
    return stored.clone(memory_format=torch.contiguous_format)


def check_finite(
    values: torch.Tensor, what: str, first: int = 0, table_format: TableFormat | None = None
) -> float:
    """The largest |value| of (rows, ...); GateError `finite`, naming the first row that is no good.

    A format must hold all values; without one any finite value will do. Quantising turns a NaN into
    an ordinary number, and a row with a value below fp16's range into zeros, so this comes before
    it. One pass for minimum and maximum finds all of it: both are NaN if any value is, and unlike
    a sum they can't overflow.
    """
    if values.numel() == 0:
        return 0.0
    limit = torch.finfo(values.dtype).max if table_format is None else LIMITS[table_format]
    low, high = (x.item() for x in torch.aminmax(values))
    if low >= -limit and high <= limit:
        return float(max(-low, high))
    rows = values.reshape(len(values), -1)
    bad, why = ~torch.isfinite(rows), "NaN or infinite"
    if not bad.any():
        bad, why = rows.abs() > limit, f"beyond {limit:g}, the most that {table_format} holds"
    row = int(bad.any(1).nonzero()[0])
    value = rows[row][bad[row]][0].item()
    raise GateError(
        "finite", f"{what} {first + row}: {int(bad[row].sum())} of its values are {why}: {value:g}"
    )
