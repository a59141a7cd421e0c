"""Which tensors a view takes and gives, by position.

A view takes what a request holds, see `ckpt.schema`, in this order: the dense inputs, then for each
feature its ids, lengths and, if it is weighted, weights. Its graph has no id maps: a feature that
goes through one (hashed, vocabulary, managed collision) is given as rows, by whoever calls the view:

    <feature>.values     int64 (ids,): raw ids, which are rows of the feature's tables
    <feature>.rows       int64 (ids,): mapped; a negative one has no row
    <feature>.lengths    int64 (batch,)
    <feature>.weights    float32 (ids,)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt.errors import BadInputError
from ckpt.schema import Dim, FeatureSpec, RequestFeature, ServingDescription


@dataclass(frozen=True)
class ViewTensor:
    """One input or output. Sizes are numbers, `batch`, or `ids:<feature>`."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class ViewFeature:
    """How a view takes one feature.

    ids, lengths, weights: names of its inputs. mapped: `ids` are rows, not raw ids.
    collision: the CollisionSpec that rows come out of, by name.
    """

    feature: RequestFeature
    ids: str
    lengths: str
    weights: str | None
    mapped: bool
    collision: str | None


@dataclass(frozen=True)
class ViewInterface:
    """Inputs and outputs in the order of the view's arguments, and the features among them."""

    inputs: tuple[ViewTensor, ...]
    outputs: tuple[ViewTensor, ...]
    features: tuple[ViewFeature, ...]


def interface_of(description: ServingDescription) -> ViewInterface:
    """The interface of a model's views. BadInputError names each feature that no view can serve."""
    readers = dict(_readers(description))
    features, problems = [], []
    for f in description.features:
        if f.name not in readers:
            continue  # neither a lookup nor an input of the program reads it
        collisions = readers[f.name]
        if len(collisions) > 1:
            problems.append(
                f"{f.name}: is read through {len(collisions)} different maps "
                f"({', '.join(sorted(c or 'no collision' for c in collisions))}), a view takes one"
            )
        if f.unknown == "refuse":
            problems.append(f"{f.name}: refuses requests with unknown ids, which a graph can't")
        collision = min(collisions, key=str)
        mapped = f.ids.kind != "identity" or collision is not None
        features.append(
            ViewFeature(
                f,
                f"{f.name}.{'rows' if mapped else 'values'}",
                f"{f.name}.lengths",
                f"{f.name}.weights" if f.weighted else None,
                mapped,
                collision,
            )
        )
    if problems:
        raise BadInputError(f"{description.model} has no view: {'; '.join(problems)}")
    inputs = [ViewTensor(i.name, i.dtype, i.shape) for i in description.inputs if i.kind == "dense"]
    for v in features:
        ids = _ids_dim(description, v.feature.name)
        inputs.append(ViewTensor(v.ids, "int64", (ids,)))
        inputs.append(ViewTensor(v.lengths, "int64", ("batch",)))
        if v.weights:
            inputs.append(ViewTensor(v.weights, "float32", (ids,)))
    names = [i.name for i in inputs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise BadInputError(
            f"{description.model} has no view: two of its inputs would be called {twice[0]}"
        )
    outputs = tuple(ViewTensor(o.name, o.dtype, o.shape) for o in description.outputs)
    return ViewInterface(tuple(inputs), outputs, tuple(features))


def input_features(description: ServingDescription) -> dict[str, FeatureSpec | str]:
    """Input of kind rows or row_ids -> its feature of a lookup; values, lengths, weights -> its name."""
    of_lookup = {(lk.input, f.output): f for lk in description.lookups for f in lk.features}
    found: dict[str, FeatureSpec | str] = {}
    for i in description.inputs:
        if i.kind in ("rows", "row_ids"):
            lookup, output = i.of
            found[i.name] = of_lookup[lookup, output]
        elif i.kind in ("values", "lengths", "weights"):
            found[i.name] = i.of[0]
    return found


def _readers(description: ServingDescription) -> Iterator[tuple[str, set[str | None]]]:
    """Each feature that is read, with the collisions (None: without) that its readers want."""
    found: dict[str, set[str | None]] = {}
    for lk in description.lookups:
        for f in lk.features:
            found.setdefault(f.feature, set()).add(f.collision)
    for i in description.inputs:
        if i.kind == "values":
            found.setdefault(i.of[0], set()).add(None)
        elif i.kind in ("lengths", "weights"):
            found.setdefault(i.of[0], set())
    for name, collisions in found.items():
        yield name, collisions or {None}


def _ids_dim(description: ServingDescription, feature: str) -> Dim:
    """`batch` if the program was exported for exactly one id of this feature in each row."""
    for i in description.inputs:
        of = input_features(description).get(i.name)
        name = of.feature if isinstance(of, FeatureSpec) else of
        if name == feature and i.kind != "lengths" and i.shape[:1] == ("batch",):
            return "batch"
    return f"ids:{feature}"
