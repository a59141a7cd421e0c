"""Which parts of a checkpoint belong together: values and tensors, optimizer state and parameters. No torch.

Digests say that each object is what was written. That all of it was written is another question: a value
tree names tensors, an optimizer's state has what its class needs for a next step, and moments have the
sizes of their parameter or table. Only what can be told for certain is a problem: of optimizers of other
classes nothing is known, and a parameter without any state may never have had a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpt.index import TensorInfo
from ckpt.values import TensorRef, iter_leaves

_MOMENTUM = "momentum_buffer"
_ADAM = ("step", "exp_avg", "exp_avg_sq")

# What each class of torch.optim keeps for a parameter once that had a gradient.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "torch.optim.adam.Adam": _ADAM,
    "torch.optim.adamw.AdamW": _ADAM,
    "torch.optim.radam.RAdam": _ADAM,
    "torch.optim.sparse_adam.SparseAdam": _ADAM,
    "torch.optim.nadam.NAdam": (*_ADAM, "mu_product"),
    "torch.optim.adamax.Adamax": ("step", "exp_avg", "exp_inf"),
    "torch.optim.adagrad.Adagrad": ("step", "sum"),
    "torch.optim.adadelta.Adadelta": ("step", "square_avg", "acc_delta"),
    "torch.optim.rmsprop.RMSprop": ("step", "square_avg"),
    "torch.optim.rprop.Rprop": ("step", "prev", "step_size"),
    "torch.optim.asgd.ASGD": ("step", "eta", "mu", "ax"),
    "torch.optim.sgd.SGD": (),
    "torch.optim._muon.Muon": (_MOMENTUM,),
}
# What it keeps only where an option of the group isn't zero or False.
_OPTIONAL: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torch.optim.adam.Adam": (("amsgrad", "max_exp_avg_sq"),),
    "torch.optim.adamw.AdamW": (("amsgrad", "max_exp_avg_sq"),),
    "torch.optim.rmsprop.RMSprop": (("momentum", _MOMENTUM), ("centered", "grad_avg")),
    "torch.optim.sgd.SGD": (("momentum", _MOMENTUM),),
}
_OF_PARAMETER_SHAPE = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta"),
        *("grad_avg", _MOMENTUM, "prev", "step_size", "ax"),
    )
)
# What fbgemm's kernels keep for a table from the start; any one of the ways in which it is called.
_KERNEL_NEEDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "fbgemm.EXACT_ADAGRAD": (("momentum1",),),
    "fbgemm.EXACT_ROWWISE_ADAGRAD": (("momentum1",),),
    "fbgemm.ADAM": (("exp_avg", "exp_avg_sq"), ("momentum1", "momentum2")),
    "fbgemm.PARTIAL_ROWWISE_ADAM": (("exp_avg", "exp_avg_sq"), ("momentum1", "momentum2")),
}
_OF_ROWS = frozenset(
    ("momentum1", "momentum2", "exp_avg", "exp_avg_sq", "prev_iter", "row_counter")
)


class Problem(NamedTuple):
    """What doesn't belong together, under the key that it is about."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def missing_tensors(values: Any, tensors: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    """Tensors that a value tree names, and that no rank has written."""
    for path, leaf in iter_leaves(values):
        if isinstance(leaf, TensorRef) and leaf.fqn not in tensors:
            named = "" if path == leaf.fqn else f"{path} names it, and "
            yield Problem(leaf.fqn, f"{named}no index of the checkpoint has this tensor")


