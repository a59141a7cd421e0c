"""What a serving description depends on, as one sum: equal sums, equal descriptions.

It covers the source of every loaded module that isn't of an installed package, the versions of
those that are, the exporter's own source, and of the model: each submodule's class, attributes,
parameters by name, shape and dtype, buffers that no checkpoint holds by value, collections with
their tables and sharding plans; the golden request by value; the process group's size and
torch's settings. What can't be written down so is named, and there is no sum.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer.description.embeddings import Embeddings, embeddings_of
from trainer.description.served import ServedModel
from trainer.description.shadow import unwrap

_FORMAT = 1
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Of nn.Module itself: written down apart, or without a part in a forward pass in eval mode.
# `_compiled_call_impl` is where nn.Module.compile() puts what runs in training; an exporter takes forward.
_OWN = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
# Chooses initial values and training, not what is served. It may hold functions.
_OF_TRAINING = ("init_fn", "weight_init_max", "weight_init_min")
# Placements of shards are `_remote_device`s.
_AS_TEXT = (torch.dtype, torch.device, torch.Size, _remote_device, bytes, complex)
_RECORDS = (".dist-info", ".egg-info")
_SETTINGS = ("TORCH", "PYTORCH", "FBGEMM")
_NOT_SETTINGS = ("TORCHELASTIC", "TORCH_NCCL", "TORCH_CPP_LOG", "TORCH_LOGS", "TORCH_TRACE")


class UnprovableError(Exception):
    """Something that a description may depend on can't be compared with an earlier start's."""


def fingerprint_of(served: ServedModel, depends_on: str = "") -> str:
    """64 hex digits. UnprovableError names what can't be compared.

    Args:
        served: what would be described.
        depends_on: whatever else the module's forward reads, such as settings in a global.
    """
    model = unwrap(served.module)
    known = {
        "format": _FORMAT,
        "name": served.name,
        "prefix": served.prefix,
        "keys": sorted(served.checkpoint_keys),
        "depends_on": depends_on,
        "code": _code(),
        "versions": _versions(),
        "settings": _settings(),
        "model": list(_modules(model, served)),
        "request": _plain([served.args, dict(served.kwargs)], "the golden request"),
        "id_maps": _plain(dict(served.id_maps), "id_maps"),
        "raw": _plain(dict(served.raw), "raw"),
    }
    return _sum(json.dumps(known, sort_keys=True).encode())


def _modules(model: nn.Module, served: ServedModel) -> Iterator[Any]:
    """Each submodule, written down; what is inside a collection belongs to it."""
    inside: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{p}." if p else "") for p in inside):
            continue
        if hooks := [h for h in _HOOKS if getattr(module, h)]:
            raise UnprovableError(f"{path or 'the model'} has {hooks[0]}")
        if (embeddings := embeddings_of(path, module)) is not None:
            inside.append(path)
            yield [path, *_collection(embeddings)]
            continue
        kept = served.prefix + (f"{path}." if path else "")
        yield [
            path,
            _class(type(module), path),
            {n: _plain(v, f"{path}.{n}") for n, v in sorted(vars(module).items()) if n not in _OWN},
            {n: _shape(p) for n, p in module._parameters.items() if p is not None},
            {
                n: _shape(b) if kept + n in served.checkpoint_keys else _tensor(b)
                for n, b in module._buffers.items()
                if b is not None
            },
        ]


def _collection(embeddings: Embeddings) -> list[Any]:
    where = embeddings.path or "the model"
    if embeddings.processors is not None or embeddings.collisions is not None:
        raise UnprovableError(f"{where} has feature processors or managed collisions")
    configs = [
        {f.name: _plain(getattr(c, f.name), where) for f in fields(c) if f.name not in _OF_TRAINING}
        for c in embeddings.configs
    ]
    plan = getattr(embeddings.module, "module_sharding_plan", None)
    return [
        _class(type(embeddings.module), where),
        configs,
        [embeddings.tables, embeddings.weighted, embeddings.need_indices],
        {n: _plain(p, where) for n, p in sorted(plan.items())} if plan is not None else None,
    ]


def _plain(value: Any, what: str) -> Any:
    """A value as JSON in which different values differ."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return ["array", str(value.dtype), list(value.shape), _sum(value.tobytes())]
    if isinstance(value, KeyedJaggedTensor):
        return [
            "KeyedJaggedTensor",
            *(_plain(v, what) for v in (value.keys(), value.values(), value.lengths())),
            _plain(value.weights_or_none(), what),
            value.stride(),
        ]
    if isinstance(value, _AS_TEXT):
        return [type(value).__name__, str(value)]
    if isinstance(value, enum.Enum):
        return ["enum", _class(type(value), what), value.name]
    if isinstance(value, list | tuple):
        return [_class(type(value), what), [_plain(v, what) for v in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(_plain(v, what)) for v in value)]
    if isinstance(value, Mapping):
        pairs = [[_plain(k, what), _plain(v, what)] for k, v in value.items()]
        return [_class(type(value), what), pairs]
    if isinstance(value, functools.partial):
        return ["partial", *(_plain(p, what) for p in (value.func, value.args, value.keywords))]
    if isinstance(value, type):
        return ["class", _class(value, what)]
    if isinstance(value, types.BuiltinFunctionType | types.FunctionType):
        return _function(value, what)
    if is_dataclass(value):
        parts = {f.name: _plain(getattr(value, f.name), what) for f in fields(value)}
        return [_class(type(value), what), parts]
    if type(value) in pytree.SUPPORTED_NODES:
        leaves, spec = pytree.tree_flatten(value)
        return [_class(type(value), what), str(spec), [_plain(v, what) for v in leaves]]
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


