"""From a request to an answer: id maps, lookups, the dense program. The same for served tables and for the
golden reference, which only look their rows up in another place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ckpt.errors import BadInputError, CorruptError
from ckpt.idmaps import Ids
from ckpt.schema import FeatureSpec, InputSpec, ServingDescription
from publisher.ids import IdMaps, Unknown, counts
from publisher.lookup import Found
from publisher.request import Request, RequestIds, RequestSpec, torch_dtype

LOOKUP_DTYPES = ("float32", "float16", "bfloat16", "float64")
ID_DTYPES = ("int64", "int32")
MOST_COLUMNS = 1 << 24
"""Of one lookup. The operator counts columns in 32 bits."""


class Lookup(Protocol):
    """Looks up the ids of one embedding collection."""

    def __call__(
        self, request: RequestIds, ids: list[Ids], unknown: Unknown, found: Found, /
    ) -> None: ...


Program = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Gives the outputs for the inputs, in the description's order."""


class Answerer:
    """Answers requests. Any number of threads may call.

    Args:
        description: says what the inputs and outputs are.
        maps: its id maps.
        lookups: all of its lookups.
        program: its dense part.
    """

    def __init__(
        self,
        description: ServingDescription,
        maps: IdMaps,
        lookups: Sequence[Lookup],
        program: Program,
    ) -> None:
        _check_maps(description, maps)
        self.spec = RequestSpec.of(description)
        self._maps = maps
        self._lookups = lookups
        self.program = program
        self._outputs = [o.name for o in description.outputs]
        self._inputs = [_Source(i, maps) for i in description.inputs]

    def __call__(self, request: Request) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """(outputs by name, unknown ids by feature); BadInputError says what is wrong with a request."""
        checked = self.spec.read(request)
        unknown: Unknown = {}
        with torch.inference_mode():
            ids = self._maps(checked, unknown)
            found: Found = {}
            for lookup in self._lookups:
                lookup(checked, ids, unknown, found)
            outputs = self.program([i(request, checked, ids, found) for i in self._inputs])
        return dict(zip(self._outputs, outputs, strict=True)), counts(unknown)


class _Source:
    """Where one input of the program comes from."""

    def __init__(self, spec: InputSpec, maps: IdMaps) -> None:
        self._kind = spec.kind
        self._name = spec.name
        self._dtype = torch_dtype(spec.dtype)
        self._feature = -1
        self._key: tuple[str, ...] = (spec.name,)
        self._size = spec.shape[0] if spec.kind in ("rows", "row_ids", "values", "weights") else ""
        self._index = maps.index
        if spec.kind in ("values", "lengths", "weights"):
            self._feature = maps.index[spec.of[0]]
        elif spec.kind == "rows":
            self._key = spec.of
        elif spec.kind == "row_ids":
            self._key = (*spec.of, "ids")

    def __call__(
        self, request: Request, checked: RequestIds, ids: list[Ids], found: Found
    ) -> torch.Tensor:
        if self._kind == "dense":
            return request[self._name]
        if self._kind == "values":
            tensor = torch.from_numpy(ids[self._feature])
        elif self._kind == "lengths":
            tensor = torch.from_numpy(checked.lengths[self._feature])
        elif self._kind == "weights":
            weights = checked.weights[self._feature]
            assert weights is not None  # `check_description` saw to it
            tensor = weights
        else:
            tensor = found[self._key]
        if self._size:
            self._check_size(tensor, checked)
        return tensor if tensor.dtype is self._dtype else tensor.to(self._dtype)

    def _check_size(self, tensor: torch.Tensor, checked: RequestIds) -> None:
        """A program may need as many ids of a feature as the batch has rows, or another feature has."""
        assert isinstance(self._size, str)  # `check_description` saw to it
        other = self._size.removeprefix("ids:")
        want = checked.batch if other == "batch" else len(checked.values[self._index[other]])
        if len(tensor) != want:
            raise BadInputError(
                f"{self._name}: the request has {len(tensor)} ids for it, and this model needs as "
                f"many as {self._size}, which is {want}"
            )


def check_description(description: ServingDescription) -> None:
    """Do a description's inputs, lookups, features and collisions fit each other? Else CorruptError.

    What is built from it relies on that and looks up memory without bounds checks.
    """
    what = f"description of {description.model}"
    features = {f.name: f for f in description.features}
    if len(features) != len(description.features):
        raise CorruptError(f"{what}: two of its features have one name")
    for lk in description.lookups:
        _check_lookup(description, lk.features, f"{what}: lookup {lk.input}")
    _check_lookup_inputs(description, what)
    for i in description.inputs:
        _check_input(i, description, f"{what}: input {i.name}")
    names = RequestSpec.of(description).names()
    if len(set(names)) != len(names):
        raise CorruptError(f"{what}: two of its inputs have one name: {', '.join(names)}")


