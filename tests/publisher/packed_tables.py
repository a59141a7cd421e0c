"""Tables in memory as a version's files hold them, made without the publisher's own writer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from publisher.formats import ALIGN_BYTES, row_bytes
from publisher.records import TableFormat

Content = Mapping[str, tuple[torch.Tensor, TableFormat]]


class Image:
    """Tables one after another in one buffer.

    offsets: where each begins. rows: what its format makes of its values, float32.
    """

    def __init__(self, tables: Content) -> None:
        data = bytearray()
        self.places: dict[str, tuple[int, TableFormat]] = {}
        self.rows: dict[str, torch.Tensor] = {}
        for fqn, (values, table_format) in tables.items():
            data.extend(bytes(-len(data) % ALIGN_BYTES))
            self.places[fqn] = (len(data), table_format)
            packed, self.rows[fqn] = pack(values, table_format)
            data.extend(packed or bytes(row_bytes(table_format, values.shape[1])))
        self.data = torch.frombuffer(data, dtype=torch.uint8)


def pack(values: torch.Tensor, table_format: TableFormat) -> tuple[bytes, torch.Tensor]:
    """(bytes of a table, the values that they stand for)."""
    if table_format in ("fp16", "fp32"):
        stored = values.half() if table_format == "fp16" else values
        return stored.numpy().tobytes(), stored.float()
    levels = 255 if table_format == "int8_rowwise" else 15
    low, high = values.numpy().min(1, initial=1e9), values.numpy().max(1, initial=-1e9)
    scale = ((high - low) / levels).astype(np.float16)
    scale[scale == 0] = 1
    bias = low.astype(np.float16)
    wide, shift = scale.astype(np.float32)[:, None], bias.astype(np.float32)[:, None]
    steps = np.clip(np.rint((values.numpy() - shift) / wide), 0, levels).astype(np.uint8)
    head = np.stack([scale, bias], 1).view(np.uint8)
    body = steps if levels == 255 else steps[:, ::2] | steps[:, 1::2] << 4
    return np.concatenate([head, body], 1).tobytes(), torch.from_numpy(steps * wide + shift)


def unpack(data: bytes, dim: int, table_format: TableFormat) -> torch.Tensor:
    """float32 (rows, dim): the values that `pack`'s bytes stand for, column by column."""
    if table_format in ("fp16", "fp32"):
        values = np.frombuffer(data, "<f2" if table_format == "fp16" else "<f4")
        return torch.from_numpy(values.astype(np.float32).reshape(-1, dim))
    each = dim if table_format == "int8_rowwise" else dim // 2
    row = np.dtype([("scale", "<f2"), ("bias", "<f2"), ("body", "u1", (each,))])
    rows = np.frombuffer(data, row)
    steps = np.empty((len(rows), dim), np.float32)
    if table_format == "int8_rowwise":
        steps[:] = rows["body"]
    else:
        steps[:, ::2], steps[:, 1::2] = rows["body"] % 16, rows["body"] // 16
    scale, bias = (rows[name].astype(np.float32)[:, None] for name in ("scale", "bias"))
    return torch.from_numpy(steps * scale + bias)
