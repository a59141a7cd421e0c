"""Objects of classes, as Instances: enums, dataclasses, named tuples, torch's small types, collections.

A class is stored by its name. At a restore it is looked up among what this process has imported, checked
for being what it was, and filled without running a line of it: neither __init__ nor __new__, no property.
"""

from __future__ import annotations

import dataclasses
import enum
import reprlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import BadInputError, CorruptError
from ckpt.values.records import FACTORIES, KEYS, MAPPINGS, Instance
from ckpt.values.text import PLAIN

OF_TORCH = ("Size", "device", "dtype", "layout", "memory_format")
_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: made by a class statement
_PEPS = frozenset(("__orig_class__", "__weakref__"))  # attributes that are no state


class _NoSuchError(Exception):
    """A class isn't, or isn't any more, what its objects can be stored or made of. Its text says why."""


def instance_of(value: Any, path: str) -> Instance | None:
    """`value` as an Instance with the live objects in its fields; None if it's nothing of the kind.

    Raises BadInputError naming the path of one that wouldn't come back.
    """
    kind = type(value)
    if kind is Instance:
        return value  # type: ignore[no-any-return]
    if kind in _QUICK and (kind is not dict or not KEYS.issuperset(map(type, value))):
        return _QUICK[kind](value, path)
    try:
        if isinstance(value, enum.Enum):
            return Instance("enum", _name_of(kind), (("name", _member_name(value)),))
        if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            names = _namedtuple_fields(kind)
            _check_attributes(value, ())
            return Instance("namedtuple", _name_of(kind), tuple(zip(names, value, strict=True)))
        if dataclasses.is_dataclass(kind):
            names = _dataclass_fields(kind)
            _check_attributes(value, names)
            fields = tuple((n, _attribute(value, n)) for n in names)
            return Instance("dataclass", _name_of(kind), fields)
    except _NoSuchError as e:
        raise BadInputError(
            f"{path or 'value'}: a {kind.__module__}.{kind.__qualname__} can't be stored: {e}"
        ) from None
    if kind.__module__ == "torch" and kind.__qualname__ in OF_TORCH:
        inner = tuple(value) if kind.__qualname__ == "Size" else str(value).removeprefix("torch.")
        return Instance("torch", kind.__qualname__, (("v", inner),))
    return None


