"""Plans a restore on one rank, before a byte moves: which stored bytes go where, and what all else gets.

A state and a checkpoint are matched along their trees: modules and dicts by key, optimizers by the names of
their parameters, lists whole or not at all. Objects that save themselves get what they had saved: their
tensors are filled in place where they fit, and made anew where only the checkpoint knows them. Ranks may hold
different parts of a state, so what is *extra* is judged over all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ckpt.belonging import incomplete_state
from ckpt.canonical import Canonical
from ckpt.canonical.cuts import TablePart, is_spread, table_parts
from ckpt.canonical.kernels import KERNELS, TABLES, local_memory_of
from ckpt.canonical.keyed import GROUPS, is_keyed, plain_of
from ckpt.canonical.optimizers import CLASS
from ckpt.errors import BadInputError, CorruptError
from ckpt.giving import KEEP
from ckpt.index import TensorInfo
from ckpt.kernel_plan import fit_kernels
from ckpt.keyed_plan import KeyedOptimizer, described, fit_keyed
from ckpt.optimizer_plan import fit_optimizer
from ckpt.pieces import Merge, Piece
from ckpt.row_plan import Table, is_of_rows
from ckpt.terms import RestoreTerms, Spell, as_argument
from ckpt.tree import FlatState, Leaf, Part, PerRank, Shard, leaf_of, torch_dtype
from ckpt.values import Instance, PerRankRef, TensorRef, as_dict, iter_leaves, parts_of, resolve

_SHOWN = 8
_COLLISION = "._mch_"
_COLLISION_MAP = f"{_COLLISION}sorted_raw_ids"


@dataclass
class Source:
    """A checkpoint as one rank sees it: tensors by key, the shared values, its own per-rank values.

    `same_world` is False where the saver had another number of ranks: per-rank parts then belong to nobody
    here.
    """

    tensors: Mapping[str, TensorInfo]
    values: Any
    per_rank: Mapping[str, Any]
    same_world: bool


_ABSENT = object()


@dataclass
class RestorePlan:
    """What one rank would do, and what stands against it. Texts name their keys.

    pieces: tensors to fill. tree, per_rank: what objects and dicts get, with tensors in it and KEEP.
    wrong: can't be. missing, extra: only the state, or only the checkpoint, has it. unclaimed: per-rank parts
    of another world. kept: left as they are, as asked. claimed: keys of the checkpoint that this rank has a
    use for. notes: what was decided without names to go by.
    kernels: what fused kernels get. merges: means to fill tensors with. alike: tensors made here that must
    turn out equal, and what is wrong if they don't.
    """

    pieces: list[Piece] = field(default_factory=list)
    tree: Any = None
    per_rank: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    kernels: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    alike: list[tuple[str, list[torch.Tensor]]] = field(default_factory=list)


def plan_restore(
    flat: FlatState,
    source: Source,
    terms: RestoreTerms,
    canonical: Canonical,
    spell: Spell = as_argument,
) -> RestorePlan:
    """Match a state with a checkpoint. Allocates what only the checkpoint has; changes nothing.

    Raises CorruptError for a checkpoint whose values name a tensor that it doesn't have, BadInputError for
    an object whose class isn't here as it was at the save.
    """
    matching = Matching(flat, source, terms, canonical, spell)
    stored = with_loose(source)
    beside = {}
    if isinstance(stored, dict) and KERNELS in stored:
        beside = stored[KERNELS]
        stored = {k: v for k, v in stored.items() if k != KERNELS}
    matching.fused = beside
    if terms.rename:
        stored = renamed(stored, flat.values, terms)
    stored = nested_like(flat.values, stored)
    matching.found.tree = matching.node(flat.values, stored, "")
    matching.found.kernels = fit_kernels(matching, beside)
    matching.found.wrong += _recut_optimizer_state(matching)
    matching.found.wrong += [
        f"{p} in the checkpoint"
        for p in incomplete_state(source.values, source.tensors)
        if not terms.excludes(p.key)
    ]
    for path, tree in (("", matching.found.tree), *matching.found.per_rank.items()):
        matching.resolved(tree, path)  # what no object can be made of is refused now
    return matching.found


def refuse(problems: Sequence[str], step: int, advice: str) -> BadInputError:
    """One error for all problems: the first few in full, the rest counted."""
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return BadInputError(f"step {step} doesn't fit this state: {shown}{more}. {advice}")


class Matching:
    """One plan in the making, along the trees of a state ("want") and of a checkpoint ("stored")."""

    def __init__(
        self,
        flat: FlatState,
        source: Source,
        terms: RestoreTerms,
        canonical: Canonical,
        spell: Spell,
    ) -> None:
        self.spell = spell
        self.flat = flat
        self.source = source
        self.terms = terms
        self.canonical = canonical
        self.found = RestorePlan()
        self.fused: Mapping[int, Any] = {}
        """What the fused kernels of the save had beside their tables, by rank."""
        self.from_dense: dict[str, dict[str, Any]] = {}
        """By the keys of tables that a fused kernel has now: what a dense optimizer had of them, by the
        kernel's names."""
        self.by_rows: set[str] = set()
        """Keys of row-wise state that was fitted to the columns of its table."""

    def resolved(self, value: Any, path: str) -> Any:
        """With objects in the place of Instances, whose classes must be here if the state is."""
        return value if self.flat.described else resolve(value, path)

    # -- tables ---------------------------------------------------------------------------------

    @cached_property
    def _by_memory(self) -> dict[int, Leaf]:
        """By the memory of its shards: a tensor of the state, one that says how it is spread if there is."""
        leaves = sorted(self.flat.leaves.values(), key=lambda x: not is_spread(x.source))
        found: dict[int, Leaf] = {}
        for leaf in leaves:
            for shard in leaf.shards:
                if shard.tensor.numel():
                    found.setdefault(shard.tensor.data_ptr(), leaf)
        return found

    @cached_property
    def _by_end(self) -> dict[str, Leaf | None]:
        """By the ends of keys: the tensor of the state; None where several end alike."""
        return _by_ends(self.flat.leaves)

    def part_of_table(self, parameter: Any, info: TensorInfo) -> TablePart | None:
        """Which part of a table a dense kernel's parameter is, if its stored state `info` is of the whole."""
        if info.kind == "per_rank" or is_spread(parameter) or not parameter.numel():
            return None
        table = self._by_memory.get(place := parameter.data_ptr())
        if table is None or not is_spread(table.source):
            return None
        return table_parts([(table.fqn, table.source)]).get(place)

    def leaf_of_parameter(self, parameter: Any, name: str) -> Leaf | None:
        """The tensor of the state that is an optimizer's parameter: by its memory, else by name."""
        for part in local_memory_of(parameter):
            if part.numel() and (leaf := self._by_memory.get(part.data_ptr())) is not None:
                return leaf
        for top, _ in self.canonical.modules:
            if (leaf := self.flat.leaves.get(f"{top}.{name}")) is not None:
                return leaf
        return self._by_end.get(name)

    @cached_property
    def _stored_by_key(self) -> dict[str, TensorInfo]:
        return {self.terms.renamed(k): info for k, info in self.source.tensors.items()}

    def stored_as(self, key: str) -> TensorInfo | None:
        """The tensor of the checkpoint that is `key` in the state."""
        return self._stored_by_key.get(key)

    def table(self, leaf: Leaf | None, kind: str) -> Table | None:
        """A tensor of the state and what was stored as it, if it is a table; `kind` is its optimizer."""
        info = None if leaf is None else self.stored_as(leaf.fqn)
        if leaf is None or info is None or len(info.shape) != 2 or info.shape != leaf.shape:
            return None
        return Table(leaf, info, kind)

    def is_of_rows(self, live: TensorRef, info: TensorInfo, table: Table) -> bool:
        """Is this the row-wise state of a table, here and as it was stored?"""
        if info.kind == "per_rank":  # of this rank's part alone
            return False
        here = self.flat.leaves[live.fqn].shape
        return is_of_rows(info.shape, table.info.shape) and is_of_rows(here, table.leaf.shape)

    def lookups(self, table: str) -> set[int]:
        """How often the fused kernels that had a table at the save had run."""
        return {
            count
            for entries in self.fused.values()
            for entry in entries
            if table in map(self.terms.renamed, entry[TABLES])
            for count in [entry.get("iter_cpu", entry.get("iter"))]
            if isinstance(count, int)
        }

    def node(self, want: Any, stored: Any, path: str) -> Any:
        """What the part of the state at `path` gets."""
        if path and self.terms.excludes(path):
            return self.kept(want, stored, path)
        if path in self.flat.objects and not isinstance(want, PerRankRef):
            return self._object(self.flat.objects[path], want, as_dict(stored), path)
        if isinstance(want, PerRankRef):
            return self._own(want, stored, path)
        if isinstance(want, Instance) or isinstance(stored, Instance):
            return self._instance(want, stored, path)
        if isinstance(want, dict) and isinstance(stored, dict):
            return self._dict(want, stored, path)
        if isinstance(want, TensorRef) and isinstance(stored, TensorRef):
            return self.tensor(want, stored, path)
        if isinstance(want, list | tuple) and has_places(want, path, self.flat):
            return self._list(want, stored, path)
        if isinstance(want, TensorRef | dict) or isinstance(stored, PerRankRef):
            return self._unlike(want, stored, path)
        return self.made(stored, path)  # a value becomes what it was, whatever that is

    def _dict(self, want: dict[Any, Any], stored: dict[Any, Any], path: str) -> dict[Any, Any]:
        out = {}
        for k, w in want.items():
            sub = f"{path}.{k}" if path else str(k)
            out[k] = self.node(w, stored[k], sub) if k in stored else self.absent(w, sub)
        for k, s in stored.items():
            if k in want:
                continue
            sub = f"{path}.{k}" if path else str(k)
            if not want:  # an empty dict takes whatever comes
                out[k] = self.made(s, sub)
            else:
                self.surplus(s, sub)
        return out

    def _instance(self, want: Any, stored: Any, path: str) -> Any:
        """A typed collection or an object of a class, on one side or both. A value is what it was; what has
        places in it is filled.
        """
        w, s = as_dict(want), as_dict(stored)
        if has_places(want, path, self.flat):
            if isinstance(w, dict) and isinstance(s, dict):
                fields = self._dict(w, s, path)
            elif (
                isinstance(want, Instance)
                and isinstance(stored, Instance)
                and want.like == stored.like
                and [k for k, _ in want.fields] == [k for k, _ in stored.fields]
            ):
                fields = self._dict(dict(want.fields), dict(stored.fields), path)
            else:
                return self._unlike(want, stored, path)
            if not isinstance(want, Instance):
                return fields
            order = dict.fromkeys([*(k for k, _ in parts_of(stored) or () if k in fields), *fields])
            return Instance(*want.like, tuple((k, fields[k]) for k in order))
        if isinstance(w, dict) and isinstance(stored, dict):
            return self._dict(w, stored, path)  # as it was stored before types were
        if isinstance(stored, PerRankRef):
            return self._unlike(want, stored, path)
        return self.made(stored, path)

    def _list(self, want: Sequence[Any], stored: Any, path: str) -> Any:
        """A list with tensors or objects in it: element by element, and whole or not at all."""
        alike = (
            type(want) is type(stored)
            and len(want) == len(stored)
            and all(
                self._is_place(w, f"{path}.{i}") or _kind(w) == _kind(s)
                for i, (w, s) in enumerate(zip(want, stored, strict=True))
            )
        )
        if not alike:
            return self._unlike(want, stored, path)
        items = [
            self.node(w, s, f"{path}.{i}")
            for i, (w, s) in enumerate(zip(want, stored, strict=True))
        ]
        return items if isinstance(want, list) else tuple(items)

    def _is_place(self, want: Any, path: str) -> bool:
        """Is it filled for itself, whatever its neighbours in a list are?"""
        return path in self.flat.objects or isinstance(want, PerRankRef | dict)

    def _unlike(self, want: Any, stored: Any, path: str) -> Any:
        """Two structures that can't be one another."""
        self.claim(stored)
        self.found.wrong.append(
            f"{path}: the checkpoint has {_shape_of(stored)}, the state {_shape_of(want)}"
        )
        return KEEP

    # -- what only one side has -----------------------------------------------------------------

    def absent(self, want: Any, path: str) -> Any:
        """Only the state has it."""
        if self.terms.excludes(path):
            return self.kept(want, _ABSENT, path)
        if isinstance(want, PerRankRef) and not self.source.same_world:
            return KEEP
        for p, _ in iter_leaves(want, path):
            (self.found.kept if self.terms.excludes(p) else self.found.missing).append(p)
        return KEEP

    def surplus(self, stored: Any, path: str) -> None:
        """Only the checkpoint has it. Tensors are judged over all ranks."""
        for p, leaf in iter_leaves(stored, path):
            foreign = isinstance(leaf, PerRankRef) and not self.source.same_world
            if not isinstance(leaf, TensorRef) and not foreign and not self.terms.excludes(p):
                self.found.extra.append(p)

    def kept(self, want: Any, stored: Any, path: str) -> Any:
        """It stays as it is, as asked."""
        self.claim(stored)
        self.found.kept += [p for p, _ in iter_leaves(want, path)]
        return KEEP

    def claim(self, stored: Any) -> None:
        """This rank has a use for it, or knows why not."""
        for _, leaf in iter_leaves(stored):
            if isinstance(leaf, TensorRef):
                self.found.claimed.add(leaf.fqn)
            elif isinstance(leaf, PerRankRef) and leaf.fqn in self.source.per_rank:
                self.claim(self.source.per_rank[leaf.fqn])

    # -- tensors --------------------------------------------------------------------------------

    def tensor(self, want: TensorRef, stored: TensorRef, path: str) -> Any:
        """A tensor that must have its like in the checkpoint."""
        leaf, info = self.flat.leaves[want.fqn], self.source.tensors[stored.fqn]
        self.found.claimed.add(stored.fqn)
        path = want.fqn if leaf.kind == "per_rank" else path
        if self.terms.excludes(path):
            self.found.kept.append(path)
            return leaf.source
        if info.dtype == leaf.dtype and info.shape == leaf.shape:
            if path.endswith(_COLLISION_MAP):
                self._check_segments(leaf, info, path)
            return self.fill(leaf, info, path)
        if (
            info.dtype == leaf.dtype
            and self.terms.resizes(path)
            and len(info.shape) == len(leaf.shape)
            and _COLLISION not in path  # its ids have rows by the sizes that it had
        ):
            return self.fill_common(leaf, info, path)
        self.found.wrong.append(
            f"{path}: the checkpoint has {info.dtype} {list(info.shape)}, the state {leaf.dtype} "
            f"{list(leaf.shape)}"
        )
        return leaf.source

    def _check_segments(self, leaf: Leaf, info: TensorInfo, path: str) -> None:
        """A managed collision gives ids of a part rows of that part: cut elsewhere they mean nothing."""
        stored = sorted({(o[0], o[0] + n[0]) for o, n in info.boxes if n[0]})
        here = sorted(
            {(s.offsets[0], s.offsets[0] + s.sizes[0]) for s in leaf.shards if s.sizes[0]}
        )
        if not set(here) <= set(stored):
            table = path.removesuffix(_COLLISION_MAP).rpartition(".")[2]
            self.found.wrong.append(
                f"{path}: the managed collision of table {table} was cut into rows {_ranges(stored)}, and is "
                f"{_ranges(here)} on this rank: its ids have their rows within their own part only; restore "
                f"at as many ranks as it was saved with"
            )

    def fits(self, want: Any, info: TensorInfo) -> bool:
        """Is there a live tensor that can take the stored one as it is?"""
        if not isinstance(want, TensorRef):
            return False
        leaf = self.flat.leaves[want.fqn]
        return (info.dtype, info.shape) == (leaf.dtype, leaf.shape)

    def fill(self, leaf: Leaf, info: TensorInfo, path: str) -> Any:
        """In place."""
        self.found.claimed.add(info.fqn)
        self.found.pieces.append(Piece(path, info.fqn, leaf.shards))
        return leaf.source

    def fill_common(self, leaf: Leaf, info: TensorInfo, path: str) -> Any:
        """What both have from the first row and column on; the rest stays as the model made it."""
        common = [min(a, b) for a, b in zip(info.shape, leaf.shape, strict=True)]
        shards = []
        for s in leaf.shards:
            sizes = tuple(
                max(0, min(o + n, most) - o)
                for o, n, most in zip(s.offsets, s.sizes, common, strict=True)
            )
            part = s.tensor[tuple(slice(0, n) for n in sizes)]
            if part.numel():
                shards.append(Shard(s.offsets, sizes, part))
        self.found.claimed.add(info.fqn)
        self.found.pieces.append(Piece(path, info.fqn, tuple(shards)))
        self.found.notes.append(
            f"{path}: {list(info.shape)} restored into {list(leaf.shape)}, the rest stays as made"
        )
        return leaf.source

    def stays(self, live: Any, stored: Any, at: str, whole: str) -> Any:
        """A part of the state of one parameter, `whole`, that is to stay as it is, as asked."""
        if live is not None:
            return self.kept(live, stored, at) and self.live(live)
        self.claim(stored)
        self.found.wrong.append(
            f"{at}: can't be left out alone, since the optimizer here has no state of this parameter yet and "
            f"needs all of it or none; leave all of it out with {self.spell('exclude', [whole])}"
        )
        return None

    def make(
        self,
        info: TensorInfo,
        path: str,
        like: torch.Tensor | None = None,
        part: TablePart | None = None,
    ) -> Any:
        """A tensor that only the checkpoint has; `like` has its shape, device and sharding.

        part: the part of a table that `like` is, if it is only that.
        """
        self.found.claimed.add(info.fqn)
        dtype = torch_dtype(info.dtype)
        if like is not None:
            made = torch.empty_like(like.detach(), dtype=dtype)
        elif info.kind == "sharded":
            self.found.wrong.append(
                f"{path}: is sharded in the checkpoint, and the state has no tensor for it that says "
                f"how it is to be sharded here"
            )
            return KEEP
        else:
            made = torch.empty(info.shape, dtype=dtype, device="cpu")
        leaf = _leaf_of(path, made, part)
        self.found.pieces.append(Piece(path, info.fqn, leaf.shards, ours=True))
        return made

    def make_resized(
        self, info: TensorInfo, path: str, like: torch.Tensor, part: TablePart | None
    ) -> Any:
        """Zeros of the shape of `like`, see `make`, with what the checkpoint has of it."""
        made = torch.zeros_like(like.detach(), dtype=torch_dtype(info.dtype))
        self.fill_common(_leaf_of(path, made, part), info, path)
        return made

    def made(self, stored: Any, path: str) -> Any:
        """A stored part as it is, with tensors made anew."""
        if isinstance(stored, TensorRef):
            return self.make(self.source.tensors[stored.fqn], path)
        if isinstance(stored, PerRankRef):
            own = self.source.per_rank.get(stored.fqn) if self.source.same_world else None
            return PerRank(None if own is None else self.resolved(self.made(own, path), path))
        if isinstance(stored, dict):
            return {k: self.made(v, f"{path}.{k}" if path else str(k)) for k, v in stored.items()}
        if type(stored) in (list, tuple):
            return type(stored)(self.made(v, f"{path}.{i}") for i, v in enumerate(stored))
        if isinstance(stored, Instance) and stored.walks:
            return stored.having([self.made(v, f"{path}.{k}") for k, v in stored.fields])
        return stored

    # -- parts of single ranks ------------------------------------------------------------------

    def _own(self, want: PerRankRef, stored: Any, path: str) -> Any:
        """A rank's own part: what it gets is in `per_rank`."""
        tree = self.flat.per_rank[want.fqn]
        if not isinstance(stored, PerRankRef):
            return self._unlike(want, stored, path)
        if not self.source.same_world:
            self.found.unclaimed.append(path)
            return KEEP
        if stored.fqn not in self.source.per_rank:
            return self.absent(tree, path)
        own = self.source.per_rank[stored.fqn]
        self.found.per_rank[path] = self.node(tree, own, path)
        return KEEP

    # -- objects that save themselves -----------------------------------------------------------

    def _object(self, obj: Any, want: Any, stored: Any, path: str) -> Any:
        """What `load_state_dict` of an object gets, or KEEP."""
        if not isinstance(want, dict) or not isinstance(stored, dict):
            return (
                self._unlike(want, stored, path)
                if type(want) is not type(stored)
                else self.given(want, stored, path)
            )
        if isinstance(obj, torch.nn.Module):
            return self._module(want, stored, path)
        if GROUPS in want and (is_keyed(obj) or isinstance(obj, KeyedOptimizer)):
            keyed = obj if isinstance(obj, KeyedOptimizer) else described(obj)
            return fit_keyed(self, keyed, want, stored, path)
        if CLASS in want and isinstance(stored.get(GROUPS), dict) and "param_groups" in want:
            stored = plain_of(stored)
        if CLASS in want and "param_groups" in want and "param_groups" in stored:
            return fit_optimizer(self, obj, want, stored, path)
        return self.given(want, stored, path)

    def _module(self, want: dict[Any, Any], stored: dict[Any, Any], path: str) -> Any:
        """Parameters and buffers must have their like; extra state is given back as it was stored."""
        out: dict[Any, Any] = {}
        touched = False
        for k, w in want.items():
            sub = f"{path}.{k}" if path else str(k)
            if k not in stored:
                self.absent(w, sub)
                out[k] = self.live(w)
            elif self.terms.excludes(sub):
                self.kept(w, stored[k], sub)
                out[k] = self.live(w)
            elif isinstance(w, TensorRef) and isinstance(stored[k], TensorRef) and not _is_extra(k):
                out[k], touched = self.tensor(w, stored[k], sub), True
            elif isinstance(w, dict) and isinstance(stored[k], dict) and not _is_extra(k):
                out[k], touched = self._module(w, stored[k], sub), True
            elif isinstance(w, TensorRef) and not _is_extra(k):
                self._unlike(w, stored[k], sub)
                out[k] = self.live(w)
            else:
                out[k], touched = self.given(w, stored[k], sub), True
        for k, s in stored.items():
            if k not in want:
                self.surplus(s, f"{path}.{k}" if path else str(k))
        return out if touched or not want else KEEP

    def given(self, want: Any, stored: Any, path: str) -> Any:
        """What an object of its own kind had saved. Its own tensors are filled where they fit."""
        if path and self.terms.excludes(path):
            self.kept(want, stored, path)
            return self.live(want)
        if isinstance(stored, TensorRef):
            info = self.source.tensors[stored.fqn]
            if self.fits(want, info):
                assert isinstance(want, TensorRef)
                return self.fill(self.flat.leaves[want.fqn], info, path)
            if isinstance(want, TensorRef) and "sharded" in (
                info.kind,
                self.flat.leaves[want.fqn].kind,
            ):
                return self.tensor(want, stored, path)
            if info.kind == "sharded" and not isinstance(want, TensorRef):
                return _ABSENT  # another rank's
            return self.make(info, path)
        if isinstance(stored, PerRankRef):
            if not self.source.same_world:
                self.found.unclaimed.append(path)
                return PerRank(None)
            own = self.source.per_rank.get(stored.fqn)
            mine = self.flat.per_rank.get(want.fqn) if isinstance(want, PerRankRef) else None
            return PerRank(
                None if own is None else self.resolved(self.given(mine, own, path), path)
            )
        if isinstance(stored, dict):
            want = as_dict(want)
            return self._given_dict(want if isinstance(want, dict) else {}, stored, path)
        if isinstance(stored, Instance) and stored.walks:
            return self._given_instance(want, stored, path)
        if type(stored) in (list, tuple):
            inner = want if type(want) is type(stored) and len(want) == len(stored) else ()
            items = [
                self.given(inner[i] if inner else None, s, f"{path}.{i}")
                for i, s in enumerate(stored)
            ]
            if any(i is _ABSENT for i in items):
                self._unlike(want, stored, path)
            return type(stored)(items)
        return stored

    def _given_instance(self, want: Any, stored: Instance, path: str) -> Any:
        inner = dict(parts_of(want) or ())
        fields = [(k, self.given(inner.get(k), v, f"{path}.{k}")) for k, v in stored.fields]
        here = tuple(f for f in fields if f[1] is not _ABSENT)
        if len(here) < len(fields) and not isinstance(as_dict(stored), dict):
            self._unlike(want, stored, path)
        return Instance(*stored.like, here) if here or not fields else _ABSENT

    def _given_dict(self, want: dict[Any, Any], stored: dict[Any, Any], path: str) -> Any:
        out = {}
        for k, s in stored.items():
            sub = f"{path}.{k}" if path else str(k)
            value = self.given(want.get(k), s, sub)
            if value is not _ABSENT:
                out[k] = value
        for k, w in want.items():
            if k not in stored:
                self.absent(w, f"{path}.{k}" if path else str(k))
                out[k] = self.live(w)
        return out if out or not stored else _ABSENT

    def live(self, want: Any) -> Any:
        """A part of the state as it is now, as its object saves it."""
        if isinstance(want, TensorRef):
            return self.flat.leaves[want.fqn].source
        if isinstance(want, PerRankRef):
            return PerRank(self.live(self.flat.per_rank[want.fqn]))
        if isinstance(want, dict):
            return {k: self.live(v) for k, v in want.items()}
        if type(want) in (list, tuple):
            return type(want)(self.live(v) for v in want)
        if isinstance(want, Instance) and want.walks:
            return want.having([self.live(v) for _, v in want.fields])
        return want


