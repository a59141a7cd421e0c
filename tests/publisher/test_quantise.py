"""Rowwise int8: layout, coverage, and what is refused before it is quantised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ckpt.digest import digest_of
from publisher.gates import GateError
from publisher.quantise import (
    ALIGN_BYTES,
    DigestingWriter,
    check_finite,
    pack_rows,
    row_bytes,
    write_table,
)


class Sink:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data


def blocks(table: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    for row in range(0, len(table), size):
        yield row, table[row : row + size]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    head = packed[:, :4].contiguous().view(torch.float16).float()
    return packed[:, 4:].float() * head[:, :1] + head[:, 1:]


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 63, 64])
def test_rows_come_back_within_half_a_step(dim: int) -> None:
    table = torch.randn(100, dim)
    packed = pack_rows(table)
    assert packed.shape == (100, row_bytes(dim))
    span = table.amax(1, keepdim=True) - table.amin(1, keepdim=True)
    # Half a step, and what fp16 loses of the scale and of the bias.
    allowed = span / 255 * 0.6 + table.abs().amax(1, keepdim=True) * 2e-3
    assert ((unpack(packed) - table).abs() <= allowed).all()


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_blocks_give_the_same_bytes_as_the_whole(size: int) -> None:
    table = torch.randn(1000, 6)
    sink = Sink()
    out = DigestingWriter(sink, "xxh3-128")
    made = write_table(out, "tables.bin", "t", (1000, 6), blocks(table, size))
    assert bytes(sink.data) == pack_rows(table).numpy().tobytes()
    assert out.entry("tables.bin").digest == digest_of(sink.data)
    assert (made.parts[0].offset, made.parts[0].rows, made.row_bytes) == (0, 1000, 10)


def test_tables_are_aligned_and_an_empty_one_keeps_a_row_of_zeros() -> None:
    sink = Sink()
    out = DigestingWriter(sink, "sha256")
    marked = torch.full((3, 5), 9.0)
    made = [
        write_table(out, "f", "a", (3, 5), blocks(marked, 2)),
        write_table(out, "f", "none", (0, 4), iter(())),
        write_table(out, "f", "b", (3, 5), blocks(marked, 2)),
    ]
    offsets = [t.parts[0].offset for t in made]
    assert offsets == [0, ALIGN_BYTES, 2 * ALIGN_BYTES]
    assert sink.data[ALIGN_BYTES : ALIGN_BYTES + row_bytes(4)] == bytes(row_bytes(4))
    assert out.entry("f").digest == digest_of(sink.data, "sha256")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([(0, 4), (5, 5)], "expected row 4"),
        ([(0, 4), (3, 7)], "expected row 4"),
        ([(0, 4)], "4 of 10 rows were read"),
        ([(0, 10), (10, 1)], "11 of 10 rows were read"),
        ([(1, 9)], "expected row 0"),
    ],
)
def test_every_row_exactly_once(given: list[tuple[int, int]], why: str) -> None:
    out = DigestingWriter(Sink(), "xxh3-128")
    rows = ((first, torch.zeros(n, 2)) for first, n in given)
    with pytest.raises(GateError, match=why) as e:
        write_table(out, "f", "table.x", (10, 2), rows)
    assert e.value.gate == "coverage"


def test_another_width_is_refused() -> None:
    out = DigestingWriter(Sink(), "xxh3-128")
    with pytest.raises(GateError, match="expected row 0 of 2 columns"):
        write_table(out, "f", "t", (4, 2), [(0, torch.zeros(4, 3))])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "1 of its values are NaN or infinite: nan"),
        (float("inf"), "1 of its values are NaN or infinite: inf"),
        (float("-inf"), "1 of its values are NaN or infinite: -inf"),
        (1e5, "1 of its values are beyond 65504"),
        (-7e4, "1 of its values are beyond 65504"),
    ],
)
def test_d50_what_int8_rows_cannot_hold_is_refused_by_row(value: float, why: str) -> None:
    table = torch.randn(10_000, 8)
    table[7777, 3] = value
    out = DigestingWriter(Sink(), "xxh3-128")
    with pytest.raises(GateError) as e:
        write_table(out, "f", "model.user", (10_000, 8), blocks(table, 1024))
    assert e.value.gate == "finite"
    assert "model.user row 7777: " in str(e.value)
    assert why in str(e.value)


def test_a_sum_that_overflows_is_no_infinity() -> None:
    check_finite(torch.full((4, 8), 3e38), "t row", limit=torch.finfo(torch.float32).max)
    check_finite(torch.full((70_000, 8), 65504.0), "t row")
    check_finite(torch.zeros(0, 8), "t row")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_tables(dtype: torch.dtype) -> None:
    table = torch.randn(50, 4).to(dtype)
    sink = Sink()
    write_table(DigestingWriter(sink, "xxh3-128"), "f", "t", (50, 4), blocks(table, 9))
    assert bytes(sink.data) == pack_rows(table.float()).numpy().tobytes()
