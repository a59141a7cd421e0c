"""Reads the `.metadata` pickle of a DCP folder without running anything that it names.

A pickle is a program that builds objects by calling what it names. This unpickler knows the few
names in DCP's metadata and gives each a stand-in: builtin containers, strings, or an inert
record made for this one load. Any other name is refused before it is even looked up.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

from ckpt.errors import BadInputError, CorruptError
from ckpt.foreign.weights import refusal
from ckpt.nesting import Path as KeyPath
from ckpt.types import ITEMSIZE

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # DCP before torch 2.3
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_BUILTINS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
}


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Where an item lies: a file name inside of the folder, and its bytes there."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: StoredItem


@dataclass(frozen=True, slots=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """What a DCP folder holds, every number checked: tensors, objects, and the paths of both, in order."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredItem]
    paths: dict[str, KeyPath]


def parse_metadata(data: bytes, what: str) -> DcpMetadata:
    """Read a `.metadata` file's bytes; `what` names it in errors.

    Raises BadInputError naming a class that doesn't belong there, or a key that can't be
    imported; CorruptError if it isn't whole.
    """
    try:
        root = _Unpickler(data, what).load()
    except BadInputError:
        raise
    except Exception as e:  # unpickling raises anything on bytes that no pickler wrote
        raise CorruptError(f"{what}: not a whole pickle ({type(e).__name__}: {e})") from None
    try:
        return _Reader(what).metadata(root)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise CorruptError(f"{what}: not DCP's metadata ({type(e).__name__}: {e})") from None


class _Record:
    """An instance of some class of DCP: its name, and the state that the pickle gives it."""

    name = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, field: str) -> Any:
        return self.state[field]


class _Unpickler(pickle.Unpickler):
    """Knows the names of `_RECORDS` and `_BUILTINS`, and the dtypes of torch."""

    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(io.BytesIO(data))
        self._what = what
        # Made anew for each load: a pickle can set attributes of the classes that it gets.
        self._records = {key: type(key[1], (_Record,), {"name": key[1]}) for key in _RECORDS}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key in self._records:
            return self._records[key]
        if key in _BUILTINS:
            return _BUILTINS[key]
        if key == ("builtins", "getattr"):
            return self._member
        if module == "torch" and name in ITEMSIZE:
            return name
        if module == "torch" and name.isidentifier():
            raise BadInputError(
                f"{self._what}: names torch.{name}, which is no dtype of a checkpoint"
            )
        raise BadInputError(refusal(self._what, f"{module}.{name}"))

    def _member(self, owner: Any, name: Any) -> _Record:
        """A member of an enumeration: before 3.11.4 Python pickles it as a look into its class."""
        if isinstance(owner, type) and issubclass(owner, _Record) and type(name) is str:
            return owner(name)
        raise BadInputError(refusal(self._what, "builtins.getattr"))


class _Reader:
    """Turns the records of one `.metadata` into checked numbers."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._items: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}

    def metadata(self, root: Any) -> DcpMetadata:
        _expect(root, "Metadata")
        for index, info in _mapping(root["storage_data"]).items():
            _expect(index, "MetadataIndex")
            offset = index.state.get("offset")
            key = (_text(index["fqn"]), None if offset is None else _numbers(offset))
            self._items[key] = self._item(key[0], info)
        tensors, objects = {}, {}
        entries = _mapping(root["state_dict_metadata"])
        for key, entry in entries.items():
            if _named(entry) == "BytesStorageMetadata":
                objects[_text(key)] = self._found(key, None)
            else:
                _expect(entry, "TensorStorageMetadata")
                tensors[_text(key)] = self._tensor(key, entry)
        paths = root.state.get("planner_data")
        # A planner that doesn't flatten leaves no paths: its keys are those of the state itself.
        known = {str(k): tuple(p) for k, p in paths.items()} if isinstance(paths, dict) else {}
        return DcpMetadata(tensors, objects, {key: known.get(key, (key,)) for key in entries})

    def _tensor(self, key: str, entry: _Record) -> StoredTensor:
        properties = entry["properties"]
        _expect(properties, "TensorProperties")
        state = properties.state
        dtype = state["dtype"] if isinstance(state, dict) else state[0]
        if dtype not in ITEMSIZE:
            raise BadInputError(f"{self._what}: {key}: dtype {dtype!r} can't be stored")
        shape = _numbers(entry["size"])
        pieces = []
        for chunk in entry["chunks"]:
            _expect(chunk, "ChunkStorageMetadata")
            offsets, sizes = _numbers(chunk["offsets"]), _numbers(chunk["sizes"])
            # A shard without elements may share its offset, and so its item, with a real one.
            if math.prod(sizes) or not math.prod(shape):
                pieces.append(StoredPiece(offsets, sizes, self._found(key, offsets)))
        return StoredTensor(dtype, shape, tuple(pieces))

    def _found(self, key: str, offsets: tuple[int, ...] | None) -> StoredItem:
        if (key, offsets) not in self._items:
            place = "" if offsets is None else f" at {offsets}"
            raise CorruptError(f"{self._what}: {key}: its data{place} isn't listed")
        return self._items[key, offsets]

    def _item(self, key: str, info: Any) -> StoredItem:
        _expect(info, "_StorageInfo")
        if info.state.get("transform_descriptors"):
            raise BadInputError(
                f"{self._what}: {key}: stored through an extension of DCP "
                f"({info['transform_descriptors']}); save it without"
            )
        file = _text(info["relative_path"])
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise BadInputError(
                f"{self._what}: {key}: {file!r} is no file name inside of the folder"
            )
        offset, length = _numbers((info["offset"], info["length"]))
        return StoredItem(file, offset, length)


def _named(record: Any) -> str:
    return record.name if isinstance(record, _Record) else type(record).__name__


def _expect(record: Any, name: str) -> None:
    if _named(record) != name:
        raise TypeError(f"expected a {name}, found a {_named(record)}")


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a dict, found a {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a string, found a {type(value).__name__}")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"expected sizes or offsets, found {str(value)[:60]}")
    return tuple(value)
