"""What a keyed optimizer gets at a restore: the state of this rank's parameters, and their options by key."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ckpt.canonical.alike import comparable, difference, few
from ckpt.canonical.cuts import empty_among
from ckpt.canonical.kernels import COUNTS, RATE
from ckpt.canonical.keyed import (
    GROUPS,
    WRAPPERS,
    homes_of,
    keyed_parameters,
    kind_of,
    makes_state,
    nest,
    trained_parameters,
)
from ckpt.canonical.optimizers import CLASS
from ckpt.conversions import STEP, as_called_by, depends_on_count, is_fused_class, same_kind
from ckpt.giving import KEEP
from ckpt.row_plan import Table, fit_rows, unknown_cut
from ckpt.tree import Leaf
from ckpt.values import TensorRef

if TYPE_CHECKING:
    from ckpt.restore_plan import Matching

_ABSENT = object()


@dataclass(frozen=True)
class KeyedOptimizer:
    """What a restore must know of a keyed optimizer.

    parameters: by key. kinds: the class of optimizer of each key. makes_state: keys of those that make their
    state at their first step. empty: keys of trained parameters without elements here. places: of what it
    wraps and combines.
    """

    parameters: Mapping[str, Any]
    kinds: Mapping[str, str]
    makes_state: Set[str]
    empty: Set[str]
    places: Set[str]


def described(optimizer: Any) -> KeyedOptimizer:
    homes = homes_of(optimizer)
    return KeyedOptimizer(
        keyed_parameters(optimizer),
        {key: kind_of(home) for key, home in homes.items()},
        {key for key, home in homes.items() if makes_state(home)},
        empty_among(trained_parameters(optimizer)),
        {place for place, _ in nest(optimizer)},
    )


def fit_keyed(
    matching: Matching,
    optimizer: KeyedOptimizer,
    want: Mapping[Any, Any],
    stored: Mapping[Any, Any],
    path: str,
) -> Any:
    """What `ckpt.canonical.keyed.give_keyed` gets, or KEEP if it doesn't fit; what is wrong is told then."""
    return _Fit(matching, optimizer, want, stored, path).tree()


