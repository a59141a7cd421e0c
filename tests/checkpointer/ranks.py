"""Several ranks as threads of one process, over one in-memory job store.

Plain tensors and values need no process group, so the protocol between ranks can be tested
without processes. Sharded state is tested on real gloo ranks in tests/distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_ranks(world_size: int, body: Callable[[int, dict[str, Any]], T]) -> list[T | BaseException]:
    """Run body(rank, keyword arguments for Checkpointer) on each rank; results or errors, by rank."""
    store = dist.HashStore()

    def run(rank: int) -> T | BaseException:
        try:
            return body(rank, {"rank": rank, "world_size": world_size, "store": store})
        except Exception as e:
            return e

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))


def values(results: list[T | BaseException]) -> list[T]:
    """The results, with the first error raised."""
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results  # type: ignore[return-value]
