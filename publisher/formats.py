"""How rows of tables lie in a version's files, by format. Little-endian, no gaps between rows.

    int8_rowwise   fp16 scale, fp16 bias, dim x uint8; a value is scale * byte + bias
    int4_rowwise   fp16 scale, fp16 bias, dim / 2 bytes, the even column in the low half
    fp16, fp32     dim values

The files `tables-00000.bin`, `tables-00001.bin`, ... one after another are one image: all but the
last are a multiple of 4096 bytes long, a table begins at a multiple of 128 bytes of the image and
lies in one piece there, and a file ends between two rows. So a host maps the files side by
side and looks up in one buffer, however many there are. A table without rows keeps one row of
zeros, so that no lookup can read its neighbour's.
"""

from __future__ import annotations

from ckpt.errors import BadInputError
from publisher.records import TableFormat

ALIGN_BYTES = 128
PAGE_BYTES = 4096
ROW_HEAD_BYTES = 4
FP16_MAX = 65504.0


def row_bytes(table_format: TableFormat, dim: int) -> int:
    """Bytes of one row. BadInputError for columns that the format can't hold."""
    if table_format == "int4_rowwise" and dim % 2:
        raise BadInputError(f"int4_rowwise needs an even number of columns, not {dim}; use int8")
    return {
        "int8_rowwise": ROW_HEAD_BYTES + dim,
        "int4_rowwise": ROW_HEAD_BYTES + dim // 2,
        "fp16": 2 * dim,
        "fp32": 4 * dim,
    }[table_format]


def tables_file(number: int) -> str:
    """Name of the n-th file of tables of a version."""
    return f"tables-{number:05d}.bin"