class _Fit:
    def __init__(
        self,
        matching: Matching,
        optimizer: KeyedOptimizer,
        want: Mapping[Any, Any],
        stored: Mapping[Any, Any],
        path: str,
    ) -> None:
        self._m = matching
        self._optimizer = optimizer
        self._want = want
        self._stored = stored
        self._path = path
        self._options = self._stored_options()
        self._state = self._by_keys_here(stored.get("state", {}))
        self._others: dict[tuple[str, str], list[str]] = {}  # keys by the classes that aren't alike

    def tree(self) -> Any:
        if not isinstance(self._stored.get("state"), dict):
            return self._m._unlike(self._want, self._stored, self._path)
        self._compare_classes()
        tree = {
            **{
                k: self._m.given(self._want.get(k), v, self._at(k))
                for k, v in self._stored.items()
                if k not in ("state", "param_groups", GROUPS, WRAPPERS, CLASS)
            },
            "state": self._entries(),
            GROUPS: self._groups(),
        }
        if beside := self._beside():
            tree[WRAPPERS] = beside
        for (was, here), keys in self._others.items():
            self._m.found.wrong.append(
                f"{self._path}: the state of {few(keys)} is of {was}, and the optimizer here is {here}; "
                f"accept it with {self._m.spell('other_optimizer', True)}, or leave it out with "
                f"{self._m.spell('exclude', [self._path])}"
            )
        return KEEP if self._m.found.wrong else tree

    def _at(self, *keys: Any) -> str:
        return ".".join([self._path, *map(str, keys)])

    # -- names ----------------------------------------------------------------------------------

    def _here(self, key: Any) -> Any:
        """The key here of what the checkpoint calls `key`."""
        terms = self._m.terms
        for top, _ in self._m.canonical.modules if terms.rename else ():
            becomes = terms.renamed(f"{top}.{key}")
            if becomes != f"{top}.{key}" and becomes.startswith(f"{top}."):
                return becomes[len(top) + 1 :]
        return key

    def _by_keys_here(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """Stored state by the keys here. Fused state has its table's name in its own name."""
        found: dict[Any, Any] = {}
        for key, entry in state.items() if isinstance(state, Mapping) else ():
            here = self._here(key)
            if here != key and isinstance(entry, dict):
                was, now = (f"{str(k).rpartition('.')[0].rpartition('.')[2]}." for k in (key, here))
                found[here] = {
                    now + k[len(was) :] if str(k).startswith(was) else k: v
                    for k, v in entry.items()
                }
            else:
                found[here] = entry
        return found

    def _is_excluded(self, key: Any) -> bool:
        terms = self._m.terms
        return terms.excludes(self._at("state", key))

    # -- state ----------------------------------------------------------------------------------

    def _entries(self) -> dict[Any, Any]:
        """An entry for each parameter that has state after the restore: of this rank's, and no others."""
        out: dict[Any, Any] = {}
        want = self._want["state"]
        for key, parameter in self._optimizer.parameters.items():
            live, stored = want.get(key, _ABSENT), self._state.get(key, _ABSENT)
            at = self._at("state", key)
            if key in self._optimizer.empty:  # another rank's part has the state
                self._m.claim(None if stored is _ABSENT else stored)
                continue
            if self._is_excluded(key):
                self._m.claim(None if stored is _ABSENT else stored)
                self._m.found.kept.append(at)
                entry = _ABSENT if live is _ABSENT else self._m.live(live)
            elif stored is _ABSENT:
                entry = self._without(key, live, at)
            else:
                entry = self._entry(key, parameter, live, stored, at)
            if entry is not _ABSENT:
                out[key] = entry
        for key, stored in self._state.items():
            if key not in self._optimizer.parameters and stored:
                if self._is_excluded(key):
                    self._m.claim(stored)
                else:
                    self._m.surplus(stored, self._at("state", key))
        return out

    def _without(self, key: Any, live: Any, at: str) -> Any:
        """The checkpoint has no state of a parameter: it had taken no step yet, or isn't known."""
        if live is _ABSENT:
            if self._options and key not in self._options and key in self._in_groups():
                self._m.found.missing.append(at)
            return _ABSENT
        if not live:
            return {}
        if key in self._options and key in self._optimizer.makes_state:
            return _ABSENT
        self._m.absent(live, at)
        return self._m.live(live)

    def _entry(self, key: Any, parameter: Any, live: Any, stored: Any, at: str) -> Any:
        if not isinstance(stored, dict):
            return self._m.given(None if live is _ABSENT else live, stored, at)
        here = live if isinstance(live, dict) else {}
        stored = self._as_called_here(key, stored, here, at)
        if not here and stored and key not in self._optimizer.makes_state:
            self._m.claim(stored)
            kind = self._class_here(key) or "of a class of its own"
            way = "" if is_fused_class(kind) else "call its init_state() before restore(), or "
            self._m.found.wrong.append(
                f"{at}: the checkpoint has {few(list(stored))}, and the optimizer here has no state of it "
                f"({kind}); {way}leave it out with {self._m.spell('exclude', [at])}"
            )
            return _ABSENT
        out = {
            k: self._value(key, parameter, here.get(k), v, f"{at}.{k}") for k, v in stored.items()
        }
        for k, v in here.items():
            if k not in stored:
                self._m.absent(v, f"{at}.{k}")
                out[k] = self._m.live(v)
        return out

    def _as_called_here(
        self, key: Any, stored: Mapping[Any, Any], here: Mapping[Any, Any], at: str
    ) -> Mapping[Any, Any]:
        """State that was kept in a kernel, and is by an optimizer's step now, or the other way round."""
        was, now = self._class_at_save(key), self._class_here(key)
        if was is None or now is None or was == now or not same_kind(was, now):
            return stored
        found = as_called_by(now, stored, here)
        leaf = self._m.leaf_of_parameter(self._optimizer.parameters[key], str(key))
        if is_fused_class(now):
            if not self._m.terms.excludes(f"{at}.{STEP}"):
                self._count_lookups(leaf, stored.get(STEP), now, at)
        elif found or STEP in here:
            counts = set() if leaf is None else self._m.lookups(leaf.fqn)
            if self._m.terms.excludes(f"{at}.{STEP}"):
                if STEP not in here:
                    self._m.stays(None, None, f"{at}.{STEP}", at)
            elif len(counts) == 1:
                found[STEP] = torch.tensor(float(counts.pop()))
            else:
                told = f"counted {sorted(counts)}" if counts else "don't say how often they ran"
                self._m.found.wrong.append(
                    f"{at}.{STEP}: the kernels of the save {told}, and {now} needs one count; leave "
                    f"the state out with {self._m.spell('exclude', [at])}"
                )
        return found

    def _count_lookups(self, leaf: Leaf | None, step: Any, now: str, at: str) -> None:
        """A kernel goes on counting where an optimizer had counted its steps."""
        if isinstance(step, TensorRef):
            step = self._m.make(self._m.source.tensors[step.fqn], f"{at}.{STEP}")
        if step is None:
            return
        if leaf is not None:
            for name in COUNTS:
                self._m.from_dense.setdefault(leaf.fqn, {})[name] = torch.as_tensor(step)
        elif depends_on_count(now):
            self._m.found.wrong.append(
                f"{at}.{STEP}: {now} corrects its updates by this count, and its table isn't in the state, "
                f"so that its kernel can't be told; put the module into the state, or leave this out with "
                f"{self._m.spell('exclude', [at])}"
            )

    def _class_at_save(self, key: Any) -> str | None:
        return next((g.get(CLASS) for _, g in self._options.get(key, {}).values()), None)

    def _class_here(self, key: Any) -> str | None:
        return self._optimizer.kinds.get(key)

    def _table(self, key: Any) -> Table | None:
        """The parameter itself, here and as it was stored, if the state has it."""
        kind = self._class_at_save(key) or self._class_here(key) or "the optimizer"
        return self._m.table(
            self._m.leaf_of_parameter(self._optimizer.parameters[key], str(key)), kind
        )

    def _value(self, key: Any, parameter: Any, live: Any, stored: Any, at: str) -> Any:
        """One thing that is kept for a parameter, most often a tensor of its shape."""
        m = self._m
        if m.terms.excludes(at):
            return m.stays(live, stored, at, self._at("state", key))
        if isinstance(stored, dict) and live is None:
            m.claim(stored)
            m.found.wrong.append(
                f"{at}: is the state of an object that isn't made yet; call init_state() before restore()"
            )
            return None
        if not isinstance(stored, TensorRef):
            return m.given(live, stored, at)
        info = m.source.tensors[stored.fqn]
        table = self._table(key)
        if table is None and (why := unknown_cut(parameter, info)):
            m.claim(stored)
            m.found.wrong.append(f"{at}: {why}, or leave it out with {m.spell('exclude', [at])}")
            return None if live is None else m.live(live)
        if isinstance(live, TensorRef) and table is not None and m.is_of_rows(live, info, table):
            return fit_rows(m, m.flat.leaves[live.fqn], info, table, at)
        if m.fits(live, info):
            return m.fill(m.flat.leaves[live.fqn], info, at)
        part = m.part_of_table(parameter, info)
        shape = tuple(parameter.shape) if part is None else part.whole
        resized = m.terms.resizes(at) or any(
            m.terms.resizes(f"{top}.{key}") for top, _ in m.canonical.modules
        )
        if isinstance(live, TensorRef):
            leaf = m.flat.leaves[live.fqn]
            if resized and leaf.dtype == info.dtype and len(leaf.shape) == len(info.shape):
                return m.fill_common(leaf, info, at)
            return m.tensor(live, stored, at)
        if live is not None:
            return m._unlike(live, stored, at)
        # One in no group isn't trained: it stands for a wrapper's own state.
        if info.shape and info.shape != shape and key in self._in_groups():
            m.found.claimed.add(info.fqn)
            m.found.wrong.append(
                f"{at}: the checkpoint has {info.dtype} {list(info.shape)} for a parameter whose shape is "
                f"{list(shape)} here; leave it out with {m.spell('exclude', [self._at('state', key)])}"
            )
            return None
        if not info.shape and key in self._in_groups("capturable", "fused"):
            # Such counts are where the parameter is: torch.optim moves them there at a load, too.
            return m.make(info, at, like=parameter.detach().new_empty(()))
        fits = bool(info.shape) and info.shape == shape
        return m.make(info, at, like=parameter if fits else None, part=part if fits else None)

    def _in_groups(self, *options: str) -> set[Any]:
        """Keys in the groups here that have one of these options on; without any: in all groups."""
        (live,) = self._want[GROUPS].values()
        return {
            k for g in live if not options or any(g.get(o) for o in options) for k in g["params"]
        }

    def _beside(self) -> dict[str, Any]:
        """What wrappers keep for themselves."""
        m, out = self._m, {}
        stored, want = self._stored.get(WRAPPERS, {}), self._want.get(WRAPPERS, {})
        for place, entries in stored.items():
            at = self._at(WRAPPERS, place)
            if m.terms.excludes(at):
                m.kept(want.get(place), entries, at)
            elif place in self._optimizer.places:
                out[place] = m.given(want.get(place), entries, at)
            else:
                m.surplus(entries, at)
        for place, live in want.items():
            if place not in stored or place not in out:
                m.absent(live, self._at(WRAPPERS, place))
                out[place] = m.live(live)
        return out

    # -- groups ---------------------------------------------------------------------------------

    def _stored_options(self) -> dict[Any, dict[int, tuple[str, Mapping[Any, Any]]]]:
        """By key here and rank of the save: where the options of the parameter's group are, and they."""
        by_rank = self._stored.get(GROUPS)
        at = GROUPS
        if by_rank is None:  # of a plain optimizer, or made by somebody else
            by_rank, at = {None: self._stored.get("param_groups", [])}, "param_groups"
        found: dict[Any, dict[int, tuple[str, Mapping[Any, Any]]]] = {}
        for rank, listed in by_rank.items():
            for i, group in enumerate(listed):
                where = f"{at}.{i}" if rank is None else f"{at}.{rank}.{i}"
                for key in group["params"]:
                    one = {CLASS: self._stored[CLASS], **group} if CLASS in self._stored else group
                    found.setdefault(self._here(key), {})[-1 if rank is None else rank] = where, one
        return found

    def _compare_classes(self) -> None:
        here = self._optimizer.kinds
        for key, by_rank in self._options.items():
            if key not in here or self._m.terms.other_optimizer or self._is_excluded(key):
                continue
            for _, group in by_rank.values():
                was = group.get(CLASS)
                if was is not None and not same_kind(was, here[key]):
                    keys = self._others.setdefault((was, here[key]), [])
                    if key not in keys:
                        keys.append(key)

    def _groups(self) -> list[dict[Any, Any]]:
        """Options for each group of this rank, in their order."""
        out = []
        (live,) = self._want[GROUPS].values()
        for i, group in enumerate(live):
            out.append(self._group(i, group))
        for by_rank in self._options.values():
            for _, group in by_rank.values():
                self._m.claim({k: v for k, v in group.items() if k != "params"})
        if not self._options and self._stored.get("state"):
            self._m.found.notes.append(
                f"{self._path}: the checkpoint has no groups of it: learning rates and other options stay "
                f"as they are"
            )
        return out

    def _group(self, i: int, group: Mapping[Any, Any]) -> dict[Any, Any]:
        m = self._m
        options: dict[Any, Any] = {k: m.live(v) for k, v in group.items()}
        if m.terms.excludes(self._at(GROUPS)):
            return options
        chosen: dict[bytes, tuple[str, Mapping[Any, Any]]] = {}
        converted: dict[bytes, tuple[str, Mapping[Any, Any]]] = {}
        for key in group["params"]:
            if key in self._options and (one := self._choice(key, i)) is not None:
                was = one[1].get(CLASS)
                if was in (None, group[CLASS]):
                    chosen.setdefault(_text(one[1]), one)
                elif same_kind(was, group[CLASS]):
                    known = {k: v for k, v in one[1].items() if k in group or k == CLASS}
                    converted.setdefault(_text(known), (one[0], known))
        options_of = [c[1] for c in chosen.values()]
        for _, of_other in converted.values() if options_of else ():
            # Of what both have, the group's own decides, and the other must have had the same.
            other = {k: v for k, v in of_other.items() if not _is_rounded(v, options_of[0].get(k))}
            options_of.append({**options_of[0], **other, CLASS: options_of[0].get(CLASS)})
        if len({_text(o) for o in options_of}) > 1 or (not chosen and len(converted) > 1):
            options_of = options_of or [c[1] for c in converted.values()]
            m.found.wrong.append(
                f"{self._path}: its parameter groups are others than at the save: {few(group['params'])} "
                f"are one group here, and had {_difference(options_of)}"
            )
            return options
        for where, had in [*chosen.values(), *converted.values()][:1]:
            for k, v in had.items():
                if k not in ("params", "param_names", CLASS):
                    options[k] = m.given(group.get(k), v, self._at(where, k))
        if converted:
            self._give_rate(group, options)
            m.found.notes.append(
                f"{self._path}: {few(group['params'])}: "
                f"{few(sorted({str(c[1].get(CLASS)) for c in converted.values()}))} of the save is "
                f"{group[CLASS]} here; options that only one of them has stay as they are here"
            )
        return options

    def _give_rate(self, group: Mapping[Any, Any], options: Mapping[Any, Any]) -> None:
        """A kernel has a learning rate of its own, which its group sets at the next step only."""
        for key in group["params"] if is_fused_class(group[CLASS]) and "lr" in options else ():
            leaf = self._m.leaf_of_parameter(self._optimizer.parameters[key], str(key))
            if leaf is not None:
                self._m.from_dense.setdefault(leaf.fqn, {})[RATE] = options["lr"]

    def _choice(self, key: Any, i: int) -> tuple[str, Mapping[Any, Any]] | None:
        """The options of one parameter: of all ranks that had it, if they agree, else the rank's own."""
        by_rank = self._options[key]
        (rank,) = self._want[GROUPS]
        if len({_text(group) for _, group in by_rank.values()}) == 1 or (
            self._m.source.same_world and rank in by_rank
        ):
            return by_rank.get(rank) or next(iter(by_rank.values()))
        self._m.found.wrong.append(
            f"{self._at(GROUPS, i)}: {key}: ranks {', '.join(map(str, sorted(by_rank)))} of the save had "
            f"{_difference([g for _, g in by_rank.values()])}: restore with as many ranks, or leave the "
            f"groups out with {self._m.spell('exclude', self._at(GROUPS))}"
        )
        return None


def _is_rounded(one: Any, other: Any) -> bool:
    """Are they one number, that a kernel keeps in single precision?"""
    if not (isinstance(one, float) and isinstance(other, float)):
        return False
    with suppress(OverflowError):
        return struct.pack("f", one) == struct.pack("f", other)
    return one == other


def _text(group: Mapping[Any, Any]) -> bytes:
    """The options of a group, to be compared."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    return comparable(dict(sorted(options.items(), key=repr)))


def _difference(options: Sequence[Mapping[Any, Any]]) -> str:
    """The first option that isn't the same in all."""
    found = difference(options, dict.fromkeys(n for o in options for n in o if n != "params"))
    return f"different values of {found}" if found else "different options"
