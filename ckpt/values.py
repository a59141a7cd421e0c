"""Nested Python values as plain JSON, and back, without ever running code.

Dicts (string or int keys), lists, tuples, strings, bytes, numbers, booleans and None come
back as what they were; anything else is refused by name. A tensor is stored elsewhere and
stands in the tree as a `TensorRef`; a `PerRankRef` says that each rank has its own subtree.
"""

from __future__ import annotations

import base64
import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from ckpt.errors import BadInputError, CorruptError
from ckpt.types import Json

MAX_DEPTH = 200
_MAX_INT_BITS = 8192
_LEAST_INT, _MOST_INT = -(1 << _MAX_INT_BITS), 1 << _MAX_INT_BITS  # both excluded


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor: its key in the checkpoint."""

    fqn: str


@dataclass(frozen=True, slots=True)
class PerRankRef:
    """Stands for a subtree that each rank has for itself: its key in the ranks' objects."""

    fqn: str


def encode_value(value: Any, path: str = "", depth: int = 0) -> Json:
    """The JSON node of `value`; BadInputError names the path of what can't be stored."""
    if depth > MAX_DEPTH:
        raise BadInputError(f"{path}: nested more than {MAX_DEPTH} deep")
    # Exact types on purpose: a subclass (an enum, a named tuple) would come back as something else.
    kind = type(value)
    if value is None or kind is bool:
        return value  # type: ignore[no-any-return]
    if kind in (int, str):
        return _plain(value, path)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode("ascii")}
    if kind is TensorRef:
        return {"$": "tensor", "v": value.fqn}
    if kind is PerRankRef:
        return {"$": "per_rank", "v": value.fqn}
    if kind in (list, tuple):
        items: list[Json] = [encode_value(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]
        return items if kind is list else {"$": "tuple", "v": items}
    if isinstance(value, dict):  # OrderedDict and the like come back as dict
        pairs: list[Json] = []
        for k, v in value.items():
            if type(k) not in (str, int):
                raise BadInputError(
                    f"{path}: key {k!r} is a {type(k).__name__}; only string and int keys are stored"
                )
            _plain(k, f"{path}: key")
            pairs.append([k, encode_value(v, f"{path}.{k}" if path else str(k), depth + 1)])
        return {"$": "dict", "v": pairs}
    raise BadInputError(
        f"{path or 'value'}: a {kind.__module__}.{kind.__qualname__} can't be stored without running "
        f"code at load; store tensors, numbers, strings, bytes, lists, tuples, dicts or None"
    )


class NotPlainError(Exception):
    """Not to be written in the quick way; `encode_value` stores it, or says why it can't be."""


def list_text(values: Sequence[Any]) -> str:
    """The text of a list whose items all are of the types in PLAIN, made by C code; see SCALARS."""
    if len(values) >= _FEW:
        _check_ints(values)
        with suppress(ValueError):  # not all are finite
            return _dumps(values)
    return f"[{','.join([SCALARS[type(v)](v) for v in values])}]"


def dict_text(values: Mapping[str | int, Any]) -> str:
    """The same of a dict whose keys are strings and ints, and whose items are of the types in PLAIN."""
    if len(values) >= _FEW:
        _check_ints(values)
        _check_ints(values.values())
        with suppress(ValueError):
            return f'{{"$":"dict","v":{_dumps(list(values.items()))}}}'
    pairs = [f"[{SCALARS[type(k)](k)},{SCALARS[type(v)](v)}]" for k, v in values.items()]
    return f'{{"$":"dict","v":[{",".join(pairs)}]}}'


def _check_ints(values: Collection[Any]) -> None:
    kinds = set(map(type, values))
    if int in kinds:
        ints = values if kinds == {int} else [v for v in values if type(v) is int]
        if min(ints) <= _LEAST_INT or max(ints) >= _MOST_INT:
            raise NotPlainError


def _int_text(value: int) -> str:
    if _LEAST_INT < value < _MOST_INT:
        return repr(value)
    raise NotPlainError


def _float_text(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'{{"$":"float","v":"{value!r}"}}'


def _bool_text(value: bool) -> str:
    return "true" if value else "false"


def _bytes_text(value: bytes) -> str:
    return f'{{"$":"bytes","v":"{base64.b64encode(value).decode("ascii")}"}}'


SCALARS: Mapping[type, Callable[[Any], str]] = {
    str: encode_basestring,
    int: _int_text,
    float: _float_text,
    bool: _bool_text,
    type(None): lambda _: "null",
    bytes: _bytes_text,
}
"""The canonical JSON text of `encode_value`, made without it, by exact type.

Strings may turn out to be no Unicode when the text is encoded. Raises NotPlainError for too large ints.
"""
PLAIN = frozenset(SCALARS) - {bytes}
"""What is the same in JSON, apart from infinities and the like."""
_FEW = 16  # items, for which the way to C code takes longer than the work
_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def decode_value(node: Any, what: str, depth: int = 0) -> Any:
    """The value of a JSON node; CorruptError naming `what` if it isn't one of ours."""
    if depth > MAX_DEPTH:
        raise CorruptError(f"{what}: nested more than {MAX_DEPTH} deep")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [decode_value(v, what, depth + 1) for v in node]
    if isinstance(node, dict) and set(node) == {"$", "v"}:
        kind, v = node["$"], node["v"]
        try:
            if kind == "float" and v in ("nan", "inf", "-inf"):
                return float(v)
            if kind == "bytes":
                return base64.b64decode(v, validate=True)
            if kind == "tensor" and isinstance(v, str):
                return TensorRef(v)
            if kind == "per_rank" and isinstance(v, str):
                return PerRankRef(v)
            if kind == "tuple" and isinstance(v, list):
                return tuple(decode_value(x, what, depth + 1) for x in v)
            if kind == "dict" and isinstance(v, list):
                pairs = [_pair(p, what) for p in v]
                items = {k: decode_value(x, what, depth + 1) for k, x in pairs}
                if len(items) == len(pairs):
                    return items
        except (TypeError, ValueError) as e:
            raise CorruptError(f"{what}: a broken {kind} node: {e}") from None
    raise CorruptError(f"{what}: not a value of this format: {reprlib.repr(node)}")


def map_leaves(value: Any, fn: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of a nested value with fn(path, leaf) in the place of each leaf."""
    if isinstance(value, dict):
        return {k: map_leaves(v, fn, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(v, fn, f"{path}.{i}") for i, v in enumerate(value))
    return fn(path, value)


def iter_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of a nested value; an empty container is a leaf of its own."""
    if isinstance(value, dict) and value:
        for k, v in value.items():
            yield from iter_leaves(v, f"{path}.{k}" if path else str(k))
    elif type(value) in (list, tuple) and value:
        for i, v in enumerate(value):
            yield from iter_leaves(v, f"{path}.{i}")
    else:
        yield path, value


def _plain(value: str | int, path: str) -> str | int:
    """A string or integer that JSON can hold and give back."""
    if isinstance(value, int):
        if value.bit_length() > _MAX_INT_BITS:
            raise BadInputError(
                f"{path}: an integer of {value.bit_length()} bits, at most {_MAX_INT_BITS} are "
                f"stored; store it as bytes"
            )
        return value
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise BadInputError(
            f"{path}: a string that isn't valid Unicode ({e.reason}); store it as bytes"
        ) from None
    return value


def _pair(node: Any, what: str) -> tuple[str | int, Any]:
    if not isinstance(node, list) or len(node) != 2 or type(node[0]) not in (str, int):
        raise CorruptError(f"{what}: not a key and a value: {reprlib.repr(node)}")
    return node[0], node[1]
