"""Dataclasses from JSON or TOML, strictly: every field with its type, and nothing else.

Field types may be str, int (never below 0), float, bool, literals, tuples of one type, optional ones,
mappings from strings, other dataclasses, and unions of dataclasses told apart by a field `kind`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt.errors import BadInputError, CorruptError

T = TypeVar("T")


def decode_stored(kind: type[T], body: Any, what: str) -> T:
    """What this project wrote itself: all fields must be there. CorruptError names the field."""
    return _Decoder(CorruptError, defaults=False).build(kind, body, what)


def decode_settings(kind: type[T], body: Any, what: str) -> T:
    """What a person wrote: fields with a default may be missing. BadInputError names the field."""
    return _Decoder(BadInputError, defaults=True).build(kind, body, what)


class _Decoder:
    def __init__(self, error: type[Exception], *, defaults: bool) -> None:
        self._error = error
        self._defaults = defaults

    def build(self, kind: type[T], body: Any, what: str) -> T:
        known, optional = _fields(kind)  # type: ignore[arg-type]
        if not isinstance(body, Mapping):
            raise self._error(f"{what}: expected fields {', '.join(known)}, found {body!r}")
        missing = set(known) - set(body) - (optional if self._defaults else set())
        if missing or set(body) - set(known):
            raise self._error(
                f"{what}: missing {', '.join(sorted(missing)) or 'nothing'}; unknown "
                f"{', '.join(sorted(map(str, set(body) - set(known)))) or 'nothing'}; the fields are "
                f"{', '.join(known)}"
            )
        return kind(**{n: self.value(known[n], v, f"{what}: {n}") for n, v in body.items()})

    def value(self, hint: Any, value: Any, what: str) -> Any:
        """One JSON value as a field's type."""
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return self._union(args, value, what)
        if origin is Literal:
            if value not in args:
                raise self._error(f"{what}: {value!r} is not one of {', '.join(map(str, args))}")
            return value
        if origin is tuple:
            if not isinstance(value, list):
                raise self._error(f"{what}: expected a list, found {value!r}")
            return tuple(self.value(args[0], v, f"{what}[{i}]") for i, v in enumerate(value))
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, Mapping):
                raise self._error(f"{what}: expected names and values, found {value!r}")
            return {str(k): self.value(args[1], v, f"{what}.{k}") for k, v in value.items()}
        if is_dataclass(hint) and isinstance(hint, type):
            return self.build(hint, value, what)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > 2**1000:
                raise self._error(f"{what}: is too large for a float")
            return float(value)
        if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
            raise self._error(f"{what}: expected {hint.__name__}, found {value!r}")
        if hint is int and value < 0:
            raise self._error(f"{what}: {value} is below 0")
        return value

    def _union(self, args: tuple[Any, ...], value: Any, what: str) -> Any:
        options = [a for a in args if a is not type(None)]
        if value is None and len(options) < len(args):
            return None
        if len(options) == 1:
            return self.value(options[0], value, what)
        if all(map(is_dataclass, options)):
            kinds = {get_args(get_type_hints(o)["kind"])[0]: o for o in options}
            named = value.get("kind") if isinstance(value, Mapping) else None
            if named not in kinds:
                raise self._error(f"{what}: kind {named!r} is not one of {', '.join(kinds)}")
            return self.build(kinds[named], value, what)
        for option in options:  # of plain types, such as int | str
            if isinstance(value, option) and not isinstance(value, bool):
                return self.value(option, value, what)
        raise self._error(f"{what}: {value!r} is of no type that may be here")


@cache
def _fields(kind: type) -> tuple[dict[str, Any], set[str]]:
    """Name -> type of each field, and the names of those with a default."""
    hints = get_type_hints(kind)
    listed = fields(kind)
    optional = {
        f.name for f in listed if f.default is not MISSING or f.default_factory is not MISSING
    }
    return {f.name: hints[f.name] for f in listed}, optional
