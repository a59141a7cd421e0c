"""Lookups against a plain Python reference: formats, unknown ids, means, weights, sequences (case D58)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.schema import FeatureSpec, LookupSpec, Pooling, RequestFeature, ServingDescription
from publisher.ids import IdMaps, Unknown, counts
from publisher.lookup import Found, ReferenceLookup, TableLookup
from publisher.records import TableFormat
from publisher.request import RequestSpec
from tests.publisher.packed_tables import Image
from tests.publisher.tiny import description

MARK = 1000.0
FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)
Bags = Sequence[Sequence[int]]
POSITIONS = torch.tensor([0.5, 2.0, -1.0, 0.25, 3.0, 1.5])


class Bench:
    """Tables of one lookup in memory, marked rows after each of them, and the two ways to look up."""

    def __init__(
        self,
        spec: LookupSpec,
        formats: Mapping[str, TableFormat],
        *,
        marked: bool = True,
        unknown: RequestFeature | None = None,
    ) -> None:
        self.spec = spec
        tables: dict[str, tuple[torch.Tensor, TableFormat]] = {}
        for f in spec.features:
            table = torch.randint(0, 16, (f.rows, f.dim)).float()
            if f.rows:  # whole steps of one number, so that int4 and int8 hold them exactly
                table[:, 0], table[:, -1] = 0.0, 15.0
            tables[f.table_fqn] = (table, formats[f.table_fqn])
            if marked:
                tables[f"{f.table_fqn}.mark"] = (torch.full((4, f.dim), MARK), formats[f.table_fqn])
        names = dict.fromkeys(f.feature for f in spec.features)
        weighted = {f.feature for f in spec.features if f.weights == "request"}
        self.features = tuple(
            unknown if unknown and unknown.name == n else RequestFeature(n, weighted=n in weighted)
            for n in names
        )
        described: ServingDescription = description(
            lookups=(spec,), features=self.features, inputs=(), constants=()
        )
        self.request = RequestSpec.of(described)
        self.image = Image(tables)
        maps = IdMaps(described, {"position:p": POSITIONS})
        self.maps = maps
        self.served = TableLookup(spec, maps, self.image.data, self.image.places)
        self.reference = ReferenceLookup(spec, maps, lambda fqn, rows: self.image.rows[fqn][rows])

    def tensors(self, bags: Mapping[str, Bags]) -> dict[str, torch.Tensor]:
        out = {}
        for f in self.features:
            of = bags[f.name]
            flat = [i for b in of for i in b]
            out[f"{f.name}.values"] = torch.tensor(flat, dtype=torch.int64)
            out[f"{f.name}.lengths"] = torch.tensor([len(b) for b in of], dtype=torch.int64)
            if f.weighted:
                out[f"{f.name}.weights"] = torch.arange(len(flat)).float() + 0.5
        return out

    def look_up(self, bags: Mapping[str, Bags]) -> tuple[Found, dict[str, int]]:
        """Both ways, which must agree."""
        request = self.request.read(self.tensors(bags))
        found: list[Found] = [{}, {}]
        missing: list[Unknown] = [{}, {}]
        for lookup, into, unknown in zip(
            (self.served, self.reference), found, missing, strict=True
        ):
            lookup(request, self.maps(request, unknown), unknown, into)
        assert found[0].keys() == found[1].keys()
        for key, tensor in found[0].items():
            torch.testing.assert_close(tensor, found[1][key], rtol=1e-5, atol=1e-3)
        counted = [counts(m) for m in missing]
        assert counted[0] == counted[1]
        return found[0], counted[0]

    def check(self, bags: Mapping[str, Bags]) -> None:
        """Against plain Python, counts of unknown ids too."""
        found, unknown = self.look_up(bags)
        want = torch.tensor(plain(self, bags))
        torch.testing.assert_close(found["lk",], want, rtol=1e-5, atol=1e-3)
        outside: dict[str, int] = {}
        for f in self.spec.features:
            n = sum(not 0 <= i < f.rows for bag in bags[f.feature] for i in bag)
            if n:
                outside[f.feature] = outside.get(f.feature, 0) + n
        assert unknown == outside


def plain(bench: Bench, bags: Mapping[str, Bags]) -> list[list[float]]:
    """What `ckpt.schema` promises of a pooled lookup, in plain Python."""
    batch = len(next(iter(bags.values())))
    out: list[list[float]] = [[] for _ in range(batch)]
    for f in bench.spec.features:
        rows, at = bench.image.rows[f.table_fqn].tolist(), 0
        for b, bag in enumerate(bags[f.feature]):
            total = [0.0] * f.dim
            for position, i in enumerate(bag):
                weight = {"none": 1.0, "request": at + 0.5, "position": 0.0}[f.weights]
                if f.weights == "position":
                    weight = float(POSITIONS[position])
                at += 1
                if 0 <= i < f.rows:
                    total = [x + weight * y for x, y in zip(total, rows[i], strict=True)]
            if f.pooling == "mean" and bag:
                total = [x / len(bag) for x in total]
            out[b] += total
    return out


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("table_format", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_d58_edges_of_one_table(
    rows: int, table_format: TableFormat, pooling: Pooling, marked: bool
) -> None:
    for dim in (2, 8, 64, *(() if table_format == "int4_rowwise" else (3,))):
        spec = LookupSpec("lk", (FeatureSpec("f", "t", rows, dim, pooling),))
        bench = Bench(spec, {"t": table_format}, marked=marked)
        edges: Bags = [[-1, 5, 7], [], [rows], [rows - 1], [-1], [0, rows, -(2**62), 2**62], [0, 0]]
        bench.check({"f": edges})
        for bag in edges:  # each alone, at batch 1, too
            bench.check({"f": [bag]})
        bench.check({"f": [[], [], []]})


FEATURES = (
    FeatureSpec("a", "t.a", 5, 4, "sum"),
    FeatureSpec("b", "t.b", 1, 2, "mean", weights="request"),
    FeatureSpec("c", "t.none", 0, 6, "sum"),
    FeatureSpec("d", "t.a", 5, 4, "mean"),  # the same table again
    FeatureSpec("e", "t.e", 300, 10, "sum", weights="position", position_fqn="p"),
)
MIXED_FORMATS: dict[str, TableFormat] = {
    "t.a": "int4_rowwise",
    "t.b": "fp32",
    "t.none": "fp16",
    "t.e": "int8_rowwise",
}
MIXED = Bench(LookupSpec("lk", FEATURES), MIXED_FORMATS)
bag = st.lists(st.integers(-2, 302), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.tuples(*[st.lists(bag, min_size=n, max_size=n)] * 5)))
def test_d58_formats_and_weights_in_one_lookup(bags: tuple[list[list[int]], ...]) -> None:
    MIXED.check({f.feature: b for f, b in zip(FEATURES, bags, strict=True)})


def test_a_bag_beyond_the_weighted_positions_is_refused() -> None:
    from ckpt.errors import BadInputError

    bags: dict[str, Bags] = {f.feature: [[]] for f in FEATURES}
    with pytest.raises(BadInputError, match=r"e: a row has 7 ids.*first 6 positions"):
        MIXED.look_up({**bags, "e": [[0] * 7]})


def test_two_features_may_share_their_ids() -> None:
    spec = LookupSpec(
        "lk", (FeatureSpec("f", "t.x", 4, 2, "sum"), FeatureSpec("f", "t.y", 9, 4, "mean"))
    )
    bench = Bench(spec, {"t.x": "int8_rowwise", "t.y": "fp32"})
    bags: dict[str, Bags] = {"f": [[3, 8, -1], []]}
    found, unknown = bench.look_up(bags)
    torch.testing.assert_close(found["lk",], torch.tensor(plain(bench, bags)))
    assert unknown == {"f": 2}  # -1 lacks in both tables, 8 in one: each counts once
    assert math.isfinite(float(found["lk",].sum()))


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_sequence_gives_a_row_for_each_id(table_format: TableFormat) -> None:
    """Of several widths in one lookup; zeros and -1 for ids without a row."""
    spec = LookupSpec(
        "lk",
        (
            FeatureSpec("a", "t.a", 7, 4, "none", "item"),
            FeatureSpec("b", "t.b", 3, 8, "none", "other", weights="request"),
            FeatureSpec("c", "t.c", 0, 4, "none", "empty"),
        ),
    )
    bench = Bench(spec, dict.fromkeys(("t.a", "t.b", "t.c"), table_format))
    found, unknown = bench.look_up(
        {"a": [[6, 7], [], [0]], "b": [[2], [-1, 0], []], "c": [[], [0], []]}
    )
    zero = [0.0] * 4
    rows = bench.image.rows["t.a"].tolist()
    assert found["lk", "item", "ids"].tolist() == [6, -1, 0]
    torch.testing.assert_close(
        found["lk", "item"], torch.tensor([rows[6], zero, rows[0]]), rtol=1e-5, atol=1e-3
    )
    other = bench.image.rows["t.b"]
    want = torch.stack([0.5 * other[2], torch.zeros(8), 2.5 * other[0]])
    torch.testing.assert_close(found["lk", "other"], want, rtol=1e-5, atol=1e-3)
    assert found["lk", "empty"].tolist() == [zero]
    assert unknown == {"a": 1, "b": 1, "c": 1}
    nothing, _ = bench.look_up({"a": [[]], "b": [[]], "c": [[]]})
    assert [tuple(nothing["lk", o].shape) for o in ("item", "other", "empty")] == [
        (0, 4),
        (0, 8),
        (0, 4),
    ]
