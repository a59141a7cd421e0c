"""What a plain optimizer gets at a restore: state by its parameters' names, options by its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ckpt.canonical.alike import few
from ckpt.canonical.cuts import TablePart, is_empty
from ckpt.canonical.optimizers import CLASS, Name, class_of, numbered, parameters
from ckpt.conversions import FUSED
from ckpt.index import TensorInfo
from ckpt.row_plan import fit_rows
from ckpt.values import TensorRef

if TYPE_CHECKING:
    from ckpt.restore_plan import Matching

# Classes of torch.optim whose state isn't of their parameters' shapes.
_OWN_SHAPES = frozenset(("torch.optim.lbfgs.LBFGS", "torch.optim._adafactor.Adafactor"))
# Those whose state begins with other values than zeros.
_NOT_ZEROS = frozenset(
    ("torch.optim.adagrad.Adagrad", "torch.optim.asgd.ASGD", "torch.optim.rprop.Rprop")
)


def fit_optimizer(
    matching: Matching,
    optimizer: Any,
    want: dict[Any, Any],
    stored: Mapping[Any, Any],
    path: str,
) -> Any:
    """The state dict with numbers that the optimizer's `load_state_dict` gets."""
    return _Fit(matching, optimizer, want, stored, path).tree()


class _Fit:
    def __init__(
        self,
        matching: Matching,
        optimizer: Any,
        want: dict[Any, Any],
        stored: Mapping[Any, Any],
        path: str,
    ) -> None:
        self._m = matching
        self._optimizer = optimizer
        self._want = want
        self._stored = stored
        self._path = path
        self._by_number: list[Name] = matching.canonical.by_number(optimizer)
        self._by_name: dict[Name, torch.Tensor] = {}
        for name, p in zip(self._by_number, parameters(optimizer), strict=True):
            self._by_name.setdefault(name, p)
        self._class = str(stored.get(CLASS, class_of(optimizer)))

    def tree(self) -> Any:
        m, wrong = self._m, self._m.found.wrong
        same_class = self._class == class_of(self._optimizer)
        if FUSED in self._class:
            wrong.append(
                f"{self._path}: is the state of {self._class}, which {class_of(self._optimizer)} keeps under "
                f"other names: wrap the optimizer in a torchrec KeyedOptimizerWrapper, or leave it out with "
                f"{m.spell('exclude', [self._path])}"
            )
            self._m.claim(self._stored)
            return None
        if not same_class and not self._m.terms.other_optimizer:
            wrong.append(
                f"{self._path}: is the state of {self._class}, and the optimizer here is a "
                f"{class_of(self._optimizer)}; accept it with {m.spell('other_optimizer', True)}, or "
                f"leave it out with {m.spell('exclude', [self._path])}"
            )
            self._m.claim(self._stored)
            return None
        names = self._names()
        if names is None:
            self._m.claim(self._stored)
            return None
        groups = self._groups(names, same_class=same_class)
        tree = {
            **{
                k: self._m.given(self._want.get(k), v, self._at(k))
                for k, v in self._stored.items()
                if k not in ("state", "param_groups")
            },
            "state": self._state(names),
            "param_groups": groups,
        }
        return numbered(tree, self._by_number)

    def _at(self, *keys: Any) -> str:
        return ".".join([self._path, *map(str, keys)])

    # -- names ----------------------------------------------------------------------------------

    def _stored_names(self) -> list[list[Name]]:
        """What the checkpoint calls the parameters of each group."""
        groups = []
        for g in self._stored["param_groups"]:
            params, given = list(g["params"]), g.get("param_names")
            if given is not None and len(given) == len(params):
                params = [
                    str(n) if type(k) is int else k for k, n in zip(params, given, strict=True)
                ]
            groups.append(params)
        return groups

    def _names(self) -> dict[Name, Name] | None:
        """Stored name -> name here. None, with what is wrong told, if they don't go together."""
        stored = self._stored_names()
        flat = [n for g in stored for n in g]
        numbers = [n for n in flat if type(n) is int and n not in self._by_name]
        found: dict[Name, Name] = {}
        if (flat and len(numbers) == len(flat)) or self._all_numbers(flat):
            return self._by_order(stored)
        for n in flat:
            here = self._here(n)
            if here is not None:
                found[n] = here
        if unnamed := [n for n in found if type(n) is int]:
            self._m.found.notes.append(
                f"{self._path}: {len(unnamed)} of its parameters are in no module of the state and have no "
                f"name: they go by their order and shape"
            )
        lost = [n for n in flat if n not in found]
        times = Counter(found.values())
        new = [n for n in self._by_number if n not in times]
        if twice := [n for n, count in times.items() if count > 1]:
            self._m.found.wrong.append(
                f"{self._path}: two parameters of the checkpoint are {few(twice)}"
            )
            return None
        terms = self._m.terms
        lost = [n for n in lost if not terms.excludes(self._at("state", n))]
        new = [n for n in new if not terms.excludes(self._at("state", n))]
        if (lost or new) and not terms.partial:
            self._m.found.wrong.append(self._other_parameters(lost, new))
            return None
        self._m.found.kept += [self._at("state", n) for n in (*lost, *new)]
        return found

    def _all_numbers(self, flat: Sequence[Name]) -> bool:
        """Does the checkpoint hold numbers only, where the parameters here have names?"""
        return (
            bool(flat)
            and all(type(n) is int for n in flat)
            and any(type(n) is str for n in self._by_number)
        )

    def _by_order(self, stored: list[list[Name]]) -> dict[Name, Name] | None:
        """A checkpoint without names: parameters go by their order, as torch itself has it."""
        here = self._groups_here()
        if [len(g) for g in stored] != [len(g) for g in here]:
            self._m.found.wrong.append(self._other_groups(stored, here))
            return None
        self._m.found.notes.append(
            f"{self._path}: the checkpoint has no names of its parameters: they go by their order"
        )
        return {s: h for a, b in zip(stored, here, strict=True) for s, h in zip(a, b, strict=True)}

    def _groups_here(self) -> list[list[Name]]:
        left = iter(self._by_number)
        return [[next(left) for _ in g["params"]] for g in self._optimizer.param_groups]

    def _here(self, name: Name) -> Name | None:
        """The name here of what the checkpoint calls `name`."""
        names, terms = self._m.canonical.names, self._m.terms
        found = None
        if type(name) is str:
            tops = {k for k, _ in self._m.canonical.modules} | {
                o.partition(".")[0] for o in terms.rename
            }
            for top in sorted(tops):
                key = f"{top}.{name}" if top else name
                if (becomes := terms.renamed(key)) != key:
                    found = found if found is not None else names.find(becomes)
            if found is None:
                found = names.find(name)
        if found is not None and (known := names.name(found)) in self._by_name:
            return known
        return name if name in self._by_name else None

    def _other_parameters(self, lost: Sequence[Name], new: Sequence[Name]) -> str:
        said = []
        if lost:
            said.append(
                f"the checkpoint's {few(lost)} {'is' if len(lost) == 1 else 'are'} not in it"
            )
        if new:
            said.append(f"its {few(new)} {'is' if len(new) == 1 else 'are'} not in the checkpoint")
        return (
            f"{self._path}: holds other parameters than at the save: {'; '.join(said)} (groups of the "
            f"checkpoint: {_sizes(self._stored_names())}; here: {_sizes(self._groups_here())})"
        )

    def _other_groups(self, stored: list[list[Name]], here: list[list[Name]]) -> str:
        return (
            f"{self._path}: its parameter groups are others than at the save: the checkpoint has "
            f"{_sizes(stored)}, the optimizer {_sizes(here)}; make the groups as they were before restore()"
        )

    # -- groups ---------------------------------------------------------------------------------

    def _groups(self, names: dict[Name, Name], *, same_class: bool) -> list[dict[str, Any]]:
        """The options of each group here, from the stored group that has its parameters."""
        stored = [[names[n] for n in g if n in names] for g in self._stored_names()]
        here = self._groups_here()
        groups = []
        used: set[int] = set()
        for i, (members, live) in enumerate(zip(here, self._want["param_groups"], strict=True)):
            likely = {s for s, g in enumerate(stored) if set(g) & set(members)}
            if not members and i < len(stored) and not stored[i]:
                likely = {i}
            at = self._at("param_groups", i)
            group = {k: v for k, v in live.items() if k != "params"}
            options = self._m.live(group)
            if len(likely) > 1 or likely & used:
                self._m.found.wrong.append(self._other_groups(self._stored_names(), here))
            elif likely and same_class and not self._m.terms.excludes(at):
                (s,) = likely
                used.add(s)
                for k, v in self._stored["param_groups"][s].items():
                    if k not in ("params", "param_names"):
                        options[k] = self._m.given(group.get(k), v, f"{at}.{k}")
            elif likely:
                used |= likely
                self._m.claim([self._stored["param_groups"][s] for s in likely])
            options["params"] = members
            groups.append(options)
        for s, g in enumerate(self._stored["param_groups"]):
            if s in used:
                continue
            self._m.claim(g)
            if g["params"] and not self._m.terms.partial and any(n in names for n in g["params"]):
                self._m.found.wrong.append(self._other_groups(self._stored_names(), here))
        return groups

    # -- state ----------------------------------------------------------------------------------

    def _state(self, names: dict[Name, Name]) -> dict[Any, Any]:
        out: dict[Any, Any] = {}
        taken = set(names.values())
        members = {n for g in self._stored_names() for n in g}
        original = self._original_names()
        for k, entry in self._stored["state"].items():
            name = original.get(k, k)
            here = names.get(name)
            at = self._at("state", k if here is None else here)
            if here is None:
                if name in members:
                    self._m.claim(entry)  # told already
                else:  # state of no parameter
                    out[k] = self._m.given(self._want["state"].get(k), entry, at)
            elif self._m.terms.excludes(at):
                self._m.claim(entry)
                self._m.found.kept.append(at)
            elif is_empty(self._by_name[here]):  # another rank's part has the state
                self._m.claim(entry)
            else:
                out[here] = self._entry(
                    self._by_name[here], self._want["state"].get(here), entry, at
                )
        live_state = self._optimizer.state
        for name, p in self._by_name.items():
            if (
                is_empty(p) and p in live_state
            ):  # isn't stored, and torch would drop what isn't given
                out[name] = dict(live_state[p])
        for k, live in self._want["state"].items():
            at = self._at("state", k)
            gone = k in self._by_name and k not in taken
            if k not in out and (gone or self._m.terms.excludes(at)):
                out[k] = self._m.live(live)
        return out

    def _original_names(self) -> dict[Name, Name]:
        """Keys of the stored state -> names, where the groups had names beside their numbers."""
        found: dict[Name, Name] = {}
        for g, names in zip(self._stored["param_groups"], self._stored_names(), strict=True):
            found.update(zip(g["params"], names, strict=True))
        return found

    def _entry(self, parameter: torch.Tensor, live: Any, stored: Any, at: str) -> Any:
        if not isinstance(stored, dict):
            return self._m.given(live, stored, at)
        live = live if isinstance(live, dict) else {}
        return {k: self._value(parameter, live.get(k), v, at, k) for k, v in stored.items()}

    def _value(self, parameter: torch.Tensor, live: Any, stored: Any, whole: str, k: Any) -> Any:
        """One thing that is kept for a parameter, at `whole`; most often a tensor of its shape."""
        m, at = self._m, f"{whole}.{k}"
        if not isinstance(stored, TensorRef):
            return m.given(live, stored, at)
        info = m.source.tensors[stored.fqn]
        m.found.claimed.add(info.fqn)
        if m.terms.excludes(at):
            return m.stays(live, stored, at, whole)
        table = m.table(m.leaf_of_parameter(parameter, ""), self._class)
        if isinstance(live, TensorRef) and table is not None and m.is_of_rows(live, info, table):
            return fit_rows(m, m.flat.leaves[live.fqn], info, table, at)
        part = m.part_of_table(parameter, info)
        shape = tuple(parameter.shape) if part is None else part.whole
        was = self._shape_at_save(parameter)
        resized = m.terms.resizes(at) or self._resizes(parameter)
        if len(info.shape) > 0 and info.shape != shape and resized and info.shape == was:
            return self._resized(parameter, part, live, info, at)
        partly = part is not None and live is None and bool(info.shape) and info.shape != shape
        if partly or self._misfits(info, shape, was):
            m.found.wrong.append(
                f"{at}: the checkpoint has {info.dtype} {list(info.shape)} for a parameter whose shape "
                f"is {list(shape)} here"
                + (f" and was {list(was)} at the save" if was not in (None, shape) else "")
                + f"; leave it out with {m.spell('exclude', [whole])}"
            )
            return None
        if m.fits(live, info):
            return m.fill(m.flat.leaves[live.fqn], info, at)
        fits = bool(shape) and info.shape == shape
        return m.make(info, at, like=parameter if fits else None, part=part if fits else None)

    def _misfits(
        self, info: TensorInfo, shape: tuple[int, ...], was: tuple[int, ...] | None
    ) -> bool:
        if was is not None and was != shape:
            return len(info.shape) > 0
        own_shapes = not self._class.startswith("torch.optim.") or self._class in _OWN_SHAPES
        return len(info.shape) > 0 and info.shape != shape and not own_shapes

    def _shape_at_save(self, parameter: torch.Tensor) -> tuple[int, ...] | None:
        """If the checkpoint has the parameter itself."""
        for key in self._m.canonical.names.keys(parameter):
            info = self._m.source.tensors.get(key)
            if info is not None:
                return info.shape
        return None

    def _resizes(self, parameter: torch.Tensor) -> bool:
        return any(self._m.terms.resizes(k) for k in self._m.canonical.names.keys(parameter))

    def _resized(
        self, parameter: torch.Tensor, part: TablePart | None, live: Any, info: TensorInfo, at: str
    ) -> Any:
        """State of a parameter that grew or shrank: what both have, and else what a fresh one begins with."""
        m, shape = self._m, tuple(parameter.shape) if part is None else part.whole
        if isinstance(live, TensorRef):
            leaf = m.flat.leaves[live.fqn]
            if leaf.shape == shape and leaf.dtype == info.dtype:
                return m.fill_common(leaf, info, at)
        if not self._class.startswith("torch.optim.") or self._class in _NOT_ZEROS:
            m.found.wrong.append(
                f"{at}: {list(info.shape)} can't become {list(shape)}: what new rows begin "
                f"with is known to {self._class} only; take a step before restore(), or leave it out "
                f"with {m.spell('exclude', [at])}"
            )
            return None
        return m.make_resized(info, at, parameter, part)


def _sizes(groups: Sequence[Sequence[Name]]) -> str:
    return " | ".join(f"{len(g)} ({few(g)})" if g else "0" for g in groups) or "none"
