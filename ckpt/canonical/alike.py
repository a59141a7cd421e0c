"""Are options of several ranks or groups the same, and how their differences are told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt.manifest import canonical
from ckpt.united import without_tensors
from ckpt.values import encode_value

_SHOWN = 3


def comparable(values: Any) -> bytes:
    """The same for values that are alike. Tensors in them don't count: they aren't known yet."""
    return canonical(encode_value(without_tensors(values)))


def difference(options: Sequence[Mapping[Any, Any]], names: Iterable[Any]) -> str | None:
    """The first of the named options that isn't the same in all, with its values."""
    for name in names:
        values = list(dict.fromkeys(repr(o.get(name)) for o in options))
        if len(values) > 1:
            return f"{name} ({', '.join(values[:_SHOWN])})"
    return None


def few(names: Sequence[Any]) -> str:
    """The first few, the rest counted."""
    shown = ", ".join(map(str, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
