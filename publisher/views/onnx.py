"""A view as an ONNX file, with the names of a request for its inputs.

FOLDER/model.onnx
FOLDER/model.onnx.data    the weights, where one protobuf message can't hold them
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from ckpt.errors import BadInputError
from publisher.views.interface import ViewInterface

MODEL = "model.onnx"
DATA = "model.onnx.data"
# A message ends at 2 GiB; the graph itself needs a part of it.
INLINE_BYTES = 1 << 30


def check_installed() -> None:
    missing = [p for p in ("onnx", "onnxscript") if importlib.util.find_spec(p) is None]
    if missing:
        raise BadInputError(
            f"ONNX views need {' and '.join(missing)}; install sidestage[onnx] on this host"
        )


def write_model(
    program: torch.export.ExportedProgram,
    interface: ViewInterface,
    path: Path,
    properties: Mapping[str, str],
) -> None:
    """Translate a view; `properties` go into its metadata.

    BadInputError for operators that ONNX doesn't have.
    """
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [log.level for log in logs]
    try:
        # They tell of packages that aren't needed, and warn of their own use of themselves.
        for log in logs:
            log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                program,
                dynamo=True,
                # An optimised graph has other weights, under other names.
                optimize=False,
                input_names=[i.name for i in interface.inputs],
                output_names=[o.name for o in interface.outputs],
                verbose=False,
            )
    except Exception as e:  # the exporter's errors have no common class
        first = next((line for line in str(e).splitlines() if line.strip()), "no message")
        raise BadInputError(
            f"the view can't be translated to ONNX ({type(e).__name__}: {first.strip()})"
        ) from e
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
    assert made is not None, "dynamo=True gives a program"
    for node in made.model.graph:
        node.metadata_props.clear()  # stack traces with this host's paths
    made.model.metadata_props.update(properties)
    size_bytes = sum(t.numel() * t.element_size() for t in program.state_dict.values())
    made.save(str(path), external_data=size_bytes > INLINE_BYTES)
