"""What a serving description depends on, as one sum: equal sums, equal descriptions.

It covers the source of every loaded module that isn't of an installed package, the versions of
those that are, the exporter's own source, and of the model: each submodule's class, attributes,
parameters by name, shape and dtype, buffers that no checkpoint holds by value, collections with
their tables and sharding plans; the golden request by value; the process group's size and
torch's settings. What can't be written down so is named, and there is no sum.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.description.embeddings import Embeddings, embeddings_of
from trainer.description.served import ServedModel
from trainer.description.shadow import unwrap
from trainer.plain import (
    UnprovableError,
    class_name,
    installed,
    plain,
    sha256,
    tensor_shape,
    tensor_value,
)

_FORMAT = 1
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Of nn.Module itself: written down apart, or without a part in a forward pass in eval mode.
# `_compiled_call_impl` is where nn.Module.compile() puts what runs in training; an exporter takes forward.
_OWN = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
# Chooses initial values and training, not what is served. It may hold functions.
_OF_TRAINING = ("init_fn", "weight_init_max", "weight_init_min")
_SETTINGS = ("TORCH", "PYTORCH", "FBGEMM")
_NOT_SETTINGS = ("TORCHELASTIC", "TORCH_NCCL", "TORCH_CPP_LOG", "TORCH_LOGS", "TORCH_TRACE")


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
        "versions": installed(),
        "settings": _settings(),
        "model": list(_modules(model, served)),
        "request": plain([served.args, dict(served.kwargs)], "the golden request"),
        "id_maps": plain(dict(served.id_maps), "id_maps"),
        "raw": plain(dict(served.raw), "raw"),
    }
    return sha256(json.dumps(known, sort_keys=True).encode())


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
            class_name(type(module), path),
            {n: plain(v, f"{path}.{n}") for n, v in sorted(vars(module).items()) if n not in _OWN},
            {n: tensor_shape(p) for n, p in module._parameters.items() if p is not None},
            {
                n: tensor_shape(b) if kept + n in served.checkpoint_keys else tensor_value(b)
                for n, b in module._buffers.items()
                if b is not None
            },
        ]


def _collection(embeddings: Embeddings) -> list[Any]:
    where = embeddings.path or "the model"
    if embeddings.processors is not None or embeddings.collisions is not None:
        raise UnprovableError(f"{where} has feature processors or managed collisions")
    configs = [
        {f.name: plain(getattr(c, f.name), where) for f in fields(c) if f.name not in _OF_TRAINING}
        for c in embeddings.configs
    ]
    plan = getattr(embeddings.module, "module_sharding_plan", None)
    return [
        class_name(type(embeddings.module), where),
        configs,
        [embeddings.tables, embeddings.weighted, embeddings.need_indices],
        {n: plain(p, where) for n, p in sorted(plan.items())} if plan is not None else None,
    ]


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
        return {n: sha256(Path(f).read_bytes()) for n, f in files.items()}
    except OSError as e:
        raise UnprovableError(f"{e.filename} can't be read") from e


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
