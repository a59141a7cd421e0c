"""What is seen of a table's rows while they are streamed, as sums that tasks can add up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from publisher.records import TableStats

if TYPE_CHECKING:
    import torch

    from publisher.quantise import Encoded

NORM_COUNTS = 42
"""Entries of `TableStats.norm_counts`: rows of length 0, then 2^-20 to 2^21 by powers of two."""
_LEAST_EXPONENT = -20
_SAFE = (
    1e15  # squares of smaller values, and sums of many of them, stay below fp32's largest number
)


@dataclass(frozen=True)
class RowSums:
    """Raw sums over rows: adding those of any split of a table gives those of the table.

    values: how many values the rows have. The other fields are what `TableStats` is made of.
    """

    rows: int = 0
    values: int = 0
    norm_sum: float = 0.0
    max_norm: float = 0.0
    square_sum: float = 0.0
    error_square_sum: float = 0.0
    max_abs_err: float = 0.0
    norm_counts: tuple[int, ...] = (0,) * NORM_COUNTS

    def __add__(self, other: RowSums) -> RowSums:
        counts = zip(self.norm_counts, other.norm_counts, strict=True)
        return RowSums(
            self.rows + other.rows,
            self.values + other.values,
            self.norm_sum + other.norm_sum,
            max(self.max_norm, other.max_norm),
            self.square_sum + other.square_sum,
            self.error_square_sum + other.error_square_sum,
            max(self.max_abs_err, other.max_abs_err),
            tuple(a + b for a, b in counts),
        )

    def stats(self) -> TableStats:
        rows, values = max(self.rows, 1), max(self.values, 1)
        return TableStats(
            mean_norm=self.norm_sum / rows,
            max_norm=self.max_norm,
            norm_counts=self.norm_counts,
            max_abs_err=self.max_abs_err,
            rms_err=math.sqrt(self.error_square_sum / values),
            rms=math.sqrt(self.square_sum / values),
        )


def sums_of(values: torch.Tensor, largest: float, encoded: Encoded) -> RowSums:
    """The sums of fp32 rows, (rows, dim), and of what they were encoded to: of all, not of a sample.

    largest: the largest |value|, which is finite.
    """
    import torch

    rows = len(values)
    if values.numel() == 0:
        return RowSums(rows, 0, norm_counts=(rows,) + (0,) * (NORM_COUNTS - 1))
    # Only fp32 tables can hold values whose squares need more than fp32.
    norms = torch.linalg.vector_norm(
        values, dim=1, dtype=torch.float64 if largest > _SAFE else torch.float32
    )
    zero = norms == 0
    if zero.any():  # or too short for the squares
        norms[zero] = values[zero].abs().amax(1).to(norms.dtype)
    exponents = torch.frexp(norms).exponent - 1
    buckets = (
        (exponents - _LEAST_EXPONENT + 1).clamp_(1, NORM_COUNTS - 1).masked_fill_(norms == 0, 0)
    )
    norms = norms.double()
    error_square_sum = max_abs_err = 0.0
    if encoded.values is not values:
        errors = (encoded.values - values).flatten()
        error_square_sum = float(torch.dot(errors, errors))
        max_abs_err = max(abs(x.item()) for x in torch.aminmax(errors))
    return RowSums(
        rows,
        values.numel(),
        float(norms.sum()),
        float(norms.max()),
        float(torch.dot(norms, norms)),
        error_square_sum,
        max_abs_err,
        tuple(torch.bincount(buckets, minlength=NORM_COUNTS).tolist()),
    )
