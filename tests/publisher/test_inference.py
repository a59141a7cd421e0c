"""The Open Inference Protocol's JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ckpt.errors import BadInputError, SidestageError
from ckpt.schema import RequestFeature
from publisher.inference import metadata_of, parse_request, response_of, wanted_outputs
from publisher.loading import Prediction
from tests.publisher.tiny import description


def one(data: Any, shape: Any = (2,), datatype: Any = "INT64", name: Any = "x") -> bytes:
    item = {"name": name, "shape": list(shape), "datatype": datatype, "data": data}
    return json.dumps({"inputs": [item]}).encode()


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (one([1, 2]), torch.tensor([1, 2])),
        (one([[1, 2], [3, 4]], (2, 2)), torch.tensor([[1, 2], [3, 4]])),
        (one([1, 2, 3, 4], (2, 2)), torch.tensor([[1, 2], [3, 4]])),
        (one([1, 2.5], datatype="FP32"), torch.tensor([1.0, 2.5])),
        (one([], (0,)), torch.zeros(0, dtype=torch.int64)),
        (one([], (0, 3), "FP32"), torch.zeros(0, 3)),
        (one([2**63 - 1, -(2**63)]), torch.tensor([2**63 - 1, -(2**63)])),
        (one([True, False], datatype="BOOL"), torch.tensor([True, False])),
        (one([1, 2], datatype="FP64"), torch.tensor([1.0, 2.0], dtype=torch.float64)),
        (one([1, 2], datatype="BF16"), torch.tensor([1, 2], dtype=torch.bfloat16)),
        (one([0, 255], datatype="UINT8"), torch.tensor([0, 255], dtype=torch.uint8)),
    ],
)
def test_inputs(body: bytes, want: torch.Tensor) -> None:
    got = parse_request(body, ["x"], 100)[0]["x"]
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe\xfd", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"inputs": NaN}', "NaN is no JSON number"),
        (b"[]", '"inputs"'),
        (b'{"inputs": {}}', '"inputs"'),
        (b'{"inputs": [3]}', r"inputs\[0\]: needs a name"),
        (one([1, 2], name=3), r"inputs\[0\]: needs a name"),
        (one([1, 2], datatype="INT65"), "input x: datatype 'INT65'; known are BOOL"),
        (one([1, 2], datatype=None), "input x: datatype None"),
        (one([1, 2], datatype=["INT64"]), "input x: datatype"),
        (one([1, 2], (-2,)), "is not a list of sizes"),
        (one([1, 2], (True,)), "is not a list of sizes"),
        (one([1, 2], (3,)), r"input x: 2 numbers for shape \[3\]"),
        (one([1, 2], (2**40, 2**40)), "more than 100 numbers, this server's limit"),
        (one([], (0, 2**70)), "more than 100 numbers, this server's limit"),
        (one([0] * 101, (101,)), "more than 100 numbers, this server's limit"),
        (one([1], (1,) * 9), "input x: 9 dimensions; at most 8"),
        (one([1, 2], name="y"), "input 'y': unknown; expected x"),
        (one("12"), "input x: data must be a list"),
        (one([1.5, 2.0]), "something that is no INT64 number"),
        (one(["a", "b"]), "something that is no INT64 number"),
        (one([None, 1]), "something that is no INT64 number"),
        (one([{}, 1]), "something that is no INT64 number"),
        (one([True, False]), "something that is no INT64 number"),
        (one([[1], [2, 3]]), "rows of different lengths"),
        (one([2**63, 0]), "something that is no INT64 number"),
        (one([2**70, 0]), "something that is no INT64 number"),
        (one([300, 0], datatype="UINT8"), "a number is outside UINT8"),
        (one([1e39, 0], datatype="FP32"), "a number is too large for FP32"),
        (
            json.dumps({"inputs": [json.loads(one([1, 2]))["inputs"][0]] * 2}).encode(),
            "input x: given twice",
        ),
    ],
)
def test_malformed_inputs_are_refused_in_one_line(body: bytes, why: str) -> None:
    with pytest.raises(BadInputError, match=why) as e:
        parse_request(body, ["x"], 100)
    assert "\n" not in str(e.value)


def test_outputs_may_be_chosen() -> None:
    tiny = description()
    assert wanted_outputs({}, tiny) == ["score", "user_stamp", "genre_stamp", "dense_stamp"]
    assert wanted_outputs({"outputs": [{"name": "score"}]}, tiny) == ["score"]
    with pytest.raises(BadInputError, match="output 'x': unknown; this model has score"):
        wanted_outputs({"outputs": [{"name": "x"}]}, tiny)
    with pytest.raises(BadInputError, match='"outputs" must be a list'):
        wanted_outputs({"outputs": "score"}, tiny)


def test_a_response() -> None:
    prediction = Prediction({"score": torch.tensor([[0.5], [0.25]])}, 7, {})
    got = json.loads(response_of(prediction, "tiny", ["score"], {"id": "q1"}))
    assert got == {
        "model_name": "tiny",
        "model_version": "7",
        "id": "q1",
        "outputs": [{"name": "score", "shape": [2, 1], "datatype": "FP32", "data": [0.5, 0.25]}],
    }


def test_an_output_that_is_no_number_is_an_error() -> None:
    prediction = Prediction({"score": torch.tensor([float("nan")])}, 7, {})
    with pytest.raises(SidestageError, match="output score: not finite for this request"):
        response_of(prediction, "tiny", ["score"], {})


def test_metadata() -> None:
    made = description(features=(RequestFeature("user", weighted=True), RequestFeature("genre")))
    got = metadata_of(made, [2, 3])
    assert got["name"] == "tiny"
    assert got["versions"] == ["2", "3"]
    assert got["inputs"][0] == {"name": "dense", "datatype": "FP32", "shape": [-1, 3]}
    assert {"name": "user.lengths", "datatype": "INT64", "shape": [-1]} in got["inputs"]
    assert {"name": "user.weights", "datatype": "FP32", "shape": [-1]} in got["inputs"]
    assert "genre.weights" not in {i["name"] for i in got["inputs"]}
    assert got["outputs"][0] == {"name": "score", "datatype": "FP32", "shape": [-1]}


def test_text_among_numbers_costs_no_memory() -> None:
    """numpy would make room for the longest string in every place: gigabytes of a megabyte."""
    item = {"name": "a", "datatype": "FP32", "shape": [1, 3]}
    for data, why in (
        (["x" * 1_000_000] + ["y"] * 500, "holds something that is no FP32 number"),
        ([[0.0] * 1000] * 1000, "1000000 numbers or more for 3 places"),
        ([[0.0, 1.0], [2.0]], "rows of different lengths"),
        ([0.0, True, 2.0], "holds something that is no FP32 number"),
    ):
        body = json.dumps({"inputs": [{**item, "data": data}]}).encode()
        with pytest.raises(BadInputError, match=why):
            parse_request(body, {"a"}, 4 << 20)
