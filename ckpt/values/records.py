"""What stands in a value tree for something else, and what all kinds of values have in common."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import BadInputError

MAX_DEPTH = 200
MAX_INT_BITS = 8192
KEYS = frozenset((str, int))
"""Key types of the dicts that hold tensors and objects, whose keys are parts of the tensors' names."""

MAPPINGS: Mapping[type, str] = {
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    defaultdict: "defaultdict",
}
FACTORIES: Mapping[str, type | None] = {
    "": None,
    **{t.__name__: t for t in (int, float, list, dict, set, str, bool, tuple, bytes, complex)},
}
"""What a defaultdict may make its values with."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for a tensor: its key in the checkpoint."""

    fqn: str


@dataclass(frozen=True, slots=True)
class PerRankRef:
    """Stands for a subtree that each rank has for itself: its key in the ranks' objects."""

    fqn: str


@dataclass(frozen=True, slots=True)
class Instance:
    """Stands for an object whose class isn't looked up yet.

    kind: "dataclass", "namedtuple", "enum", "torch", "deque", one of MAPPINGS, or "dict" for one with keys
    that are neither strings nor integers. type: "module:qualname" of a class; for torch, which of its types;
    the default factory of a defaultdict; the greatest length of a deque. fields: (name, value) in order.
    """

    kind: str
    type: str
    fields: tuple[tuple[Any, Any], ...]

    @property
    def walks(self) -> bool:
        """May there be tensors and objects in it? Then it is gone through like a dict."""
        return self.kind not in ("enum", "torch") and KEYS.issuperset(
            type(k) for k, _ in self.fields
        )

    @property
    def like(self) -> tuple[str, str]:
        """Two that have the same of this are of one type."""
        return self.kind, self.type

    def having(self, values: Iterable[Any]) -> Instance:
        """The same with other values under the same names."""
        return replace(self, fields=tuple(zip((k for k, _ in self.fields), values, strict=True)))

    def __repr__(self) -> str:
        if self.kind == "enum":
            names = self.fields[0][1]
            return f"{self.type}.{names if isinstance(names, str) else '|'.join(names)}"
        if self.kind == "torch":
            return f"torch.{self.type}({self.fields[0][1]!r})"
        inner = ", ".join(f"{k}={v!r}" for k, v in self.fields)
        return f"{self.type if ':' in self.type else self.kind}({inner})"


def plain(value: str | int, path: str) -> str | int:
    """A string or integer that JSON can hold and give back."""
    if isinstance(value, int):
        if value.bit_length() > MAX_INT_BITS:
            raise BadInputError(
                f"{path}: an integer of {value.bit_length()} bits, at most {MAX_INT_BITS} are "
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


def odd_float(value: float) -> str:
    """The text of a float that JSON has no number for. A nan of its own bits keeps them."""
    if math.isnan(value) and (bits := struct.pack(">d", value)) != _NAN:
        return f"nan:{bits.hex()}"
    return repr(value)


def float_of(text: str) -> float:
    """The same back. Raises ValueError."""
    if text in ("nan", "inf", "-inf"):
        return float(text)
    name, _, bits = text.partition(":")
    (value,) = struct.unpack(">d", bytes.fromhex(bits)) if len(bits) == 16 else (0.0,)
    if name != "nan" or odd_float(value) != text:
        raise ValueError(f"{text[:40]!r} is no such float")
    return float(value)


_NAN = struct.pack(">d", math.nan)
