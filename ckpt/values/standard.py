"""Values of the standard library that aren't JSON's own: what each is as JSON, by exact type, and back.

An encoder gets the value, a function that encodes what is in it, and its path for errors; a decoder gets the
node. Decoders raise TypeError, ValueError or ArithmeticError for what no encoder has written.
"""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

from ckpt.errors import BadInputError
from ckpt.types import Json
from ckpt.values.records import float_of, plain
from ckpt.values.text import node_text

Inner = Callable[[Any], Any]

_PATHS = {t.__name__: t for t in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)}
_UTC = timezone.utc  # noqa: UP017 - what `timezone` gives for no offset
_MOST_SEEK = (1 << 63) - 1


def text64(data: Any) -> str:
    return base64.b64encode(data).decode("ascii")


def bytes64(node: Any) -> bytes:
    return base64.b64decode(typed(node, str), validate=True)


def typed(node: Any, kind: type) -> Any:
    """`node` itself, which must be of exactly this type."""
    if type(node) is not kind:
        raise TypeError(f"a {type(node).__name__} where a {kind.__name__} belongs")
    return node


def listed(node: Any, count: int) -> list[Any]:
    if len(typed(node, list)) != count:
        raise ValueError(f"{len(node)} items where {count} belong")
    return list(node)


def _ints(node: Any, count: int) -> list[int]:
    return [typed(n, int) for n in listed(node, count)]


def _set(value: Any, inner: Inner, _: str) -> Json:
    # Sorted: the order of a set is its process's own.
    return sorted(map(inner, value), key=node_text)


def _set_back(items: list[Any]) -> set[Any]:
    found = set(items)
    if len(found) != len(items):
        raise ValueError("two items are equal")
    return found


def _fraction(value: Fraction, _: Inner, path: str) -> Json:
    return [plain(value.numerator, path), plain(value.denominator, path)]


def _range(value: range, _: Inner, path: str) -> Json:
    return [plain(n, path) for n in (value.start, value.stop, value.step)]


def _delta(value: timedelta) -> Json:
    return [value.days, value.seconds, value.microseconds]


def _delta_back(node: Any) -> timedelta:
    value = timedelta(*_ints(node, 3))
    if _delta(value) != node:
        raise ValueError("not a normal timedelta")
    return value


def _zone(value: Any, path: str) -> Json:
    if value is None:
        return None
    if type(value) is not timezone:
        raise BadInputError(
            f"{path}: a time with a {type(value).__module__}.{type(value).__qualname__} can't be stored; "
            f"use datetime.timezone, such as value.astimezone(datetime.timezone.utc)"
        )
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    return [_delta(offset), *(plain(n, path) for n in name)]


def _zone_back(node: Any) -> timezone | None:
    if node is None:
        return None
    offset, *name = typed(node, list)
    if len(name) > 1:
        raise ValueError("a zone with two names")
    if not name and offset == [0, 0, 0]:
        return _UTC
    return timezone(_delta_back(offset), *(typed(n, str) for n in name))


def _moment(value: datetime | time, _: Inner, path: str) -> Json:
    bare = value.replace(tzinfo=None, fold=0).isoformat()
    return [bare, value.fold, _zone(value.tzinfo, path)]


def _moment_back(node: Any, kind: type[datetime] | type[time]) -> Any:
    text, fold, zone = listed(node, 3)
    bare = kind.fromisoformat(typed(text, str))
    if bare.tzinfo is not None or bare.isoformat() != text:
        raise ValueError(f"no {kind.__name__}: {text[:40]!r}")
    return bare.replace(tzinfo=_zone_back(zone), fold=typed(fold, int))


def _same_text(kind: Callable[[str], Any], text: Callable[[Any], str] = str) -> Callable[..., Any]:
    """Decodes what must give the same text again: none but the canonical form is a value of ours."""

    def back(node: Any) -> Any:
        value = kind(typed(node, str))
        if text(value) != node:
            raise ValueError(f"not as it is written: {node[:40]!r}")
        return value

    return back


def _path(value: PurePath, _: Inner, path: str) -> Json:
    return [type(value).__name__, plain(str(value), path)]


