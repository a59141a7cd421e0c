"""A second tiny model: a sequence lookup, weights, and every kind of id map.

item   hashed, a sequence of vectors; the program also gets its rows and lengths
user   a vocabulary, whose unknown ids take row 0
tag    behind a managed collision, weighted by the request; the program gets the weights, too
page   identity, weighted by position; unknown ids add nothing
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import safetensors.torch
import torch

from ckpt import layout
from ckpt.digest import digest_of
from ckpt.idmaps import EMPTY_SLOT, hashed
from ckpt.manifest import RunRecord, encode
from ckpt.schema import (
    CollisionSpec,
    ConstantSpec,
    FeatureSpec,
    HashedIds,
    InputSpec,
    LookupSpec,
    OutputSpec,
    RequestFeature,
    ServingDescription,
    VocabularyIds,
)
from tests.publisher.tiny import RUN_ID, TinyRun

ITEMS, USERS, TAGS, PAGES = 11, 5, 8, 6
ITEM, USER, TAG, PAGE = (f"model.{n}.weight" for n in ("item", "user", "tag", "page"))
RAW_TAGS, TAG_ROWS, POSITION = "model.mc.raw", "model.mc.rows", "model.position"
HASH = HashedIds(seed=3, modulus=ITEMS)
VOCABULARY = {"raw": torch.tensor([-7, 100, 2**40]), "row": torch.tensor([4, 1, 3])}
VOCABULARY_KEY = "serving/descriptions/d1/user.safetensors"
KNOWN_TAGS = {900: 2, -5: 0, 31: 6}
Bags = Sequence[Sequence[int]]


class Dense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over = torch.nn.Linear(3 + 8, 1)

    def forward(  # the inputs of a program are positional
        self,
        dense: torch.Tensor,
        pooled: torch.Tensor,
        items: torch.Tensor,
        item_rows: torch.Tensor,
        item_lengths: torch.Tensor,
        user_ids: torch.Tensor,
        tag_weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ends = item_lengths.cumsum(0)
        bag = torch.searchsorted(ends, torch.arange(items.shape[0]), right=True)
        summed = torch.zeros(dense.shape[0], 2).index_add(0, bag, items)
        score = self.over(torch.cat([dense, pooled, summed], 1)).squeeze(1)
        return score, summed, item_rows + 0, user_ids + 0, tag_weights * 2


@cache
def program() -> bytes:
    batch = torch.export.Dim("batch", min=1, max=4096)
    items, users, tags = (torch.export.Dim(n, max=1 << 20) for n in ("items", "users", "tags"))
    given = (
        torch.randn(3, 3),
        torch.randn(3, 6),
        torch.randn(5, 2),
        torch.arange(5),
        torch.tensor([2, 0, 3]),
        torch.arange(4),
        torch.rand(7),
    )
    sizes = (batch, batch, items, items, batch, users, tags)
    exported = torch.export.export(
        Dense().eval(), given, dynamic_shapes=tuple({0: s} for s in sizes)
    )
    out = io.BytesIO()
    torch.export.save(exported, out)
    return out.getvalue()


def request(item: Bags, user: Bags, tag: Bags, page: Bags) -> dict[str, torch.Tensor]:
    out = {"dense": torch.arange(3.0 * len(item)).reshape(-1, 3) / 10}
    for name, bags in (("item", item), ("user", user), ("tag", tag), ("page", page)):
        out[f"{name}.values"] = torch.tensor([i for b in bags for i in b], dtype=torch.int64)
        out[f"{name}.lengths"] = torch.tensor([len(b) for b in bags], dtype=torch.int64)
    out["tag.weights"] = torch.arange(len(out["tag.values"])) / 4 + 0.5
    return out


def golden() -> dict[str, torch.Tensor]:
    """With the ids that the trainer made: unknown user 5 has row 0 there."""
    out = request(
        [[70, 71], [], [-1]], [[100], [5, -7], [2**40]], [[31], [900, 12], []], [[0, 5], [3], []]
    )
    out["item.rows"] = torch.from_numpy(hashed(out["item.values"].numpy(), HASH))
    out["user.rows"] = torch.tensor([1, 0, 4, 3])
    return out


def description(**changes: object) -> ServingDescription:
    code = program()
    vocabulary, sha256 = safetensors.torch.save(VOCABULARY), hashlib.sha256(code).hexdigest()
    made = ServingDescription(
        model="rich",
        program_key=layout.code_key(sha256, ".pt2"),
        program_sha256=sha256,
        golden_key=f"{layout.description_prefix('d1')}golden.safetensors",
        golden_digest=digest_of(safetensors.torch.save(golden())),
        export_max_abs_err=0.0,
        inputs=(
            InputSpec("dense", "dense", "float32", ("batch", 3)),
            InputSpec("ebc#0", "lookup", "float32", ("batch", 6)),
            InputSpec("items", "rows", "float32", ("ids:item", 2), ("ec#0", "item")),
            InputSpec("item_rows", "row_ids", "int64", ("ids:item",), ("ec#0", "item")),
            InputSpec("item_lengths", "lengths", "int64", ("batch",), ("item",)),
            InputSpec("user_ids", "values", "int64", ("ids:user",), ("user",)),
            InputSpec("tag_weights", "weights", "float32", ("ids:tag",), ("tag",)),
        ),
        lookups=(
            LookupSpec("ec#0", (FeatureSpec("item", ITEM, ITEMS, 2, "none", "item"),)),
            LookupSpec(
                "ebc#0",
                (
                    FeatureSpec("tag", TAG, TAGS, 2, "sum", weights="request", collision="tags"),
                    FeatureSpec("user", USER, USERS, 2, "mean"),
                    FeatureSpec(
                        "page", PAGE, PAGES, 2, "sum", weights="position", position_fqn=POSITION
                    ),
                ),
            ),
        ),
        constants=(
            ConstantSpec("over.weight", "model.over.weight", "float32", (1, 11)),
            ConstantSpec("over.bias", "model.over.bias", "float32", (1,)),
        ),
        outputs=(
            OutputSpec("score", "float32", ("batch",)),
            OutputSpec("item_sum", "float32", ("batch", 2)),
            OutputSpec("item_rows", "int64", ("ids:item",)),
            OutputSpec("user_ids", "int64", ("ids:user",)),
            OutputSpec("tag_weights", "float32", ("ids:tag",)),
        ),
        features=(
            RequestFeature("item", HASH),
            RequestFeature(
                "user",
                VocabularyIds(VOCABULARY_KEY, digest_of(vocabulary), 3),
                unknown="row",
                unknown_row=0,
            ),
            RequestFeature("tag", weighted=True),
            RequestFeature("page"),
            RequestFeature("unused"),
        ),
        collisions=(CollisionSpec("tags", RAW_TAGS, TAG_ROWS, TAGS, 0, (7,)),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    raw, rows = torch.full((TAGS,), EMPTY_SLOT), torch.arange(TAGS)
    for slot, (tag, row) in enumerate(KNOWN_TAGS.items()):
        raw[slot], rows[slot] = tag, row
    return {
        **{
            n: torch.randn(r, 2, generator=g)
            for n, r in ((ITEM, ITEMS), (USER, USERS), (TAG, TAGS), (PAGE, PAGES))
        },
        RAW_TAGS: raw,
        TAG_ROWS: rows,
        POSITION: torch.tensor([0.5, 2.0, -1.0]),
        "model.over.weight": torch.randn(1, 11, generator=g),
        "model.over.bias": torch.randn(1, generator=g),
    }


def begin(run: TinyRun, described: ServingDescription | None = None) -> TinyRun:
    """What a trainer of this model would have written at its start."""
    described = described or description()
    run.root.create(layout.RUN, encode(RunRecord(RUN_ID, 1.0, "test")))
    run.attempt(1, None)
    run.trust.add(program())
    run.root.create(described.program_key, program())
    run.root.create(described.golden_key, safetensors.torch.save(golden()))
    run.root.create(VOCABULARY_KEY, safetensors.torch.save(VOCABULARY))
    run.describe("d1", described)
    return run


def plain(held: dict[str, torch.Tensor], asked: dict[str, torch.Tensor]) -> dict[str, object]:
    """The model's answer, id by id."""

    def bags(name: str) -> list[list[int]]:
        values, out = asked[f"{name}.values"].tolist(), []
        for n in asked[f"{name}.lengths"].tolist():
            out.append(values[:n])
            values = values[n:]
        return out

    known_users = dict(zip(VOCABULARY["raw"].tolist(), VOCABULARY["row"].tolist(), strict=True))
    weights = iter(asked["tag.weights"].tolist())
    scores, sums, item_rows, user_ids = [], [], [], []
    for b, dense in enumerate(asked["dense"]):
        tag = torch.zeros(2)
        for i in bags("tag")[b]:
            tag += next(weights) * held[TAG][KNOWN_TAGS.get(i, 7)]
        users = [known_users.get(i, 0) for i in bags("user")[b]]
        user = sum((held[USER][r] for r in users), torch.zeros(2)) / max(len(users), 1)
        page = torch.zeros(2)
        for position, i in enumerate(bags("page")[b]):
            if 0 <= i < PAGES:
                page += held[POSITION][position] * held[PAGE][i]
        items = hashed(np.array(bags("item")[b], np.int64), HASH).tolist()
        summed = sum((held[ITEM][r] for r in items), torch.zeros(2))
        x = torch.cat([dense, tag, user, page, summed])
        scores.append(float(held["model.over.weight"][0] @ x + held["model.over.bias"][0]))
        sums.append(summed.tolist())
        item_rows += items
        user_ids += users
    return {
        "score": torch.tensor(scores),
        "item_sum": torch.tensor(sums),
        "item_rows": torch.tensor(item_rows, dtype=torch.int64),
        "user_ids": torch.tensor(user_ids, dtype=torch.int64),
        "tag_weights": asked["tag.weights"] * 2,
    }
