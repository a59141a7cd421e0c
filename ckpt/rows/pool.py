"""What row guards ask of the place where old rows are kept.

There are three: `native_pool` for tables in host memory, `torch_pool`, its reference, and
`device_pool` for tables on a device; `pools` is all of a checkpointer's in one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, eq=False)
class Table:
    """A table shard under guard: its live weight and the optimizer state that has its rows.

    components: tensors of shape (rows, ...), the weight first. A row's bytes lie together.
    """

    name: str
    components: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> int:
        return self.components[0].shape[0]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a row of each component."""
        return tuple(math.prod(c.shape[1:]) * c.element_size() for c in self.components)


def nbytes(table: Table) -> int:
    """Bytes of all rows."""
    return table.rows * sum(table.widths)


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a touch ran out of room: go on from there."""

    segment: int
    at: int


class Pool(Protocol):
    """Tags of all rows, and the old rows that open snapshots still need.

    A tag is the epoch in which a row was last about to change, 0: long ago. `copy`, `pass_all`
    and `tags` are the copying side's; all others are the training
    side's, one thread at a time.
    Key: what `add` returned.
    """

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def fullness(self) -> float:
        """How much of what may be kept is, 0 to 1."""
        ...

    def takes(self, table: Table) -> bool:
        """Can it keep rows of this table?"""
        ...

    def add(self, table: Table) -> Any:
        """Start to keep tags of a table; returns its key in the other calls."""
        ...

    def drop(self, key: Any) -> None: ...

    def lay_out(self, chunk_rows: Mapping[Any, int], capacity_bytes: int) -> None:
        """Set the chunks of all tables, and how much old rows may take. No snapshot may be open."""
        ...

    def touch(
        self,
        keys: Sequence[Any],
        ids: torch.Tensor,
        bounds: Sequence[int] | torch.Tensor,
        start: Stop,
    ) -> Stop | None:
        """Rows ids[bounds[s]:bounds[s + 1]] of keys[s] are about to change. None: all done.

        bounds: a tensor only where the tables are on a device.
        """
        ...

    def touch_all(self, key: Any) -> None:
        """Any row may change now. No open snapshot may still need the table."""
        ...

    def open(self, slot: int, epoch: int) -> None:
        """A snapshot begins, in which no row is copied yet; `epoch` is above all before."""
        ...

    def close(self, slot: int) -> None: ...

    def passed(self, key: Any, slot: int) -> int:
        """How many rows of a table the snapshot has."""
        ...

    def pass_all(self, slot: int) -> None:
        """The snapshot needs nothing any more."""
        ...

    def copy(self, key: Any, slot: int, a: int, b: int, out: Sequence[torch.Tensor | None]) -> int:
        """Copy rows [a, b) of one chunk as they were at opening; returns how many were old rows.

        out: for each component uint8 of shape (bytes,), or None where it isn't wanted.
        Returns -1 if some of the table's memory isn't there any more.
        """
        ...

    def release(self, key: Any, chunk: int) -> None:
        """Drop what is kept of a chunk: no open snapshot needs it any more."""
        ...

    def kept_chunks(self, key: Any) -> list[int]:
        """The chunks of which something is kept."""
        ...

    def tags(self, key: Any, a: int, b: int) -> torch.Tensor:
        """The tags of rows [a, b), uint8 in host memory, as they are now."""
        ...

    def age(self, by: int) -> None:
        """Make all tags older by `by` epochs. No snapshot may be open."""
        ...