def _leaf_of(path: str, made: torch.Tensor, part: TablePart | None) -> Leaf:
    """A tensor that was made: of a parameter, or of the part of a table that it is."""
    whole = made if part is None else Part(part.offsets, part.whole, made)
    return leaf_of(path, whole, per_rank=False)


def _by_ends(leaves: Mapping[str, Leaf]) -> dict[str, Leaf | None]:
    found: dict[str, Leaf | None] = {}
    for key, leaf in leaves.items():
        end = key
        while end:
            found[end] = None if end in found else leaf
            _, _, end = end.partition(".")
    return found


def has_places(want: Any, path: str, flat: FlatState) -> bool:
    """Are there tensors, objects or ranks' own parts in it?"""
    if path in flat.objects or isinstance(want, TensorRef | PerRankRef):
        return True
    parts = parts_of(want) or ()
    return any(has_places(v, f"{path}.{k}" if path else str(k), flat) for k, v in parts)


def with_loose(source: Source) -> Any:
    """The values, and at the top the tensors that no value places: files of other tools have nothing else."""
    placed: set[str] = set()
    for tree in (source.values, *source.per_rank.values()):
        for path, leaf in iter_leaves(tree):
            if isinstance(leaf, TensorRef):
                placed.add(leaf.fqn)
                if leaf.fqn not in source.tensors:
                    raise CorruptError(
                        f"{path}: its tensor {leaf.fqn} is in no index of the checkpoint"
                    )
    loose = {
        k: TensorRef(k)
        for k, info in source.tensors.items()
        if k not in placed and info.kind != "per_rank"
    }
    if not loose or not isinstance(source.values, dict | None):
        return source.values
    return {**(source.values or {}), **loose}


