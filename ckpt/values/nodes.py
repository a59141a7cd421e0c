"""Nested values as JSON nodes, and back. Nodes are JSON, in which only {"$": kind, "v": ...} has meaning."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import BadInputError, CorruptError
from ckpt.types import Json
from ckpt.values import arrays, classes, standard
from ckpt.values.records import (
    FACTORIES,
    KEYS,
    MAPPINGS,
    MAX_DEPTH,
    Instance,
    PerRankRef,
    TensorRef,
    odd_float,
    plain,
)

_DECODERS: Mapping[str, Callable[[Any], Any]] = {**standard.DECODERS, **arrays.DECODERS}
_INSTANCES = frozenset(("dataclass", "namedtuple", "enum", "torch", "deque", *MAPPINGS.values()))
_MOST_PLACES = (1 << 63) - 1


def encode_value(value: Any, path: str = "", depth: int = 0) -> Json:
    """The JSON node of `value`; BadInputError names the path of what can't be stored."""
    try:
        return _encode(value, path, depth)
    except RecursionError:
        raise BadInputError(f"{path or 'value'}: nested too deep") from None


def _encode(value: Any, path: str, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise BadInputError(f"{path}: nested more than {MAX_DEPTH} deep")
    # Exact types on purpose: a subclass would come back as something else.
    kind = type(value)
    if value is None or kind is bool:
        return value  # type: ignore[no-any-return]
    if kind in (int, str):
        return plain(value, path)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": odd_float(value)}
    if kind is bytes:
        return {"$": "bytes", "v": standard.text64(value)}
    if kind is TensorRef:
        return {"$": "tensor", "v": value.fqn}
    if kind is PerRankRef:
        return {"$": "per_rank", "v": value.fqn}
    if kind in (list, tuple):
        items: list[Json] = [_encode(v, f"{path}.{i}", depth + 1) for i, v in enumerate(value)]
        return items if kind is list else {"$": "tuple", "v": items}
    if kind is dict:  # of any keys: what of it walks, and what doesn't, has one form
        return {"$": "dict", "v": _pairs(value.items(), path, depth)}
    if kind in standard.ENCODERS:
        name, encode = standard.ENCODERS[kind]
        return {"$": name, "v": encode(value, lambda v: _encode(v, path, depth + 1), path)}
    instance = classes.instance_of(value, path)
    if instance is not None:
        pairs = _pairs(instance.fields, path, depth)
        head = [] if instance.kind == "dict" else [instance.type]
        return {"$": instance.kind, "v": [*head, *pairs]}
    if isinstance(value, Mapping):  # of another class: its content is stored
        return {"$": "dict", "v": _pairs(value.items(), path, depth)}
    found = arrays.encode_array(value, path)
    if found is None:
        raise BadInputError(
            f"{path or 'value'}: a {kind.__module__}.{kind.__qualname__} can't be stored without running "
            f"code at load; {_advice(value)}"
        )
    return found


def _pairs(items: Any, path: str, depth: int) -> list[Json]:
    pairs: list[Json] = []
    for k, v in items:
        where = f"{path}.{k}" if path else str(k)
        if type(k) in KEYS:
            key: Json = plain(k, f"{path}: key")
        else:
            key = _encode(k, f"{path}: key {k!r}", depth + 1)
        pairs.append([key, _encode(v, where, depth + 1)])
    return pairs


def _advice(value: Any) -> str:
    if isinstance(value, int | float | complex | str | bytes | list | tuple | set | frozenset):
        plain_type = next(t for t in type(value).__mro__ if t.__module__ == "builtins")
        return f"store the {plain_type.__name__} that it is, as {plain_type.__name__}(value)"
    if type(value).__module__.partition(".")[0] == "torch":
        return (
            "tensors and objects with a state_dict are stored in dicts with string or integer keys, lists, "
            "tuples, dataclasses and named tuples, and of tensors only dense ones"
        )
    if callable(value):
        return "store its name, and look it up where you need it"
    return (
        "store tensors, numbers, strings, bytes, dates, numpy arrays, and lists, tuples, sets, dicts and "
        "dataclasses of them, or give its class state_dict() and load_state_dict()"
    )


def decode_value(node: Any, what: str) -> Any:
    """The value of a JSON node; CorruptError naming `what` if it isn't one of ours. Imports no torch."""
    try:
        return _decode(node, what, 0)
    except RecursionError:
        raise CorruptError(f"{what}: nested too deep") from None


def _decode(node: Any, what: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CorruptError(f"{what}: nested more than {MAX_DEPTH} deep")
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, list):
        return [_decode(v, what, depth + 1) for v in node]
    if isinstance(node, dict) and set(node) == {"$", "v"}:
        kind, v = node["$"], node["v"]
        try:
            if kind in ("tensor", "per_rank") and isinstance(v, str):
                return TensorRef(v) if kind == "tensor" else PerRankRef(v)
            if kind in standard.OF_ITEMS and isinstance(v, list):
                return standard.OF_ITEMS[kind]([_decode(x, what, depth + 1) for x in v])
            if kind == "dict" and isinstance(v, list):
                pairs = _decode_pairs(v, what, depth)
                if KEYS.issuperset([type(k) for k, _ in pairs]):
                    return dict(pairs)
                return Instance("dict", "", tuple(pairs))
            if kind in _INSTANCES and isinstance(v, list) and v and isinstance(v[0], str):
                pairs = _decode_pairs(v[1:], what, depth)
                _check(found := Instance(kind, v[0], tuple(pairs)))
                return found
            if kind in _DECODERS:
                return _DECODERS[kind](v)
        except (TypeError, ValueError, ArithmeticError) as e:
            told = reprlib.repr(str(e))[1:-1]
            raise CorruptError(f"{what}: a broken {kind} node: {told}") from None
    raise CorruptError(f"{what}: not a value of this format: {reprlib.repr(node)}")


def _decode_pairs(nodes: list[Any], what: str, depth: int) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for node in nodes:
        if not isinstance(node, list) or len(node) != 2:
            raise CorruptError(f"{what}: not a key and a value: {reprlib.repr(node)}")
        key = node[0]
        if type(key) not in KEYS:
            key = _decode(key, what, depth + 1)
        pairs.append((key, _decode(node[1], what, depth + 1)))
    if len({k for k, _ in pairs}) != len(pairs):
        raise ValueError("two keys are equal")
    return pairs


def _check(value: Instance) -> None:
    """ValueError for what no object is stored as, by its kind."""
    kind, names = value.kind, [k for k, _ in value.fields]
    if kind in ("dataclass", "namedtuple", "enum", "torch"):
        fits = all(type(n) is str for n in names)
        if kind == "torch":
            fits = fits and names == ["v"] and _is_of_torch(value.type, value.fields[0][1])
        else:
            fits = fits and value.type.count(":") == 1
        if kind == "enum":
            member = value.fields[0][1] if len(names) == 1 else None
            flags = member if type(member) is tuple else ()
            fits = fits and names == ["name"]
            fits = fits and (type(member) is str or type(member) is tuple)
            fits = fits and all(type(f) is str for f in flags)
    elif kind == "deque":
        most = value.type
        fits = names == list(range(len(names))) and all(type(n) is int for n in names)
        if most:
            fits = fits and most.isascii() and most.isdigit() and str(int(most)) == most
            fits = fits and len(names) <= int(most) <= _MOST_PLACES
    else:
        fits = value.type in FACTORIES if kind == "defaultdict" else not value.type
    if not fits:
        raise ValueError(f"no {kind} is stored as {value.type!r} with {names!r}")


def _is_of_torch(kind: str, v: Any) -> bool:
    if kind == "Size":
        return type(v) is tuple and all(type(n) is int for n in v)
    return kind in classes.OF_TORCH and type(v) is str