def resolve(value: Any, path: str = "") -> Any:
    """A copy of a decoded value with objects in the place of Instances, whose classes must be imported.

    Raises BadInputError naming the path and the class of what can't be made here.
    """
    kind = type(value)
    if kind is Instance:
        fields = [(resolve(k, path), resolve(v, f"{path}.{k}")) for k, v in value.fields]
        try:
            return _BUILDERS[value.kind](value.type, fields)
        except _NoSuchError as e:
            raise BadInputError(
                f"{path}: the checkpoint has a {value.type} here, and {e}; or leave this key out with "
                f"exclude={[path]!r}"
            ) from None
        except (TypeError, ValueError, KeyError, OverflowError) as e:
            raise CorruptError(
                f"{path}: no {value.kind} can be made of {reprlib.repr(value)}: {e}"
            ) from None
    if kind is dict:
        if PLAIN.issuperset(map(type, value.values())):
            return value
        return {k: resolve(v, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if kind in (list, tuple):
        if PLAIN.issuperset(map(type, value)):
            return value
        return kind([resolve(v, f"{path}.{i}") for i, v in enumerate(value)])
    if kind in (set, frozenset):
        made = kind([resolve(v, path) for v in value])
        if len(made) != len(value):
            raise CorruptError(f"{path}: two items of a {kind.__name__} are one")
        return made
    if kind is slice:
        return slice(*(resolve(v, path) for v in (value.start, value.stop, value.step)))
    return value


# -- classes by their names --------------------------------------------------------------------


def _name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in name:
        raise _NoSuchError(
            "its class is made in a function, where nobody finds it again; define it in a module"
        )
    if _find(name) is not cls:
        raise _NoSuchError(f"{name} is another class by now; store it under one name")
    return name


def _find(name: str) -> type:
    """The class of this name among what is imported. No module's or class's own code looks it up."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    if not isinstance(found, types.ModuleType):
        raise _NoSuchError(f"no module {module} is imported; import it before restore()")
    for part in qualname.split("."):
        found = vars(found).get(part)
        if not isinstance(found, type):
            raise _NoSuchError(f"{module} has no class {qualname}; define it as it was at the save")
    return found  # type: ignore[no-any-return]


def _check_made(cls: type, bases: tuple[type, ...]) -> None:
    """A class can be filled from outside if nothing else is below its `class` statements, and it has no
    say in how it's saved, or at its end.
    """
    if _attribute_of(cls, "state_dict") is not None:
        raise _NoSuchError(
            "it saves itself by its state_dict(), for which it must be in a dict with string or integer "
            "keys, a list or a tuple, and have a load_state_dict()"
        )
    for c in cls.__mro__:
        if c not in bases and not c.__flags__ & _HEAP_TYPE:
            raise _NoSuchError(f"it derives from {c.__name__}; store its parts")
        if "__del__" in c.__dict__:
            raise _NoSuchError("its class has a __del__; store its parts")


def _attribute_of(cls: type, name: str) -> Any:
    return next((c.__dict__[name] for c in cls.__mro__ if name in c.__dict__), None)


def _dataclass_fields(cls: type) -> tuple[str, ...]:
    _check_made(cls, (object,))
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        raise _NoSuchError("it belongs into dicts with string or integer keys, lists and tuples")
    names = tuple(f.name for f in dataclasses.fields(cls))
    for n in names:
        found = _attribute_of(cls, n)
        if hasattr(type(found), "__set__") and not isinstance(found, types.MemberDescriptorType):
            raise _NoSuchError(f"its field {n} is a {type(found).__name__}; store its parts")
    return names


def _namedtuple_fields(cls: type) -> tuple[str, ...]:
    _check_made(cls, (tuple, object))
    names: tuple[str, ...] = _attribute_of(cls, "_fields")
    if not all(type(n) is str for n in names):
        raise _NoSuchError("its fields have no names; store its parts")
    return names


def _check_attributes(value: Any, fields: tuple[str, ...]) -> None:
    if more := set(getattr(value, "__dict__", ())).difference(fields, _PEPS):
        raise _NoSuchError(
            f"it has attributes beside its fields ({', '.join(sorted(map(str, more))[:4])}); make them "
            f"fields, or give it state_dict() and load_state_dict()"
        )


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        raise _NoSuchError(f"its field {name} has no value") from None


def _member_name(value: enum.Enum) -> Any:
    """The name of a member; of a combination of flags those of its flags."""
    cls = type(value)
    if cls._member_map_.get(value._name_) is value:
        return value._name_
    if isinstance(value, enum.Flag):
        flags = [m for m in cls if m._value_ & value._value_]
        together = 0
        for m in flags:
            together |= m._value_
        if together == value._value_:
            return tuple(m._name_ for m in flags)
    raise _NoSuchError("it isn't among the members of its class; store its value")


# -- from Instances to objects -----------------------------------------------------------------

_Fields = list[tuple[Any, Any]]


def _build_dataclass(name: str, fields: _Fields) -> Any:
    cls = _find(name)
    if not dataclasses.is_dataclass(cls):
        raise _NoSuchError(f"{name} is no dataclass here; define it as it was at the save")
    _check_names(name, _dataclass_fields(cls), fields)
    made = object.__new__(cls)
    for n, v in fields:
        object.__setattr__(made, n, v)
    return made


def _build_namedtuple(name: str, fields: _Fields) -> Any:
    cls = _find(name)
    if not issubclass(cls, tuple) or not isinstance(_attribute_of(cls, "_fields"), tuple):
        raise _NoSuchError(f"{name} is no named tuple here; define it as it was at the save")
    names = _namedtuple_fields(cls)
    _check_names(name, names, fields)
    parts = dict(fields)
    return tuple.__new__(cls, [parts[n] for n in names])


def _check_names(name: str, here: tuple[str, ...], fields: _Fields) -> None:
    stored = [n for n, _ in fields]
    if set(here) != set(stored):
        differing = sorted(set(here) ^ set(stored))
        raise _NoSuchError(
            f"{name} has other fields here ({', '.join(differing)} on one side only); define it as it was "
            f"at the save"
        )


def _build_enum(name: str, fields: _Fields) -> Any:
    cls = _find(name)
    if not isinstance(cls, enum.EnumType):
        raise _NoSuchError(f"{name} is no enum here; define it as it was at the save")
    members: Mapping[str, Any] = cls._member_map_
    member = fields[0][1]
    names = (member,) if isinstance(member, str) else member
    if gone := [n for n in names if n not in members]:
        raise _NoSuchError(f"{name} has no member {gone[0]}; define it as it was at the save")
    if isinstance(member, str):
        return members[member]
    if not issubclass(cls, enum.Flag) or _own_code(cls):
        raise _NoSuchError(f"{name} doesn't combine its members as enum.Flag does")
    together = 0
    for n in names:
        together |= members[n]._value_
    return cls(together)


def _own_code(cls: type) -> bool:
    """Would making a combination of flags run code of its class?"""
    return any(
        n in c.__dict__
        for c in cls.__mro__
        if c.__module__ not in ("enum", "builtins")
        for n in ("_missing_", "__init__", "_create_pseudo_member_")
    )


def _build_torch(kind: str, fields: _Fields) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise _NoSuchError("torch isn't imported; import it")
    inner, cls = fields[0][1], vars(torch)[kind]
    if kind == "Size":
        return cls(inner)
    if kind == "device":
        try:
            return cls(inner)
        except RuntimeError:
            raise _NoSuchError(f"this torch has no device {inner[:40]}; use a newer one") from None
    found = vars(torch).get(inner)
    if not isinstance(found, cls):
        raise _NoSuchError(f"this torch has no {kind} {inner[:40]}; use a newer one")
    return found


def _dict(_: str, fields: _Fields) -> Any:
    made = dict(fields)
    if len(made) != len(fields):
        raise ValueError("two keys are one")
    return made


def _counter(_: str, fields: _Fields) -> Any:
    made: Counter[Any] = Counter()
    dict.update(made, _dict("", fields))
    return made


def _build_deque(most: str, fields: _Fields) -> Any:
    return deque((v for _, v in fields), int(most) if most else None)


_BUILDERS: Mapping[str, Callable[[str, _Fields], Any]] = {
    "dataclass": _build_dataclass,
    "namedtuple": _build_namedtuple,
    "enum": _build_enum,
    "torch": _build_torch,
    "dict": _dict,
    "OrderedDict": lambda _, fields: OrderedDict(_dict("", fields)),
    "Counter": _counter,
    "defaultdict": lambda name, fields: defaultdict(FACTORIES[name], _dict("", fields)),
    "deque": _build_deque,
}


# -- collections -------------------------------------------------------------------------------


def mapping_type(value: Any, path: str) -> str:
    """What the Instance of one of MAPPINGS has as its type."""
    if type(value) is not defaultdict:
        return ""
    factory = value.default_factory
    for name, known in FACTORIES.items():
        if known is factory:
            return name
    raise BadInputError(
        f"{path or 'value'}: a defaultdict that makes its values with {factory!r} can't be stored without "
        f"running code at load; give it one of {', '.join(filter(None, FACTORIES))} or None, or store "
        f"dict(value)"
    )


def _of_mapping(value: Any, path: str) -> Instance:
    return Instance(MAPPINGS[type(value)], mapping_type(value, path), tuple(value.items()))


def _of_deque(value: Any, _: str) -> Instance:
    most = "" if value.maxlen is None else str(value.maxlen)
    return Instance("deque", most, tuple(enumerate(value)))


_QUICK: Mapping[type, Callable[[Any, str], Instance]] = {
    **dict.fromkeys(MAPPINGS, _of_mapping),
    deque: _of_deque,
    dict: lambda value, _: Instance("dict", "", tuple(value.items())),
}
