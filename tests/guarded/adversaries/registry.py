"""Adversaries by theme, and what each must come to: nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.guarded.adversaries.stage import Stage

Kind = Literal["plain", "fused", "ranks"]
"""plain: torch alone. fused: a bare table-batched embedding of fbgemm. ranks: a process group, of
one rank and of two; `Stage.job` is a sharded TorchRec model there."""
Guards = Literal["native", "torch"]
Right = Literal["exact", "refused", "either"]
Odd = Literal["", "meta", "float64", "bfloat16"]
"""What torch's defaults were changed to: the default device, or the default dtype."""

BOTH: tuple[Guards, ...] = ("native", "torch")
PASSES = ("before", "part")
"""When an adversary acts: before anything of a save is copied, and once a part is."""
BEFORE = ("before",)
THEMES = ("steps", "writes", "memory", "lookups", "structure")
# Both loops are tried under changed defaults: native ones have once written to an address of the
# default device, and what torch makes without a name of dtype or device may be anything.
_ODD: tuple[tuple[Guards, Odd], ...] = (
    ("native", "meta"),
    ("torch", "meta"),
    ("native", "float64"),
    ("torch", "bfloat16"),
)


@dataclass(frozen=True)
class Adversary:
    """One way to treat state.

    right: what its saves must come to. A save that isn't this adversary's doing is exact anyway.
    names: a refusal must name one of these; without any, a key of the state.
    after: what the last save must come to once the adversary has stopped.
    guarded: tables are still left in place by the last save: no way out by copying everything.
    slow: only `make fuzz` runs it.
    """

    name: str
    act: Callable[[Stage], None]
    on: tuple[Kind, ...]
    right: Right
    names: tuple[str, ...]
    guards: tuple[Guards, ...]
    worlds: tuple[int, ...]
    passes: tuple[str, ...]
    odd: bool
    after: Right
    guarded: bool
    slow: bool
    deadline_s: float

    @property
    def theme(self) -> str:
        return self.act.__module__.rpartition(".")[2]


@dataclass(frozen=True)
class Case:
    """An adversary in one configuration."""

    adversary: Adversary
    kind: Kind
    guards: Guards
    world: int
    odd: Odd = ""

    @property
    def passes(self) -> tuple[str, ...]:
        return self.adversary.passes if self.guards == "native" and self.world == 1 else BEFORE

    def __str__(self) -> str:
        where = f"{self.world} ranks" if self.world > 1 else "1 rank"
        parts = [self.kind if self.kind != "ranks" else where, self.guards, self.odd]
        return f"{self.adversary.name} [{' '.join(filter(None, parts))}]"


_known: dict[str, Adversary] = {}


def adversary(
    name: str,
    *on: Kind,
    right: Right = "either",
    names: tuple[str, ...] = (),
    guards: tuple[Guards, ...] = ("native",),
    worlds: tuple[int, ...] = (1, 2),
    passes: tuple[str, ...] = PASSES,
    odd: bool = False,
    after: Right = "exact",
    guarded: bool = False,
    slow: bool = False,
    deadline_s: float = 20.0,
) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Register a function of a `Stage`.

    guards: BOTH where what is tried has to do with the loops of row guards; `make fuzz` tries both
    everywhere. passes: BEFORE where it's all the same what is copied by then. odd: also run it with
    torch's default device and dtype changed.
    """

    def register(act: Callable[[Stage], None]) -> Callable[[Stage], None]:
        assert name not in _known, name
        _known[name] = Adversary(
            name=name,
            act=act,
            on=on or ("plain",),
            right=right,
            names=names,
            guards=guards,
            worlds=worlds,
            passes=passes,
            odd=odd,
            after=after,
            guarded=guarded,
            slow=slow,
            deadline_s=deadline_s,
        )
        return act

    return register


def find(name: str) -> Adversary:
    return _known[name]


def cases(theme: str) -> list[Case]:
    """Of one theme, whose module was imported: each adversary in each of its configurations."""
    found = []
    for one in _known.values():
        if one.theme != theme or (one.slow and not fuzzing()):
            continue
        for kind in one.on:
            if kind != "plain" and find_spec("fbgemm_gpu") is None:
                continue
            for guards in BOTH if fuzzing() else one.guards:
                worlds = one.worlds if kind == "ranks" else (1,)
                # The loops are the same on each rank: one of them is enough for two.
                if guards == "torch" and kind == "ranks" and not fuzzing():
                    worlds = tuple(w for w in worlds if w == 1)
                found += [Case(one, kind, guards, world) for world in worlds]
            if one.odd and kind != "ranks":
                found += [Case(one, kind, guards, 1, odd) for guards, odd in _ODD]
    return found


def fuzzing() -> bool:
    return bool(os.environ.get("SIDESTAGE_FUZZ"))


def request(case: Case, folder: str, passes: list[str], deadline_s: float) -> dict[str, Any]:
    """What the fork server is asked to run."""
    return {
        "theme": case.adversary.theme,
        "name": case.adversary.name,
        "kind": case.kind,
        "guards": case.guards,
        "world": case.world,
        "odd": case.odd,
        "folder": folder,
        "passes": passes,
        "deadline_s": deadline_s,
    }
