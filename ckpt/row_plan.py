"""Row-wise optimizer state of a table, from however its columns were cut to however they are.

Such state has a value for each row of each column shard: the mean, over the shard's columns, of something
that is kept for each element (squares of gradients), or a count that is the same in all. The shards' rows are
stored one after the other. So the value of a wider shard is the mean of those in it, weighted by their
columns; that of a narrower one isn't known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from ckpt.canonical.alike import few
from ckpt.index import TensorInfo
from ckpt.pieces import Merge, Piece
from ckpt.tree import Leaf, Shard, torch_dtype

if TYPE_CHECKING:
    from ckpt.restore_plan import Matching

_COUNTS = frozenset(("prev_iter", "row_counter"))
# What keeps a mean over the columns of a row; what others keep for a row isn't known to be one.
_MEANS = frozenset(
    (
        "fbgemm.EXACT_ROWWISE_ADAGRAD",
        "fbgemm.PARTIAL_ROWWISE_ADAM",
        "fbgemm.PARTIAL_ROWWISE_LAMB",
        "torchrec.optim.rowwise_adagrad.RowWiseAdagrad",
    )
)
Interval = tuple[int, int]


class Table(NamedTuple):
    """A table here, and as it was stored. `kind`: the class of optimizer whose state was stored."""

    leaf: Leaf
    info: TensorInfo
    kind: str

    @property
    def stored_columns(self) -> list[Interval]:
        """[first, stop) of each column shard of the save, in their order."""
        return sorted({(o[1], o[1] + n[1]) for o, n in self.info.boxes if 0 not in n})


def is_of_rows(shape: Sequence[int], table: Sequence[int]) -> bool:
    """Has it a value for each row of each column shard of a table?"""
    return (
        len(table) == 2
        and tuple(shape) != tuple(table)
        and (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1))
        and table[0] > 0
        and shape[0] > 0
        and shape[0] % table[0] == 0
    )


def unknown_cut(parameter: Any, info: TensorInfo) -> str | None:
    """Why row-wise state of a parameter can't be taken where the table isn't on both sides. None: it can.

    Where all column shards have one width, as many of them are the same ones.
    """
    if not isinstance(parameter, ShardedTensor) or not is_of_rows(info.shape, parameter.size()):
        return None
    widths = {shard.shard_sizes[1] for shard in parameter.metadata().shards_metadata}
    if len(widths) < 2:
        return None
    return (
        f"is row-wise state of column shards of {few(sorted(widths))} columns here, and how they were cut "
        f"at the save isn't known: have the module in the state and in the checkpoint"
    )


def fit_rows(m: Matching, leaf: Leaf, info: TensorInfo, table: Table, at: str) -> Any:
    """Fill the row-wise state `leaf` of a table from `info`. Tells what can't be."""
    m.found.claimed.add(info.fqn)
    m.by_rows.add(leaf.fqn)
    rows, columns = table.leaf.shape[0], table.stored_columns
    here = [s for s in leaf.shards if s.sizes[0]]
    of = _columns_here(here, table)
    out_with = f"leave it out with {m.spell('exclude', [at])}"
    if info.dtype != leaf.dtype or info.shape[0] != rows * len(columns):
        m.found.wrong.append(
            f"{at}: the checkpoint has {info.dtype} {list(info.shape)} for {len(columns)} column shards of "
            f"{rows} rows of {table.leaf.fqn}, and the state has {leaf.dtype}; {out_with}"
        )
        return leaf.source
    if of is None:
        m.found.wrong.append(
            f"{at}: {table.leaf.fqn} has other shards on this rank than this state of it, so that their "
            f"columns can't be told; {out_with}"
        )
        return leaf.source
    for shard, (first, stop) in zip(here, of, strict=True):
        out = shard.tensor.select(1, 0) if shard.tensor.dim() > 1 else shard.tensor
        inside = [n for n, (a, b) in enumerate(columns) if a < stop and b > first]
        if at.rpartition(".")[2] in _COUNTS:
            inside = inside[:1]  # they have all counted the same
        elif why := _refusal(m, [columns[n] for n in inside], (first, stop), table.kind):
            m.found.wrong.append(
                f"{at}: row-wise state of {table.leaf.fqn}, whose column shards were {_shown(columns)} at "
                f"the save and are others here: {why}, or {out_with}"
            )
            return leaf.source
        elif any(columns[n][0] < first or columns[n][1] > stop for n in inside):
            m.found.notes.append(
                f"{at}: approximate: column shards of {table.leaf.fqn} get the mean of those of the save "
                f"that they have columns of"
            )
        shares = [min(columns[n][1], stop) - max(columns[n][0], first) for n in inside]
        starts = [rows * n + shard.offsets[0] % rows for n in inside]
        if len(inside) == 1:
            m.found.pieces.append(Piece(at, info.fqn, (_box(info, starts[0], out),)))
        else:
            parts = dict(zip(starts, shares, strict=True))
            m.found.merges.append(_merge(m, at, info, parts, out))
    return leaf.source


def _refusal(m: Matching, stored: Sequence[Interval], here: Interval, kind: str) -> str | None:
    """Why the values of these column shards can't become that of one, and what to do."""
    if stored == [here]:
        return None
    if kind not in _MEANS:
        return f"what {kind} keeps for a row isn't known to be a mean; restore at the sharding of the save"
    whole = all(here[0] <= a and b <= here[1] for a, b in stored)
    if not whole and not m.terms.approximate:
        return (
            f"the value of a part of one isn't known; restore at the sharding of the save, take the whole's "
            f"for it with {m.spell('approximate', True)}"
        )
    return None


def _columns_here(shards: Sequence[Shard], table: Table) -> list[Interval] | None:
    """The columns of the table that each of these shards of its state is of. None: it can't be told."""
    of = [s for s in table.leaf.shards if s.tensor.numel()]
    if len(of) != len(shards):
        return None
    # Both have the shards of one column one after the other.
    of.sort(key=lambda s: (s.offsets[1], s.offsets[0]))
    columns = {}
    for n, s in zip(sorted(range(len(of)), key=lambda n: shards[n].offsets[0]), of, strict=True):
        if s.sizes[0] != shards[n].sizes[0]:
            return None
        columns[n] = s.offsets[1], s.offsets[1] + s.sizes[1]
    return [columns[n] for n in range(len(of))]


def _box(info: TensorInfo, row: int, out: torch.Tensor) -> Shard:
    """Rows from `row` on of a stored tensor, to fill `out` of shape (rows,)."""
    if len(info.shape) == 1:
        return Shard((row,), (len(out),), out)
    return Shard((row, 0), (len(out), 1), out.unsqueeze(1))


def _merge(
    m: Matching, at: str, info: TensorInfo, shares: Mapping[int, int], out: torch.Tensor
) -> Merge:
    """The mean of boxes of a stored tensor, by their first rows; they are read before anything is changed."""
    dtype = torch_dtype(info.dtype)
    parts = {row: torch.empty(len(out), dtype=dtype, device="cpu") for row in shares}
    boxes = tuple(_box(info, row, part) for row, part in parts.items())
    m.found.pieces.append(Piece(at, info.fqn, boxes, ours=True))
    return Merge(at, out, tuple(parts.values()), tuple(shares.values()))


def _shown(columns: Sequence[Interval]) -> str:
    return ", ".join(f"[{a}, {b})" for a, b in columns)
