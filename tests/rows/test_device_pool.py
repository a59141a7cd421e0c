"""The pool for tables on a device, on tensors in host memory: everything but streams and events."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.errors import SaveError
from ckpt.rows import Group, RowGuards, RowSnapshot, Table
from ckpt.rows.device import HostDevice
from ckpt.rows.device_pool import DevicePool
from ckpt.rows.pools import Pools
from ckpt.rows.torch_pool import TorchPool
from ckpt.types import SystemClock

BUFFER = 8 * 4096
DIMS = (8, 4, 8, 12)
ROWS = (400, 90, 1, 0)
FEATURES = [0, 1, 1, 2, 3, 0]


class ToldDevice(HostDevice):
    """Counts waits, and knows which tensors the host may look into."""

    def __init__(self) -> None:
        self.waits = 0
        self.hosts: set[int] = set()

    def mark(self) -> Any:
        return _Told(self)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        there = super().host(shape, dtype)
        self.hosts.add(there.data_ptr())
        return there


class _Told:
    def __init__(self, device: ToldDevice) -> None:
        self.device = device

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        self.device.waits += 1


class NoSync(TorchDispatchMode):
    """Refuses what would make the host wait on CUDA: operations whose result's size or value it needs."""

    def __init__(self, device: ToldDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "item", "is_nonzero"}:
            assert args[0].data_ptr() in self.device.hosts, "the host reads a tensor of the device"
        assert not name.startswith(("nonzero", "masked_select", "unique", "_unique", "bincount"))
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            assert not masks, "a mask as an index"
        if name.startswith("repeat_interleave"):
            assert (kwargs or {}).get("output_size") is not None
        return func(*args, **(kwargs or {}))


def fused() -> list[Table]:
    """Tables as fbgemm lays them out: weights of all in one storage, states of all in another."""
    weights = torch.randn(sum(r * d for r, d in zip(ROWS, DIMS, strict=True)) + 8)
    states = torch.rand(sum(ROWS) + 4)
    tables, w, s = [], 8, 4
    for n, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True)):
        weight, state = weights[w : w + rows * dim].view(rows, dim), states[s : s + rows]
        tables.append(Table(f"t{n}", (weight, state)))
        w, s = w + rows * dim, s + rows
    return tables


def guarded(
    overlay: int = 1 << 20, buffer: int = BUFFER, **options: Any
) -> tuple[RowGuards, Group, list[Table], ToldDevice]:
    device = ToldDevice()
    guards = RowGuards(SystemClock(), 30.0, **options)
    guards._pool = DevicePool(device)
    tables = fused()
    group = guards.group(tables)
    guards.lay_out(buffer, overlay)
    return guards, group, tables, device


def copies(tables: Sequence[Table]) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(c.clone() for c in t.components) for t in tables]


def read(snapshot: RowSnapshot, table: Table, chunks: range | None = None) -> list[torch.Tensor]:
    """What a persist thread gets of a table."""
    place = snapshot.find(table.components[0])
    if place is None:
        assert not table.rows
        return [c.clone() for c in table.components]
    got = [torch.full_like(c, -7) for c in table.components]
    for chunk in chunks if chunks is not None else range(-(-table.rows // place.chunk_rows)):
        a, b = chunk * place.chunk_rows, min(table.rows, (chunk + 1) * place.chunk_rows)
        out = [g[a:b].reshape(b - a, -1).view(torch.uint8).view(-1) for g in got]
        snapshot.copy(place, chunk, out)
    return got


def batch(seed: int, n: int = 50, narrow: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, edges) of a lookup with more ids than its segments have, some out of range."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, n, (len(FEATURES),), generator=g)
    counts[seed % len(FEATURES)] = 0
    edges = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]) + seed % 3
    ids = torch.randint(-3, 420, (int(edges[-1]) + 5,), generator=g)
    return (ids.int(), edges.int()) if narrow else (ids, edges)