def nested_like(want: Any, stored: Any) -> Any:
    """A checkpoint of flat keys, such as a file of another tool had, in the shape of the state."""
    if not isinstance(stored, dict) or not isinstance(want, dict):
        return stored
    tree = {k: v for k, v in stored.items() if k in want}
    for k, v in stored.items():
        if k not in want and not (isinstance(k, str) and _attach(tree, want, k, v)):
            tree[k] = v
    return tree


def renamed(stored: Any, want: Any, terms: RestoreTerms) -> Any:
    """A checkpoint's tree with parts moved to where the state has them.

    Raises BadInputError where two parts come to one place, or a rename finds nothing.
    """
    moved: list[tuple[str, str, Any]] = []
    used: set[str] = set()
    tree = _without_moved(stored, "", "", terms, moved)
    for old, new, node in moved:
        used |= {o for o in terms.rename if old == o or old.startswith(f"{o}.")}
        if not _attach(tree, want, new, node):
            raise BadInputError(f"rename: {old} becomes {new}, which the checkpoint has already")
    if unused := sorted(set(terms.rename) - used):
        raise BadInputError(
            f"rename: the checkpoint has nothing that is or begins with {unused[0]!r}; its first keys "
            f"are {', '.join([p for p, _ in iter_leaves(stored)][:4])}"
        )
    return tree


