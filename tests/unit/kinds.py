"""One value or more of each kind that is stored by type, and what two of them being the same means."""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import torch


class Colour(enum.IntEnum):
    RED = 1
    CRIMSON = 1


class Stage(str, enum.Enum):  # noqa: UP042 - as people write it, too
    TRAIN = "train"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Progress:
    """Its constructor counts: making one at a restore must not run it."""

    step: Any
    best: Any = None
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    table: str
    row: Any


class Outer:
    class Inner(NamedTuple):
        a: Any


UTC = timezone.utc  # noqa: UP017 - as the value is called
BERLIN = timezone(timedelta(hours=1), "CET")
STRUCTURE = np.dtype(
    {"names": ["a", "b"], "formats": ["<i2", (">f8", (2,))], "offsets": [2, 8]}, align=False
)


def _read(stream: Any, position: int) -> Any:
    stream.seek(position)
    return stream


def nan_of(bits: int) -> float:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    return float(value)


HASHABLE: list[Any] = [
    *(0, True, None, 1.5, -0.0, "a", b"x", (1, ("b", None)), frozenset({1, "a"}), math.inf),
    *(Colour.RED, Stage.TRAIN, Access.READ, Access.READ | Access.WRITE, Access(0), ..., 2 - 0j),
    *(np.float64(0.1), np.int8(3), np.bool_(True), np.str_("s\0"), np.bytes_(b"s\0"), np.str_("")),
    *(np.datetime64("2024-02-29", "ns"), np.timedelta64(-3, "D"), np.complex64(1j), np.float16(2)),
    *(Decimal("1.50"), Decimal("-1E+999999"), Fraction(-3, 7), uuid.UUID(int=5), range(9, 1, -2)),
    *(date(2024, 2, 29), datetime(2024, 2, 29, 1, fold=1), datetime(1, 1, 1, tzinfo=UTC)),
    *(
        time(1, 2, 3, 4, tzinfo=BERLIN),
        timedelta(-1, 5),
        UTC,
        BERLIN,
        timezone(timedelta(0), "UTC"),
    ),
    *(Path("a/b"), Path(), PurePosixPath("/x"), PureWindowsPath("c:/x"), Point(1, 2.0)),
    *(torch.Size([2, 0]), torch.float32, torch.bfloat16, torch.device("cuda", 3), torch.strided),
    *(
        torch.device("cpu"),
        torch.channels_last,
        np.dtype("<f4"),
        STRUCTURE,
        np.dtype(("i4", (2, 3))),
    ),
    *(Key("t", 3), Key("t", (1, None)), Outer.Inner(1), np.dtype("datetime64[ns]")),
]
OTHERS: list[Any] = [
    *(
        nan_of(0x7FF8000000000000),
        nan_of(0xFFF8000000000000),
        nan_of(0x7FF0000000000001),
        -math.inf,
    ),
    *(
        complex(math.nan, -0.0),
        np.float64("nan"),
        np.datetime64("NaT"),
        np.float32(-0.0),
        Decimal("nan"),
    ),
    *(np.longdouble("1.1"), np.void(b"abc"), np.zeros(1, STRUCTURE)[0], Decimal("sNaN12")),
    *(np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.array(3.5), np.zeros((0, 3))),
    *(np.arange(12)[::-2], np.array(["a", "bc"]), np.array([b"x\0y"]), np.zeros(2, STRUCTURE)),
    *(
        np.array([True, False]),
        np.array(["2024"], "M8[Y]"),
        np.arange(3, dtype=">u2"),
        np.zeros(2, "U0"),
    ),
    *(np.array([nan_of(0x7FF8000000000001)]), np.random.RandomState(3).get_state()),
    *(set(), {1, "a", (2,)}, bytearray(b"ab"), slice(1, None, "x"), {Access.READ, Stage.TRAIN}),
    *(
        OrderedDict(),
        OrderedDict(b=1, a=2),
        Counter("abca"),
        Counter({(1, 2): 3}),
        deque(),
        deque([1], 4),
    ),
    *(defaultdict(list, a=[1]), defaultdict(None), defaultdict(int, {None: 1}), deque([[1], {2}])),
    *(Point([1], {"a": 1}), Progress(1, {"loss": np.float32(0.5)}), Key("t", [1])),
    *(
        {True: 1, 2.5: [3], "1": 4},
        {None: 1},
        {Stage.TRAIN: 1},
        {(1, "a"): {b"": 2}},
        {Key("t", 1): 5},
    ),
    *(
        _read(io.BytesIO(b"abc"), 2),
        _read(io.BytesIO(), 9),
        _read(io.StringIO("a\r\nb", newline=""), 3),
    ),
]


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types and bits all the way down, and in the same order where there is one."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            (list(map(type, a)) == list(map(type, b)))
            and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
            and getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        )
    if isinstance(a, list | tuple | deque):
        alike = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return alike and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, np.ndarray):
        if a.dtype.names is not None:  # what lies between fields has no meaning
            return a.dtype == b.dtype and all(same(a[n], b[n]) for n in a.dtype.names)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.str_ | np.bytes_):
        return list(a) == list(b)  # type: ignore[call-overload, no-any-return]
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and same(np.asarray(a), np.asarray(b))
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, datetime | time):
        return a == b and a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    if isinstance(a, io.BytesIO | io.StringIO):
        return bool(a.__getstate__() == b.__getstate__())
    if dataclasses.is_dataclass(a):
        names = [f.name for f in dataclasses.fields(a)]
        return all(same(getattr(a, n), getattr(b, n)) for n in names)
    return bool(a == b) and repr(a) == repr(b)