def _check_maps(description: ServingDescription, maps: IdMaps) -> None:
    """A collision gives rows of its table; the rows of other maps are looked at for each request."""
    for lk in description.lookups:
        for s in lk.features:
            known = maps.collisions[s.collision][0] if s.collision is not None else None
            if known is not None and len(known.row) and int(known.row.max()) >= s.rows:
                raise CorruptError(
                    f"id maps: collision {s.collision} leads to row {int(known.row.max())} of "
                    f"{s.table_fqn}, which has {s.rows}"
                )


def _check_lookup(
    description: ServingDescription, specs: tuple[FeatureSpec, ...], what: str
) -> None:
    features = {f.name: f for f in description.features}
    collisions = {c.name: c for c in description.collisions}
    if not specs or len({s.pooling == "none" for s in specs}) != 1:
        raise CorruptError(f"{what}: it is neither pooled nor a sequence")
    outputs = {s.output for s in specs}
    if specs[0].pooling == "none" and len(outputs) != len(specs):
        raise CorruptError(f"{what}: two of its outputs have one name")
    for s in specs:
        f = features.get(s.feature)
        if f is None:
            raise CorruptError(f"{what}: no feature {s.feature} in its requests")
        if not 1 <= s.dim <= MOST_COLUMNS:
            raise CorruptError(f"{what}: {s.table_fqn} has {s.dim} columns")
        if s.weights == "request" and not f.weighted:
            raise CorruptError(f"{what}: {s.feature} has no weights in the request")
        if (s.weights == "position") != (s.position_fqn is not None):
            raise CorruptError(f"{what}: {s.feature}: weights by position need a checkpoint key")
        if s.collision is not None and s.collision not in collisions:
            raise CorruptError(f"{what}: {s.feature}: there is no collision {s.collision}")
        if s.collision is not None:
            shared = collisions[s.collision].unknown_rows
            if not shared or max(shared) >= s.rows:
                raise CorruptError(
                    f"{what}: {s.feature}: collision {s.collision} has unknown rows {shared} in a "
                    f"table of {s.rows}"
                )
        if f.unknown == "row" and (
            f.unknown_row is None or (s.collision is None and f.unknown_row >= s.rows)
        ):
            raise CorruptError(
                f"{what}: {s.feature}: unknown ids take row {f.unknown_row} of {s.rows}"
            )


def _check_lookup_inputs(description: ServingDescription, what: str) -> None:
    """Each pooled lookup is one input, as wide as its tables; a sequence's rows and ids may be."""
    widths = {
        lk.input: sum(f.dim for f in lk.features)
        for lk in description.lookups
        if lk.features[0].pooling != "none"
    }
    inputs = {i.name: i for i in description.inputs if i.kind == "lookup"}
    lookups = {lk.input for lk in description.lookups}
    if widths.keys() != inputs.keys() or len(lookups) != len(description.lookups):
        raise CorruptError(
            f"{what}: its lookups {sorted(widths)} aren't the program's {sorted(inputs)}"
        )
    for name, spec in inputs.items():
        if widths[name] > MOST_COLUMNS:
            raise CorruptError(f"{what}: lookup {name} gives {widths[name]} columns, more than any")
        if spec.shape != ("batch", widths[name]) or spec.dtype not in LOOKUP_DTYPES:
            raise CorruptError(
                f"{what}: lookup {name} gives {widths[name]} columns, its input is {spec.dtype} "
                f"{spec.shape}"
            )


def _check_input(i: InputSpec, description: ServingDescription, what: str) -> None:
    sequences: Mapping[tuple[str, ...], FeatureSpec] = {
        (lk.input, f.output): f
        for lk in description.lookups
        for f in lk.features
        if f.pooling == "none"
    }
    features = {f.name: f for f in description.features}
    if i.kind == "dense":
        if any(isinstance(d, str) and (at or d != "batch") for at, d in enumerate(i.shape)):
            raise CorruptError(f"{what}: a dense input of shape {i.shape}")
        return
    if i.kind == "lookup":
        return
    if i.kind in ("rows", "row_ids"):
        f = sequences.get(i.of)
        if f is None:
            raise CorruptError(f"{what}: no sequence lookup gives {i.of}")
        want: tuple[int, ...] = (f.dim,) if i.kind == "rows" else ()
        dtypes = LOOKUP_DTYPES if i.kind == "rows" else ID_DTYPES
    else:
        feature = features.get(i.of[0]) if len(i.of) == 1 else None
        if feature is None or (i.kind == "weights" and not feature.weighted):
            raise CorruptError(f"{what}: no feature of the request gives {i.kind} of {i.of}")
        want = ()
        dtypes = LOOKUP_DTYPES if i.kind == "weights" else ID_DTYPES
    sizes = (
        {"batch"} if i.kind == "lengths" else {"batch", *(f"ids:{u}" for u in _used(description))}
    )
    if not i.shape or i.shape[0] not in sizes or i.shape[1:] != want or i.dtype not in dtypes:
        raise CorruptError(
            f"{what}: is {i.dtype} {i.shape}; its source gives {want or 'one number'} for each id"
        )


def _used(description: ServingDescription) -> list[str]:
    return [f.name for f in RequestSpec.of(description).features]