def _without_moved(
    stored: Any, old: str, new: str, terms: RestoreTerms, moved: list[tuple[str, str, Any]]
) -> Any:
    if any(isinstance(leaf, TensorRef) for _, leaf in iter_leaves(stored)):
        stored = as_dict(stored)
    if not isinstance(stored, dict):
        return stored
    out = {}
    for k, v in stored.items():
        was, here = (f"{old}.{k}", f"{new}.{k}") if old else (str(k), str(k))
        becomes = terms.renamed(was)
        node = _without_moved(v, was, becomes, terms, moved)
        if becomes == here:
            out[k] = node
        else:
            moved.append((was, becomes, node))
    return out


def _attach(tree: dict[Any, Any], want: Any, place: str, node: Any) -> bool:
    """Put a node where the state has `place`; False if something is there."""
    want = as_dict(want)
    for k, w in want.items() if isinstance(want, dict) else ():
        if place == str(k):
            if k in tree:
                return False
            tree[k] = node
            return True
        if place.startswith(f"{k}.") and isinstance(as_dict(w), dict):
            inner = tree.setdefault(k, {})
            return isinstance(inner, dict) and _attach(inner, w, place[len(str(k)) + 1 :], node)
    if place in tree:
        return False
    tree[place] = node
    return True


def _ranges(parts: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"[{a}, {b})" for a, b in parts)