def train(group: Group, tables: Sequence[Table], ids: torch.Tensor, edges: torch.Tensor) -> None:
    """What comes after a touch: changes just the rows that the ids mean."""
    for n, t in enumerate(FEATURES):
        rows = ids[int(edges[n]) : int(edges[n + 1])].long()
        if tables[t].rows:
            rows = torch.where((rows >= 0) & (rows < tables[t].rows), rows, 0)
            for c in tables[t].components:
                c.index_fill_(0, rows, float(torch.rand(())))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_fused_lookup_in_one_call_that_never_waits(narrow: bool, on_host: bool) -> None:
    torch.manual_seed(1)
    guards, group, tables, device = guarded()
    assert len(guards._pool._banks) == 3  # type: ignore[attr-defined] # widths 8, 4 and no rows
    snapshot = guards.open()
    want = copies(tables)
    for seed in range(20):
        ids, edges = batch(seed, narrow=narrow)
        bounds = edges.tolist() if on_host else edges
        with NoSync(device):
            group.touch(ids, bounds, FEATURES)
        train(group, tables, ids, edges)
    assert device.waits == 0
    for table, w in zip(tables, want, strict=True):
        assert all(map(torch.equal, read(snapshot, table), w)), table.name
    snapshot.close()
    assert not guards.busy
    assert guards.overlay_bytes == 0


def test_rows_are_kept_once() -> None:
    guards, group, _, device = guarded()
    snapshot = guards.open()
    ids = torch.arange(30).repeat(10)
    for _ in range(3):
        group.touch_rows(0, ids)
    group.touch_rows(0, ids[:0])
    record = 8 * 4 + 4 + 10
    assert device.waits == 0
    assert guards.overlay_bytes <= (30 + ids.numel()) * record  # what the last call may have kept
    snapshot.close()


@pytest.mark.parametrize("seed", range(3))
def test_training_and_copying_at_once(seed: int) -> None:
    torch.manual_seed(seed)
    guards, group, tables, _ = guarded(overlay=20_000)
    failures: list[str] = []

    def persist(snapshot: RowSnapshot, want: list[tuple[torch.Tensor, ...]]) -> None:
        try:
            for table, w in zip(tables, want, strict=True):
                if not all(map(torch.equal, read(snapshot, table), w)):
                    failures.append(table.name)
        except BaseException as e:
            failures.append(repr(e))
        finally:
            snapshot.close()

    for save in range(8):
        want = copies(tables)
        thread = threading.Thread(target=persist, args=(guards.open(), want))
        thread.start()
        for n in range(12):
            ids, edges = batch(seed * 1000 + save * 12 + n, n=200)
            group.touch(ids, edges, FEATURES)
            train(group, tables, ids, edges)
        thread.join(30)
        assert not thread.is_alive()
    assert not failures


def test_a_full_overlay_first_drops_what_no_snapshot_needs() -> None:
    waits: list[float] = []
    chunk = 2 * 4096 + 100 * 36
    guards, group, tables, _ = guarded(overlay=12_000, buffer=chunk, waited=waits.append)
    pool: Any = guards._pool
    bank = pool._tables[0].bank
    assert 200 < bank.capacity < 300
    snapshot = guards.open()
    want = copies(tables)

    def change(a: int) -> None:
        group.touch_rows(0, torch.arange(a, a + 100))
        for c in tables[0].components:
            c[a : a + 100] = -1

    got = [read(snapshot, tables[0], range(1))]
    change(0)  # copied already
    change(100)
    change(200)
    assert bank.bound == 200
    got.append(read(snapshot, tables[0], range(1, 2)))
    change(300)
    assert bank.bound == 200
    assert not waits
    got.append(read(snapshot, tables[0], range(2, 4)))
    for k, w in enumerate(want[0]):
        assert torch.equal(torch.cat([got[0][k][:100], got[1][k][100:200], got[2][k][200:]]), w)
    snapshot.close()


def test_a_full_overlay_waits_for_the_copying_and_loses_nothing() -> None:
    torch.manual_seed(3)
    copied: list[list[torch.Tensor]] = []
    waits: list[float] = []

    def copy_on() -> None:
        if not copied:
            copied.append(read(snapshot, tables[0]))

    guards, group, tables, _ = guarded(overlay=4_000, hurry=copy_on, waited=waits.append)
    snapshot = guards.open()
    want = copies(tables)
    for a in range(0, 400, 40):
        group.touch_rows(0, torch.arange(a, a + 40))
        for c in tables[0].components:
            c[a : a + 40] = -1
    assert len(waits) == 1
    assert all(map(torch.equal, copied[0], want[0]))
    snapshot.close()


