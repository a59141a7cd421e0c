"""Raw ids to rows, the same way in a trainer's input pipeline and on a serving host.

numpy only: a reader process needs no torch for it. -1 stands for an id without a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.errors import BadInputError
from ckpt.schema import HashedIds

Ids = npt.NDArray[np.int64]
EMPTY_SLOT = np.iinfo(np.int64).max
"""What a managed collision writes where it has no id."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def hashed(raw: Ids, spec: HashedIds) -> Ids:
    """SplitMix64 of each id (its 64 bits, unsigned), started at `seed`, modulo `modulus`."""
    if spec.modulus < 1:
        raise BadInputError(f"hashed ids: modulus {spec.modulus}; give at least 1")
    seed = np.uint64(spec.seed & (2**64 - 1))
    with np.errstate(over="ignore"):
        z = raw.astype(np.int64).view(np.uint64) + (seed + np.uint64(1)) * _GOLDEN
        for shift, factor in _MIX:
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    return (z % np.uint64(spec.modulus)).astype(np.int64)


@dataclass(frozen=True)
class KnownIds:
    """The rows of a list of raw ids: a vocabulary, or a managed collision's state.

    raw: int64, ascending, each once. row: int64, as many.
    """

    raw: Ids
    row: Ids

    @staticmethod
    def of(raw: Ids, row: Ids, what: str) -> KnownIds:
        """Sorted, without empty slots; BadInputError if an id comes twice or the sizes differ."""
        if raw.shape != row.shape or raw.ndim != 1:
            raise BadInputError(f"{what}: {raw.shape} raw ids for {row.shape} rows")
        used = raw != EMPTY_SLOT
        raw, row = raw[used], row[used]
        order = np.argsort(raw, kind="stable")
        raw, row = raw[order], row[order]
        twice = np.flatnonzero(raw[1:] == raw[:-1])
        if len(twice):
            raise BadInputError(f"{what}: raw id {raw[twice[0]]} has two rows")
        return KnownIds(raw, row)

    def rows(self, raw: Ids) -> Ids:
        """The row of each id; -1 for those that aren't in the list."""
        if not len(self.raw):
            return np.full(raw.shape, -1, np.int64)
        at = np.searchsorted(self.raw, raw)
        at[at == len(self.raw)] = 0
        return np.where(self.raw[at] == raw, self.row[at], -1)


def collided(raw: Ids, known: KnownIds, block: int, unknown_rows: tuple[int, ...]) -> Ids:
    """Rows by a managed collision: ids without a row of their own share their block's last row."""
    rows = known.rows(raw)
    missing = rows < 0
    if missing.any():
        blocks = raw[missing] // block if block else np.zeros(int(missing.sum()), np.int64)
        shared = np.asarray(unknown_rows, np.int64)
        rows[missing] = shared[np.clip(blocks, 0, len(shared) - 1)]
    return rows
