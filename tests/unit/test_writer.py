"""ChunkWriter over blocks of a snapshot whose chunks mix in the file, and over plain tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ckpt.blocks import Block, Piece
from ckpt.config import CheckpointConfig
from ckpt.digest import digest_of
from ckpt.errors import SaveError
from ckpt.events import ListSink
from ckpt.index import TensorEntry, decode_index
from ckpt.pump import Pump
from ckpt.ring import Ring
from ckpt.storage import MemoryStorage
from ckpt.threads import WriteThreads
from ckpt.tree import host_bytes
from ckpt.writer import ChunkWriter, Placement

CONFIG = CheckpointConfig(chunk_bytes=8192, compression="off")
PLACE = Placement("data/x", 0, {"w": "replicated", "m": "replicated", "b": "replicated"})


def state() -> dict[str, torch.Tensor]:
    return {"b": torch.randn(3), "m": torch.randn(500), "w": torch.randn(500, 32)}


def plan_of(tensors: dict[str, torch.Tensor]) -> tuple[SavePlan, DefaultSavePlanner]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, None, True)
    (plan,), _ = planner.create_global_plan([planner.create_local_plan()])
    return plan, planner


@dataclass
class Rows:
    pieces: Sequence[Piece]
    tensors: Sequence[torch.Tensor]

    def fill(self, views: Sequence[torch.Tensor]) -> None:
        for view, piece, tensor in zip(views, self.pieces, self.tensors, strict=True):
            view.copy_(tensor[piece.row : piece.row + piece.rows].reshape(-1).view(torch.uint8))


class Together:
    """All tensors with equal row counts as one table: a block has the same rows of each."""

    def __init__(self, plan: SavePlan, tensors: dict[str, torch.Tensor]) -> None:
        self.items = [(n, tensors[item.index.fqn]) for n, item in enumerate(plan.items)]
        self.skipped: tuple[int, int] | None = None

    def blocks(self, chunk_bytes: int) -> Iterator[Block]:
        tables = [(n, t) for n, t in self.items if len(t) == 500]
        rest = [(n, t) for n, t in self.items if len(t) != 500]
        for row in range(0, 500, 60):
            yield self._block(tables, row, min(60, 500 - row))
        for n, tensor in rest:
            yield self._block([(n, tensor)], 0, len(tensor))

    def _block(self, group: list[tuple[int, torch.Tensor]], row: int, rows: int) -> Rows:
        pieces = [Piece(n, row, rows, t[row : row + rows].nbytes) for n, t in group]
        kept = [i for i, p in enumerate(pieces) if (p.item, p.row) != self.skipped]
        return Rows([pieces[i] for i in kept], [group[i][1] for i in kept])

    @property
    def total_bytes(self) -> int:
        return sum(t.nbytes for _, t in self.items)

    @property
    def largest_row_bytes(self) -> int:
        return 128

    def pressure(self) -> float:
        return 0.0


class Offering(DefaultSavePlanner):
    """A planner that hands over a snapshot."""

    def __init__(self, blocks: Together) -> None:
        super().__init__()
        self.blocks = blocks


@pytest.fixture
def threads() -> Iterator[WriteThreads]:
    found = WriteThreads(2, "normal", ListSink())
    yield found
    found.close()


def read_back(storage: MemoryStorage, writer: ChunkWriter) -> dict[str, bytes]:
    data, index = (storage.read(e.key) for e in writer.files)
    for entry, content in zip(writer.files, (data, index), strict=True):
        assert (entry.size_bytes, entry.digest) == (len(content), digest_of(content))
    tensors, _ = decode_index(index, "idx")  # checks that chunks cover each row once, in order
    return {t.fqn: bytes_of(t, data) for t in tensors}


def bytes_of(tensor: TensorEntry, data: bytes) -> bytes:
    return b"".join(
        data[c.offset : c.offset + c.stored_bytes] for s in tensor.shards for c in s.chunks
    )


@pytest.mark.parametrize("with_threads", [True, False])
def test_chunks_of_several_tensors_may_mix_in_the_file(
    threads: WriteThreads, with_threads: bool
) -> None:
    tensors, storage = state(), MemoryStorage()
    plan, _ = plan_of(tensors)
    pump = Pump(Ring(4, 8192, pinned=False), CONFIG, threads) if with_threads else None
    writer = ChunkWriter(storage, PLACE, CONFIG, pump)
    results = writer.write_data(plan, Offering(Together(plan, tensors))).wait()
    expected = {name: bytes(host_bytes(t)) for name, t in tensors.items()}
    assert read_back(storage, writer) == expected
    assert writer.tensor_bytes == sum(map(len, expected.values()))
    assert {r.index.fqn: r.size_in_bytes for r in results} == {
        name: len(data) for name, data in expected.items()
    }
    offsets: dict[str, list[int]] = {
        r.index.fqn: [c.offset for c in r.storage_data.chunks] for r in results
    }
    assert offsets["w"][0] < offsets["m"][0] < offsets["w"][1] or (
        offsets["m"][0] < offsets["w"][0] < offsets["m"][1]
    )


def test_tensors_of_a_planner_are_written_the_same_with_and_without_threads(
    threads: WriteThreads,
) -> None:
    tensors = {**state(), "b": torch.tensor(1.5)}
    files = []
    for pump in (None, Pump(Ring(4, 8192, pinned=False), CONFIG, threads)):
        storage = MemoryStorage()
        plan, planner = plan_of(tensors)
        writer = ChunkWriter(storage, PLACE, CONFIG, pump)
        writer.write_data(plan, planner)
        assert read_back(storage, writer) == {n: bytes(host_bytes(t)) for n, t in tensors.items()}
        files.append([storage.read(e.key) for e in writer.files])
    assert files[0] == files[1]


def test_rows_that_a_snapshot_left_out_fail_the_save_by_name() -> None:
    tensors, storage = state(), MemoryStorage()
    plan, _ = plan_of(tensors)
    blocks = Together(plan, tensors)
    item = [i.index.fqn for i in plan.items].index("m")
    blocks.skipped = (item, 120)
    with pytest.raises(SaveError, match="m: row 120 of 500 wasn't written"):
        ChunkWriter(storage, PLACE, CONFIG).write_data(plan, Offering(blocks))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty_tensors_have_no_chunks(shape: Any) -> None:
    tensors, storage = {"w": torch.empty(shape)}, MemoryStorage()
    plan, planner = plan_of(tensors)
    writer = ChunkWriter(storage, PLACE, CONFIG)
    writer.write_data(plan, planner)
    assert read_back(storage, writer) == {"w": b""}
    assert writer.files[0].size_bytes == 0
