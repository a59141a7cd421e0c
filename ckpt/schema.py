"""The serving description: what a trainer tells a publisher, once, about its model.

It is shared by the exporter (trainer) and the publisher, which has no model code: the
dense part is a `torch.export` program whose embedding lookups became inputs; this schema
says which checkpoint tensors fill it, which tables feed each lookup, how raw ids become
rows, and how a request is laid out.

A request is a flat mapping of tensors over one batch:

    <dense input>        (batch, ...), of the dtype that the program takes
    <feature>.values     int64 raw ids, (number of ids,), all rows of the batch one after another
    <feature>.lengths    int64, (batch,): how many ids each row has
    <feature>.weights    float32, (number of ids,): for weighted features only

The way of an id: raw id -> the feature's `ids` map (what the trainer's input pipeline does)
-> for features behind a managed collision, that table's own map -> row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from ckpt.errors import CorruptError
from ckpt.manifest import seal, unseal
from ckpt.typed import decode_stored
from ckpt.types import Buffer

Pooling = Literal["sum", "mean", "none"]
WeightSource = Literal["none", "request", "position"]
InputKind = Literal["dense", "lookup", "rows", "row_ids", "values", "lengths", "weights"]
UnknownIds = Literal["zero", "row", "refuse"]
KIND = "serving_description"
EVENT_TIME = "event_time_s"
"""Annotation of a commit: event time of the newest trained batch, Unix seconds as a decimal."""

Dim = int | str
"""A size, or `batch`, or `ids:<feature>`: how many ids the batch has of that feature."""


@dataclass(frozen=True)
class IdentityIds:
    """Raw ids are rows."""

    kind: Literal["identity"] = "identity"


@dataclass(frozen=True)
class HashedIds:
    """row = hash(raw id, seed) % modulus; `ckpt.idmaps` defines the hash."""

    seed: int
    modulus: int
    kind: Literal["hashed"] = "hashed"


@dataclass(frozen=True)
class VocabularyIds:
    """Known raw ids have rows; the list is a safetensors file: `raw` int64 ascending, `row` int64.

    key: its storage key under the run's root. digest: of the file. size: how many ids it has.
    """

    key: str
    digest: str
    size: int
    kind: Literal["vocabulary"] = "vocabulary"


@dataclass(frozen=True)
class RequestFeature:
    """One sparse feature of a request.

    ids: how its raw ids become the ids that the trained model gets.
    unknown: what becomes of an id that has no row (not in the vocabulary, or outside the table):
        `zero` adds nothing, `row` takes `unknown_row`, `refuse` refuses the request. Counted always.
    weighted: the request brings a weight for each id.
    """

    name: str
    ids: IdentityIds | HashedIds | VocabularyIds = IdentityIds()
    unknown: UnknownIds = "zero"
    unknown_row: int | None = None
    weighted: bool = False


@dataclass(frozen=True)
class CollisionSpec:
    """A managed-collision map of one table, held by the checkpoint beside the table.

    raw_ids_fqn, rows_fqn: checkpoint keys of the raw ids (int64, (size,); empty slots hold the
        largest int64) and of the rows they have (int64, (size,)).
    block: raw ids b * block to (b + 1) * block - 1 belong to block b (0: there is one block); ids
        beyond them, as unsigned numbers, to block id % (number of blocks).
    unknown_rows: per block, the row that ids without a row of their own train and read.
    """

    name: str
    raw_ids_fqn: str
    rows_fqn: str
    size: int
    block: int
    unknown_rows: tuple[int, ...]


@dataclass(frozen=True)
class FeatureSpec:
    """One feature of a lookup: its ids pick rows of `table_fqn`, (rows, dim).

    Ids outside [0, rows) give a zero vector and are counted; a mean divides by the full length.

    feature: the request's feature. output: its name in the collection's output.
    pooling: over the bag; `none` gives one vector for each id.
    weights: what each row is multiplied by before pooling: nothing, the request's weights, or
        those of checkpoint key `position_fqn`, (most ids of a row,), by position in the bag.
    collision: the CollisionSpec that its ids go through, by name.
    """

    feature: str
    table_fqn: str
    rows: int
    dim: int
    pooling: Pooling
    output: str = ""
    weights: WeightSource = "none"
    position_fqn: str | None = None
    collision: str | None = None


@dataclass(frozen=True)
class LookupSpec:
    """One call of an embedding collection.

    Pooled: one input of the program, `input`, (batch, sum of dims): the features' vectors side by
    side, in order. Sequence (all features pool by `none`): inputs of kind `rows` and `row_ids`.
    """

    input: str
    features: tuple[FeatureSpec, ...]


@dataclass(frozen=True)
class InputSpec:
    """A positional input of the program.

    kind   of                    what the host gives
    dense                        the request's tensor `name`
    lookup                       the pooled lookup whose `input` is `name`
    rows   (lookup, output)      one vector for each id: (ids:<feature>, dim)
    row_ids (lookup, output)     the row of each id: int64 (ids:<feature>,)
    values, lengths, weights     (feature,): the feature's ids as the trained model gets them (mapped by
                                 `RequestFeature.ids`, before a managed collision), lengths or weights
    """

    name: str
    kind: InputKind
    dtype: str
    shape: tuple[Dim, ...]
    of: tuple[str, ...] = ()


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
    golden_key, golden_digest: a safetensors file with one raw request; beside it, for each feature
        whose map isn't the identity, `<feature>.rows`: the ids that the trainer's own pipeline made.
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
    features: tuple[RequestFeature, ...]
    collisions: tuple[CollisionSpec, ...] = ()

    def tables(self) -> dict[str, tuple[int, int]]:
        """Checkpoint key -> (rows, dim) of each table that a lookup needs."""
        return {f.table_fqn: (f.rows, f.dim) for lk in self.lookups for f in lk.features}


def encode_description(description: ServingDescription) -> bytes:
    return seal(KIND, asdict(description))


def decode_description(data: Buffer, key: str) -> ServingDescription:
    """Read a description back; CorruptError names `key` and the field that is wrong."""
    description = decode_stored(ServingDescription, unseal(KIND, data, key), key)
    features = {f.name for f in description.features}
    known = {"batch", *(f"ids:{f}" for f in features)}
    shapes = [(s.name, s.shape) for s in description.inputs]
    shapes += [(s.name, s.shape) for s in description.outputs]
    for name, shape in shapes:
        for d in shape:
            if isinstance(d, str) and d not in known:
                raise CorruptError(f"{key}: {name}: {d!r} is no size that a request has")
    used = {f.feature for lk in description.lookups for f in lk.features}
    if used - features:
        raise CorruptError(
            f"{key}: no feature {', '.join(sorted(used - features))} in its requests"
        )
    return description
