"""Writes a checkpoint as one torch.save file of a plain nested dict."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import BadInputError
from ckpt.export.selection import selected_tree
from ckpt.export.targets import new_file, sync_file
from ckpt.restore import CheckpointReader
from ckpt.values import TensorRef, common, map_leaves, resolve

_MOST_INT_BITS = 2039  # 255 bytes with a sign: the longest kind that weights_only knows


def export_torch(
    reader: CheckpointReader,
    target: Path,
    keys: Sequence[str],
    *,
    replace: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the values and the tensors `keys` to `target`; returns its size in bytes.

    The file loads with `torch.load(target, weights_only=True)`. torch.save takes whole tensors:
    this holds all of them in host memory. `progress` gets the bytes of each tensor read.

    Raises ConflictError if `target` exists and not `replace`; BadInputError for a value that
    weights_only refuses; CorruptError if a chunk doesn't match its digest.
    """

    def load(path: str, leaf: Any) -> Any:
        if isinstance(leaf, int) and leaf.bit_length() > _MOST_INT_BITS:
            raise BadInputError(
                f"{path}: torch.load(weights_only=True) reads no integer of {leaf.bit_length()} bits; "
                f"use another format"
            )
        if not isinstance(leaf, TensorRef):
            return leaf
        tensor = reader.read(leaf.fqn)
        progress(tensor.nbytes)
        return tensor

    with new_file(target, replace=replace) as partial:
        state = resolve(common(map_leaves(selected_tree(reader, keys), load)))
        # Not by its path: torch.save would write the name of the partial file into it.
        with open(partial, "xb") as fh:
            torch.save(state, fh)
        sync_file(partial)
        try:
            # The promise above, kept by trying it: mapped, so that only the pickle is read.
            torch.load(partial, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as e:
            raise BadInputError(
                f"step {reader.record.step} has a value that torch.load(weights_only=True) doesn't "
                f"read ({_last_line(e)}); use another format"
            ) from e
        return partial.stat().st_size


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("Unsupported")), lines[0])
