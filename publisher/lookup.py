"""Lookups: from a version's tables in a memory map, and from fp32 rows for the golden reference.

Ids without a row add a zero vector, as `publisher.ids` says; a mean divides by the bag's full
length. The operator itself would read row 0, or beyond the table, for such an id: they are
sent to row 0 with weight 0. Tables of all formats go through one operator call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import fbgemm_gpu  # noqa: F401  (registers the operator)
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

from ckpt.errors import BadInputError
from ckpt.idmaps import Ids
from ckpt.schema import FeatureSpec, LookupSpec
from publisher.ids import IdMaps, LookupRows, PickedRows, Unknown
from publisher.records import TableFormat
from publisher.request import RequestIds

RowsOf = Callable[[str, list[int]], torch.Tensor]
Found = dict[tuple[str, ...], torch.Tensor]
"""What lookups found: (input,) a pooled one's vectors, (input, output) a sequence's rows, and
(input, output, "ids") which rows these are."""

_TYPES: dict[TableFormat, SparseType] = {
    "int8_rowwise": SparseType.INT8,
    "int4_rowwise": SparseType.INT4,
    "fp16": SparseType.FP16,
    "fp32": SparseType.FP32,
}


class TableLookup:
    """One lookup of a description over mapped tables. Any number of threads may call.

    Args:
        spec: the lookup.
        maps: the description's id maps.
        image: the tables' bytes, uint8.
        tables: where in it each table begins, and its format, by checkpoint key.
    """

    def __init__(
        self,
        spec: LookupSpec,
        maps: IdMaps,
        image: torch.Tensor,
        tables: Mapping[str, tuple[int, TableFormat]],
    ) -> None:
        self.spec = spec
        self._rows = LookupRows(spec, maps)
        self._weights = BagWeights(spec, maps)
        self._is_sequence = is_sequence(spec)
        if self._is_sequence:
            # The operator gives vectors of one width in a call.
            dims = dict.fromkeys(f.dim for f in spec.features)
            groups = [[i for i, f in enumerate(spec.features) if f.dim == d] for d in dims]
        else:
            groups = [list(range(len(spec.features)))]
        self._calls = [(g, _Call([spec.features[i] for i in g], image, tables)) for g in groups]

    def __call__(self, request: RequestIds, ids: list[Ids], unknown: Unknown, found: Found) -> None:
        """Look up a checked request's mapped ids into `found`; counts those without a row."""
        picked = self._rows(request, ids, unknown)
        weights = self._weights(request, picked)
        if self._is_sequence:
            self._look_up_rows(picked, weights, found)
            return
        if picked.missing is not None:
            weights = torch.ones(len(picked.rows)) if weights is None else weights
            weights = weights.masked_fill(torch.from_numpy(picked.missing), 0.0)
        bags = np.zeros(picked.lengths.size + 1, np.int64)
        np.cumsum(picked.lengths.ravel(), out=bags[1:])
        call = self._calls[0][1]
        found[self.spec.input,] = call(
            torch.from_numpy(picked.rows), torch.from_numpy(bags), PoolingMode.SUM.value, weights
        )

    def _look_up_rows(self, picked: PickedRows, weights: torch.Tensor | None, found: Found) -> None:
        vectors: list[torch.Tensor] = [torch.empty(0)] * len(picked.counts)
        parts = np.split(picked.rows, np.cumsum(picked.counts)[:-1])
        for group, call in self._calls:
            rows = np.concatenate([parts[i] for i in group])
            counts = [picked.counts[i] for i in group]
            ends = torch.from_numpy(np.cumsum([0, *counts]))
            got = call(torch.from_numpy(rows), ends, PoolingMode.NONE.value, None)
            for i, of_feature in zip(group, torch.split(got, counts), strict=True):
                vectors[i] = of_feature
        set_rows(self.spec, picked, weights, vectors, found)


class _Call:
    """The operator with all arguments that don't change from one request to the next."""

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        image: torch.Tensor,
        tables: Mapping[str, tuple[int, TableFormat]],
    ) -> None:
        offsets = [tables[f.table_fqn][0] for f in features]
        formats = [tables[f.table_fqn][1] for f in features]
        ends = np.cumsum([0, *(f.dim for f in features)])
        none = torch.empty(0, dtype=torch.uint8)
        places = torch.full((len(features),), EmbeddingLocation.HOST.value, dtype=torch.int32)
        widest = {t: max((f.dim for f, g in zip(features, formats, strict=True) if g == t), default=0)
                  for t in _TYPES}  # fmt: skip
        self._tables = (
            image,
            none,  # uvm_weights
            places,
            torch.tensor(offsets, dtype=torch.int64),
            torch.tensor([_TYPES[t].as_int() for t in formats], dtype=torch.uint8),
            torch.from_numpy(ends.astype(np.int32)),
            int(ends[-1]),
            0,  # the widest int2 table: there is none
            *(widest[t] for t in ("int4_rowwise", "int8_rowwise", "fp16", "fp32")),
        )
        operator = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
        self._operator = operator.default
        # Output in fp32, no cache, rows without gaps, no fp8.
        self._rest = (SparseType.FP32.as_int(), None, None, 1, 0, -1, -1)

    def __call__(
        self, rows: torch.Tensor, bags: torch.Tensor, pooling: int, weights: torch.Tensor | None
    ) -> torch.Tensor:
        got: torch.Tensor = self._operator(*self._tables, rows, bags, pooling, weights, *self._rest)
        return got


