from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import CorruptError, UnsupportedFormatError
from ckpt.manifest import canonical, seal
from ckpt.schema import (
    KIND,
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
    decode_description,
    encode_description,
)

DESCRIPTION = ServingDescription(
    model="dlrm",
    program_key="code/ff.pt2",
    program_sha256="ff",
    golden_key="serving/descriptions/x/golden.safetensors",
    golden_digest="xxh3-128:00",
    export_max_abs_err=1e-7,
    inputs=(
        InputSpec("dense", "dense", "float32", ("batch", 13)),
        InputSpec("pooled", "lookup", "float32", ("batch", 2, 16)),
    ),
    lookups=(
        LookupSpec(
            "pooled",
            (
                FeatureSpec("user", "model.user.weight", 100, 16, "sum"),
                FeatureSpec("friend", "model.user.weight", 100, 16, "mean"),
                FeatureSpec("item", "model.item.weight", 50, 16, "sum"),
            ),
        ),
    ),
    constants=(
        ConstantSpec("w", "model.over.weight", "float32", (4, 4)),
        ConstantSpec("scale", None, "float32", ()),
    ),
    outputs=(OutputSpec("score", "float32", ("batch",)),),
    features=(
        RequestFeature("user"),
        RequestFeature("friend", HashedIds(7, 100), "row", 3, weighted=True),
        RequestFeature("item", VocabularyIds("serving/v", "xxh3-128:11", 50), "refuse"),
    ),
    collisions=(CollisionSpec("c", "model.raw", "model.row", 9, 5, (4, 8)),),
)


def test_round_trip() -> None:
    assert decode_description(encode_description(DESCRIPTION), "k") == DESCRIPTION


def test_tables_are_named_once() -> None:
    assert DESCRIPTION.tables() == {"model.user.weight": (100, 16), "model.item.weight": (50, 16)}


def test_every_truncation_is_corrupt() -> None:
    data = encode_description(DESCRIPTION)
    for n in range(len(data)):
        with pytest.raises(CorruptError, match=r"^k: "):
            decode_description(data[:n], "k")


def test_every_flipped_byte_is_found() -> None:
    data = encode_description(DESCRIPTION)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises((CorruptError, UnsupportedFormatError), match=r"^k: "):
            decode_description(damaged, "k")


def test_another_version_is_named() -> None:
    doc = {**json.loads(encode_description(DESCRIPTION)), "format": 1}
    with pytest.raises(UnsupportedFormatError, match=r"^k: format version 1"):
        decode_description(canonical(doc), "k")


def put(*path: Any) -> Callable[[Any, Any], None]:
    def change(body: Any, value: Any) -> None:
        for part in path[:-1]:
            body = body[part]
        body[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (put("model"), 5),
        (put("program_sha256"), None),
        (put("export_max_abs_err"), "0.1"),
        (put("export_max_abs_err"), True),
        (put("export_max_abs_err"), 10**400),
        (put("inputs"), None),
        (put("inputs"), [5]),
        (put("inputs"), {"a": 1}),
        (put("inputs", 0, "kind"), "sparse"),
        (put("inputs", 0, "shape"), ["rows"]),
        (put("inputs", 0, "shape"), [-1]),
        (put("inputs", 0, "shape"), 5),
        (put("lookups", 0, "features"), None),
        (put("lookups", 0, "features", 0, "rows"), -1),
        (put("lookups", 0, "features", 0, "rows"), 1.5),
        (put("lookups", 0, "features", 0, "pooling"), "max"),
        (put("lookups", 0, "features", 0, "pooling"), []),
        (put("constants", 0, "fqn"), 5),
        (put("constants", 0, "shape"), ["batch"]),
        (put("outputs", 0), {}),
        (put("outputs", 0, "shape"), ["ids:nobody"]),
        (put("features", 0, "name"), "someone"),
        (put("features", 1, "ids", "kind"), "eval"),
        (put("features", 1, "ids", "seed"), None),
        (put("features", 1, "unknown"), "guess"),
    ],
)
def test_wrong_fields_are_corrupt(change: Callable[[Any, Any], None], value: Any) -> None:
    body = json.loads(encode_description(DESCRIPTION))["body"]
    change(body, value)
    with pytest.raises(CorruptError, match=r"^k: "):
        decode_description(seal(KIND, body), "k")


def test_a_missing_field_is_corrupt() -> None:
    for name in json.loads(encode_description(DESCRIPTION))["body"]:
        body = json.loads(encode_description(DESCRIPTION))["body"]
        del body[name]
        with pytest.raises(CorruptError, match=f"^k: missing {name};"):
            decode_description(seal(KIND, body), "k")
