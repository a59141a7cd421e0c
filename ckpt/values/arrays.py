"""numpy's scalars, arrays and dtypes as JSON: their bytes, by dtype and shape, and back.

numpy is imported where a value of it is decoded, never to find out that something isn't one.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckpt.errors import BadInputError
from ckpt.types import Json
from ckpt.values.records import plain
from ckpt.values.standard import bytes64, listed, text64, typed

if TYPE_CHECKING:
    import numpy as np

_SIMPLE = re.compile(r"[<>|][biufcmMSUV?]\d{1,9}(\[\d{0,9}[a-zA-Zμ]{1,2}\])?")
_STRUCTURE = frozenset(("names", "formats", "offsets", "itemsize", "align"))
_X87_BITS, _X87_BYTES = 63, 10
_MOST_EMPTY = 65536  # elements of no bytes: a crafted shape must not cost what it didn't bring


def encode_array(value: Any, path: str) -> Json:
    """The node of a value of numpy; None for what is none, or of no kind that is stored."""
    np = sys.modules.get("numpy")
    if np is None:
        return None
    if isinstance(value, np.dtype):
        return {"$": "np.dtype", "v": _dtype(value, path)}
    if isinstance(value, np.generic) and type(value) is value.dtype.type:
        if isinstance(value, np.str_):  # arrays lose the zeros at a string's end
            return {"$": "np.str", "v": plain("".join(value), path)}
        if isinstance(value, np.bytes_):
            return {"$": "np.bytes", "v": text64(bytes(value))}
        return {"$": "np.scalar", "v": [_dtype(value.dtype, path), text64(_content(value, "C"))]}
    if type(value) is np.ndarray:
        dtype = _dtype(value.dtype, path)
        if not value.dtype.itemsize and value.size > _MOST_EMPTY:
            raise BadInputError(f"{path}: an array of {value.size} empty elements; store its shape")
        order: Literal["C", "F"] = "F" if value.flags.fnc else "C"
        return {
            "$": "np.array",
            "v": [dtype, list(value.shape), order, text64(_content(value, order))],
        }
    return None


def _content(value: Any, order: Literal["C", "F"]) -> bytes:
    """Its bytes. What lies between fields, or behind a long double, isn't its own, and differs by process."""
    import numpy as np

    data: bytes = _without_gaps(np.asarray(value)).tobytes(order)
    if value.dtype.kind in "fc" and np.finfo(value.dtype).nmant == _X87_BITS:
        width = np.dtype(np.longdouble).itemsize
        parts = np.frombuffer(bytearray(data), np.uint8).reshape(-1, width)
        parts[:, _X87_BYTES:] = 0
        data = parts.tobytes()
    return data


def _without_gaps(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    if value.dtype.names is None:
        return value
    clean = np.zeros(value.shape, value.dtype)
    for name in value.dtype.names:
        clean[name] = _without_gaps(value[name])
    return clean


def _dtype(dtype: Any, path: str) -> Json:
    """What `_dtype_back` makes an equal dtype of, or BadInputError."""
    import numpy as np

    if dtype.hasobject:
        raise BadInputError(
            f"{path}: numpy objects ({dtype}) can't be stored without running code at load; give the "
            f"array a dtype of numbers or strings, or store a list"
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_dtype(base, path), list(shape)]
    if dtype.names is not None and dtype.type is np.void:
        if any(len(f) > 2 for f in dtype.fields.values()):
            raise BadInputError(
                f"{path}: a numpy dtype with titles ({dtype}); leave the titles out"
            )
        fields = [dtype.fields[n] for n in dtype.names]
        return {
            "names": [plain(n, path) for n in dtype.names],
            "formats": [_dtype(f[0], path) for f in fields],
            "offsets": [int(f[1]) for f in fields],
            "itemsize": dtype.itemsize,
            "align": bool(dtype.isalignedstruct),
        }
    if _SIMPLE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype:
        return str(dtype.str)
    raise BadInputError(
        f"{path}: the dtype {dtype} isn't one of numpy's own; store it as one that is, or as a tensor"
    )


def _dtype_back(node: Any, depth: int = 0) -> np.dtype[Any]:
    import numpy as np

    if depth > 32:
        raise ValueError("a dtype nested too deep")
    found: np.dtype[Any]
    if isinstance(node, list):
        base, shape = listed(node, 2)
        found = np.dtype((_dtype_back(base, depth + 1), _shape(shape)))
    elif isinstance(node, dict) and set(node) == _STRUCTURE:
        node = {k: typed(v, list) if k.endswith("s") else v for k, v in node.items()}
        formats = [_dtype_back(f, depth + 1) for f in node["formats"]]
        names = [typed(n, str) for n in node["names"]]
        offsets = [typed(n, int) for n in node["offsets"]]
        itemsize = typed(node["itemsize"], int)
        if any(o < 0 or o + f.itemsize > itemsize for f, o in zip(formats, offsets, strict=True)):
            raise ValueError("a field outside of its structure")
        found = np.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize},
            align=typed(node["align"], bool),
        )
    elif isinstance(node, str) and _SIMPLE.fullmatch(node):
        found = np.dtype(node)
        if found.str != node:
            raise ValueError(f"no dtype: {node}")
    else:
        raise ValueError("no dtype")
    if found.hasobject:
        raise ValueError("a dtype of objects")
    return found


def _shape(node: Any) -> tuple[int, ...]:
    shape = tuple(typed(n, int) for n in typed(node, list))
    if any(n < 0 for n in shape):
        raise ValueError("a negative size")
    return shape


def _array_back(node: Any) -> Any:
    import numpy as np

    name, sizes, order, data = listed(node, 4)
    dtype, shape, content = _dtype_back(name), _shape(sizes), bytes64(data)
    if order not in ("C", "F") or dtype.subdtype is not None:
        raise ValueError("no array")
    _check_size(dtype, math.prod(shape), content)
    return np.ndarray(shape, dtype, bytearray(content), order=order)


def _scalar_back(node: Any) -> Any:
    import numpy as np

    name, data = listed(node, 2)
    dtype, content = _dtype_back(name), bytes64(data)
    if dtype.subdtype is not None or dtype.kind in "SU":
        raise ValueError(f"no scalar of {dtype}")
    _check_size(dtype, 1, content)
    return np.ndarray((), dtype, bytearray(content))[()]


def _check_size(dtype: np.dtype[Any], count: int, content: bytes) -> None:
    """As many bytes as elements: nothing is made that wasn't stored."""
    if count * dtype.itemsize != len(content) or (not dtype.itemsize and count > _MOST_EMPTY):
        raise ValueError(f"{len(content)} bytes for {count} elements of {dtype}")


def _string_back(node: Any) -> Any:
    import numpy as np

    return np.str_(typed(node, str))


def _bytes_back(node: Any) -> Any:
    import numpy as np

    return np.bytes_(bytes64(node))


DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "np.dtype": _dtype_back,
    "np.scalar": _scalar_back,
    "np.array": _array_back,
    "np.str": _string_back,
    "np.bytes": _bytes_back,
}
