"""Proof that collections do what the schema says: its reading of the live tables gives their output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpt.errors import BadInputError
from ckpt.idmaps import KnownIds, collided
from ckpt.schema import CollisionSpec, FeatureSpec, LookupSpec
from ckpt.tree import Leaf, flatten
from trainer.description.request import Feature
from trainer.description.shadow import Call

TOLERANCE = 1e-4
"""Largest accepted error, relative to values above 1."""

_ROOT = "model"


class LiveTables:
    """Rows of the model's tables by checkpoint key, wherever they are. Its methods are collective.

    Args:
        model: the live model. prefix: what stands before its names in checkpoint keys.
        collisions: the managed collisions of the schema.
    """

    def __init__(self, model: nn.Module, prefix: str, collisions: Sequence[CollisionSpec]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._leaves = flatten({_ROOT: model}, rank).leaves
        self._prefix = prefix
        self._collisions = {c.name: c for c in collisions}

    def rows(self, spec: FeatureSpec, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(row of each id, int64 (n,); its vector, float32 (n, dim)), on the device of `ids`."""
        row = ids.long() if spec.collision is None else self._collided(spec.collision, ids)
        total = torch.zeros(len(row), spec.dim, device=ids.device)
        copies = torch.zeros_like(total)
        for shard in self._leaf(spec.table_fqn).shards:
            begin, column = shard.offsets
            here = (row >= begin) & (row < begin + shard.sizes[0])
            columns = slice(column, column + shard.sizes[1])
            total[here, columns] += shard.tensor[row[here] - begin].to(total)
            copies[here, columns] += 1
        _sum_over_ranks(total)
        _sum_over_ranks(copies)
        return row, total / copies.clamp(min=1)

    def position_weights(self, fqn: str) -> Tensor:
        return self._leaf(fqn).shards[0].tensor

    def _collided(self, name: str, ids: Tensor) -> Tensor:
        """What the buffers make of some raw ids; each rank knows those of its own shard."""
        spec = self._collisions[name]
        parts = zip(
            self._leaf(spec.raw_ids_fqn).shards, self._leaf(spec.rows_fqn).shards, strict=True
        )
        known = torch.full_like(ids, -1, dtype=torch.int64)
        for raw, row in parts:
            # Copies: torch takes a tensor that numpy has seen for one that can't be resized any more.
            raw_ids, rows = (t.tensor.detach().to("cpu", copy=True) for t in (raw, row))
            table = KnownIds.of(raw_ids.numpy(), rows.numpy(), name)
            found = torch.from_numpy(table.rows(ids.cpu().long().numpy())).to(known)
            known = torch.maximum(known, found)
        if _world_size() > 1:
            dist.all_reduce(known, op=dist.ReduceOp.MAX)
        asked, found_rows = ids.cpu().long().numpy(), known.cpu().numpy()
        unique, first = np.unique(asked[found_rows >= 0], return_index=True)
        mapped = collided(
            asked,
            KnownIds(unique, found_rows[found_rows >= 0][first]),
            spec.block,
            spec.unknown_rows,
        )
        return torch.from_numpy(mapped).to(ids.device)

    def _leaf(self, fqn: str) -> Leaf:
        leaf = self._leaves.get(f"{_ROOT}.{fqn.removeprefix(self._prefix)}")
        if leaf is None:
            raise BadInputError(f"the model's state has no tensor {fqn.removeprefix(self._prefix)}")
        return leaf


def check_lookup(
    call: Call, lookup: LookupSpec, request: Mapping[str, Feature], tables: LiveTables
) -> None:
    """Read the request's rows as the schema says, and compare with what the collection gave.

    Collective. BadInputError naming the feature that differs. It does happen: TorchRec 1.8 divides
    means twice, where a row-wise table with MEAN shares its collection with tables cut otherwise.
    """
    column = 0
    for spec in lookup.features:
        ids = request[spec.feature].ids
        row, vectors = tables.rows(spec, ids.values())
        if call.pooled is not None:
            want = _pooled(spec, ids, vectors, tables)
            got = call.pooled[:, column : column + spec.dim]
            column += spec.dim
        else:
            jagged = call.sequences[spec.output]
            want, got = vectors, jagged.values()
            _check_sequence(call, spec, jagged, ids.lengths(), row)
        if want.shape != got.shape:
            raise BadInputError(
                _differs(call, spec, f"{tuple(got.shape)}, not {tuple(want.shape)}")
            )
        error = float((want - got).abs().max()) if want.numel() else 0.0
        if not error <= TOLERANCE * max(1.0, float(got.abs().max()) if got.numel() else 0.0):
            raise BadInputError(_differs(call, spec, f"off by {error:.3g}"))


def _pooled(spec: FeatureSpec, ids: Feature, vectors: Tensor, tables: LiveTables) -> Tensor:
    lengths: Tensor = ids.lengths().long()  # type: ignore[attr-defined]
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    if spec.weights == "request":
        vectors = vectors * ids.weights()[:, None]  # type: ignore[attr-defined]
    elif spec.weights == "position":
        assert spec.position_fqn is not None, "lookup_of gives both or none"
        within = torch.arange(len(bag), device=bag.device) - (lengths.cumsum(0) - lengths)[bag]
        vectors = vectors * tables.position_weights(spec.position_fqn)[within][:, None]
    pooled = torch.zeros(len(lengths), spec.dim, dtype=vectors.dtype, device=vectors.device)
    pooled.index_add_(0, bag, vectors)
    return pooled / lengths.clamp(min=1)[:, None] if spec.pooling == "mean" else pooled


def _check_sequence(
    call: Call, spec: FeatureSpec, jagged: object, lengths: Tensor, row: Tensor
) -> None:
    if not torch.equal(jagged.lengths().long(), lengths.long()):  # type: ignore[attr-defined]
        raise BadInputError(_differs(call, spec, "other lengths"))
    indices = jagged.weights_or_none()  # type: ignore[attr-defined]
    if indices is not None and not torch.equal(indices.long(), row):
        raise BadInputError(_differs(call, spec, "need_indices gives other rows"))


def _differs(call: Call, spec: FeatureSpec, how: str) -> str:
    what = "made of" if spec.pooling == "none" else f"the {spec.pooling} of"
    rows = "its rows" if spec.collision is None else f"the rows that {spec.collision} gives it"
    message = f"{call.name}: feature {spec.feature!r} isn't {what} {rows} ({how})"
    if spec.pooling == "mean":
        message += "; in TorchRec 1.8, row-wise tables with MEAN need a collection of their own"
    return message


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum_over_ranks(tensor: Tensor) -> None:
    if _world_size() > 1:
        dist.all_reduce(tensor)
