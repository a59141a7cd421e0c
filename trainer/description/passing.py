"""Proof that a model hands ids, lengths and weights to its collections as the request has them.

On the golden request, `values % 10` can't be told from `values`: here the shadow runs on ids, rows and
weights that show such changes. Its stand-ins note what they are given and answer with zeros, so that
no table and no process group is touched; the numbers of its dense part mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ckpt.errors import BadInputError, SidestageError
from ckpt.schema import LookupSpec
from trainer.description.request import Feature, Request
from trainer.description.shadow import Call, Feed
from trainer.description.source import user_line

_BATCH = 8
_LONGER = 1000
"""Ids by which a probed feature's longest row is longer than in the golden request."""
_ENOUGH = 32
"""Ids of each feature that are probed at least: each kind of `_telling_ids` is among them."""

Sent = Mapping[str, Any]
"""Feature -> JaggedTensor."""


def check_passing(
    shadow: nn.Module,
    feed: Feed,
    request: Request,
    lookups: Sequence[LookupSpec],
    fixed: Collection[str] = (),
) -> None:
    """Require that every lookup gets what the request has for its source feature.

    Negative ids, ids far beyond each table and the ends of the dtype are sent, in rows that are longer
    than the golden request's, and empty; with weights that are negative, large and no integers. Where
    the dense part itself indexes by ids, it gets index 0 instead of failing (see `_AnyIndex`). If the
    model still fails on other lengths, the golden request's lengths are kept, which then shows
    nothing of rows longer than those. A model that fails on both is refused: ids that can't be sent
    can't be compared.

    Args:
        shadow: on the CPU.
        feed: what the first probe saw.
        request: the golden request.
        lookups: the schema of the feed's calls.
        fixed: features of which the model takes every row to have one id; they keep their lengths.

    BadInputError names the collection, the feature, and the first id, row or weight that is changed.
    """
    rows = {f.name: 1 for f in request.features}
    for spec in (f for lookup in lookups for f in lookup.features):
        rows[spec.feature] = max(rows[spec.feature], spec.rows)
    try:
        _probe(shadow, feed, request, lookups, _varied(request, fixed), rows)
    except _FailsError:
        try:
            _probe(shadow, feed, request, lookups, _golden_lengths(request), rows)
        except _FailsError as e:
            line = user_line(e)
            raise BadInputError(
                f"the model fails on ids outside of its tables{f', at {line}' if line else ''} ({e}), so "
                f"nobody can show that it doesn't rewrite ids; make it take any id"
            ) from e


class _FailsError(Exception):
    """The model can't run on such a request."""


class _AnyIndex(TorchFunctionMode):
    """Lets a dense part index its own tensors by ids that they lack: what fails gets zeros for ids.

    It can't hide a change of ids: those that arrive as they were sent are the request's own.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError):
            given = (args, kwargs or {})
            if not any(_whole(leaf) for leaf in pytree.tree_leaves(given)):
                raise
            args, kwargs = pytree.tree_map(lambda x: torch.zeros_like(x) if _whole(x) else x, given)
            return func(*args, **kwargs)


def _whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)


def _probe(  # noqa: PLR0913, PLR0917 - one call, of a fixed order
    shadow: nn.Module,
    feed: Feed,
    request: Request,
    lookups: Sequence[LookupSpec],
    lengths: Mapping[str, Tensor],
    rows: Mapping[str, int],
) -> None:
    """One run for each part of the ids; more where a feature has few."""
    needed = {f.feature for lookup in lookups for f in lookup.features}
    counts = {name: int(lengths[name].sum()) for name in sorted(needed)}
    empty = [name for name, count in counts.items() if not count]
    if empty:
        raise _FailsError(f"feature {empty[0]!r} has no ids in the golden request")
    runs = -(-_ENOUGH // min(counts.values(), default=_ENOUGH))
    for run in range(runs):
        sent = {
            f.name: _ids(f, n, lengths[f.name], rows[f.name], run)
            for n, f in enumerate(request.features)
        }
        received = _received(shadow, feed, request, sent)
        for call, lookup in zip(feed.calls, lookups, strict=True):
            if call.name not in received:
                raise BadInputError(
                    f"{call.name} isn't called on other ids than the golden request's: how often must "
                    f"not depend on data"
                )
            _compare(call, lookup, received[call.name], sent)


def _varied(request: Request, fixed: Collection[str]) -> dict[str, Tensor]:
    """Other lengths of fewer rows. Features of equal lengths keep them equal."""
    out = {}
    for f in request.features:
        lengths = f.ids.lengths().cpu()[:_BATCH].clone()
        if f.name not in fixed:
            longest = int(lengths.argmax())
            lengths[(longest + 1) % len(lengths)] = 0
            lengths[longest] += _LONGER
        out[f.name] = lengths
    return out


def _golden_lengths(request: Request) -> dict[str, Tensor]:
    return {f.name: f.ids.lengths().cpu() for f in request.features}


def _ids(feature: Feature, index: int, lengths: Tensor, rows: int, run: int) -> Any:
    """Ids and weights of a feature that are no other feature's, nor another run's."""
    count, golden = int(lengths.sum()), feature.ids
    generator = torch.Generator().manual_seed(1 + index + 1000 * run)
    values = _telling_ids(count, golden.values().dtype, rows, run * count, generator)
    weights = golden.weights_or_none()
    if weights is not None:
        spread = torch.randn(count, generator=generator) * 100
        spread[::3] *= 1e4
        spread[:1] = -2.5 - index
        weights = spread.to(weights.dtype)
    return JaggedTensor(values, weights, lengths)


def _telling_ids(
    count: int, dtype: torch.dtype, rows: int, begin: int, generator: torch.Generator
) -> Tensor:
    """Ids inside, just beyond and far beyond a table, and at the ends of the dtype, in turns.

    Nothing between 2**31 and 2**40: a dense part that makes a tensor as long as an id would get the
    memory for it, and fill it.
    """
    ends = torch.iinfo(dtype)
    far = min(1 << 40, ends.max // 4)

    def random(low: int, high: int) -> Tensor:
        return torch.randint(low, min(high, ends.max), (count,), generator=generator)

    at = torch.arange(count)
    edges = torch.tensor([0, rows - 1, rows, ends.max, ends.min, -1])
    kinds = torch.stack(
        [
            random(rows, rows + 1000),
            -random(1, rows + 1000),
            random(far, ends.max),
            -random(far, ends.max),
            random(0, rows),
            random(ends.max - 1000, ends.max),
            random(ends.min, ends.min + 1000),
            edges[(at + begin // 8) % len(edges)],
        ]
    )
    return kinds[(at + begin) % len(kinds), at].clamp(ends.min, ends.max).to(dtype)


def _received(shadow: nn.Module, feed: Feed, request: Request, sent: Sent) -> dict[str, Any]:
    """What each call gets, by its name."""
    received: dict[str, Any] = {}

    def note(call: Call, features: Any) -> Any:
        received[call.name] = features
        return _zeros(call, features)

    feed.begin(note)
    try:
        with torch.no_grad(), _AnyIndex():
            request.call(shadow, _leaves(request, sent))
    except SidestageError:
        raise
    except Exception as e:
        raise _FailsError(f"{type(e).__name__}: {e}") from e
    return received


def _leaves(request: Request, sent: Sent) -> dict[str, Any]:
    """The model's arguments, of as many rows as `sent` has."""
    batch = len(next(iter(sent.values())).lengths())
    leaves: dict[str, Any] = {}
    for name, leaf in request.leaves.items():
        if isinstance(leaf, KeyedJaggedTensor):
            own = {f.key: sent[f.name] for f in request.features if f.argument == name}
            weighted = leaf.weights_or_none() is not None
            leaves[name] = KeyedJaggedTensor(
                keys=list(own),
                values=torch.cat([j.values() for j in own.values()]),
                lengths=torch.cat([j.lengths() for j in own.values()]),
                weights=torch.cat([j.weights() for j in own.values()]) if weighted else None,
                stride=batch,
            )
        else:
            leaves[name] = leaf.cpu()[:batch].clone() if isinstance(leaf, Tensor) else leaf
    return leaves


