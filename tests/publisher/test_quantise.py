"""The formats of rows: fbgemm's bits, what its lookup reads of them, what is refused, the sums."""

from __future__ import annotations

import math

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

from ckpt.errors import BadInputError
from publisher.formats import row_bytes
from publisher.gates import GateError
from publisher.policy import GateLimits
from publisher.quantise import LIMITS, check_finite, decode_rows, encode_rows
from publisher.records import PublishedTable, TableFormat, TableStats
from publisher.sums import RowSums, Tally, row_errors, row_norms
from publisher.tasks import Table
from publisher.verdicts import dequantisation_error
from publisher.views.module import TableRows
from tests.publisher.packed_tables import pack, unpack
from tests.publisher.written_tables import Rows, offsets_in_image, tables_of, write_all

FORMATS: list[TableFormat] = ["int8_rowwise", "int4_rowwise", "fp16", "fp32"]
SPARSE = {
    "int8_rowwise": SparseType.INT8,
    "int4_rowwise": SparseType.INT4,
    "fp16": SparseType.FP16,
    "fp32": SparseType.FP32,
}


@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("dim", [1, 2, 3, 6, 8, 63, 64])
def test_rows_come_back_within_half_a_step(dim: int, table_format: TableFormat) -> None:
    if table_format == "int4_rowwise" and dim % 2:
        with pytest.raises(BadInputError, match="even number of columns"):
            row_bytes(table_format, dim)
        return
    table = torch.randn(100, dim)
    stored = encode_rows(table, table_format)
    assert stored.shape == (100, row_bytes(table_format, dim))
    restored = decode_rows(stored, table_format)
    for row in range(2):  # alone: at an odd offset or with an odd stride, some of them
        assert torch.equal(
            decode_rows(stored[row : row + 1], table_format), restored[row : row + 1]
        )
    by_hand = unpack(stored.numpy().tobytes(), dim, table_format)
    torch.testing.assert_close(restored, by_hand, rtol=1e-6, atol=1e-6)
    packed, values = pack(table, table_format)
    assert torch.equal(unpack(packed, dim, table_format), values)
    span = table.amax(1, keepdim=True) - table.amin(1, keepdim=True)
    levels = {"int8_rowwise": 255, "int4_rowwise": 15}.get(table_format, math.inf)
    # Half a step, and what fp16 loses of the scale and of the bias.
    allowed = span / levels * 0.6 + table.abs().amax(1, keepdim=True) * 2e-3
    assert ((restored - table).abs() <= allowed).all()
    if table_format == "fp32":
        assert torch.equal(restored, table)
    entry = PublishedTable(
        "t", 1, dim, table_format, stored.shape[1], (), TableStats(0, 0, (), 0, 0, 0, 0)
    )
    seen = TableRows(entry, stored[:1])(torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(seen, by_hand[:1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("dim", [4, 6, 10, 64])
def test_fbgemms_lookup_reads_the_rows(dim: int, table_format: TableFormat) -> None:
    """Out of written files, at their offset, behind another table; the last row too."""
    tensors = {"a": torch.randn(3, dim), "t": torch.randn(20, dim)}
    tables = tables_of(tensors, table_format)
    image, made, results = write_all(tables, Rows(tensors))
    offset = offsets_in_image(made, results)["t"]
    assert offset % 128 == 0
    operator = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", 1, dim, SPARSE[table_format], EmbeddingLocation.HOST)],
        device="cpu",
        pooling_mode=PoolingMode.SUM,
        row_alignment=1,
        output_dtype=SparseType.FP32,
        bounds_check_mode=BoundsCheckMode.NONE,
        indices_dtype=torch.int64,
    )
    operator.initialize_weights()
    operator.weights_offsets = torch.tensor([offset])
    operator.weights_host = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    got = operator(torch.tensor([0, 19, 7]), torch.tensor([0, 1, 2, 3]))
    want = decode_rows(encode_rows(tensors["t"], table_format), table_format)[[0, 19, 7]]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_bits_are_fbgemms(bits: int) -> None:
    table_format: TableFormat = "int8_rowwise" if bits == 8 else "int4_rowwise"
    table = torch.randn(200, 64) * 10 ** torch.empty(200, 1).uniform_(-8, 4)
    table[7] = 3.25
    theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(table, bits)
    stored = encode_rows(table, table_format)
    assert torch.equal(stored, torch.cat([theirs[:, -4:], theirs[:, :-4]], 1))


@pytest.mark.parametrize("dim", [4, 16, 128])
@pytest.mark.parametrize(
    ("table_format", "most"), [("int8_rowwise", 0.007), ("int4_rowwise", 0.11)]
)
def test_ordinary_tables_are_far_from_the_default_limit(
    dim: int, table_format: TableFormat, most: float
) -> None:
    tensors = {"normal": torch.randn(2000, dim), "uniform": torch.rand(2000, dim) - 0.5}
    for table in write_all(tables_of(tensors, table_format), Rows(tensors))[1]:
        assert (
            0 < dequantisation_error(table.stats) < most < GateLimits().dequantisation_max_rel_err
        )


@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e5, -7e4])
def test_d50_what_a_format_cannot_hold_is_refused_by_row(
    value: float, table_format: TableFormat
) -> None:
    table = torch.randn(10_000, 8)
    table[7777, 3] = value
    tables = tables_of({"model.user": table}, table_format)
    source = Rows({"model.user": table}, chunk=1024)
    if table_format == "fp32" and math.isfinite(value):
        assert write_all(tables, source)[1][0].stats.max_norm == pytest.approx(abs(value))
        return
    with pytest.raises(GateError) as e:
        write_all(tables, source)
    why = "beyond 65504" if math.isfinite(value) else f"NaN or infinite: {value}"
    assert e.value.gate == "finite"
    assert "model.user row 7777: 1 of its values are " in str(e.value)
    assert why in str(e.value)


