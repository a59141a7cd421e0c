"""Writes a checkpoint as one safetensors file, chunk by chunk, without holding it in memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt.errors import BadInputError, ConflictError, NotFoundError, StorageError
from ckpt.restore import CheckpointReader
from ckpt.tree import torch_dtype
from ckpt.values import encode_value

# The names of the safetensors format, which knows no others.
SAFETENSORS_DTYPES = {
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


def export_safetensors(
    reader: CheckpointReader,
    target: Path,
    keys: Sequence[str],
    *,
    replace: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the tensors `keys` to `target`; returns its size in bytes.

    Values that aren't tensors go into the file's metadata under "sidestage.values". The file
    appears whole or not at all. `progress` gets the bytes of each tensor done.

    Raises ConflictError if `target` exists and not `replace`; BadInputError for a dtype that
    the format doesn't have; CorruptError if a chunk doesn't match its digest.
    """
    if target.exists() and not replace:
        raise ConflictError(f"{target}: exists already; name another file or pass --force")
    header, offsets = _header(reader, keys)
    size = len(header) + sum(reader.info(k).nbytes for k in keys)
    with _new_file(target, size) as data:
        data[: len(header)] = header
        for key in keys:
            info = reader.info(key)
            if info.nbytes:
                start = len(header) + offsets[key]
                view = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=start)
                reader.read_into(key, _typed(view, info.dtype, info.shape), (0,) * len(info.shape))
                del view  # the mapping can't be closed while a tensor looks at it
            progress(info.nbytes)
    return size


def select(reader: CheckpointReader, patterns: Sequence[str]) -> list[str]:
    """Keys that match any of the shell-style patterns, in order; all of them if there are none."""
    import fnmatch

    keys = sorted(reader.tensors)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(k, pattern) for k in keys):
            raise NotFoundError(
                f"{pattern}: no key of step {reader.record.step} matches; see `ckpt show`"
            )
    if not patterns:
        return keys
    return [k for k in keys if any(fnmatch.fnmatchcase(k, p) for p in patterns)]


def _header(reader: CheckpointReader, keys: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, Any] = {
        "__metadata__": {
            "sidestage.step": str(reader.record.step),
            "sidestage.run": reader.record.run_id,
            "sidestage.values": json.dumps(encode_value(reader.values())),
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
def _new_file(target: Path, size: int) -> Iterator[mmap.mmap]:
    """A mapped file of `size` bytes that gets its name once it is complete and synced."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb+") as fh:
            # Reserve the blocks: a full disk must be an error here, not a SIGBUS in the mapping.
            os.posix_fallocate(fh.fileno(), 0, size)
            with contextlib.closing(mmap.mmap(fh.fileno(), size)) as data:
                yield data
                data.flush()
            os.fsync(fh.fileno())
        os.replace(partial, target)
    except OSError as e:
        raise StorageError(f"{target}: can't be written ({e}); {size} bytes are needed") from e
    finally:
        partial.unlink(missing_ok=True)