def test_a_snapshot_that_training_waited_for_too_long_is_given_up() -> None:
    guards, group, tables, _ = guarded(overlay=4_000)
    guards._stall_limit_s = 0.0
    snapshot = guards.open()
    group.touch_rows(0, torch.arange(400))
    group.touch_rows(0, torch.arange(400))
    with pytest.raises(SaveError, match="stall_limit_s"):
        read(snapshot, tables[0])
    snapshot.close()
    assert not guards.busy


def test_the_proof_reads_tags_on_the_host() -> None:
    guards, group, tables, _ = guarded()
    snapshot = guards.open()
    group.touch_rows(0, torch.tensor([3, 5]))
    place = snapshot.find(tables[0].components[0])
    assert place is not None
    tags, since = snapshot.tags(place, 0, 8, snapshot.number)
    assert (tags < since).tolist() == [n not in (3, 5) for n in range(8)]
    assert snapshot.tags(place, 0, 8, None)[1] == 0
    read(snapshot, tables[0])
    group.touch_all(0)
    tags, since = snapshot.tags(place, 0, 400, snapshot.number)
    assert not (tags < since).any()
    snapshot.close()


def test_tags_follow_their_tables_when_groups_come_and_go() -> None:
    guards, group, _, _ = guarded()
    other = guards.group([Table("x", (torch.randn(10, 4),))])
    guards.lay_out(BUFFER, 1 << 20)
    guards.open().close()
    group.touch_rows(0, torch.tensor([7]))
    other.touch_rows(0, torch.tensor([2]))
    assert not guards.busy
    guards.drop(group)
    guards.lay_out(BUFFER, 1 << 20)
    key = other.keys[0]
    assert key.tag.nonzero().flatten().tolist() == [2]
    snapshot = guards.open()
    table = other.tables[0]
    want = table.components[0].clone()
    other.touch_rows(0, torch.tensor([2, 11]))
    table.components[0][[0, 2]] = 0
    assert torch.equal(read(snapshot, table)[0], want)
    snapshot.close()


def test_each_place_of_tables_has_its_pool_and_its_share() -> None:
    made: list[DevicePool] = []

    def pool_of(device: torch.device) -> DevicePool | None:
        if device.type == "meta":
            made.append(_MetaPool(HostDevice()))
            return made[-1]
        return None

    pools = Pools(TorchPool(), pool_of)
    guards = RowGuards(SystemClock(), 1.0)
    guards._pool = pools
    here = guards.group([Table("here", (torch.randn(30, 4),))])
    guards.group([Table("there", (torch.randn(10, 4, device="meta"),))])
    assert len(made) == 1
    guards.lay_out(BUFFER, 4000)
    assert pools._host.capacity_bytes == 3000
    assert made[0].asked == 1000
    here.touch(torch.tensor([1, 2]), torch.tensor([0, 2]), [0])  # edges are fetched for the host's
    assert here.keys[0].tag.nonzero().flatten().tolist() == [1, 2]


class _MetaPool(DevicePool):
    asked = 0

    def takes(self, table: Table) -> bool:
        return True

    def lay_out(self, chunk_rows: Any, capacity_bytes: int) -> None:
        self.asked = capacity_bytes


class _Interrupted(TorchPool):
    """Lets training settle in the middle of a copy: behind the frontier, before old rows are laid over."""

    meanwhile: Any = None

    def copy(self, key: Any, slot: int, a: int, b: int, out: Any) -> int:
        laid = super().copy(key, slot, a, b, out)
        if self.meanwhile is not None:
            self.meanwhile()
            laid = super().copy(key, slot, a, b, out)  # its last part: reads what is kept again
        return laid


def test_a_chunk_is_kept_until_its_old_rows_are_laid_over() -> None:
    """Another snapshot's end must not free what a copy in progress is about to read."""
    guards = RowGuards(SystemClock(), 30.0)
    pool = _Interrupted()
    guards._pool = pool
    table = Table("t", (torch.randn(10, 4),))
    group = guards.group([table])
    guards.lay_out(BUFFER, 1 << 20)
    first, second = guards.open(), guards.open()
    want = table.components[0].clone()
    group.touch_rows(0, torch.arange(10))
    table.components[0].zero_()
    assert torch.equal(read(first, table)[0], want)
    first.close()

    def settle() -> None:
        pool.meanwhile = None
        assert guards.busy

    pool.meanwhile = settle
    assert torch.equal(read(second, table)[0], want)
    second.close()
    assert not guards.busy
    assert guards.overlay_bytes == 0
