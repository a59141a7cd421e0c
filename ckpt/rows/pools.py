"""All pools of a checkpointer as one: host memory's, and one for each device with tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.rows.device import CudaDevice
from ckpt.rows.device_pool import DevicePool
from ckpt.rows.pool import Pool, Stop, Table, nbytes


def cuda_pool(device: torch.device) -> Pool | None:
    """A pool for tables on a device, or None where nothing can be guarded."""
    return DevicePool(CudaDevice(device)) if device.type == "cuda" else None


class Pools:
    """See `Pool`. A call's tables are all in one place.

    Args:
        host: for the tables in host memory.
        pool_of: makes the pool of a device when a table is there.
    """

    def __init__(
        self, host: Pool, pool_of: Callable[[torch.device], Pool | None] = cuda_pool
    ) -> None:
        self._host = host
        self._pool_of = pool_of
        self._pools: dict[torch.device, Pool] = {}
        self._of: dict[Any, Pool] = {}

    @property
    def capacity_bytes(self) -> int:
        return sum(p.capacity_bytes for p in self._each())

    @property
    def used_bytes(self) -> int:
        return sum(p.used_bytes for p in self._each())

    @property
    def fullness(self) -> float:
        return max(p.fullness for p in self._each())

    def takes(self, table: Table) -> bool:
        pool = self._for(table)
        return pool is not None and pool.takes(table)

    def add(self, table: Table) -> Any:
        pool = self._for(table)
        assert pool is not None
        key = pool.add(table)
        self._of[key] = pool
        return key

    def drop(self, key: Any) -> None:
        self._of.pop(key).drop(key)

    def lay_out(self, chunk_rows: Mapping[Any, int], capacity_bytes: int) -> None:
        """Each pool has the same part of its tables for old rows, in the memory where they are."""
        total = sum(nbytes(key.table) for key in chunk_rows)
        for pool in self._each():
            mine = {key: rows for key, rows in chunk_rows.items() if self._of[key] is pool}
            share = sum(nbytes(key.table) for key in mine)
            pool.lay_out(mine, capacity_bytes * share // max(total, 1))

    def touch(
        self,
        keys: Sequence[Any],
        ids: torch.Tensor,
        bounds: Sequence[int] | torch.Tensor,
        start: Stop,
    ) -> Stop | None:
        if not keys:
            return None
        pool = self._of[keys[0]]
        # Rows given by hand may be anywhere; those of lookups are where their tables are.
        ids = ids.to(keys[0].table.components[0].device)
        if pool is self._host and isinstance(bounds, torch.Tensor):
            bounds = bounds.tolist()
        return pool.touch(keys, ids, bounds, start)

    def touch_all(self, key: Any) -> None:
        self._of[key].touch_all(key)

    def open(self, slot: int, epoch: int) -> None:
        for pool in self._each():
            pool.open(slot, epoch)

    def close(self, slot: int) -> None:
        for pool in self._each():
            pool.close(slot)

    def passed(self, key: Any, slot: int) -> int:
        return self._of[key].passed(key, slot)

    def pass_all(self, slot: int) -> None:
        for pool in tuple(self._each()):
            pool.pass_all(slot)

    def copy(self, key: Any, slot: int, a: int, b: int, out: Sequence[torch.Tensor | None]) -> int:
        return self._of[key].copy(key, slot, a, b, out)

    def release(self, key: Any, chunk: int) -> None:
        self._of[key].release(key, chunk)

    def kept_chunks(self, key: Any) -> list[int]:
        return self._of[key].kept_chunks(key)

    def tags(self, key: Any, a: int, b: int) -> torch.Tensor:
        return self._of[key].tags(key, a, b)

    def age(self, by: int) -> None:
        for pool in self._each():
            pool.age(by)

    def _each(self) -> Iterator[Pool]:
        yield self._host
        yield from tuple(self._pools.values())  # guard() may add one meanwhile

    def _for(self, table: Table) -> Pool | None:
        device = table.components[0].device
        if device.type == "cpu":
            return self._host
        if device not in self._pools:
            pool = self._pool_of(device)
            if pool is None:
                return None
            self._pools[device] = pool
        return self._pools[device]
