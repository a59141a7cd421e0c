"""The pump: what it writes, in which order whatever the threads do, and that no error is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.blocks import Block, Piece
from ckpt.config import CheckpointConfig
from ckpt.digest import digest_of
from ckpt.errors import SaveError, StorageError
from ckpt.events import ListSink
from ckpt.pace import Pace
from ckpt.pump import Pump, Pumped
from ckpt.ring import ALIGN_BYTES, Ring
from ckpt.storage import LocalStorage
from ckpt.storage.memory import MemoryWriter
from ckpt.threads import WriteThreads
from ckpt.types import SystemClock

DEADLINE_S = 30.0


@dataclass
class FakeBlock:
    pieces: Sequence[Piece]
    data: list[bytes]
    error: BaseException | None = None

    def fill(self, views: Sequence[torch.Tensor]) -> None:
        if self.error is not None:
            raise self.error
        for view, data in zip(views, self.data, strict=True):
            assert view.shape == (len(data),)
            assert view.data_ptr() % ALIGN_BYTES == 0
            view.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@dataclass
class FakeBlocks:
    """Blocks of given bytes; `end` is raised in the place of the end of the blocks."""

    all: list[FakeBlock]
    end: BaseException | None = None
    asked: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, *blocks: Sequence[bytes]) -> FakeBlocks:
        return cls(
            [
                FakeBlock([Piece(i, n, 1, len(d)) for i, d in enumerate(block)], list(block))
                for n, block in enumerate(blocks)
            ]
        )

    def blocks(self, chunk_bytes: int) -> Iterator[Block]:
        self.asked.append(chunk_bytes)
        yield from self.all
        if self.end is not None:
            raise self.end

    @property
    def total_bytes(self) -> int:
        return sum(len(d) for b in self.all for d in b.data)

    @property
    def largest_row_bytes(self) -> int:
        return max((len(d) for b in self.all for d in b.data), default=0)

    def pressure(self) -> float:
        return 0.0


class InOrder:
    """A writer that can only append, as an object store's."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: Any) -> None:
        self.data += data


def noise(length: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator).numpy())


@pytest.fixture(scope="module")
def threads() -> Iterator[WriteThreads]:
    found = WriteThreads(2, "normal", ListSink())
    yield found
    found.close()


@pytest.fixture
def ring() -> Ring:
    return Ring(3, 1 << 16, pinned=False)


def assert_all_back(ring: Ring) -> None:
    """Every buffer can be taken at once: a lost one would make this wait for ever, so ask first."""
    assert ring._out == 0


