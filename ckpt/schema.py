"""The serving description: what a trainer tells a publisher, once, about its model.

It is shared by the exporter (trainer) and the publisher, which has no model code: the
dense part is a `torch.export` program whose embedding lookups became inputs; this schema
says which checkpoint tensors fill it, which tables feed each lookup, and how a request
is laid out.

A request is a flat mapping of tensors over one batch:

    <dense input>        float, (batch, ...)
    <feature>.values     int64 row ids, (number of ids,), all rows of the batch one after another
    <feature>.lengths    int64, (batch,): how many ids each row has
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ckpt.errors import CorruptError
from ckpt.manifest import seal, unseal
from ckpt.types import Buffer

Pooling = Literal["sum", "mean"]
InputKind = Literal["dense", "lookup"]
KIND = "serving_description"

Dim = int | str


@dataclass(frozen=True)
class FeatureSpec:
    """One feature of a lookup: its ids pick rows of `table_fqn`, (rows, dim), pooled over the bag.

    Ids outside [0, rows) give a zero vector and are counted; a mean divides by the full length.
    """

    feature: str
    table_fqn: str
    rows: int
    dim: int
    pooling: Pooling


@dataclass(frozen=True)
class LookupSpec:
    """One call of an embedding collection. Its output is the features' vectors side by side, in order."""

    input: str
    features: tuple[FeatureSpec, ...]


@dataclass(frozen=True)
class InputSpec:
    """A positional input of the program; `batch` in its shape is the dynamic dimension."""

    name: str
    kind: InputKind
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class ConstantSpec:
    """A parameter or buffer of the program, filled from checkpoint key `fqn` (None: kept as exported)."""

    name: str
    fqn: str | None
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OutputSpec:
    """One output of the program."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class ServingDescription:
    """All that a publisher needs besides a commit.

    program_key, program_sha256: the `torch.export` archive under `code/`.
    golden_key, golden_digest: a safetensors file with one request.
    export_max_abs_err: how far the exported program was from the live model on that request.
    """

    model: str
    program_key: str
    program_sha256: str
    golden_key: str
    golden_digest: str
    export_max_abs_err: float
    inputs: tuple[InputSpec, ...]
    lookups: tuple[LookupSpec, ...]
    constants: tuple[ConstantSpec, ...]
    outputs: tuple[OutputSpec, ...]

    def tables(self) -> dict[str, tuple[int, int]]:
        """Checkpoint key -> (rows, dim) of each table that a lookup needs."""
        return {f.table_fqn: (f.rows, f.dim) for lk in self.lookups for f in lk.features}


def encode_description(description: ServingDescription) -> bytes:
    return seal(KIND, asdict(description))


def decode_description(data: Buffer, key: str) -> ServingDescription:
    """Read a description back; CorruptError names `key` and the field that is wrong."""
    body = unseal(KIND, data, key)
    try:
        return ServingDescription(
            model=_str(body["model"]),
            program_key=_str(body["program_key"]),
            program_sha256=_str(body["program_sha256"]),
            golden_key=_str(body["golden_key"]),
            golden_digest=_str(body["golden_digest"]),
            export_max_abs_err=_float(body["export_max_abs_err"]),
            inputs=tuple(
                InputSpec(
                    _str(i["name"]),
                    _one_of(i["kind"], get_args(InputKind)),
                    _str(i["dtype"]),
                    _shape(i["shape"]),
                )
                for i in body["inputs"]
            ),
            lookups=tuple(
                LookupSpec(_str(lk["input"]), tuple(_feature(f) for f in lk["features"]))
                for lk in body["lookups"]
            ),
            constants=tuple(
                ConstantSpec(
                    _str(c["name"]),
                    None if c["fqn"] is None else _str(c["fqn"]),
                    _str(c["dtype"]),
                    tuple(_int(n) for n in c["shape"]),
                )
                for c in body["constants"]
            ),
            outputs=tuple(
                OutputSpec(_str(o["name"]), _str(o["dtype"]), _shape(o["shape"]))
                for o in body["outputs"]
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise CorruptError(f"{key}: broken serving description: {e!r}") from None


def _feature(f: Mapping[str, Any]) -> FeatureSpec:
    return FeatureSpec(
        _str(f["feature"]),
        _str(f["table_fqn"]),
        _int(f["rows"]),
        _int(f["dim"]),
        _one_of(f["pooling"], get_args(Pooling)),
    )


def _str(v: Any) -> str:
    if not isinstance(v, str):
        raise TypeError(f"{v!r} is not a string")
    return v


def _int(v: Any) -> int:
    if not isinstance(v, int) or isinstance(v, bool) or v < 0:
        raise TypeError(f"{v!r} is not a count")
    return v


def _float(v: Any) -> float:
    if not isinstance(v, int | float) or isinstance(v, bool):
        raise TypeError(f"{v!r} is not a number")
    return float(v)


def _one_of(v: Any, allowed: tuple[str, ...]) -> Any:
    if v not in allowed:
        raise ValueError(f"{v!r} is not one of {', '.join(allowed)}")
    return v


def _shape(v: Any) -> tuple[Dim, ...]:
    return tuple(d if d == "batch" else _int(d) for d in v)
