"""Values written down as JSON such that different values differ, for sums that say "nothing has changed".

What can't be written down so raises UnprovableError: whoever asked must then do the work again.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# Placements of shards are `_remote_device`s.
_AS_TEXT = (torch.dtype, torch.device, torch.Size, _remote_device, bytes, complex)
_RECORDS = (".dist-info", ".egg-info")


class UnprovableError(Exception):
    """Something can't be compared with what it was at an earlier start."""


def plain(value: Any, what: str) -> Any:
    """A value as JSON in which different values differ."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Tensor):
        return tensor_value(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ["array", str(value.dtype), list(value.shape), sha256(value.tobytes())]
    if isinstance(value, KeyedJaggedTensor):
        return [
            "KeyedJaggedTensor",
            *(plain(v, what) for v in (value.keys(), value.values(), value.lengths())),
            plain(value.weights_or_none(), what),
            value.stride(),
        ]
    if isinstance(value, _AS_TEXT):
        return [type(value).__name__, str(value)]
    if isinstance(value, enum.Enum):
        return ["enum", class_name(type(value), what), value.name]
    if isinstance(value, list | tuple):
        return [class_name(type(value), what), [plain(v, what) for v in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(plain(v, what)) for v in value)]
    if isinstance(value, Mapping):
        pairs = [[plain(k, what), plain(v, what)] for k, v in value.items()]
        return [class_name(type(value), what), pairs]
    if isinstance(value, functools.partial):
        return ["partial", *(plain(p, what) for p in (value.func, value.args, value.keywords))]
    if isinstance(value, type):
        return ["class", class_name(value, what)]
    if isinstance(value, types.BuiltinFunctionType | types.FunctionType):
        return _function(value, what)
    if is_dataclass(value):
        parts = {f.name: plain(getattr(value, f.name), what) for f in fields(value)}
        return [class_name(type(value), what), parts]
    if type(value) in pytree.SUPPORTED_NODES:
        leaves, spec = pytree.tree_flatten(value)
        return [class_name(type(value), what), str(spec), [plain(v, what) for v in leaves]]
    raise UnprovableError(f"{what} holds a {type(value).__name__}")


def _function(value: Any, what: str) -> list[str]:
    """A function by its name: its source is part of the code. Not one that carries values along."""
    if isinstance(value, types.FunctionType) and (
        value.__closure__ or value.__name__ == "<lambda>"
    ):
        raise UnprovableError(f"{what} holds {value.__qualname__}, a function made while running")
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        raise UnprovableError(f"{what} holds {value.__qualname__}, bound to an object")
    return ["function", str(value.__module__), value.__qualname__]


def class_name(kind: type, what: str) -> str:
    if "<locals>" in kind.__qualname__:
        raise UnprovableError(f"{what} is of {kind.__qualname__}, a class made while running")
    return f"{kind.__module__}.{kind.__qualname__}"


def tensor_shape(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), tensor.device.type]


def tensor_value(tensor: Tensor) -> list[Any]:
    if type(tensor) not in {Tensor, nn.Parameter} or tensor.layout != torch.strided:
        raise UnprovableError(f"a {type(tensor).__name__} of layout {tensor.layout}")
    # A copy: torch takes a tensor that numpy has seen for one that can't be resized any more.
    data = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
    return ["tensor", *tensor_shape(tensor), sha256(data.numpy())]


def installed() -> dict[str, Any]:
    """Of all that is installed, by the names of their records: `torch-2.13.0.dist-info`."""
    records: set[str] = set()
    for folder in sys.path:
        try:
            records.update(n for n in os.listdir(folder or ".") if n.endswith(_RECORDS))
        except OSError:
            continue
    return {"python": sys.version, "torch": str(torch.version.git_version), "all": sorted(records)}


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
