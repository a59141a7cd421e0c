"""Raw ids to rows, the same way in a trainer's input pipeline and on a serving host.

numpy only: a reader process needs no torch for it. -1 stands for an id without a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.errors import BadInputError
from ckpt.schema import HashedIds, IdentityIds, UnknownIds

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


@dataclass(frozen=True)
class Vocabulary:
    """Raw ids that have rows: two lists of one length, int64, in any order."""

    raw: Ids
    row: Ids


@dataclass(frozen=True)
class IdMap:
    """How a training pipeline makes ids of a feature's raw ids, and what serving does with unknown ones.

    ids: how. unknown: what a served model does with an id without a row; `row` takes `unknown_row`.
    """

    ids: IdentityIds | HashedIds | Vocabulary
    unknown: UnknownIds = "zero"
    unknown_row: int | None = None

    def __post_init__(self) -> None:
        if (self.unknown == "row") != (self.unknown_row is not None):
            raise BadInputError(
                f"unknown = {self.unknown!r} with unknown_row = {self.unknown_row}: give a row with "
                f'"row", and with nothing else'
            )
        if self.unknown_row is not None:
            _check_whole("unknown_row", self.unknown_row, 0, 2**63 - 1)
        if isinstance(self.ids, HashedIds):
            _check_whole("hashed ids: seed", self.ids.seed, 0, 2**64 - 1)
            _check_whole("hashed ids: modulus", self.ids.modulus, 1, 2**63 - 1)

    def apply(self, raw: Ids) -> Ids:
        """The ids that the model gets; -1 for an id that is unknown and has no `unknown_row`."""
        if isinstance(self.ids, HashedIds):
            return hashed(raw, self.ids)
        if isinstance(self.ids, Vocabulary):
            rows = KnownIds.of(self.ids.raw, self.ids.row, "vocabulary").rows(raw)
            return rows if self.unknown_row is None else np.where(rows < 0, self.unknown_row, rows)
        return raw


def _check_whole(what: str, value: object, least: int, most: int) -> None:
    """A description must be readable again: it takes Python's own ints only, none below 0."""
    if type(value) is not int or not least <= value <= most:
        raise BadInputError(f"{what} = {value!r}; give an int from {least} to {most}")


def collided(raw: Ids, known: KnownIds, block: int, unknown_rows: tuple[int, ...]) -> Ids:
    """Rows by a managed collision: ids without a row of their own share their block's last row.

    An id beyond the last block belongs to that of its remainder (of its 64 bits, unsigned).
    """
    rows = known.rows(raw)
    missing = rows < 0
    if missing.any():
        shared = np.asarray(unknown_rows, np.int64)
        blocks = np.zeros(int(missing.sum()), np.int64)
        if block:
            unsigned = raw[missing].astype(np.int64).view(np.uint64)
            blocks = (unsigned // np.uint64(block)).astype(np.int64)
            beyond = unsigned // np.uint64(block) >= np.uint64(len(shared))
            blocks[beyond] = (unsigned[beyond] % np.uint64(len(shared))).astype(np.int64)
        rows[missing] = shared[blocks]
    return rows