def _is_extra(key: Any) -> bool:
    return str(key).rpartition(".")[2] == "_extra_state"


def _kind(value: Any) -> str:
    names = {TensorRef: "tensor", PerRankRef: "PerRank part"}
    kind = names.get(type(value), type(value).__name__)
    return kind if kind in ("tensor", "PerRank part", "dict", "list", "tuple") else "value"


def _shape_of(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(map(_kind, value[:4]))})"
    kind = {"value": type(value).__name__}.get(_kind(value), _kind(value))
    return f"a {kind}"


def _recut_optimizer_state(m: Matching) -> list[str]:
    """Rowwise state of a table whose columns are cut elsewhere: the same shape, another meaning.

    Column shards have their rows one after the other: once cut, they mean nothing at other numbers of rows.
    """
    problems = []
    taken = {piece.key for piece in m.found.pieces} | set(m.source.tensors)
    for fqn, leaf in m.flat.leaves.items():
        info = m.stored_as(fqn)
        if info is None or leaf.kind != "sharded" or not leaf.shards:
            continue
        if len(leaf.shape) != 2 or info.shape[1:] != leaf.shape[1:]:
            continue
        stored = {(o[1], s[1]) for o, s in info.boxes if 0 not in s}
        here = {(s.offsets[1], s.sizes[1]) for s in leaf.shards if 0 not in s.sizes}
        resized = info.shape != leaf.shape and len(stored | here) > 1
        if here <= stored and not resized:
            continue
        inner = f".{fqn.partition('.')[2]}."
        problems += [
            f"{name}: rowwise state of {fqn}, whose column shards were {sorted(stored)} and are "
            f"{sorted(here)} here; restore at the sharding it was saved with, or leave the optimizer out"
            for name, x in m.flat.leaves.items()
            if inner in f".{name}." and is_of_rows(x.shape, leaf.shape) and name in taken
            if name not in m.by_rows and not m.terms.excludes(name)
        ]
    return problems
