"""States, and checkpoints as something that can be compared bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt import CheckpointConfig, Checkpointer
from ckpt.catalog import Catalog
from ckpt.export import export_dcp, export_safetensors, export_torch, select, selected_tree
from ckpt.foreign import open_foreign
from ckpt.importing import Target, import_checkpoint
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, Storage
from ckpt.types import ITEMSIZE, CommitRef
from ckpt.values import map_leaves

FORMATS = ("safetensors", "torch", "dcp")

NESTED: dict[str, Any] = {
    "none": None,
    "list": [True, 1, 1.0, -0.0, float("inf"), "é\u0000", b"\x00\xff", 2**80, [], ()],
    "tuple": ((), (1, ("a",)), []),
    7: {"empty": {}, "deep": [{"lr": 0.1}, {}, {"lr": (1, 2)}]},
    "$": {"v": 1},
}


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors_of(dtype: str) -> dict[str, torch.Tensor]:
    """A scalar, an empty one and a table of random bits."""
    kind: torch.dtype = getattr(torch, dtype)
    found = {}
    for name, shape in {"scalar": (), "empty": (0, 3), "table": (70, 9)}.items():
        size = torch.Size(shape).numel() * kind.itemsize
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8)
        found[name] = raw.view(kind).view(shape)
    return found


def every_dtype(without: tuple[str, ...] = ()) -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: tensors_of(name) for name in ITEMSIZE if name not in without}


def saved(root: Path | Storage, state: dict[str, Any], step: int = 1) -> None:
    config = CheckpointConfig(chunk_bytes=4096)
    with Checkpointer(str(root) if isinstance(root, Path) else root, config) as c:
        c.restore({}, partial=True)
        c.save(step, state).committed.result()


def reader(root: Path | Storage, step: int | None = None) -> CheckpointReader:
    storage = LocalStorage(root) if isinstance(root, Path) else root
    catalog = Catalog(storage)
    found = catalog.latest() if step is None else catalog.find(step)
    assert found is not None
    assert found.record is not None
    return CheckpointReader(storage, found.record)


def contents(root: Path | Storage, step: int | None = None) -> str:
    """All of a checkpoint as text: its nested values, with dtype, shape and bits for each tensor."""
    r = reader(root, step)

    def told(_: str, leaf: Any) -> Any:
        if not hasattr(leaf, "fqn"):
            return leaf
        t = r.read(leaf.fqn)
        return f"{t.dtype} {tuple(t.shape)} {bits(t).hex()}"

    return repr(map_leaves(selected_tree(r, select(r, [])), told))


def exported(
    root: Path | Storage, form: str, target: Path, *patterns: str, step: int | None = None
) -> Path:
    r = reader(root, step)
    keys = select(r, patterns)
    write = {"safetensors": export_safetensors, "torch": export_torch, "dcp": export_dcp}[form]
    size = write(r, target, keys)
    files = list(target.iterdir()) if target.is_dir() else [target]
    assert size == sum(f.stat().st_size for f in files)
    return target


def imported(
    source: Path,
    root: Path,
    *,
    step: int = 1,
    onto: int | None = None,
    under: str | None = None,
) -> CommitRef:
    with open_foreign(source, under=under) as foreign:
        return import_checkpoint(foreign, Target(LocalStorage(root), step, onto))