class BagWeights:
    """What one lookup's rows are multiplied by: weights of the request or by position, and means.

    Args:
        spec: the lookup.
        maps: holds the weights by position.
    """

    def __init__(self, spec: LookupSpec, maps: IdMaps) -> None:
        self._features = spec.features
        self._index = [maps.index[f.feature] for f in spec.features]
        self._is_mean = np.array([f.pooling == "mean" for f in spec.features])
        self._positions = {
            f.position_fqn: maps.positions(f.position_fqn)
            for f in spec.features
            if f.position_fqn is not None
        }
        self._weighted = any(f.weights != "none" for f in spec.features)
        self._any = self._weighted or bool(self._is_mean.any())

    def __call__(self, request: RequestIds, picked: PickedRows) -> torch.Tensor | None:
        """float32, one for each id; None: all are 1."""
        if not self._any:
            return None
        weights = None
        if self._weighted:
            weights = torch.cat([self._of(i, request, picked) for i in range(len(self._features))])
        if self._is_mean.any():
            # An empty bag has no ids: what it is given is never used.
            lengths = np.maximum(picked.lengths, 1).astype(np.float32)
            per_bag = np.where(self._is_mean[:, None], np.float32(1) / lengths, np.float32(1))
            shares = torch.from_numpy(np.repeat(per_bag.ravel(), picked.lengths.ravel()))
            weights = shares if weights is None else weights * shares
        return weights

    def _of(self, i: int, request: RequestIds, picked: PickedRows) -> torch.Tensor:
        f, n = self._features[i], picked.counts[i]
        if f.weights == "request":
            given = request.weights[self._index[i]]
            assert given is not None  # `check_description` saw to it
            return given
        if f.weights == "none":
            return torch.ones(n)
        assert f.position_fqn is not None  # `check_description` saw to it
        by_position, lengths = self._positions[f.position_fqn], picked.lengths[i]
        if n and (longest := int(lengths.max())) > len(by_position):
            raise BadInputError(
                f"{f.feature}: a row has {longest} ids, and the model has weights for the first "
                f"{len(by_position)} positions only; send shorter rows"
            )
        starts = np.cumsum(lengths) - lengths
        return by_position[torch.from_numpy(np.arange(n) - np.repeat(starts, lengths))]


class ReferenceLookup:
    """The same lookup from fp32 rows, the slow and plain way.

    Args:
        spec: the lookup.
        maps: the description's id maps.
        rows_of: gives the rows of a table, by checkpoint key.
    """

    def __init__(self, spec: LookupSpec, maps: IdMaps, rows_of: RowsOf) -> None:
        self.spec = spec
        self._rows = LookupRows(spec, maps)
        self._weights = BagWeights(spec, maps)
        self._rows_of = rows_of

    def __call__(self, request: RequestIds, ids: list[Ids], unknown: Unknown, found: Found) -> None:
        picked = self._rows(request, ids, unknown)
        weights = self._weights(request, picked)
        parts = [torch.from_numpy(p) for p in np.split(picked.rows, np.cumsum(picked.counts)[:-1])]
        vectors = []
        for f, rows in zip(self.spec.features, parts, strict=True):
            distinct, position = torch.unique(rows, return_inverse=True)
            # An empty table's zero row, and what ids that add nothing point at, isn't read.
            asked = distinct if f.rows else distinct[:0]
            of_table = self._rows_of(f.table_fqn, asked.tolist()).float().reshape(-1, f.dim)
            vectors.append(of_table[position] if f.rows else torch.zeros(len(rows), f.dim))
        if is_sequence(self.spec):
            set_rows(self.spec, picked, weights, vectors, found)
            return
        weights = torch.ones(len(picked.rows)) if weights is None else weights
        if picked.missing is not None:
            weights = weights.masked_fill(torch.from_numpy(picked.missing), 0.0)
        pooled = []
        for i, (rows, of_ids) in enumerate(
            zip(vectors, torch.split(weights, picked.counts), strict=True)
        ):
            lengths = torch.from_numpy(picked.lengths[i])
            bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            pooled.append(
                torch.zeros(len(lengths), rows.shape[1]).index_add_(0, bag, rows * of_ids[:, None])
            )
        found[self.spec.input,] = torch.cat(pooled, 1)


def is_sequence(spec: LookupSpec) -> bool:
    return spec.features[0].pooling == "none"


def set_rows(
    spec: LookupSpec,
    picked: PickedRows,
    weights: torch.Tensor | None,
    vectors: Sequence[torch.Tensor],
    found: Found,
) -> None:
    """A sequence's vectors into `found`: weighted, and zeros for the ids without a row."""
    start = 0
    for f, n, of_feature in zip(spec.features, picked.counts, vectors, strict=True):
        mine = slice(start, start + n)
        start += n
        rows = torch.from_numpy(picked.rows[mine])
        out = of_feature if weights is None else of_feature * weights[mine, None]
        if picked.missing is not None:
            missing = torch.from_numpy(picked.missing[mine])
            out = out.masked_fill(missing[:, None], 0.0)
            rows = rows.masked_fill(missing, -1)
        found[spec.input, f.output] = out
        found[spec.input, f.output, "ids"] = rows
