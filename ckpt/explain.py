"""What a restore of a checkpoint into a described state would do: by the plan that a restore itself makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt.canonical import Canonical
from ckpt.canonical.kernels import KERNELS
from ckpt.canonical.keyed import GROUPS
from ckpt.canonical.optimizers import CLASS
from ckpt.description import StateDescription
from ckpt.errors import BadInputError
from ckpt.index import TensorInfo
from ckpt.keyed_plan import KeyedOptimizer
from ckpt.restore import CheckpointReader
from ckpt.restore_plan import RestorePlan, nested_like, plan_restore
from ckpt.restorer import payload_of, source_for, verdict
from ckpt.terms import RestoreTerms, Spell
from ckpt.tree import FlatState, Leaf, Shard, torch_dtype
from ckpt.types import ITEMSIZE
from ckpt.values import TensorRef, iter_leaves


@dataclass(frozen=True)
class Outcome:
    """One entry: its key in the state, of what only the checkpoint has its key there.

    outcome: "restored"; "kept", as a term asks; "missing", only the state has it; "left", only the
    checkpoint has it. nbytes: of a tensor, else 0.
    """

    key: str
    outcome: str
    nbytes: int


@dataclass(frozen=True)
class Explanation:
    """outcomes: of tensors, and of values that aren't restored. notes: what the restore would tell.

    refused: why it would be refused, "" if it would not. problems: all reasons, each with its key.
    """

    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    refused: str


def explain(
    reader: CheckpointReader, state: StateDescription, terms: RestoreTerms, spell: Spell
) -> Explanation:
    """Plan the restore of a checkpoint into a state, as its first rank would. Reads no tensor."""
    step = reader.record.step
    try:
        source = source_for(reader, 0, state.world_size, terms, spell)
        flat, canonical = _as_flat(state, reader.values())
        with FakeTensorMode(allow_non_fake_inputs=True):  # what a plan allocates takes no memory
            plan = plan_restore(flat, source, terms, canonical, spell)
    except BadInputError as e:
        return Explanation((), (), (str(e),), str(e))
    refused = ""
    try:
        verdict([payload_of(plan)], source, step, terms, spell)
    except BadInputError as e:
        refused = str(e)
    outcomes = tuple(_outcomes(plan, flat, source.tensors, terms))
    return Explanation(
        outcomes, tuple(sorted(set(plan.notes))), tuple(sorted(set(plan.wrong))), refused
    )


def _outcomes(
    plan: RestorePlan, flat: FlatState, stored: Mapping[str, TensorInfo], terms: RestoreTerms
) -> Iterator[Outcome]:
    sizes = {n: sum(s.tensor.nbytes for s in x.shards) for n, x in flat.leaves.items()}
    filled: dict[str, int] = {}
    for piece in plan.pieces:
        if not any(piece.key == merge.key and piece.ours for merge in plan.merges):
            filled[piece.key] = filled.get(piece.key, 0) + _nbytes(
                piece.shards, stored[piece.stored]
            )
    for merge in plan.merges:
        filled[merge.key] = filled.get(merge.key, 0) + merge.out.nbytes
    for key, nbytes in filled.items():
        yield Outcome(key, "restored", nbytes)
    for key in sorted(set(plan.kept)):
        yield Outcome(key, "kept", sizes.get(key, 0))
    for key in sorted(set(plan.missing)):
        yield Outcome(key, "missing", sizes.get(key, 0))
    left = [k for k in stored if k not in plan.claimed and not terms.excludes(terms.renamed(k))]
    for key in sorted({*left, *plan.extra}):
        yield Outcome(key, "left", stored[key].nbytes if key in stored else 0)


def _nbytes(shards: tuple[Shard, ...], info: TensorInfo) -> int:
    return sum(s.tensor.numel() for s in shards) * ITEMSIZE[info.dtype]


# -- a state of nothing but shapes ----------------------------------------------------------------


def _as_flat(state: StateDescription, stored: Any) -> tuple[FlatState, Canonical]:
    """The state as a restore gets it, as if one process had all of it, with stand-ins for its objects."""
    values = (
        {k: v for k, v in state.values.items() if k != KERNELS}
        if isinstance(state.values, dict)
        else state.values
    )
    values = nested_like(stored, values)
    flat = FlatState({}, values, dict(state.per_rank[0]))
    for name, info in state.tensors.items():
        shards = tuple(Shard(o, n, _shape_only(n, info.dtype)) for o, n in info.boxes)
        whole = shards[0].tensor if len(shards) == 1 else _shape_only(info.shape, info.dtype)
        flat.leaves[name] = Leaf(name, info.kind, info.dtype, info.shape, shards, whole)
    tables = _Parameters(flat)
    optimizers = list(_optimizers(values, ""))
    for path, tree in optimizers:
        if isinstance(tree.get(GROUPS), dict):
            groups = _one_list(tree[GROUPS])
            flat.values = _with(flat.values, path, {**tree, GROUPS: {0: groups}})
            flat.objects[path] = _keyed(tree, groups, tables)
        else:
            flat.objects[path] = _plain(tree, tables)
    for key, node in values.items() if isinstance(values, dict) else ():
        if str(key) not in flat.objects and _is_module(node):
            flat.objects[str(key)] = nn.Module()
    canonical = Canonical(0)
    canonical.look(tables.modules())
    return flat, canonical


def _shape_only(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of one element that is seen as many."""
    return torch.empty((), dtype=torch_dtype(dtype), device="cpu").expand(shape)


