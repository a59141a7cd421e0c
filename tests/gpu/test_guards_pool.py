"""Row guards of tables on CUDA: several tables in one storage, as fbgemm lays them out, and streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from ckpt.ring import Ring
from ckpt.rows import Group, RowGuards, RowSnapshot, Table
from ckpt.types import SystemClock
from tests.gpu.guards_job import DEADLINE_S, no_host_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]
DIMS = (64, 16, 64)
ROWS = (100_000, 30_000, 500)
FEATURES = [0, 1, 1, 2, 0]
BUFFER = 2 << 20


def fused() -> list[Table]:
    weights = torch.randn(sum(r * d for r, d in zip(ROWS, DIMS, strict=True)), device="cuda")
    states = torch.rand(sum(ROWS), device="cuda")
    tables, w, s = [], 0, 0
    for n, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True)):
        weight, state = weights[w : w + rows * dim].view(rows, dim), states[s : s + rows]
        tables.append(Table(f"t{n}", (weight, state)))
        w, s = w + rows * dim, s + rows
    return tables


def train(group: Group, tables: Sequence[Table], seed: int, n: int = 4000) -> None:
    """A step: announced with edges on the device, then rows change in place."""
    g = torch.Generator("cuda").manual_seed(seed)
    edges = torch.arange(0, (len(FEATURES) + 1) * n, n, device="cuda")
    parts = [
        (torch.rand(n, generator=g, device="cuda").pow(3) * ROWS[t]).long().clamp_(max=ROWS[t] - 1)
        for t in FEATURES
    ]
    ids = torch.cat(parts)
    with no_host_sync():
        group.touch(ids, edges, FEATURES)
    for t, rows in zip(FEATURES, parts, strict=True):
        for c in tables[t].components:
            c.index_fill_(0, rows, float(seed))


def persist(
    snapshot: RowSnapshot,
    tables: Sequence[Table],
    want: Sequence[Sequence[torch.Tensor]],
    failures: list[str],
) -> None:
    ring = Ring(2, BUFFER, pinned=True)
    ring.device = tables[0].components[0].device
    try:
        for table, whole in zip(tables, want, strict=True):
            place = snapshot.find(table.components[0])
            assert place is not None
            for chunk in range(-(-table.rows // place.chunk_rows)):
                a = chunk * place.chunk_rows
                rows = min(place.chunk_rows, table.rows - a)
                buffer = ring.take()
                first = rows * table.widths[0]
                end = first + rows * table.widths[1]
                out = [buffer.tensor[:first], buffer.tensor[first:end]]
                snapshot.copy(place, chunk, out)
                for o, w in zip(out, whole, strict=True):
                    expected = w[a : a + rows].cpu().reshape(-1).view(torch.uint8)
                    if not torch.equal(o, expected):
                        failures.append(f"{table.name}: rows {a} to {a + rows}")
                ring.give(buffer)
    except BaseException as e:
        failures.append(repr(e))
    finally:
        snapshot.close()
        ring.close()


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("overlay", [1 << 20, 64 << 20])
def test_exact_beside_a_persist_thread(streams: int, overlay: int) -> None:
    """A small overlay makes training wait and clears up; several streams are put in order."""
    torch.manual_seed(0)
    waits: list[float] = []
    guards = RowGuards(SystemClock(), DEADLINE_S, waited=waits.append)
    tables = fused()
    group = guards.group(tables)
    guards.lay_out(BUFFER, overlay)
    failures: list[str] = []
    others = [torch.cuda.Stream() for _ in range(streams - 1)]
    seed = 0
    for _ in range(6):
        want = [[c.clone() for c in t.components] for t in tables]
        snapshot = guards.open()
        whole = [[w.cpu() for w in parts] for parts in want]  # behind nothing but the clones
        thread = threading.Thread(target=persist, args=(snapshot, tables, whole, failures))
        thread.start()
        for n in range(10):
            seed += 1
            if others and n % 2:
                others[0].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(others[0]):
                    train(group, tables, seed)
                torch.cuda.current_stream().wait_stream(others[0])
            else:
                train(group, tables, seed)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert not failures
    assert not guards.busy
    assert guards.overlay_bytes == 0
    if overlay > BUFFER:
        assert not waits


def test_opening_comes_after_what_was_enqueued_before() -> None:
    """A long queue of changes is still to be made when the snapshot opens: they belong to it."""
    guards = RowGuards(SystemClock(), DEADLINE_S)
    tables = fused()
    group = guards.group(tables)
    guards.lay_out(BUFFER, 64 << 20)
    big = torch.randn(4096, 4096, device="cuda")
    for n in range(20):
        big = big @ big
        big /= big.norm()
        for t in tables:
            for c in t.components:
                c.fill_(n)
    with no_host_sync():
        snapshot = guards.open()
    want = [[torch.full(c.shape, 19.0) for c in t.components] for t in tables]
    failures: list[str] = []
    thread = threading.Thread(target=persist, args=(snapshot, tables, want, failures))
    thread.start()
    train(group, tables, 77)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert not failures


def test_ring_buffers_are_pinned_and_released() -> None:
    torch.zeros(1, device="cuda")
    ring = Ring(2, BUFFER, pinned=True)
    for _ in range(3):
        buffer = ring.take()
        assert buffer._pinned
        buffer.tensor.copy_(
            torch.full((buffer.tensor.numel(),), 7, dtype=torch.uint8, device="cuda")
        )
        assert int(buffer.tensor[-1]) == 7
        ring.give(buffer)
    ring.reserve(2 * BUFFER)
    buffer = ring.take()
    assert buffer._pinned
    ring.give(buffer)
    ring.close()
