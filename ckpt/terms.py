"""What a restore may do where the checkpoint and the state aren't alike. No torch: commands use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

Spell = Callable[[str, object], str]
"""How a caller writes a term and its value: messages advise only what their reader can do."""


def as_argument(name: str, value: object) -> str:
    """For whoever calls `Checkpointer.restore` himself."""
    return f"{name}={value!r}"


@dataclass(frozen=True)
class RestoreTerms:
    """Exceptions from "all of it, alike, or nothing", each asked for by name.

    Patterns are shell patterns for whole keys (`model.head.*`); a pattern without a wildcard also
    stands for all keys below it (`ema` is `ema` and `ema.*`).

    partial: accept keys that only one side has; those of the state stay as they are.
    exclude: patterns of keys that aren't restored, whatever the checkpoint has for them.
    rename: the beginning of a key in the checkpoint -> what it is in this state; the longest one counts.
    rows: patterns of tensors whose sizes may differ: what both have is restored from the first row and
        column on, and the rest stays as the model made it. The row-aligned optimizer state of such a
        parameter goes with it.
    elastic: accept another number of ranks where parts of the state belong to single ranks: those
        then stay as they are.
    other_optimizer: accept the state of another optimizer class.
    approximate: where a column shard of a table has a part only of one of the save, its row-wise optimizer
        state is the mean of all that it has columns of.
    """

    partial: bool = False
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    elastic: bool = False
    other_optimizer: bool = False
    approximate: bool = False

    def __post_init__(self) -> None:
        for name in ("exclude", "rows"):  # one pattern is no list of letters
            object.__setattr__(self, name, patterns(getattr(self, name)))

    def asked(self) -> dict[str, Any]:
        """The terms that aren't as by default, as keyword arguments of `Checkpointer.restore`."""
        nothing = RestoreTerms()
        return {
            f.name: value
            for f in fields(RestoreTerms)
            if (value := getattr(self, f.name)) != getattr(nothing, f.name)
        }

    def spelled(self, name: str, value: object) -> str:
        """How whoever gave these terms to a session writes one of them; `fresh` is no term there."""
        if name == "fresh":
            return "another root"
        return f"restore=RestoreTerms({name}={value!r})"

    def excludes(self, key: str) -> bool:
        """Is this key of the state not to be restored?"""
        return matches(self.exclude, key)

    def resizes(self, key: str) -> bool:
        """May this tensor's sizes differ?"""
        return matches(self.rows, key)

    def renamed(self, key: str) -> str:
        """The key in the state of what the checkpoint calls `key`."""
        for old in sorted(self.rename, key=len, reverse=True):
            if key == old or key.startswith(f"{old}."):
                return self.rename[old] + key[len(old) :]
        return key


def patterns(given: Sequence[str] | str) -> tuple[str, ...]:
    """Patterns as a tuple, of one given alone too."""
    return (given,) if isinstance(given, str) else tuple(given)


def matches(patterns: tuple[str, ...], key: str) -> bool:
    """Does one of the patterns stand for this key?"""
    return any(
        fnmatchcase(key, p) or (not set(p) & set("*?[") and key.startswith(f"{p}."))
        for p in patterns
    )