def _zeros(call: Call, features: Any) -> Any:
    """An output of the collection, of the shape that belongs to `features`."""
    if call.pooled is not None:
        pooled = torch.zeros(features.stride(), sum(call.dims), dtype=call.pooled.dtype)
        return KeyedTensor(list(call.keys), list(call.dims), pooled)
    given, out = features.to_dict(), {}
    names = call.embeddings.outputs()
    for key, dim in zip(call.keys, call.dims, strict=True):
        ids, like = given[names[key][0]], call.sequences[key]
        indices = like.weights_or_none()
        out[key] = JaggedTensor(
            values=torch.zeros(len(ids.values()), dim, dtype=like.values().dtype),
            weights=None if indices is None else torch.zeros(len(ids.values())).to(indices.dtype),
            lengths=ids.lengths(),
        )
    return out


def _compare(call: Call, lookup: LookupSpec, features: Any, sent: Sent) -> None:
    given, names = features.to_dict(), call.embeddings.outputs()
    for spec in lookup.features:
        got, want = given.get(names[spec.output][0]), sent[spec.feature]
        if got is None:
            raise BadInputError(f"{call.name}: feature {spec.feature!r} isn't always looked up")
        at = _first_change(want.lengths(), got.lengths())
        if at is not None:
            raise BadInputError(
                f"{call.name}: a row of {at[0]} ids of feature {spec.feature!r} arrives with {at[1]} "
                f"ids: the model rewrites them; do that in the input pipeline, before the model"
            )
        at = _first_change(want.values(), got.values())
        if at is not None:
            raise BadInputError(
                f"{call.name}: id {at[0]} of feature {spec.feature!r} arrives as {at[1]}: the model "
                f"rewrites ids; do that in the input pipeline, before the model, and describe it in "
                f"id_maps"
            )
        if spec.weights == "request":
            weights = got.weights_or_none()
            at = None if weights is None else _first_change(want.weights(), weights)
            if weights is None or at is not None:
                what = "a weight" if at is None else f"weight {at[0]:g}"
                how = "doesn't arrive" if at is None else f"arrives as {at[1]:g}"
                raise BadInputError(
                    f"{call.name}: {what} of feature {spec.feature!r} {how}: the model computes "
                    f"weights; do that in the input pipeline, before the model"
                )


def _first_change(sent: Tensor, got: Tensor) -> tuple[Any, Any] | None:
    """The first element that differs: what was sent, and what arrived."""
    shared = min(len(sent), len(got))
    if got.dtype == sent.dtype or not got.dtype.is_floating_point:
        same = sent[:shared].to(got.dtype) == got[:shared]
        same &= got[:shared].to(sent.dtype) == sent[:shared]
    else:
        same = got[:shared] == sent[:shared]
    differs = (~same).nonzero()
    if len(differs):
        at = int(differs[0])
        return sent[at].item(), got[at].item()
    if len(sent) != len(got):
        return len(sent), len(got)
    return None