@pytest.mark.parametrize("table_format", ["int8_rowwise", "int4_rowwise", "fp16"])
def test_rows_at_the_limit_keep_their_ends(table_format: TableFormat) -> None:
    limit = LIMITS[table_format]
    rows = torch.tensor([[limit, -limit, 0.0, 1.0], [limit] * 4, [-limit] * 4])
    restored = decode_rows(encode_rows(rows, table_format), table_format)
    assert torch.isfinite(restored).all()
    torch.testing.assert_close(restored[:, :2], rows[:, :2], rtol=1e-3, atol=0)


def test_a_sum_that_overflows_is_no_infinity() -> None:
    assert check_finite(torch.full((4, 8), 3e38), "t row") == pytest.approx(3e38)
    check_finite(torch.full((70_000, 8), 65504.0), "t row", 0, "int8_rowwise")
    check_finite(torch.zeros(0, 8), "t row")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_tables(dtype: torch.dtype) -> None:
    table = torch.randn(50, 4).to(dtype)
    tables = tables_of({"t": table})
    assert write_all(tables, Rows({"t": table}, 9))[0] == (
        encode_rows(table.float(), "int8_rowwise").numpy().tobytes()
    )


def sums(
    table: torch.Tensor, table_format: TableFormat, first: int = 0, rows: int = 1000
) -> RowSums:
    """Of the rows from `first` on of a table of `rows` rows, in two blocks."""
    tally = Tally(Table("t", rows, table.shape[1], table_format))
    for at, block in ((0, table[: len(table) // 3]), (len(table) // 3, table[len(table) // 3 :])):
        largest = check_finite(block, "t row", 0, table_format)
        tally.add(first + at, block, row_norms(block, largest), encode_rows(block, table_format))
    return tally.sums()


def mean_row_err(table: torch.Tensor, errors: torch.Tensor) -> float:
    """Row by row: both without the place of the largest |value|, 1 at most, rows of zeros aside."""
    found = []
    for row, wrong in zip(table.double(), errors.double(), strict=True):
        kept = [i for i in range(len(row)) if i != int(row.abs().argmax())]
        if row[kept].any():
            found.append(min(float(wrong[kept].norm() / row[kept].norm()), 1.0))
        elif row.any():
            found.append(min(float(wrong.norm() / row.norm()), 1.0))
    return sum(found) / len(found)


@pytest.mark.parametrize("table_format", FORMATS)
def test_the_sums_of_parts_are_those_of_the_table(table_format: TableFormat) -> None:
    table = torch.randn(1000, 16) * 10 ** torch.empty(1000, 1).uniform_(-9, 3)
    table[::7] = 0.0
    restored = unpack(encode_rows(table, table_format).numpy().tobytes(), 16, table_format)
    errors = (restored - table).double()
    norms = table.double().norm(dim=1)
    total = sums(table[:1], table_format) + sums(table[1:640], table_format, 1)
    total = RowSums() + total + sums(table[640:], table_format, 640) + sums(table[:0], table_format)
    stats = total.stats()
    assert stats.mean_norm == pytest.approx(float(norms.mean()), rel=1e-6)
    assert stats.max_norm == pytest.approx(float(norms.max()), rel=1e-6)
    assert stats.rms == pytest.approx(float(table.double().square().mean().sqrt()), rel=1e-6)
    assert stats.rms_err == pytest.approx(float(errors.square().mean().sqrt()), rel=1e-4)
    assert stats.max_abs_err == pytest.approx(float(errors.abs().max()), rel=1e-4)
    assert stats.mean_row_err == pytest.approx(mean_row_err(table, errors), rel=1e-4)
    exponents = [math.floor(math.log2(n)) if n else None for n in norms.tolist()]
    assert stats.norm_counts[0] == exponents.count(None) == 143
    assert sum(stats.norm_counts) == 1000
    assert stats.norm_counts[1] == sum(e is not None and e <= -20 for e in exponents) > 0
    assert stats.norm_counts[20] == exponents.count(-1)


def test_errors_of_a_large_table_are_those_of_every_fourth_row() -> None:
    table = torch.randn(1001, 8)
    table[3::4] *= 100
    large = 1 << 20
    total = sums(table[:1], "int8_rowwise", 5, large) + sums(table[1:], "int8_rowwise", 6, large)
    mine = table[3::4].contiguous()  # row 5 + 3 of the table is the first that can be divided by 4
    errors = decode_rows(encode_rows(mine, "int8_rowwise"), "int8_rowwise") - mine
    assert total.error_values == mine.numel()
    assert total.stats().max_abs_err == float(errors.abs().max())
    assert total.stats().rms_err == pytest.approx(float(errors.double().square().mean().sqrt()))
    assert total.error_rows == len(mine)
    assert total.stats().mean_row_err == pytest.approx(mean_row_err(mine, errors), rel=1e-5)
    assert sum(total.norm_counts) == 1001


def of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("values", "errors", "want"),
    [
        (of([3.0, 4.0, -100.0]), of([0.6, 0.8, 50.0]), [0.2]),  # 1 of 5, the largest aside
        (of([1.0, 1.0], [0.0, 0.0]), of([0.5, 0.25], [0.0, 0.0]), [0.25]),  # no row of zeros
        (of([0.0, -8.0, 0.0]), of([0.3, 0.0, 0.4]), [0.0625]),  # nothing else: 0.5 of 8
        (of([2.0], [-4.0]), of([0.5], [0.0]), [0.25, 0.0]),
        (of([1.0, 1.0]), of([9.0, 9.0]), [1.0]),
        (of([1e-30, 1e-31]), of([-1e-30, -1e-31]), [1.0]),  # too small to be squared, and lost
        (of([0.0, 0.0]), of([0.0, 1e-9]), [1.0]),
        (of([1.0, 2.0]), of([math.nan, 0.0]), [math.nan]),
    ],
)
def test_row_errors(values: torch.Tensor, errors: torch.Tensor, want: list[float]) -> None:
    torch.testing.assert_close(row_errors(values, errors), torch.tensor(want), equal_nan=True)


def test_sums_of_what_fp32_cannot_square() -> None:
    table = torch.tensor([[3e38, 3e38], [1e-30, 0.0], [0.0, 0.0]])
    stats = sums(table, "fp32").stats()
    assert stats.max_norm == pytest.approx(3e38 * math.sqrt(2))
    assert math.isfinite(stats.rms)
    assert (stats.norm_counts[0], stats.norm_counts[1], stats.norm_counts[-1]) == (1, 1, 1)
