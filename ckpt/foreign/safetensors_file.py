"""Reads a safetensors file, mapped into memory; with the tree that `ckpt export` put into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ckpt.errors import BadInputError, CorruptError
from ckpt.foreign.source import Content, ForeignTensor, Piece
from ckpt.formats import SAFETENSORS_DTYPES, SAFETENSORS_VALUES
from ckpt.values import TensorRef, decode_value, map_leaves

TORCH_DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}


def recognises(head: bytes, size_bytes: int) -> bool:
    """Do these first bytes, a header's length and its brace, begin a safetensors file of that size?"""
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and head[8:9] == b"{" and 2 <= length <= size_bytes - 8


@contextmanager
def read(source: Path) -> Iterator[Content]:
    """Its tensors, in the tree of its metadata if it has ours, else loose: their names tell no tree."""
    try:
        with safe_open(source, framework="pt") as fh:
            tensors = {key: _tensor(source, fh, key) for key in fh.keys()}  # noqa: SIM118
            yield _content(source, tensors, (fh.metadata() or {}).get(SAFETENSORS_VALUES))
    except SafetensorError as e:
        raise CorruptError(f"{source}: not a whole safetensors file ({e})") from None


def _content(source: Path, tensors: dict[str, ForeignTensor], values: str | None) -> Content:
    if values is None:
        return Content(loose=tensors)
    used: set[str] = set()

    def place(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef):
            return leaf
        if leaf.fqn not in tensors:
            raise CorruptError(
                f"{source}: its {SAFETENSORS_VALUES} name {leaf.fqn}, which isn't in it"
            )
        used.add(leaf.fqn)
        return tensors[leaf.fqn]

    try:
        node = json.loads(values)
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{source}: {SAFETENSORS_VALUES}: not JSON: {e}") from None
    tree = map_leaves(decode_value(node, f"{source}: {SAFETENSORS_VALUES}"), place)
    if not isinstance(tree, dict):
        raise CorruptError(f"{source}: {SAFETENSORS_VALUES}: not a dict")
    return Content(tree, {k: t for k, t in tensors.items() if k not in used})


def _tensor(source: Path, fh: Any, key: str) -> ForeignTensor:
    view = fh.get_slice(key)
    dtype, shape = view.get_dtype(), tuple(view.get_shape())
    if dtype not in TORCH_DTYPES:
        raise BadInputError(f"{source}: {key}: dtype {dtype} can't be stored; leave this key out")
    piece = Piece((0,) * len(shape), shape, partial(_load, source, fh, key))
    return ForeignTensor(TORCH_DTYPES[dtype], shape, (piece,))


def _load(source: Path, fh: Any, key: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = fh.get_tensor(key)
    except SafetensorError as e:
        raise CorruptError(f"{source}: {key}: {e}") from None
    return tensor
