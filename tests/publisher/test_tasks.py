"""Any tables, formats, file sizes and blocks: one image, its rule kept, each row once."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.digest import digest_of
from ckpt.errors import ConflictError
from ckpt.storage import MemoryStorage
from publisher.formats import ALIGN_BYTES, PAGE_BYTES
from publisher.gates import GateError
from publisher.quantise import encode_rows
from publisher.reading import ahead
from publisher.records import PublishedTable
from publisher.tasks import FILE_BYTES, FileResult, Table, join_tables, plan_files
from publisher.writing import TableWriter
from tests.publisher.written_tables import Rows, job, offsets_in_image, tables_of, write_all

FORMATS = st.sampled_from(["int8_rowwise", "int4_rowwise", "fp16", "fp32"])
SHAPES = st.tuples(st.integers(0, 1500), st.integers(1, 12).map(lambda n: 2 * n), FORMATS)


@st.composite
def any_tables(draw: st.DrawFn) -> list[Table]:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
    return [Table(f"t.{n}", rows, dim, f) for n, (rows, dim, f) in enumerate(shapes)]  # type: ignore[arg-type]


def check_image(tables: list[PublishedTable], results: list[FileResult], image: bytes) -> None:
    """The rule of `publisher.formats`."""
    assert all(r.file.size_bytes % PAGE_BYTES == 0 for r in results[:-1])
    begins, at = {}, 0
    for r in results:
        assert r.file.digest == digest_of(image[at : at + r.file.size_bytes])
        begins[r.file.key] = at
        at += r.file.size_bytes
    assert at == len(image)
    spans = []
    for t in tables:
        begin = begins[t.parts[0].file] + t.parts[0].offset
        assert begin % ALIGN_BYTES == 0
        row = 0
        for part in t.parts:  # in one piece, from row 0 to the last
            assert part.first_row == row
            assert begins[part.file] + part.offset == begin + row * t.row_bytes
            row += part.rows
        assert row == t.rows
        spans.append((begin, begin + max(t.rows, 1) * t.row_bytes))
    spans = sorted([*spans, (len(image), len(image))])
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@settings(max_examples=40, deadline=None)
@given(any_tables(), st.sampled_from([5000, 20_000, 100_000, FILE_BYTES]), st.integers(60, 2000))
def test_the_image_is_that_of_each_table_as_a_whole(
    tables: list[Table], file_bytes: int, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    tensors = {t.fqn: torch.randn(t.rows, t.dim, generator=generator) for t in tables}
    tasks = plan_files(tables, file_bytes)
    image, made, results = write_all(tables, Rows(tensors, chunk), tasks)
    check_image(list(made), results, image)
    offsets = offsets_in_image(made, results)
    for t in made:
        encoded = encode_rows(tensors[t.fqn], t.format).numpy().tobytes()
        at = offsets[t.fqn]
        assert image[at : at + t.rows * t.row_bytes] == encoded
        if not t.rows:
            assert not any(image[at : at + t.row_bytes])
        assert sum(t.stats.norm_counts) == t.rows
    used = sum(t.rows * t.row_bytes for t in made)
    assert len(tasks) <= max(1, math.ceil((used + PAGE_BYTES * 2 * len(tables)) / file_bytes))


def test_large_tables_are_shared_out_evenly_and_small_ones_stay_whole() -> None:
    """1 TiB of fp32, its plan only."""
    tables = [Table(f"small.{n}", 1000, 16, "int8_rowwise") for n in range(200)]
    tables += [Table("huge", 1 << 32, 64, "int8_rowwise"), Table("odd", 10**6, 63, "int8_rowwise")]
    tasks = plan_files(tables)
    sizes = [t.size_bytes for t in tasks]
    assert len(tasks) == math.ceil(sum(t.size_bytes for t in tables) / FILE_BYTES)
    assert max(sizes) <= FILE_BYTES * 17 / 16
    assert min(sizes) >= FILE_BYTES * 15 / 16
    cut = {p.table.fqn for t in tasks for p in t.pieces if p.rows != p.table.rows}
    assert cut <= {"huge", "odd"}


def test_no_table_is_still_one_file() -> None:
    (task,) = plan_files([])
    assert (task.name, task.size_bytes, task.pieces) == ("tables-00000.bin", 0, ())


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (slice(1, None), "expected 0|from row 0 on"),
        (slice(0, -1), "rows were written"),
        (slice(0, 0), "t.0: 0 of 5000 rows were written"),
    ],
)
def test_gate_coverage_of_files(lost: slice, why: str) -> None:
    tensors = {"t.0": torch.randn(5000, 8)}
    tables = tables_of(tensors)
    _, _, results = write_all(tables, Rows(tensors), plan_files(tables, 9000))
    assert len(results) > 2
    with pytest.raises(GateError, match=why) as e:
        join_tables(tables, results[lost])
    assert e.value.gate == "coverage"
    assert "t.0" in str(e.value)
    with pytest.raises(GateError, match=r"t\.0: tables-0000"):  # twice
        join_tables(tables, [results[0], *results])


class _Wrong(Rows):
    """Gives a table's rows as (first row, how many) that a test made up."""

    def __init__(self, given: list[tuple[int, int]], dim: int = 2) -> None:
        super().__init__({"table.x": torch.zeros(20, dim)})
        self.given = given

    def iter_rows(self, fqn: str, first: int = 0, rows: int | None = None, **_: object):  # type: ignore[no-untyped-def, override]
        for at, count in self.given:
            yield at, torch.zeros(count, self.tensors[fqn].shape[1])