def unnamed_tensors(trees: Iterable[Any], tensors: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    """Tensors that none of the value trees names. `trees`: all of a checkpoint, those of each rank, too."""
    named = {
        leaf.fqn for tree in trees for _, leaf in iter_leaves(tree) if isinstance(leaf, TensorRef)
    }
    for fqn in sorted(set(tensors) - named):
        yield Problem(fqn, "no value of the checkpoint names this tensor")


def incomplete_state(values: Any, tensors: Mapping[str, TensorInfo]) -> Iterator[Problem]:
    """Optimizer state in the shared values that lacks a part, or has one that doesn't fit."""
    optimizers = list(_optimizers(values, ""))
    wanted = {name for _, tree in optimizers for name in tree["state"] if isinstance(name, str)}
    shapes = _Shapes(tensors, wanted, tuple(f"{path}." for path, _ in optimizers if path))
    for path, tree in optimizers:
        for names, kind, options in _groups(tree):
            for name in names:
                key = ".".join((path, "state", str(name))) if path else f"state.{name}"
                entry = tree["state"].get(name)
                if kind in _KERNEL_NEEDS and not entry:
                    yield Problem(key, f"{kind} keeps state for each table, and there is none")
                elif isinstance(entry, dict) and entry:
                    for problem in _of_entry(kind, options, entry):
                        yield Problem(key, problem)
                    yield from _misfits(key, kind, entry, tensors, shapes.of(name))


def problems(values: Any, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """All that doesn't belong together in what all ranks share, a line each. Reads nothing."""
    found = [*missing_tensors(values, tensors), *incomplete_state(values, tensors)]
    return [str(p) for p in found]


def _optimizers(value: Any, path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(path, tree) of the optimizers whose classes are stored, nested ones too."""
    if isinstance(value, dict):
        plain = isinstance(value.get("class"), str) and isinstance(value.get("param_groups"), list)
        keyed = isinstance(value.get("groups"), dict)
        if (plain or keyed) and isinstance(value.get("state"), dict):
            yield path, value
            return
    if isinstance(value, dict | list | tuple):
        for k, v in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _optimizers(v, f"{path}.{k}" if path else str(k))


def _groups(tree: Mapping[Any, Any]) -> Iterator[tuple[list[Any], str, Mapping[Any, Any]]]:
    """(its parameters, class, options) of each group, a parameter of several ranks' groups once."""
    listed = tree.get("param_groups")
    if not isinstance(tree.get("class"), str):
        of_ranks = [g for g in tree["groups"].values() if isinstance(g, list)]
        listed = [g for groups in of_ranks for g in groups]
    seen: set[Any] = set()
    for group in listed or ():
        if isinstance(group, dict) and isinstance(group.get("params"), list):
            kind = tree.get("class") if isinstance(tree.get("class"), str) else group.get("class")
            names = [n for n in group["params"] if isinstance(n, str | int) and n not in seen]
            seen.update(names)
            yield names, str(kind), group


def _of_entry(kind: str, options: Mapping[Any, Any], entry: Mapping[Any, Any]) -> Iterator[str]:
    """What the state of one parameter lacks for a next step."""
    if kind in _NEEDS:
        optional = [k for option, k in _OPTIONAL.get(kind, ()) if _is_on(options.get(option))]
        lost = [k for k in (*_NEEDS[kind], *optional) if k not in entry]
        lost += [k for k in _NEEDS[kind] if k != _MOMENTUM and k in entry and entry[k] is None]
        if lost:
            yield f"{kind} needs {', '.join(lost)}, and there is only {_names(entry)}"
    elif kind in _KERNEL_NEEDS:
        have = {_last(k) for k in entry}
        if not any(set(way) <= have for way in _KERNEL_NEEDS[kind]):
            needs = " or ".join(" and ".join(way) for way in _KERNEL_NEEDS[kind])
            yield f"{kind} needs {needs}, and there is only {_names(entry)}"


def _misfits(
    key: str,
    kind: str,
    entry: Mapping[Any, Any],
    tensors: Mapping[str, TensorInfo],
    parameter: list[tuple[int, ...]],
) -> Iterator[Problem]:
    """Moments whose sizes aren't those of any tensor that may be their parameter."""
    for k, leaf in entry.items():
        info = tensors.get(leaf.fqn) if isinstance(leaf, TensorRef) else None
        if info is None or not parameter:
            continue
        if kind in _NEEDS:
            of_parameter = k in _OF_PARAMETER_SHAPE
            fits = not of_parameter or any(info.shape == shape for shape in parameter)
        else:
            fits = _last(k) not in _OF_ROWS or any(_fits_rows(k, info, s) for s in parameter)
        if not fits:
            sizes = " or ".join(str(list(shape)) for shape in parameter)
            yield Problem(f"{key}.{k}", f"is {list(info.shape)}, and its parameter is {sizes}")


def _fits_rows(key: Any, info: TensorInfo, table: tuple[int, ...]) -> bool:
    """State of a table: a value for each element, or for each row of each of its column shards."""
    if not info.shape or not table:
        return True
    if _last(key) != "momentum1" and len(info.shape) == 1 and info.shape[0] == len(info.boxes):
        return True  # a single value for each shard
    if len(info.shape) == 1:
        return (
            info.shape[0] % table[0] == 0 and info.shape[0] > 0 if table[0] else not info.shape[0]
        )
    return info.shape == table


class _Shapes:
    """The shapes that parameters may have, by their canonical names.

    A name is the end of a tensor's key: what is before it is where the state has the module. Where several
    keys end alike, each of them may be it.
    """

    def __init__(
        self, tensors: Mapping[str, TensorInfo], names: set[str], aside: tuple[str, ...]
    ) -> None:
        self._found: dict[str, list[tuple[int, ...]]] = {}
        for fqn, info in tensors.items():
            if fqn.startswith(aside) if aside else False:
                continue
            end = fqn
            while True:
                if end in names:
                    self._found.setdefault(end, []).append(info.shape)
                _, dot, end = end.partition(".")
                if not dot:
                    break

    def of(self, name: Any) -> list[tuple[int, ...]]:
        return sorted(set(self._found.get(name, ())))


def _is_on(option: Any) -> bool:
    """An option that is a tensor, such as a learning rate, isn't known here."""
    return isinstance(option, bool | int | float) and option != 0


def _last(key: Any) -> str:
    return str(key).rpartition(".")[2]


def _names(entry: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, entry)) or "nothing"
