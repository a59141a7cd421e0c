"""Reads a stock DCP folder: its metadata without unpickling, its items with weights_only."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt import layout, nesting
from ckpt.errors import BadInputError, CorruptError
from ckpt.foreign.metadata import DcpMetadata, StoredItem, StoredPiece, StoredTensor, parse_metadata
from ckpt.foreign.source import Content, ForeignTensor, Piece, check_tiling, whole
from ckpt.foreign.weights import load_weights
from ckpt.formats import DCP_SIDECAR, DCP_SIDECAR_KIND
from ckpt.manifest import unseal
from ckpt.tree import dtype_name
from ckpt.values import common, decode_value, encode_value, resolve

METADATA = ".metadata"


def recognise(folder: Path) -> Literal["dcp"]:
    """The format, or BadInputError saying what the folder is instead."""
    if (folder / METADATA).is_file():
        return "dcp"
    if (folder / layout.RUN).is_file():
        raise BadInputError(f"{folder}: is the root of a Sidestage run already; see `ckpt ls`")
    if (folder / "__0.metadata").is_file():
        raise BadInputError(
            f"{folder}: was saved with use_collectives=False, each rank for itself; load it with DCP "
            f"and save it again"
        )
    if any(folder.glob("*.distcp")):
        raise BadInputError(f"{folder}: has no {METADATA}: a DCP save that never finished")
    raise BadInputError(f"{folder}: not a DCP checkpoint: it has no {METADATA}")


@contextmanager
def read(folder: Path) -> Iterator[Content]:
    """Its state as a tree. Objects are loaded at once, tensors piece by piece.

    Every item is looked at here, but for the data of tensors, so that a file that is missing, too
    short or holds something else is found before anything of it is used.
    """
    recognise(folder)
    metadata = parse_metadata((folder / METADATA).read_bytes(), str(folder / METADATA))
    _check_files(folder, _items(metadata))
    leaves: dict[str, Any] = {
        key: _load(folder, item, f"{folder}: {key}") for key, item in metadata.objects.items()
    }
    for key, stored in metadata.tensors.items():
        leaves[key] = _tensor(folder, key, stored)
        check_tiling(f"{folder}: {key}", leaves[key])
        for piece in stored.pieces:
            _load_piece(folder, key, stored, piece, device="meta")
    sidecar = folder / DCP_SIDECAR
    if sidecar.is_file():
        yield Content(_as_exported(sidecar, leaves))
        return
    flat = {key: (path, leaves[key]) for key, path in metadata.paths.items()}
    yield Content(nesting.number_optimizer_state(nesting.nested(flat)))


def _as_exported(sidecar: Path, leaves: dict[str, Any]) -> dict[Any, Any]:
    """The tree that `ckpt export` wrote down, with what the DCP folder holds in its places."""
    node = unseal(DCP_SIDECAR_KIND, sidecar.read_bytes(), str(sidecar)).get("values")
    tree = decode_value(node, str(sidecar))
    placed: set[str] = set()

    def place(key: str, _: nesting.Path, exported: Any) -> Any:
        placed.add(key)
        found = leaves.get(key)
        try:
            alike = encode_value(resolve(common(exported))) == encode_value(found)
        except BadInputError:  # tensors
            alike = False
        return exported if alike else found

    exported = nesting.map_flat(tree if isinstance(tree, dict) else {}, place)
    if differing := sorted(placed ^ set(leaves)):
        raise CorruptError(
            f"{sidecar}: isn't about this checkpoint: {differing[0]} is only in one of them; remove "
            f"the file to import by DCP's own paths"
        )
    return exported


def _items(metadata: DcpMetadata) -> Iterator[StoredItem]:
    yield from metadata.objects.values()
    for tensor in metadata.tensors.values():
        yield from (piece.item for piece in tensor.pieces)


def _check_files(folder: Path, items: Iterable[StoredItem]) -> None:
    needed: dict[str, int] = {}
    for item in items:
        needed[item.file] = max(needed.get(item.file, 0), item.offset + item.length)
    for name, size_bytes in sorted(needed.items()):
        path = folder / name
        if not path.is_file():
            raise CorruptError(f"{path}: the metadata lists this file but it is gone")
        if path.stat().st_size < size_bytes:
            raise CorruptError(
                f"{path}: has {path.stat().st_size} bytes, the metadata needs {size_bytes}; it was cut"
            )


def _tensor(folder: Path, key: str, stored: StoredTensor) -> ForeignTensor:
    pieces = (
        Piece(p.offsets, p.sizes, partial(_load_piece, folder, key, stored, p))
        for p in stored.pieces
    )
    return ForeignTensor(stored.dtype, stored.shape, tuple(pieces))


def _load_piece(
    folder: Path, key: str, stored: StoredTensor, piece: StoredPiece, *, device: str = "cpu"
) -> torch.Tensor:
    what = f"{folder / piece.item.file}: {key}"
    tensor = _load(folder, piece.item, what, device)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CorruptError(f"{what}: holds a {type(tensor).__name__}, not a tensor")
    found = (dtype_name(what, tensor.dtype), tuple(tensor.shape))
    if found != (stored.dtype, piece.sizes):
        raise CorruptError(
            f"{what}: holds {found[0]} {list(found[1])}, the metadata says {stored.dtype} "
            f"{list(piece.sizes)}"
        )
    return tensor if tensor.is_meta else whole(tensor, what).pieces[0].load()


def _load(folder: Path, item: StoredItem, what: str, device: str = "cpu") -> Any:
    with io.BufferedReader(_Slice(folder / item.file, item.offset, item.length)) as stream:
        return load_weights(stream, what, device=device)


class _Slice(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, as a file."""

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        got = self._file.readinto(view) or 0
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()
