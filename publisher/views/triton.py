"""A view for Triton's PyTorch backend: an AOTInductor package, and the model's config.pbtxt.

    REPOSITORY/<model>/config.pbtxt
    REPOSITORY/<model>/<version>/model.pt2

The package holds all weights. It needs the instruction set of the CPU it was compiled on, and a
Triton whose torch loads packages of this one's.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import torch

from ckpt.errors import BadInputError
from publisher.views.interface import ViewInterface, ViewTensor

CONFIG = "config.pbtxt"
PACKAGE = "model.pt2"

_MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
_HEAD = """\
# Inputs and outputs go by position; the comment above each says which tensor of a request it is.
# max_batch_size is 0 since bags are ragged: a request brings its own batch, of any size from 1 on.
name: {name}
backend: "pytorch"
platform: "torch_aoti"
max_batch_size: 0
version_policy { latest { num_versions: 1 } }
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "ENABLE_WEIGHT_SHARING" value { string_value: "true" } }
"""


def config_text(model: str, interface: ViewInterface) -> str:
    """The model's config.pbtxt, the same for each version with this interface.

    BadInputError for a model name or a tensor that Triton doesn't take.
    """
    if not _MODEL.fullmatch(model):
        raise BadInputError(
            f"model {model!r} can't be a folder of a Triton repository; rename it to letters, "
            f"digits, dots, - and _"
        )
    rows = {v.ids: v for v in interface.features if v.mapped}
    blocks = [_HEAD.replace("{name}", json.dumps(model))]
    for i, tensor in enumerate(interface.inputs):
        view, note = rows.get(tensor.name), ""
        if view is not None:
            through: list[str] = (
                [] if view.feature.ids.kind == "identity" else [view.feature.ids.kind]
            )
            through += [f"collision {view.collision}"] if view.collision is not None else []
            note = f"; rows, not raw ids: map them first ({', then '.join(through)}), -1: no row"
        blocks.append(_block("input", f"INPUT__{i}", tensor, note))
    for i, tensor in enumerate(interface.outputs):
        blocks.append(_block("output", f"OUTPUT__{i}", tensor, ""))
    return "".join(blocks)


def write_package(program: torch.export.ExportedProgram, path: Path) -> None:
    """Compile a view and package it with its weights. BadInputError where that can't be done."""
    from torch.fx.experimental import _config

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own use of itself
            from torch._inductor import aoti_compile_and_package

            # As at the export: sizes of 0 and 1 are sizes like any other.
            with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                aoti_compile_and_package(program, package_path=str(path))
    except Exception as e:  # the compiler's errors have no common class
        first = next((line for line in str(e).splitlines() if line.strip()), "no message")
        raise BadInputError(
            f"the view can't be compiled ({type(e).__name__}: {first.strip()}); AOTInductor needs a "
            f"C++ compiler on this host"
        ) from e


def _block(kind: str, name: str, tensor: ViewTensor, note: str) -> str:
    if tensor.dtype not in _TYPES or not tensor.shape:
        raise BadInputError(
            f"{kind} {tensor.name}: Triton takes no {tensor.dtype} of shape {tensor.shape}"
        )
    shape = ", ".join(map(str, tensor.shape))
    dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in tensor.shape)
    comment = json.dumps(f"{tensor.name}: {tensor.dtype} ({shape}){note}", ensure_ascii=True)[1:-1]
    return (
        f"# {comment}\n"
        f"{kind} {{ name: {json.dumps(name)} data_type: {_TYPES[tensor.dtype]} dims: [ {dims} ] }}\n"
    )
