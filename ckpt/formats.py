"""Names in other formats that both the writing and the reading side use."""

from __future__ import annotations

from collections.abc import Mapping

SAFETENSORS_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""safetensors' name of each dtype that it has, by torch's."""

SAFETENSORS_VALUES = "sidestage.values"
"""Metadata entry of a safetensors file: the tree of values, in which TensorRefs name its tensors."""

DCP_SIDECAR = "sidestage.json"
"""File beside DCP's own in a folder that we wrote: the tree as it was, with what DCP's keys lose."""

DCP_SIDECAR_KIND = "dcp_export"