def check_file(data: bytes, pumped: Pumped, blocks: FakeBlocks) -> None:
    """The file is exactly its chunks at aligned places, zeros between them, and the digests fit."""
    assert pumped.size_bytes == len(data)
    assert pumped.digest == digest_of(data)
    expected = bytearray(len(data))
    by_piece = {id(p): d for b in blocks.all for p, d in zip(b.pieces, b.data, strict=True)}
    end = 0
    for piece, chunk in pumped.chunks:
        assert chunk.offset == -(-end // ALIGN_BYTES) * ALIGN_BYTES
        end = chunk.offset + chunk.stored_bytes
        stored = data[chunk.offset : end]
        expected[chunk.offset : end] = stored
        assert chunk.digest == xxhash.xxh3_128_digest(stored).ljust(32, b"\0")
        raw = zstandard.decompress(stored) if chunk.codec == "zstd" else stored
        assert raw == by_piece[id(piece)]
        assert (chunk.row, chunk.rows) == (piece.row, piece.rows)
    assert end == len(data)
    assert expected == data
    assert len(pumped.chunks) == len(by_piece)


@st.composite
def contents(draw: st.DrawFn) -> list[list[bytes]]:
    size = st.integers(1, 20_000) | st.sampled_from([4095, 4096, 4097, 8192])
    count = draw(st.integers(0, 6))
    return [
        [
            noise(n, seed) if seed % 3 else bytes(n)
            for n, seed in draw(st.lists(st.tuples(size, st.integers(0, 999)), max_size=4))
        ]
        for _ in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(contents(), st.sampled_from(["auto", "off"]), st.sampled_from(["offsets", "order", "none"]))
def test_any_blocks_make_the_same_file_however_it_is_written(
    data: list[list[bytes]], compression: Any, way: str
) -> None:
    threads = WriteThreads(2, "normal", ListSink())
    config = CheckpointConfig(chunk_bytes=1 << 16, compression=compression)
    blocks, ring = FakeBlocks.of(*data), Ring(3, 1 << 16, pinned=False)
    out: Any = InOrder() if way == "order" else MemoryWriter("k")
    pumped = Pump(ring, config, None if way == "none" else threads).run(blocks, out)
    threads.close()
    check_file(bytes(out.data), pumped, blocks)
    assert_all_back(ring)


def test_compressible_and_noisy_chunks_of_one_block_each_get_their_codec(
    ring: Ring, threads: WriteThreads
) -> None:
    blocks = FakeBlocks.of([bytes(10_000), noise(10_000, 1), bytes(5000)], [noise(100, 2)])
    out = MemoryWriter("k")
    pumped = Pump(ring, CheckpointConfig(), threads).run(blocks, out)
    assert [c.codec for _, c in pumped.chunks] == ["zstd", "raw", "zstd", "raw"]
    check_file(bytes(out.data), pumped, blocks)


def test_a_chunk_whose_sample_promised_too_much_stays_raw(
    ring: Ring, threads: WriteThreads
) -> None:
    """Only its middle shrinks; the attempt is given up without a second copy of the chunk."""
    data = noise(200_000, 1) + bytes(70_000) + noise(200_000, 2)
    blocks = FakeBlocks.of([data, bytes(20_000)])
    out = MemoryWriter("k")
    pumped = Pump(ring, CheckpointConfig(), threads).run(blocks, out)
    assert [c.codec for _, c in pumped.chunks] == ["raw", "zstd"]
    check_file(bytes(out.data), pumped, blocks)


def test_chunks_are_no_longer_than_a_buffer_and_a_longer_row_makes_it_grow(
    threads: WriteThreads,
) -> None:
    ring = Ring(2, 8192, pinned=False)
    blocks = FakeBlocks.of([noise(100, 1)])
    Pump(ring, CheckpointConfig(), threads).run(blocks, MemoryWriter("k"))
    assert blocks.asked == [8192]
    blocks = FakeBlocks.of([noise(50_000, 1)])
    Pump(ring, CheckpointConfig(), threads).run(blocks, MemoryWriter("k"))
    assert blocks.asked == [53_248]
    assert ring.buffer_bytes == 53_248


def test_a_local_file_is_the_same(tmp_path: Any, threads: WriteThreads) -> None:
    """Large enough for direct writes, with a tail that can't be."""
    ring = Ring(4, 1 << 20, pinned=False)
    blocks = FakeBlocks.of(*[[noise(700_000 + n, n), noise(3000, n)] for n in range(12)])
    storage = LocalStorage(tmp_path / "run")
    with storage.writer("k") as out:
        pumped = Pump(ring, CheckpointConfig(), threads).run(blocks, out)
    check_file(storage.read("k"), pumped, blocks)


class Failing(MemoryWriter):
    """Fails the write of one offset."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__("k")
        self.at = at
        self.error = error

    def write_at(self, offset: int, data: Any) -> None:
        if offset == self.at:
            raise self.error
        super().write_at(offset, data)


@pytest.mark.parametrize("failing", [0, 3, 7])
@pytest.mark.parametrize("kind", [StorageError, RuntimeError, SystemExit])
def test_an_error_of_a_writer_thread_ends_the_pump(
    ring: Ring, threads: WriteThreads, failing: int, kind: type[BaseException]
) -> None:
    """Also of the last write, after which nothing would ask again (pytorch#191391)."""
    blocks = FakeBlocks.of(*[[noise(4096, n)] for n in range(8)])
    out = Failing(4096 * failing, kind("the disk is gone"))
    with pytest.raises(kind, match="the disk is gone"):
        Pump(ring, CheckpointConfig(), threads).run(blocks, out)
    assert_all_back(ring)
    again = MemoryWriter("k")
    pumped = Pump(ring, CheckpointConfig(), threads).run(blocks, again)
    check_file(bytes(again.data), pumped, blocks)


@pytest.mark.parametrize("with_threads", [True, False])
def test_an_error_of_copying_ends_the_pump(
    ring: Ring, threads: WriteThreads, with_threads: bool
) -> None:
    blocks = FakeBlocks.of(*[[noise(4096, n)] for n in range(8)])
    blocks.all[5].error = SaveError("given up")
    with pytest.raises(SaveError, match="given up"):
        Pump(ring, CheckpointConfig(), threads if with_threads else None).run(
            blocks, MemoryWriter("k")
        )
    assert_all_back(ring)


@pytest.mark.parametrize("with_threads", [True, False])
def test_an_error_between_blocks_ends_the_pump(
    ring: Ring, threads: WriteThreads, with_threads: bool
) -> None:
    blocks = FakeBlocks.of([noise(4096, 1)], [noise(100, 2)])
    blocks.end = SaveError("an untracked write")
    with pytest.raises(SaveError, match="untracked"):
        Pump(ring, CheckpointConfig(), threads if with_threads else None).run(
            blocks, MemoryWriter("k")
        )
    assert_all_back(ring)


def test_an_error_ends_a_copier_that_waits_for_its_pace(ring: Ring, threads: WriteThreads) -> None:
    blocks = FakeBlocks.of(*[[noise(4096, n)] for n in range(3)])
    pace = Pace(1e6, blocks.total_bytes, blocks.pressure, SystemClock())
    with pytest.raises(StorageError, match="gone"):
        Pump(ring, CheckpointConfig(), threads, pace).run(blocks, Failing(0, StorageError("gone")))
    assert_all_back(ring)


def test_an_error_ends_a_copier_that_waits_for_a_buffer(threads: WriteThreads) -> None:
    ring = Ring(2, 4096, pinned=False)
    blocks = FakeBlocks.of(*[[noise(4096, n)] for n in range(50)])
    with pytest.raises(StorageError, match="gone"):
        Pump(ring, CheckpointConfig(), threads).run(blocks, Failing(4096, StorageError("gone")))
    assert_all_back(ring)


def test_a_paced_save_that_is_hurried_ends(ring: Ring, threads: WriteThreads) -> None:
    blocks = FakeBlocks.of(*[[noise(4096, n)] for n in range(5)])
    waiting = threading.Event()

    def pressure() -> float:
        waiting.set()
        return 0.0

    pace = Pace(1e6, blocks.total_bytes, pressure, SystemClock())
    out = MemoryWriter("k")
    pump = Pump(ring, CheckpointConfig(), threads, pace)
    thread = threading.Thread(target=pump.run, args=(blocks, out))
    thread.start()
    assert waiting.wait(DEADLINE_S)
    threads.hurry()
    thread.join(DEADLINE_S)
    assert len(out.data) == 5 * 4096