class _Parameters:
    """The tensors of a state that its optimizers' parameters are, by the names that these have."""

    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._ends: dict[str, str] = {}
        for key in flat.leaves:
            end = key
            while end:
                self._ends.setdefault(end, key)
                _, _, end = end.partition(".")
        self._modules: dict[str, nn.Module] = {}

    def of(self, name: str | int) -> nn.Parameter:
        key = self._ends.get(str(name))
        if key is None:
            return nn.Parameter(torch.empty(0), requires_grad=False)
        top = key.removesuffix(f".{name}") if key != name else ""
        module = self._modules.setdefault(top, nn.Module())
        if str(name) not in module._parameters:
            source = self._flat.leaves[key].source
            module._parameters[str(name)] = nn.Parameter(source, requires_grad=False)
        found = module._parameters[str(name)]
        assert found is not None
        return found

    def modules(self) -> dict[str, nn.Module]:
        return self._modules


def _optimizers(node: Any, path: str) -> Iterator[tuple[str, dict[Any, Any]]]:
    """(path, tree) of the optimizers in a value tree."""
    if not isinstance(node, dict):
        return
    if isinstance(node.get("state"), dict) and (
        isinstance(node.get(GROUPS), dict)
        or (isinstance(node.get(CLASS), str) and isinstance(node.get("param_groups"), list))
    ):
        yield path, node
        return
    for k, v in node.items():
        yield from _optimizers(v, f"{path}.{k}" if path else str(k))


def _one_list(by_rank: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """The groups of all ranks, each parameter once."""
    seen: set[Any] = set()
    groups = []
    for listed in by_rank.values():
        for group in listed:
            new = [k for k in group["params"] if k not in seen]
            seen.update(new)
            if new:
                groups.append({**group, "params": new})
    return groups


def _keyed(
    tree: Mapping[str, Any], groups: list[dict[str, Any]], tables: _Parameters
) -> KeyedOptimizer:
    kinds = {k: str(g.get(CLASS)) for g in groups for k in g["params"]}
    keys = dict.fromkeys([*kinds, *tree["state"]])
    own = {k for k, kind in kinds.items() if not kind.startswith("fbgemm.")}
    places = set(tree.get("wrappers", {})) | {"optimizer"}
    return KeyedOptimizer({k: tables.of(k) for k in keys}, kinds, own, set(), places)


def _plain(tree: Mapping[str, Any], tables: _Parameters) -> torch.optim.Optimizer:
    """An optimizer of the same class by name, with the same groups, that can do nothing."""
    module, _, name = tree[CLASS].rpartition(".")
    kind: Any = type(name, (torch.optim.Optimizer,), {"__module__": module})
    optimizer = kind.__new__(kind)
    optimizer.param_groups = [
        {
            **g,
            "params": [tables.of(n) for n in g["params"]],
            "param_names": [str(n) for n in g["params"]],
        }
        for g in tree["param_groups"]
    ]
    optimizer.state = {}
    found: torch.optim.Optimizer = optimizer
    return found


def _is_module(node: Any) -> bool:
    """Nothing but tensors, by keys: as modules save themselves."""
    leaves = [leaf for _, leaf in iter_leaves(node)]
    return isinstance(node, dict) and bool(leaves) and all(isinstance(x, TensorRef) for x in leaves)


def _with(tree: Any, path: str, node: Any) -> Any:
    """The tree with another node at a path."""
    if not path:
        return node
    for k, v in tree.items():
        if path == str(k):
            return {**tree, k: node}
        if path.startswith(f"{k}.") and isinstance(v, dict):
            return {**tree, k: _with(v, path[len(str(k)) + 1 :], node)}
    return tree