def _path_back(node: Any) -> PurePath:
    name, text = listed(node, 2)
    if name not in _PATHS or "\0" in typed(text, str):
        raise ValueError("no path")
    value = _PATHS[name](text)
    if str(value) != text:
        raise ValueError("not a normal path")
    return value


def _bytes_io(value: io.BytesIO, _: Inner, path: str) -> Json:
    data, position, rest = _state_of(value, path)
    _check_bare(rest, path)
    return [text64(data), position]


def _bytes_io_back(node: Any) -> io.BytesIO:
    data, position = listed(node, 2)
    value = io.BytesIO(bytes64(data))
    value.seek(_seek(position))
    return value


def _string_io(value: io.StringIO, _: Inner, path: str) -> Json:
    text, newline, position, rest = _state_of(value, path)
    _check_bare(rest, path)
    return [plain(text, path), newline, position]


def _string_io_back(node: Any) -> io.StringIO:
    text, newline, position = listed(node, 3)
    if newline not in (None, "", "\n", "\r", "\r\n"):
        raise ValueError("no newline")
    value = io.StringIO()
    # By the constructor its newlines would be translated once more.
    state = (typed(text, str), newline, _seek(position), None)
    value.__setstate__(state)  # type: ignore[attr-defined]
    return value


def _state_of(value: Any, path: str) -> tuple[Any, ...]:
    if value.closed:
        raise BadInputError(f"{path}: a closed {type(value).__name__} has no content; leave it out")
    state: tuple[Any, ...] = value.__getstate__()
    return state


def _check_bare(rest: Any, path: str) -> None:
    if rest:
        raise BadInputError(
            f"{path}: has attributes of its own ({', '.join(rest)}); store them apart"
        )


def _seek(position: Any) -> int:
    if not 0 <= typed(position, int) <= _MOST_SEEK:
        raise ValueError(f"no position: {position}")
    return int(position)


ENCODERS: Mapping[type, tuple[str, Callable[[Any, Inner, str], Json]]] = {
    complex: ("complex", lambda v, inner, _: [inner(v.real), inner(v.imag)]),
    set: ("set", _set),
    frozenset: ("frozenset", _set),
    bytearray: ("bytearray", lambda v, _, __: text64(v)),
    range: ("range", _range),
    slice: ("slice", lambda v, inner, _: [inner(v.start), inner(v.stop), inner(v.step)]),
    type(...): ("Ellipsis", lambda _, __, ___: None),
    Decimal: ("Decimal", lambda v, _, __: str(v)),
    Fraction: ("Fraction", _fraction),
    datetime: ("datetime", _moment),
    date: ("date", lambda v, _, __: v.isoformat()),
    time: ("time", _moment),
    timedelta: ("timedelta", lambda v, _, __: _delta(v)),
    timezone: ("timezone", lambda v, _, path: _zone(v, path)),
    uuid.UUID: ("UUID", lambda v, _, __: str(v)),
    **dict.fromkeys(_PATHS.values(), ("path", _path)),
    io.BytesIO: ("BytesIO", _bytes_io),
    io.StringIO: ("StringIO", _string_io),
}

OF_ITEMS: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": _set_back,
    "frozenset": lambda items: frozenset(_set_back(items)),
    "slice": lambda items: slice(*listed(items, 3)),
    "complex": lambda items: complex(*(typed(n, float) for n in listed(items, 2))),
}
"""What a list of decoded items becomes."""

DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": lambda node: float_of(typed(node, str)),
    "bytes": bytes64,
    "bytearray": lambda node: bytearray(bytes64(node)),
    "range": lambda node: range(*_ints(node, 3)),
    "Ellipsis": lambda node: typed(node, type(None)) or ...,
    "Decimal": _same_text(Decimal),
    "Fraction": lambda node: Fraction(*_ints(node, 2)),
    "datetime": lambda node: _moment_back(node, datetime),
    "date": _same_text(date.fromisoformat),
    "time": lambda node: _moment_back(node, time),
    "timedelta": _delta_back,
    "timezone": lambda node: _zone_back(typed(node, list)),
    "UUID": _same_text(uuid.UUID),
    "path": _path_back,
    "BytesIO": _bytes_io_back,
    "StringIO": _string_io_back,
}
