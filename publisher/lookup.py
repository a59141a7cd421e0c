"""Pooled lookups: from int8 tables in a memory map, and from fp32 rows for the golden reference.

Ids outside [0, rows) add a zero vector and are counted; a mean divides by the bag's full
length. The operator itself would read row 0, or beyond the table, for such an id: they are
sent to row 0 with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

from ckpt.schema import FeatureSpec, LookupSpec
from publisher.request import Request, lengths_of, values_of

RowsOf = Callable[[str, list[int]], torch.Tensor]


class Int8Lookup:
    """One lookup of a description: one operator call over all of its features.

    The operator is built with tables of one row and then given the mapped file and the real
    offsets: it would allocate the tables otherwise. Any number of threads may call.

    Args:
        spec: the lookup.
        tables: the file that holds its tables, a uint8 tensor.
        offsets: where in it each table begins, by checkpoint key.
    """

    def __init__(self, spec: LookupSpec, tables: torch.Tensor, offsets: Mapping[str, int]) -> None:
        self.spec = spec
        features = spec.features
        # (unqualified call: a list of (name, rows, dim, type, place))
        self._operator = IntNBitTableBatchedEmbeddingBagsCodegen(
            [(f.feature, 1, f.dim, SparseType.INT8, EmbeddingLocation.HOST) for f in features],
            device="cpu",
            pooling_mode=PoolingMode.SUM,
            row_alignment=1,
            output_dtype=SparseType.FP32,
            bounds_check_mode=BoundsCheckMode.NONE,
            indices_dtype=torch.int64,
        )
        self._operator.initialize_weights()
        self._operator.weights_offsets = torch.tensor(
            [offsets[f.table_fqn] for f in features], dtype=torch.int64
        )
        self._operator.weights_host = tables
        self._rows = torch.tensor([f.rows for f in features])
        self._is_mean = torch.tensor([f.pooling == "mean" for f in features])

    def __call__(self, request: Request, unknown: dict[str, int]) -> torch.Tensor:
        """(batch, sum of dims) of a checked request; counts its unknown ids by feature."""
        features = self.spec.features
        ids = torch.cat([request[values_of(f.feature)] for f in features])
        lengths = torch.stack([request[lengths_of(f.feature)] for f in features])
        counts = lengths.sum(1)
        bad = (ids < 0) | (ids >= torch.repeat_interleave(self._rows, counts))
        weights = None
        if self._is_mean.any():
            # An empty bag has no ids: its infinite weight is never used.
            per_bag = torch.where(self._is_mean[:, None], 1.0 / lengths.float(), 1.0)
            weights = torch.repeat_interleave(per_bag.flatten(), lengths.flatten())
        if bad.any():
            _count(features, torch.split(bad, counts.tolist()), unknown)
            weights = torch.ones(len(ids)) if weights is None else weights
            weights, ids = weights.masked_fill(bad, 0.0), ids.masked_fill(bad, 0)
        bags = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        pooled: torch.Tensor = self._operator(ids, bags, weights)
        return pooled


def pool_rows(spec: LookupSpec, request: Request, rows_of: RowsOf) -> torch.Tensor:
    """The same lookup from fp32 rows: `rows_of(table, ids)` gives the rows of known ids."""
    out = []
    for f in spec.features:
        ids, lengths = request[values_of(f.feature)], request[lengths_of(f.feature)]
        bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        known = (ids >= 0) & (ids < f.rows)
        distinct, position = torch.unique(ids[known], return_inverse=True)
        rows = rows_of(f.table_fqn, distinct.tolist()).float().reshape(-1, f.dim)
        pooled = torch.zeros(len(lengths), f.dim).index_add_(0, bag[known], rows[position])
        if f.pooling == "mean":
            pooled /= lengths.clamp(min=1)[:, None]
        out.append(pooled)
    return torch.cat(out, 1)


def _count(
    features: tuple[FeatureSpec, ...], bad: tuple[torch.Tensor, ...], unknown: dict[str, int]
) -> None:
    for f, of_feature in zip(features, bad, strict=True):
        if n := int(of_feature.sum()):
            unknown[f.feature] = unknown.get(f.feature, 0) + n
