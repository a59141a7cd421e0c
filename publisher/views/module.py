"""A version as one nn.Module, from request tensors to outputs, in plain aten operators.

Lookups gather rows, dequantise those alone, and add each to its bag's sum. All is linear in ids, and
made of operators that compilers and other runtimes know. A bag is found by cumulative sums, so that a
request whose lengths don't sum to its ids reads and writes nothing beyond the tensors: nobody checks
requests in front of a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckpt.errors import CorruptError
from ckpt.schema import FeatureSpec, ServingDescription
from publisher.formats import ROW_HEAD_BYTES, row_bytes
from publisher.program import DenseProgram
from publisher.records import PublishedTable
from publisher.request import torch_dtype
from publisher.views.interface import ViewFeature, ViewInterface, input_features


class TableRows(nn.Module):
    """One table, held as it is published.

    Args:
        table: its entry in the manifest.
        stored: uint8 (rows, row_bytes), at least one row.
    """

    values: Tensor
    head: Tensor

    def __init__(self, table: PublishedTable, stored: Tensor) -> None:
        super().__init__()
        if table.row_bytes != row_bytes(table.format, table.dim):
            raise CorruptError(
                f"{table.fqn}: rows of {table.row_bytes} bytes can't be {table.dim} columns of "
                f"{table.format}"
            )
        self._dim, self._format = table.dim, table.format
        if table.format in ("fp16", "fp32"):
            dtype = torch.float16 if table.format == "fp16" else torch.float32
            self.register_buffer("values", stored.view(dtype))
            return
        self.register_buffer("values", stored[:, ROW_HEAD_BYTES:].contiguous())
        # A copy: to `contiguous` a single row has no gaps, and its odd stride would stay.
        heads = stored[:, :ROW_HEAD_BYTES].clone(memory_format=torch.contiguous_format)
        self.register_buffer("head", heads.view(torch.float16))

    def forward(self, rows: Tensor) -> Tensor:
        """float32 (ids, dim) for int64 rows (ids,), each of which must exist."""
        values = self.values[rows].float()
        if self._format in ("fp16", "fp32"):
            return values
        if self._format == "int4_rowwise":
            # Halves of a byte, in floats: exact, and no runtime lacks the operators.
            high = torch.floor(values / 16)
            values = torch.stack([values - 16 * high, high], 2).reshape(-1, self._dim)
        head = self.head[rows].float()
        return values * head[:, :1] + head[:, 1:]


class DensePart(nn.Module):
    """The dense program, its constants as buffers: so each exporter takes them for weights."""

    def __init__(self, program: DenseProgram, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._program = program
        self._names = {name: f"constant_{i}" for i, name in enumerate(program.exported)}
        for name, buffer in self._names.items():
            self.register_buffer(buffer, constants.get(name, program.exported[name]))

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        bound = self._program.bind({n: getattr(self, b) for n, b in self._names.items()})
        return tuple(bound(inputs))


@dataclass
class _Bags:
    """One feature's bags in a request: lengths is (batch,), all else (ids,).

    bag, position: the row that an id belongs to, and its place there. inside: it belongs to one, as all
        do in a request whose lengths sum to its ids; others must not be added beyond the batch.
    """

    ids: Tensor
    lengths: Tensor
    bag: Tensor
    position: Tensor
    inside: Tensor


class ViewModule(nn.Module):
    """Takes the interface's inputs by position; gives its outputs as a tuple.

    Args:
        description: the model's.
        interface: of its views.
        tables: by checkpoint key.
        dense: the dense part.
        positions: float32 weights by position in the bag, by checkpoint key.
    """

    def __init__(
        self,
        description: ServingDescription,
        interface: ViewInterface,
        tables: Mapping[str, TableRows],
        dense: DensePart,
        positions: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._description = description
        self._inputs = tuple(i.name for i in interface.inputs)
        self._features = {v.feature.name: v for v in interface.features}
        self._input_features = input_features(description)
        self._index = {fqn: i for i, fqn in enumerate(tables)}
        self.tables = nn.ModuleList(tables.values())
        self.dense = dense
        self._positions = {fqn: f"position_{i}" for i, fqn in enumerate(positions)}
        for fqn, weights in positions.items():
            self.register_buffer(self._positions[fqn], weights)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self._inputs, inputs, strict=True))
        bags = {name: _bags(v, given) for name, v in self._features.items()}
        pooled, rows, row_ids = {}, {}, {}
        for lk in self._description.lookups:
            parts = []
            for f in lk.features:
                known, at = self._pick(f, bags[f.feature])
                vectors = self.tables[self._index[f.table_fqn]](at)
                weights = self._weights(f, given, bags[f.feature])
                if f.pooling == "none":
                    vectors = vectors if weights is None else vectors * weights[:, None]
                    rows[lk.input, f.output] = torch.where(known[:, None], vectors, 0.0)
                    row_ids[lk.input, f.output] = torch.where(known, at, -1)
                else:
                    parts.append(_pool(f, bags[f.feature], known, weights, vectors))
            if parts:
                pooled[lk.input] = torch.cat(parts, 1)
        arguments = []
        for i in self._description.inputs:
            of = self._input_features.get(i.name)
            if i.kind == "dense":
                arguments.append(given[i.name])
            elif i.kind == "lookup":
                arguments.append(pooled[i.name].to(torch_dtype(i.dtype)))
            elif isinstance(of, FeatureSpec):
                found = rows if i.kind == "rows" else row_ids
                arguments.append(found[i.of[0], i.of[1]].to(torch_dtype(i.dtype)))
            else:
                feature = self._features[str(of)]
                names = {"values": feature.ids, "lengths": feature.lengths}
                name = names.get(i.kind, feature.weights)
                assert name is not None, f"{i.name}: {of} has no weights"
                arguments.append(given[name].to(torch_dtype(i.dtype)))
        outputs: tuple[Tensor, ...] = self.dense(arguments)
        return outputs

    def _pick(self, f: FeatureSpec, bags: _Bags) -> tuple[Tensor, Tensor]:
        """Which ids add something, and a row that exists for each id."""
        known = (bags.ids >= 0) & (bags.ids < f.rows)
        request = self._features[f.feature].feature
        row = request.unknown_row if request.unknown == "row" else None
        if row is not None and 0 <= row < f.rows:
            return torch.ones_like(known), torch.where(known, bags.ids, row)
        return known, torch.where(known, bags.ids, 0)

    def _weights(self, f: FeatureSpec, given: Mapping[str, Tensor], bags: _Bags) -> Tensor | None:
        if f.weights == "request":
            name = self._features[f.feature].weights
            assert name is not None, f"{f.feature}: its requests bring no weights"
            return given[name]
        if f.weights == "position" and f.position_fqn is not None:
            by_position: Tensor = getattr(self, self._positions[f.position_fqn])
            last = by_position.shape[0] - 1
            # Beyond the last position there is no weight: such ids add nothing.
            weights = by_position[bags.position.clamp(0, last)]
            return torch.where(bags.position <= last, weights, 0.0)
        return None


def _bags(view: ViewFeature, given: Mapping[str, Tensor]) -> _Bags:
    ids, lengths = given[view.ids], given[view.lengths]
    ends = lengths.cumsum(0)
    n = ids.shape[0]
    at = torch.arange(n, device=ids.device)
    # An id's row is the number of bags that ended before it: counted in one pass, whatever the batch.
    ended = ids.new_zeros(n + 1).index_add(0, ends.clamp(0, n), torch.ones_like(ends))
    bag = ended.cumsum(0)[:n]
    inside = bag < lengths.shape[0]
    bag = torch.where(inside, bag, 0)
    return _Bags(ids, lengths, bag, at - (ends - lengths)[bag], inside)


def _pool(
    f: FeatureSpec, bags: _Bags, known: Tensor, weights: Tensor | None, vectors: Tensor
) -> Tensor:
    """float32 (batch, dim); a mean divides by the full length."""
    adds = (bags.inside & known)[:, None]
    vectors = torch.where(adds, vectors if weights is None else vectors * weights[:, None], 0.0)
    zeros = vectors.new_zeros(bags.lengths.shape[0], f.dim)
    pooled = zeros.index_add(0, bags.bag, vectors)
    return pooled / bags.lengths.clamp(min=1)[:, None] if f.pooling == "mean" else pooled
