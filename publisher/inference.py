"""The Open Inference Protocol's JSON, to and from tensors. See docs/publishing.md for examples."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from itertools import chain
from typing import Any

import numpy as np
import torch

from ckpt.errors import BadInputError, SidestageError
from ckpt.schema import Dim, ServingDescription
from publisher.loading import Prediction
from publisher.request import lengths_of, torch_dtype, values_of, weights_of

PLATFORM = "sidestage"
_MOST_DIMS = 8

_DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "BOOL": (torch.bool, "b"),
    "UINT8": (torch.uint8, "iu"),
    "INT8": (torch.int8, "iu"),
    "INT16": (torch.int16, "iu"),
    "INT32": (torch.int32, "iu"),
    "INT64": (torch.int64, "iu"),
    "FP16": (torch.float16, "fiu"),
    "BF16": (torch.bfloat16, "fiu"),
    "FP32": (torch.float32, "fiu"),
    "FP64": (torch.float64, "fiu"),
}
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}


def parse_request(
    body: bytes, known: Collection[str], max_numbers: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors by name, the whole document). BadInputError says in one line what is malformed.

    known: names that inputs may have. max_numbers: elements of all of them together; what is
    unknown or too large is refused before a tensor is made of it.
    """
    try:
        doc = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise BadInputError(f"the body is not JSON: {e}") from None
    inputs = doc.get("inputs") if isinstance(doc, dict) else None
    if not isinstance(inputs, list):
        raise BadInputError('the body needs "inputs": a list of {name, shape, datatype, data}')
    tensors: dict[str, torch.Tensor] = {}
    room = max_numbers
    for i, item in enumerate(inputs):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise BadInputError(f"inputs[{i}]: needs a name, shape, datatype and data")
        name = item["name"]
        if name not in known:
            raise BadInputError(f"input {name!r}: unknown; expected {', '.join(known)}")
        if name in tensors:
            raise BadInputError(f"input {name}: given twice")
        shape = _shape(name, item)
        room -= math.prod(shape)
        if room < 0 or max(shape, default=0) > max_numbers:
            raise BadInputError(
                f"input {name}: shape {shape}: the request's inputs have more than {max_numbers} "
                f"numbers, this server's limit"
            )
        tensors[name] = _tensor(name, shape, item)
    return tensors, doc


def wanted_outputs(doc: dict[str, Any], description: ServingDescription) -> list[str]:
    """The output names that a request asks for; all of them if it names none."""
    known = [o.name for o in description.outputs]
    asked = doc.get("outputs")
    if asked is None:
        return known
    if not isinstance(asked, list) or not all(isinstance(o, dict) for o in asked):
        raise BadInputError('"outputs" must be a list of {name}')
    names = [o.get("name") for o in asked]
    for name in names:
        if name not in known:
            raise BadInputError(f"output {name!r}: unknown; this model has {', '.join(known)}")
    return [n for n in known if n in names]


def response_of(prediction: Prediction, model: str, names: list[str], doc: dict[str, Any]) -> bytes:
    """The response's JSON. Raises SidestageError if an output is no number that JSON can spell."""
    outputs = []
    for name in names:
        tensor = prediction.outputs[name].contiguous()
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise SidestageError(f"output {name}: not finite for this request")
        outputs.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "datatype": _NAMES[tensor.dtype],
                "data": tensor.flatten().tolist(),
            }
        )
    answer = {"model_name": model, "model_version": str(prediction.version), "outputs": outputs}
    if isinstance(doc.get("id"), str):
        answer["id"] = doc["id"]
    return json.dumps(answer, allow_nan=False).encode()


def metadata_of(description: ServingDescription, versions: list[int]) -> dict[str, Any]:
    """The protocol's model metadata; -1 stands for a free size. versions: those that are loaded."""
    inputs = [
        _tensor_metadata(i.name, i.dtype, i.shape) for i in description.inputs if i.kind == "dense"
    ]
    for feature in description.features:
        inputs += [
            _tensor_metadata(values_of(feature.name), "int64", (f"ids:{feature.name}",)),
            _tensor_metadata(lengths_of(feature.name), "int64", ("batch",)),
        ]
        if feature.weighted:
            inputs.append(
                _tensor_metadata(weights_of(feature.name), "float32", (f"ids:{feature.name}",))
            )
    return {
        "name": description.model,
        "versions": [str(n) for n in versions],
        "platform": PLATFORM,
        "inputs": inputs,
        "outputs": [_tensor_metadata(o.name, o.dtype, o.shape) for o in description.outputs],
    }


def _tensor_metadata(name: str, dtype: str, shape: tuple[Dim, ...]) -> dict[str, Any]:
    datatype = _NAMES[torch_dtype(dtype)]
    return {
        "name": name,
        "datatype": datatype,
        "shape": [-1 if isinstance(d, str) else d for d in shape],
    }


def _shape(name: str, item: dict[str, Any]) -> list[int]:
    shape = item.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise BadInputError(f"input {name}: shape {shape!r} is not a list of sizes")
    if len(shape) > _MOST_DIMS:
        raise BadInputError(f"input {name}: {len(shape)} dimensions; at most {_MOST_DIMS} are read")
    return shape


def _tensor(name: str, shape: list[int], item: dict[str, Any]) -> torch.Tensor:
    """One input. Its data may be flat or nested, of numbers that the datatype can hold."""
    datatype, data = item.get("datatype"), item.get("data")
    if not isinstance(datatype, str) or datatype not in _DTYPES:
        raise BadInputError(f"input {name}: datatype {datatype!r}; known are {', '.join(_DTYPES)}")
    if not isinstance(data, list):
        raise BadInputError(f"input {name}: data must be a list")
    dtype, kinds = _DTYPES[datatype]
    numbers = _numbers(name, data, math.prod(shape))
    if numbers is None:
        raise BadInputError(f"input {name}: data holds something that is no {datatype} number")
    array = np.array(numbers)
    if array.size and array.dtype.kind not in kinds:
        raise BadInputError(f"input {name}: data holds something that is no {datatype} number")
    if array.size != math.prod(shape):
        raise BadInputError(f"input {name}: {array.size} numbers for shape {shape}")
    if array.dtype.kind in "iu" and kinds == "iu" and array.size:
        bounds = torch.iinfo(dtype)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise BadInputError(f"input {name}: a number is outside {datatype}")
    tensor = torch.tensor(array.reshape(shape).astype(_numpy_kind(dtype)), dtype=dtype)
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise BadInputError(f"input {name}: a number is too large for {datatype}")
    return tensor


def _numbers(name: str, data: list[Any], most: int) -> list[Any] | None:
    """Nested lists of numbers as one list, no longer than need be; None if it holds anything else.

    Looked at before numpy sees it, which would make room for the longest string in every place.
    """
    while data and all(type(part) is list for part in data):
        lengths = {len(part) for part in data}
        if len(lengths) > 1:
            raise BadInputError(f"input {name}: data has rows of different lengths")
        count = len(data) * lengths.pop()
        if count > most:
            raise BadInputError(f"input {name}: {count} numbers or more for {most} places")
        data = list(chain.from_iterable(data))
    kinds = set(map(type, data))
    return data if kinds in ({bool}, set()) or kinds <= {int, float} else None


def _numpy_kind(dtype: torch.dtype) -> type:
    if dtype == torch.bool:
        return np.bool_
    return np.float64 if dtype.is_floating_point else np.int64


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
