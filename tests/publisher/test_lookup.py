"""Lookups against a plain Python reference: empty bags, R-1, R, -1, mean, many tables (case D58)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.schema import FeatureSpec, LookupSpec, Pooling
from publisher.lookup import Int8Lookup, pool_rows
from tests.publisher.image import Rows, offsets_in_image, tables_of, write_all

MARK = 1000.0
Bags = Sequence[Sequence[int]]


class Tables:
    """Int8 tables in one file, each followed by a table of marked rows; and their exact content."""

    def __init__(self, spec: LookupSpec, *, marked: bool) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        stored: dict[str, torch.Tensor] = {}
        for n, f in enumerate(spec.features):
            if f.table_fqn in self.rows:
                continue
            # Whole steps of one number: int8 holds them exactly.
            table = torch.randint(0, 256, (f.rows, f.dim)).float()
            if f.rows:
                table[:, 0], table[:, -1] = 0.0, 255.0
            self.rows[f.table_fqn] = stored[f.table_fqn] = table
            if marked:
                stored[f"mark.{n}"] = torch.full((4, f.dim), MARK)
        image, made, results = write_all(tables_of(stored), Rows(stored))
        self.offsets = offsets_in_image(made, results)
        self.data = torch.frombuffer(bytearray(image), dtype=torch.uint8)
        self.lookup = Int8Lookup(spec, self.data, self.offsets)


def reference(
    spec: LookupSpec, rows: dict[str, torch.Tensor], bags: dict[str, Bags]
) -> list[list[float]]:
    """What `ckpt.schema` promises, in plain Python."""
    batch = len(next(iter(bags.values())))
    out: list[list[float]] = [[] for _ in range(batch)]
    for f in spec.features:
        for b, bag in enumerate(bags[f.feature]):
            total = [0.0] * f.dim
            for i in bag:
                if 0 <= i < f.rows:
                    total = [
                        x + y for x, y in zip(total, rows[f.table_fqn][i].tolist(), strict=True)
                    ]
            if f.pooling == "mean" and bag:
                total = [x / len(bag) for x in total]
            out[b] += total
    return out


def request_of(bags: dict[str, Bags]) -> dict[str, torch.Tensor]:
    out = {}
    for name, of in bags.items():
        out[f"{name}.values"] = torch.tensor([i for b in of for i in b], dtype=torch.int64)
        out[f"{name}.lengths"] = torch.tensor([len(b) for b in of], dtype=torch.int64)
    return out


def check(spec: LookupSpec, tables: Tables, bags: dict[str, Bags]) -> None:
    want = torch.tensor(reference(spec, tables.rows, bags))
    unknown: dict[str, int] = {}
    got = tables.lookup(request_of(bags), unknown)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    fp32 = pool_rows(spec, request_of(bags), lambda fqn, rows: tables.rows[fqn][rows])
    torch.testing.assert_close(fp32, want, rtol=1e-5, atol=1e-4)
    outside = {
        f.feature: sum(not 0 <= i < f.rows for bag in bags[f.feature] for i in bag)
        for f in spec.features
    }
    assert unknown == {name: n for name, n in outside.items() if n}


def one(rows: int, dim: int, pooling: Pooling) -> LookupSpec:
    return LookupSpec("lk", (FeatureSpec("f", "t", rows, dim, pooling),))


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dim", [2, 3, 8, 64])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_d58_edges_of_one_table(rows: int, dim: int, pooling: Pooling, marked: bool) -> None:
    spec = one(rows, dim, pooling)
    tables = Tables(spec, marked=marked)
    edges: Bags = [[-1, 5, 7], [], [rows], [rows - 1], [-1], [0, rows, -(2**62), 2**62], [0, 0]]
    check(spec, tables, {"f": edges})
    for bag in edges:  # each alone, at batch 1, too
        check(spec, tables, {"f": [bag]})
    check(spec, tables, {"f": [[], [], []]})


FEATURES = (
    FeatureSpec("a", "t.a", 5, 4, "sum"),
    FeatureSpec("b", "t.b", 1, 2, "mean"),
    FeatureSpec("c", "t.none", 0, 6, "sum"),
    FeatureSpec("d", "t.a", 5, 4, "mean"),  # the same table again
    FeatureSpec("e", "t.e", 300, 10, "sum"),
)
MIXED = LookupSpec("lk", FEATURES)
MIXED_TABLES = Tables(MIXED, marked=True)
bag = st.lists(st.integers(-2, 302), max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.tuples(*[st.lists(bag, min_size=n, max_size=n)] * 5)))
def test_d58_mixed_tables_equal_the_reference(bags: tuple[list[list[int]], ...]) -> None:
    check(MIXED, MIXED_TABLES, {f.feature: b for f, b in zip(FEATURES, bags, strict=True)})


def test_two_features_may_share_their_ids() -> None:
    spec = LookupSpec(
        "lk",
        (FeatureSpec("f", "t.x", 4, 2, "sum"), FeatureSpec("f", "t.y", 9, 4, "mean")),
    )
    tables = Tables(spec, marked=True)
    bags: dict[str, Bags] = {"f": [[3, 8, -1], []]}
    want = torch.tensor(reference(spec, tables.rows, bags))
    unknown: dict[str, int] = {}
    torch.testing.assert_close(tables.lookup(request_of(bags), unknown), want)
    assert unknown == {"f": 3}
    assert math.isfinite(float(want.sum()))
