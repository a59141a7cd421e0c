"""Optimizer state of tables that a dense kernel holds, as parts of whole tensors.

A module's state dict says which part of a table this rank has. The parameter that an optimizer gets for it is
that part alone, a plain tensor, and so is the state that it makes; ranks have other shapes and values under
one key. So state whose parameter is the memory of a shard in the state is stored as that part of a whole, in
the form in which fused kernels have it: of the table's shape, or a value for each row of each column shard,
the shards' rows one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from ckpt.canonical.kernels import local_memory_of
from ckpt.errors import BadInputError
from ckpt.tree import Part, leaf_of

_SPREAD = (ShardedTensor, DTensor)
_Optimizer = tuple[str, Mapping[Any, Any], Mapping[Any, torch.Tensor]]


class TablePart(NamedTuple):
    """The part of a table that a parameter is. `column`: which of its column shards, of so many."""

    table: str
    offsets: tuple[int, int]
    sizes: tuple[int, int]
    whole: tuple[int, int]
    column: int
    columns: int

    def state(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(offsets, shape of the whole) of state of this shape for the part. None: not of its shape."""
        if shape == self.sizes:
            return self.offsets, self.whole
        rows, row = self.whole[0], self.offsets[0]
        if shape in ((self.sizes[0],), (self.sizes[0], 1)):
            beside = (0,) * (len(shape) - 1)
            whole = (rows * self.columns, *shape[1:])
            return (rows * self.column + row, *beside), whole
        return None


class Cuts:
    """Finds the parameters of optimizers that are parts of tables, save after save."""

    def __init__(self) -> None:
        self._noted: list[_Optimizer] = []
        self._known: _Known | None = None

    def forget(self) -> None:
        """Let go of the state."""
        self._noted = []

    def note(self, path: str, state: Mapping[Any, Any], of: Mapping[Any, torch.Tensor]) -> None:
        """An optimizer at `path` of a state has these entries, and they are of these parameters."""
        self._noted.append((path, state, of))

    def parts(self, names: Sequence[str], tensors: Sequence[Any]) -> dict[str, Part]:
        """By key: the state of such parameters among the tensors of a state, as parts of wholes.

        What is of no part's shape, such as a count of steps, stays as it is. Raises BadInputError where it
        can't be known which part of a table a shard is.
        """
        if not has_spread(tensors):  # as with most trainers: then no shard is anybody's parameter
            return {}
        noted = [
            (f"{path}.state.{key}" if path else f"state.{key}", of[key], entry)
            for path, state, of in self._noted
            for key, entry in state.items()
            # Not by number: ranks may mean different tables by one, whose parts would be taken for a whole.
            if type(key) is str and key in of and isinstance(entry, Mapping)
            if not is_spread(of[key])
        ]
        places = [p.data_ptr() for _, p, _ in noted]
        known = self._known
        if known is None or known.places != places or known.names != names:
            known = self._known = _Known(list(names), places, _owners(names, tensors, places))
        if not known.owners:
            return {}
        tables = table_parts((names[n], tensors[n]) for n in known.owners)
        there = set(names)  # those that a rank has for itself are called otherwise
        return {
            f"{at}.{k}": Part(*place, value)
            for at, p, entry in noted
            if (of := tables.get(p.data_ptr())) is not None
            for k, value in entry.items()
            if isinstance(value, torch.Tensor) and not is_spread(value) and f"{at}.{k}" in there
            if (place := of.state(tuple(value.shape))) is not None
        }


class _Known(NamedTuple):
    """Where parameters are, and the numbers of the tensors whose shards some of them are."""

    names: list[str]
    places: list[int]
    owners: list[int]


def is_spread(value: Any) -> bool:
    """Does it say itself how it is spread over ranks?"""
    return isinstance(value, _SPREAD)


def has_spread(values: Iterable[Any]) -> bool:
    """Does any? Of many it takes no time: they have few types."""
    return any(issubclass(kind, _SPREAD) for kind in set(map(type, values)))


def _owners(names: Sequence[str], tensors: Sequence[Any], places: Sequence[int]) -> list[int]:
    wanted = set(places) - {0}
    return [
        n
        for n, tensor in enumerate(tensors)
        if wanted
        and is_spread(tensor)
        and any(p.data_ptr() in wanted for p in local_memory_of(tensor))
    ]


def table_parts(tables: Iterable[tuple[str, Any]]) -> dict[int, TablePart]:
    """The parts of tables that are here, by their memory."""
    return {
        s.tensor.data_ptr(): TablePart(
            name, (s.offsets[0], s.offsets[1]), (s.sizes[0], s.sizes[1]), (rows, width), *number
        )
        for name, table in tables
        if len((leaf := leaf_of(name, table, per_rank=False)).shape) == 2
        for rows, width in [leaf.shape]
        for s in leaf.shards
        if s.tensor.numel()
        for number in [_column(name, table, s.offsets[1], s.sizes[1], width)]
    }


def _column(name: str, table: Any, first: int, width: int, whole: int) -> tuple[int, int]:
    """The number of a column shard among how many."""
    if isinstance(table, ShardedTensor):
        starts = sorted({m.shard_offsets[1] for m in table.metadata().shards_metadata})
        return starts.index(first), len(starts)
    # A DTensor knows its own shards only: they have to be of one width.
    if first % width or whole % width:
        raise BadInputError(
            f"{name}: its column shards have different widths, and a DTensor doesn't say which of them "
            f"[{first}, {first + width}) is; cut it evenly, or shard without DTensor output"
        )
    return first // width, whole // width


def empty_among(parameters: Mapping[Any, Any]) -> set[Any]:
    """The keys of those that have no element here."""
    kinds = set(map(type, parameters.values()))
    plain = all(issubclass(k, torch.Tensor) and not issubclass(k, _SPREAD) for k in kinds)
    if plain and all(p.numel() for p in parameters.values()):  # of nearly all: a quick look
        return set()
    return {key for key, p in parameters.items() if is_empty(p)}


def is_empty(parameter: Any) -> bool:
    """Has it no element here, as on a rank without a part of a table?"""
    return (
        isinstance(parameter, torch.Tensor) and not is_spread(parameter) and not parameter.numel()
    )
