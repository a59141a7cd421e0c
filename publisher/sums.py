"""What is seen of a table's rows while they are streamed, as sums that tasks can add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from publisher.records import TableStats

if TYPE_CHECKING:
    import torch

    from publisher.tasks import Table

NORM_COUNTS = 42
"""Entries of `TableStats.norm_counts`: rows of length 0, then 2^-20 to 2^21 by powers of two."""
ALL_ERRORS_ROWS = 1 << 16
ERROR_STRIDE = 4
"""Of tables of more rows, errors are taken of every fourth row."""
_LEAST_EXPONENT = -20
_NORMS_AT_ONCE = 1 << 16
_SAFE = (
    1e15  # squares of smaller values, and sums of many of them, stay below fp32's largest number
)


@dataclass(frozen=True)
class RowSums:
    """Raw sums over rows: adding those of any split of a table gives those of the table.

    values, error_values: how many values the rows have, and those have whose errors were taken.
    error_rows, row_error_sum: how many of the latter rows aren't zero, and their `row_errors`. The
    other fields are what `TableStats` is made of.
    """

    rows: int = 0
    values: int = 0
    error_values: int = 0
    error_rows: int = 0
    norm_sum: float = 0.0
    max_norm: float = 0.0
    square_sum: float = 0.0
    error_square_sum: float = 0.0
    row_error_sum: float = 0.0
    max_abs_err: float = 0.0
    norm_counts: tuple[int, ...] = (0,) * NORM_COUNTS

    def __add__(self, other: RowSums) -> RowSums:
        counts = zip(self.norm_counts, other.norm_counts, strict=True)
        return RowSums(
            self.rows + other.rows,
            self.values + other.values,
            self.error_values + other.error_values,
            self.error_rows + other.error_rows,
            self.norm_sum + other.norm_sum,
            max(self.max_norm, other.max_norm),
            self.square_sum + other.square_sum,
            self.error_square_sum + other.error_square_sum,
            self.row_error_sum + other.row_error_sum,
            max(self.max_abs_err, other.max_abs_err),
            tuple(a + b for a, b in counts),
        )

    def stats(self) -> TableStats:
        rows, values = max(self.rows, 1), max(self.values, 1)
        error_values = max(self.error_values, 1)
        return TableStats(
            mean_norm=self.norm_sum / rows,
            max_norm=self.max_norm,
            norm_counts=self.norm_counts,
            max_abs_err=self.max_abs_err,
            rms_err=math.sqrt(self.error_square_sum / error_values),
            rms=math.sqrt(self.square_sum / values),
            mean_row_err=self.row_error_sum / max(self.error_rows, 1),
        )


def row_norms(values: torch.Tensor, largest: float = 0.0) -> torch.Tensor:
    """Euclidean lengths of fp32 rows. largest: of their |values|, where that may be large."""
    import torch

    # Only fp32 tables can hold values whose squares need more than fp32.
    wide = torch.float64 if largest > _SAFE else torch.float32
    norms: torch.Tensor = torch.linalg.vector_norm(values, dim=1, dtype=wide)
    if not norms.all():
        # Rows of zeros; or some too short for their squares, which have a length all the same.
        norms = torch.where(norms == 0, values.abs().sum(1), norms)
    return norms


def row_errors(values: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """The relative error of each row that isn't zero, 0 to 1, where the row is as good as lost.

    Root mean square of a row's errors over that of its values, both without the largest |value|: it
    sets the row's scale, and beside it any error of the others would look small. A row of nothing but
    that value is compared by it. fp32 (rows, dim), within fp16's range; `errors` is overwritten.
    """
    import torch

    sizes = values.abs()
    # NumPy finds where the largest is six times as fast as torch.
    at = torch.from_numpy(sizes.numpy().argmax(1))[:, None]
    largest, own = sizes.gather(1, at), errors.gather(1, at)
    rest = row_norms(sizes.scatter_(1, at, 0.0))
    lost = row_norms(errors.scatter_(1, at, 0.0))
    alone = rest == 0
    if alone.any():
        rest = torch.where(alone, largest[:, 0], rest)
        lost = torch.where(alone, torch.hypot(lost, own[:, 0]), lost)
        some = (rest != 0) | (lost != 0)
        rest, lost = rest[some], lost[some]
    return lost.div_(rest).clamp_(max=1.0)


class Tally:
    """Takes the sums of a table's rows block by block, at a fraction of what encoding them costs."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._stride = 1 if table.rows <= ALL_ERRORS_ROWS else ERROR_STRIDE
        self._sums = RowSums()
        self._norms: list[torch.Tensor] = []
        self._waiting = 0
        self._error_values, self._error_square_sum, self._max_abs_err = 0, 0.0, 0.0
        self._error_rows, self._row_error_sum = 0, 0.0

    def add(
        self, first: int, values: torch.Tensor, norms: torch.Tensor, stored: torch.Tensor
    ) -> None:
        """fp32 rows from row `first` on, their `row_norms`, and how they are stored."""
        self._norms.append(norms.double())
        self._waiting += len(norms)
        if self._waiting >= _NORMS_AT_ONCE:
            self._count()
        self._add_errors(first, values, stored)

    def sums(self) -> RowSums:
        """Of all rows so far."""
        self._count()
        return replace(
            self._sums,
            values=self._sums.rows * self._table.dim,
            error_values=self._error_values,
            error_rows=self._error_rows,
            error_square_sum=self._error_square_sum,
            row_error_sum=self._row_error_sum,
            max_abs_err=self._max_abs_err,
        )

    def _add_errors(self, first: int, values: torch.Tensor, stored: torch.Tensor) -> None:
        import torch

        from publisher.quantise import decode_rows

        sample = slice(-first % self._stride, None, self._stride)
        values = values[sample]
        self._error_values += values.numel()
        if self._table.format == "fp32" or not values.numel():
            return
        by_row = decode_rows(stored[sample], self._table.format).sub_(values)
        errors = by_row.flatten()
        self._error_square_sum += float(torch.dot(errors, errors))
        low, high = (x.item() for x in torch.aminmax(errors))
        self._max_abs_err = max(self._max_abs_err, -low, high)
        relative = row_errors(values, by_row)
        self._error_rows += len(relative)
        self._row_error_sum += float(relative.sum(dtype=torch.float64))

    def _count(self) -> None:
        import torch

        if not self._waiting:
            return
        norms = torch.cat(self._norms)
        self._norms, self._waiting = [], 0
        exponents = torch.frexp(norms).exponent - 1
        buckets = (exponents - _LEAST_EXPONENT + 1).clamp_(1, NORM_COUNTS - 1)
        buckets.masked_fill_(norms == 0, 0)
        self._sums += RowSums(
            rows=len(norms),
            norm_sum=float(norms.sum()),
            max_norm=float(norms.max()),
            square_sum=float(torch.dot(norms, norms)),
            norm_counts=tuple(torch.bincount(buckets, minlength=NORM_COUNTS).tolist()),
        )
