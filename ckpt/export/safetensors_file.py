"""Writes a checkpoint as one safetensors file, chunk by chunk, without holding it in memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import BadInputError, StorageError
from ckpt.export.selection import selected_tree
from ckpt.export.targets import new_file
from ckpt.formats import SAFETENSORS_DTYPES, SAFETENSORS_VALUES
from ckpt.restore import CheckpointReader
from ckpt.tree import torch_dtype
from ckpt.values import encode_value


def export_safetensors(
    reader: CheckpointReader,
    target: Path,
    keys: Sequence[str],
    *,
    replace: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the tensors `keys` to `target`; returns its size in bytes.

    Values that aren't tensors, and where the tensors stand among them, go into the file's
    metadata under "sidestage.values". The file appears whole or not at all. `progress` gets the
    bytes of each tensor done.

    Raises ConflictError if `target` exists and not `replace`; BadInputError for a dtype that
    the format doesn't have; CorruptError if a chunk doesn't match its digest.
    """
    header, offsets = _header(reader, keys)
    size = len(header) + sum(reader.info(k).nbytes for k in keys)
    with new_file(target, replace=replace) as partial, _mapped(partial, size) as data:
        data[: len(header)] = header
        for key in keys:
            info = reader.info(key)
            if info.nbytes:
                start = len(header) + offsets[key]
                view = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=start)
                reader.read_into(key, _typed(view, info.dtype, info.shape), (0,) * len(info.shape))
            progress(info.nbytes)
    return size


def _header(reader: CheckpointReader, keys: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, Any] = {
        "__metadata__": {
            "sidestage.step": str(reader.record.step),
            "sidestage.run": reader.record.run_id,
            SAFETENSORS_VALUES: json.dumps(encode_value(selected_tree(reader, keys))),
        }
    }
    offsets, at = {}, 0
    # The format wants no holes and aligned tensors: widest elements first.
    for key in sorted(keys, key=lambda k: (-torch_dtype(reader.info(k).dtype).itemsize, k)):
        info = reader.info(key)
        if info.dtype not in SAFETENSORS_DTYPES:
            raise BadInputError(f"{key}: safetensors has no dtype {info.dtype}; leave this key out")
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [at, at + info.nbytes],
        }
        offsets[key] = at
        at += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _typed(view: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return view.view(torch_dtype(dtype)).view(shape)


@contextlib.contextmanager
def _mapped(path: Path, size: int) -> Iterator[mmap.mmap]:
    """A new file of `size` bytes, mapped; synced at the end."""
    with open(path, "xb+") as fh:
        # Reserve the blocks: a full disk must be an error here, not a SIGBUS in the mapping.
        try:
            os.posix_fallocate(fh.fileno(), 0, size)
        except OSError as e:
            raise StorageError(f"{path.parent}: no room ({e}); {size} bytes are needed") from e
        # Not closed by hand: after an error its traceback still holds tensors that look at it.
        data = mmap.mmap(fh.fileno(), size)
        yield data
        data.flush()
        os.fsync(fh.fileno())
