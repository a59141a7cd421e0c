"""The canonical JSON text of `encode_value` for containers of plain values, made without it, by C code."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from json.encoder import encode_basestring
from typing import Any

from ckpt.values.records import MAX_INT_BITS, odd_float

_LEAST_INT, _MOST_INT = -(1 << MAX_INT_BITS), 1 << MAX_INT_BITS  # both excluded


def node_text(node: Any) -> str:
    """The canonical text of a JSON node."""
    return _canonical(node)


class NotPlainError(Exception):
    """Not to be written in the quick way; `encode_value` stores it, or says why it can't be."""


def list_text(values: Sequence[Any]) -> str:
    """The text of a list whose items all are of the types in PLAIN, made by C code; see SCALARS."""
    if len(values) >= _FEW:
        _check_ints(values)
        with suppress(ValueError):  # not all are finite
            return _dumps(values)
    return f"[{','.join([SCALARS[type(v)](v) for v in values])}]"


def pairs_text(values: Mapping[str | int, Any]) -> str:
    """`[key,value],[key,value]` of a dict whose keys are strings and ints, and whose items are PLAIN."""
    if len(values) >= _FEW:
        _check_ints(values)
        _check_ints(values.values())
        with suppress(ValueError):
            return _dumps(list(values.items()))[1:-1]
    return ",".join([f"[{SCALARS[type(k)](k)},{SCALARS[type(v)](v)}]" for k, v in values.items()])


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
    return repr(value) if math.isfinite(value) else f'{{"$":"float","v":"{odd_float(value)}"}}'


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
_canonical = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
).encode
