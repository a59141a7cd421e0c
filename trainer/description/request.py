"""The golden request taken apart: the model's arguments as named tensors and features."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ckpt.errors import BadInputError

_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Feature:
    """A sparse feature of the request.

    name: in requests: its key, or `<argument>.<key>` where several arguments have that key.
    argument, key: where the model gets it. ids: JaggedTensor on the model's device.
    """

    name: str
    argument: str
    key: str
    ids: Any

    @property
    def size(self) -> str:
        """The schema's name of how many ids it has."""
        return f"ids:{self.name}"


class Request:
    """What a model is called with.

    Args:
        model: its forward gives arguments their names.
        args, kwargs: tensors over the batch, KeyedJaggedTensors and plain values, alone or in whatever
            torch's pytree opens: dicts, lists, tuples, registered dataclasses.

    Raises BadInputError naming an argument that can't be part of a request.
    """

    def __init__(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            self._bound = inspect.signature(model.forward).bind(*args, **kwargs)
            leaves, self._spec = pytree.tree_flatten_with_path(
                dict(self._bound.arguments), is_leaf=_is_jagged
            )
        except (TypeError, ValueError) as e:
            raise BadInputError(f"the golden request doesn't fit the model's forward: {e}") from e
        self.leaves: dict[str, Any] = {".".join(map(_step, path)): leaf for path, leaf in leaves}
        self.batch = self._batch_size()
        sparse = {n: v for n, v in self.leaves.items() if isinstance(v, KeyedJaggedTensor)}
        uses = Counter(chain.from_iterable(value.keys() for value in sparse.values()))
        self.features: list[Feature] = []
        for argument, value in sparse.items():
            for key, jagged in value.to_dict().items():
                name = key if uses[key] == 1 else f"{argument}.{key}"
                self.features.append(Feature(name, argument, key, jagged))
        self._check_names()

    @property
    def dense(self) -> dict[str, Tensor]:
        return {n: v for n, v in self.leaves.items() if isinstance(v, Tensor)}

    def call(self, model: nn.Module, leaves: Mapping[str, Any] | None = None) -> Any:
        """The model's output; by default for this request, of which it gets copies of its own."""
        values = leaves or {n: _copy(v) for n, v in self.leaves.items()}
        tree = pytree.tree_unflatten([values[name] for name in self.leaves], self._spec)
        bound = inspect.BoundArguments(self._bound.signature, tree)
        return model(*bound.args, **bound.kwargs)

    def _batch_size(self) -> int:
        sizes = {}
        for name, value in self.leaves.items():
            if isinstance(value, KeyedJaggedTensor):
                sizes[name] = _stride(name, value)
            elif isinstance(value, Tensor) and value.dim():
                sizes[name] = value.shape[0]
            elif not isinstance(value, _PLAIN):
                what = (
                    "tensor without dimensions"
                    if isinstance(value, Tensor)
                    else type(value).__name__
                )
                raise BadInputError(
                    f"argument {name} is a {what}; a served model takes tensors over the batch, "
                    f"KeyedJaggedTensors and plain values, and what torch.utils._pytree can open: "
                    f"register its class there, or describe an inner module"
                )
        rows = set(sizes.values())
        if len(rows) > 1:
            raise BadInputError(
                f"the arguments' batch sizes differ: "
                f"{', '.join(f'{n} {s}' for n, s in sizes.items())}; all must be over one batch"
            )
        if not rows or min(rows) < 2:
            raise BadInputError("the golden request needs at least two rows")
        return rows.pop()

    def _check_names(self) -> None:
        names = Counter(list(self.dense))
        names.update(
            f"{f.name}.{p}" for f in self.features for p in ("values", "lengths", "weights")
        )
        for name, uses in names.items():
            if uses > 1:
                raise BadInputError(f"two tensors of a request would be called {name}; rename one")


def output_names(outputs: Any) -> list[str]:
    """Dict keys and positions, joined by dots; a lone tensor is called "output"."""
    names = [
        ".".join(map(_step, path)) or "output"
        for path, leaf in pytree.tree_flatten_with_path(outputs)[0]
        if isinstance(leaf, Tensor)
    ]
    for name, uses in Counter(names).items():
        if uses > 1:
            raise BadInputError(f"two outputs of the model would be called {name}; rename one")
    return names


def tensors_of(outputs: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]


def _step(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _is_jagged(value: Any) -> bool:
    return isinstance(value, KeyedJaggedTensor | KeyedTensor | JaggedTensor)


def _stride(name: str, value: Any) -> int:
    if value.variable_stride_per_key() or value.inverse_indices_or_none() is not None:
        raise BadInputError(
            f"argument {name}: its features have batch sizes of their own (variable stride); pass "
            f"features over one batch"
        )
    return int(value.stride())


def _copy(value: Any) -> Any:
    """A copy of a leaf: some collections write into what they are given."""
    if isinstance(value, KeyedJaggedTensor):
        weights = value.weights_or_none()
        return KeyedJaggedTensor(
            keys=list(value.keys()),
            values=value.values().clone(),
            lengths=value.lengths().clone(),
            weights=None if weights is None else weights.clone(),
            stride=value.stride(),
        )
    return value.clone() if isinstance(value, Tensor) else value


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each row's ids begin, and the end: (batch + 1,). By aten operators only."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0), (1, 0)).to(lengths.dtype)