@pytest.mark.parametrize(
    ("given_rows", "why"),
    [
        ([(0, 4), (5, 5)], "expected row 4"),
        ([(0, 4), (3, 7)], "expected row 4"),
        ([(0, 4)], "4 of 10 rows from row 0 on were read"),
        ([(0, 10), (10, 1)], "11 of 10 rows from row 0 on were read"),
        ([(1, 9)], "expected row 0"),
    ],
)
def test_gate_coverage_of_what_is_read(given_rows: list[tuple[int, int]], why: str) -> None:
    with pytest.raises(GateError, match=why) as e:
        write_all([Table("table.x", 10, 2, "int8_rowwise")], _Wrong(given_rows))
    assert e.value.gate == "coverage"
    with pytest.raises(GateError, match="expected row 0 of 3 columns"):
        write_all([Table("table.x", 10, 3, "int8_rowwise")], _Wrong([(0, 10)]))


def test_a_task_that_was_written_already_is_taken_and_another_file_is_not() -> None:
    """A worker may die between its file and its answer: the second one writes the same bytes."""
    tensors = {"t.0": torch.randn(50, 8)}
    (task,) = plan_files(tables_of(tensors))
    storage = MemoryStorage()
    writer = TableWriter(job(), Rows(tensors), storage)
    assert writer.write(task) == writer.write(task)
    with pytest.raises(ConflictError):
        writer.write(replace(task, size_bytes=task.size_bytes + 1))


@pytest.mark.parametrize("memory_mib", [1, 2, 64])
def test_blocks_follow_the_memory(memory_mib: int) -> None:
    asked: list[int] = []

    class Source(Rows):
        def iter_rows(self, fqn: str, first: int = 0, rows: int | None = None, *, most_rows=None):  # type: ignore[no-untyped-def]
            asked.append(most_rows * 4 * self.tensors[fqn].shape[1])
            return super().iter_rows(fqn, first, rows, most_rows=most_rows)

    tensors = {"narrow": torch.zeros(9, 4), "wide": torch.zeros(2, 1 << 20)}
    writer = TableWriter(job(memory_mib << 20), Source(tensors), MemoryStorage())
    writer.write(plan_files(tables_of(tensors))[0])
    narrow, wide = asked
    assert 64 << 10 <= narrow <= max(64 << 10, memory_mib << 17)
    assert narrow <= 2 << 20
    assert wide == 4 << 20  # one row


def test_workers_share_a_hosts_memory() -> None:
    made = replace(job(), memory_bytes=64 << 20, least_bytes=20 << 20)
    fit, share = made.shared(8)
    assert (fit, share.memory_bytes) == (3, (64 << 20) // 3)
    assert replace(made, least_bytes=1 << 30).shared(8)[0] == 1


class _Counted(Rows):
    """Each chunk is memory of its own, as one read is; notes the most that was held at once."""

    held_bytes = most_bytes = 0

    def iter_rows(
        self, fqn: str, first: int = 0, rows: int | None = None, *, most_rows: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for at, block in super().iter_rows(fqn, first, rows):
            array = block.numpy().copy()
            self._count(array.nbytes)
            weakref.finalize(array, self._count, -array.nbytes)
            chunk = torch.from_numpy(array)
            del array
            step = most_rows or len(chunk)
            for start in range(0, len(chunk), step):
                yield at + start, chunk[start : start + step]
            del chunk

    def _count(self, n: int) -> None:
        self.held_bytes += n
        self.most_bytes = max(self.most_bytes, self.held_bytes)


@pytest.mark.parametrize("blocks_of_a_chunk", [1, 4])
@pytest.mark.parametrize("threads", [0, 1])
def test_chunks_keep_to_the_memory(blocks_of_a_chunk: int, threads: int) -> None:
    """One chunk at a time; with memory for two and for what waits, the next is read ahead."""
    block, buffer = 64 << 10, 1 << 20
    chunk = blocks_of_a_chunk * block
    tensors = {"t": torch.ones(20 * (chunk // 16), 4)}
    least = 2 * chunk + buffer + 16 * block  # to read ahead
    source = _Counted(tensors, chunk // 16)
    made = replace(job(least - (not threads)), least_bytes=chunk)
    with patch("publisher.writing.ahead", wraps=ahead) as used:
        TableWriter(made, source, MemoryStorage()).write(plan_files(tables_of(tensors))[0])
    assert used.call_count == threads
    assert source.most_bytes <= (2 * chunk + 8 * block if threads else chunk)


def test_an_error_ends_the_thread_that_reads_ahead() -> None:
    rows = torch.ones(2_000_000, 4)
    rows[600_000, 1] = float("nan")
    with patch("publisher.writing.ahead", wraps=ahead) as used, pytest.raises(GateError) as e:
        write_all([Table("t", len(rows), 4, "int8_rowwise")], Rows({"t": rows}))
    assert used.call_count == 1
    assert e.value.gate == "finite"  # and while it's held, with its frames:
    assert [t for t in threading.enumerate() if t.name == "read-ahead"] == []


def test_small_pieces_are_read_without_a_thread() -> None:
    with patch("publisher.writing.ahead", wraps=ahead) as used:
        tensors = {f"t.{i}": torch.ones(3, 4) for i in range(9)}
        write_all(tables_of(tensors), Rows(tensors))
    assert used.call_count == 0