def _class(kind: type, what: str) -> str:
    if "<locals>" in kind.__qualname__:
        raise UnprovableError(f"{what} is of {kind.__qualname__}, a class made while running")
    return f"{kind.__module__}.{kind.__qualname__}"


def _shape(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), tensor.device.type]


def _tensor(tensor: Tensor) -> list[Any]:
    if type(tensor) not in {Tensor, nn.Parameter} or tensor.layout != torch.strided:
        raise UnprovableError(f"a {type(tensor).__name__} of layout {tensor.layout}")
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return ["tensor", *_shape(tensor), _sum(data.numpy())]


def _code() -> dict[str, str]:
    """Module -> sum of its source, for all that are loaded and not installed, and for the exporter."""
    paths = sysconfig.get_paths()
    installed = tuple(
        str(Path(paths[p]).resolve()) + os.sep
        for p in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    # Modules of installed packages may name files that don't exist, as torch's do.
    found = {n: f for n, m in sorted(sys.modules.items()) if (f := getattr(m, "__file__", None))}
    own = {
        n
        for n, f in found.items()
        if "." not in n and not os.path.realpath(f).startswith(installed)
    }
    # The exporter is taken whole below: which of its modules are loaded so far must not matter.
    files = {
        n: f
        for n, f in found.items()
        if n.partition(".")[0] in own and not n.startswith(f"{__package__}.")
    }
    here = Path(__file__).parent
    files |= {f"exporter/{p.name}": str(p) for p in here.glob("*.py")}
    ckpt = Path(sys.modules["ckpt"].__file__ or "").parent
    files |= {f"exporter/ckpt/{n}": str(ckpt / n) for n in ("schema.py", "idmaps.py", "layout.py")}
    try:
        # A file that several names have (`__main__`) is read for each: they are few and small.
        return {n: _sum(Path(f).read_bytes()) for n, f in files.items()}
    except OSError as e:
        raise UnprovableError(f"{e.filename} can't be read") from e


def _versions() -> dict[str, Any]:
    """Of all that is installed, by the names of their records: `torch-2.13.0.dist-info`."""
    records: set[str] = set()
    for folder in sys.path:
        try:
            records.update(n for n in os.listdir(folder or ".") if n.endswith(_RECORDS))
        except OSError:
            continue
    return {"python": sys.version, "torch": str(torch.version.git_version), "all": sorted(records)}


def _settings() -> dict[str, Any]:
    """Of torch, and of the job."""
    return {
        "environment": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(_SETTINGS) and not k.startswith(_NOT_SETTINGS)
        },
        "dtype": str(torch.get_default_dtype()),
        "autocast": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def _sum(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
