"""One optimizer under two roofs: in the backward pass of a fused kernel, or as a step of its own.

Both keep the same state for an element, called differently, and change it alike where it gets a gradient.
Where it gets none a kernel leaves it, and torch's Adam goes on decaying its moments. A kernel counts its
lookups where the other counts steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_DENSE = {
    "fbgemm.EXACT_SGD": "torch.optim.sgd.SGD",
    "fbgemm.EXACT_ADAGRAD": "torch.optim.adagrad.Adagrad",
    "fbgemm.EXACT_ROWWISE_ADAGRAD": "torchrec.optim.rowwise_adagrad.RowWiseAdagrad",
    "fbgemm.ADAM": "torch.optim.adam.Adam",
}
# What a kernel calls the state of a table, after the table's name, and what the optimizer does.
_ADAGRAD = {"momentum1": "sum"}
_ADAM = {
    "momentum1": "exp_avg",
    "exp_avg": "exp_avg",
    "momentum2": "exp_avg_sq",
    "exp_avg_sq": "exp_avg_sq",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "torch.optim.adagrad.Adagrad": _ADAGRAD,
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": _ADAGRAD,
    "torch.optim.adam.Adam": _ADAM,
}
STEP = "step"
FUSED = "fbgemm."
"""How the class of an optimizer in a kernel begins."""
# Kernels whose updates depend on how often they have run.
_CORRECTED = frozenset(("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB"))


def same_kind(one: str | None, other: str | None) -> bool:
    """Are they one optimizer, wherever it runs? Options of the groups aside."""
    return one is not None and other is not None and _dense(one) == _dense(other)


def is_fused_class(kind: str) -> bool:
    return kind.startswith(FUSED)


def depends_on_count(kind: str) -> bool:
    """Does a kernel of this class, with or without `fbgemm.`, correct its updates by a count?"""
    return kind.removeprefix(FUSED) in _CORRECTED


def as_called_by(kind: str, entry: Mapping[Any, Any], here: Iterable[Any]) -> dict[Any, Any]:
    """The state of a parameter under the names of `kind`, an optimizer with the same updates.

    here: the names that it has for the state now. What it has no name for keeps its own. A fused one has
    no count of steps: that is left out.
    """
    names = _NAMES.get(_dense(kind), {})
    if not is_fused_class(kind):
        return {names.get(_last(k), k): v for k, v in entry.items()}
    by_dense = {names[_last(k)]: k for k in here if _last(k) in names}
    return {by_dense.get(k, k): v for k, v in entry.items() if k != STEP}


def _dense(kind: str) -> str:
    return _DENSE.get(kind, kind)


def _last(key: Any) -> str:
    return str(key).rpartition(".")[2]
