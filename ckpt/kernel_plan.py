"""What the fused kernels of this rank get at a restore, joined by the keys of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.canonical.kernels import KERNELS, KIND, OPTIONS, TABLES, kind_of_kernel
from ckpt.manifest import canonical
from ckpt.united import without_tensors
from ckpt.values import TensorRef, encode_value

if TYPE_CHECKING:
    from ckpt.restore_plan import Matching

_COUNTS = ("iter", "iter_cpu", "max_counter")
_Stored = tuple[str, Mapping[str, Any]]


def fit_kernels(matching: Matching, stored: Mapping[int, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """(kernel, what `ckpt.canonical.kernels.give_kernel` gets). What can't be decided is told as wrong."""
    matching.claim(stored)
    if matching.terms.excludes(KERNELS):
        return []
    parts = [(leaf.fqn, s.tensor) for leaf in matching.flat.leaves.values() for s in leaf.shards]
    found = matching.canonical.kernels.find([k for k, _ in parts], [t for _, t in parts])
    by_key = _by_key(matching, stored)
    fitted = []
    for kernel, keys in found:
        values = _values(matching, kernel, list(dict.fromkeys(keys)), by_key)
        if values is not None:
            fitted.append((kernel, values))
    if found and not stored:
        matching.found.notes.append(
            f"{KERNELS}: the checkpoint doesn't say how often fused kernels have run: their counts stay as "
            f"they are"
        )
    return fitted


def _by_key(matching: Matching, stored: Mapping[int, Any]) -> dict[str, dict[int, list[_Stored]]]:
    """By table and rank of the save: the kernels that had it, each with its place in the checkpoint."""
    found: dict[str, dict[int, list[_Stored]]] = {}
    for rank, entries in stored.items():
        for i, entry in enumerate(entries):
            for key in dict.fromkeys(entry[TABLES]):
                of_rank = found.setdefault(matching.terms.renamed(key), {}).setdefault(rank, [])
                of_rank.append((f"{KERNELS}.{rank}.{i}", entry))
    return found


def _values(
    matching: Matching,
    kernel: Any,
    keys: list[str],
    by_key: Mapping[str, Mapping[int, list[_Stored]]],
) -> dict[str, Any] | None:
    chosen: dict[bytes, _Stored] = {}
    told: dict[bytes, str] = {}
    for key in keys:
        if key in by_key and not matching.terms.excludes(key):
            for one in _choice(matching, by_key[key], keys):
                chosen.setdefault(_text(one[1]), one)
                told.setdefault(_text(one[1]), key)
    if not chosen:
        return None
    if len(chosen) > 1:
        matching.found.wrong.append(
            f"{KERNELS}: {', '.join(dict.fromkeys(told.values()))}: one kernel has them here, and those of "
            f"the save had {_difference([e for _, e in chosen.values()])}: restore with as many ranks at the "
            f"same sharding, or leave this out with exclude={KERNELS!r}"
        )
        return None
    ((path, entry),) = chosen.values()
    same = entry[KIND] == kind_of_kernel(kernel)
    values: dict[str, Any] = {OPTIONS: entry[OPTIONS]} if same else {}
    for name in (*_COUNTS, *(("learning_rate",) if same else ())):
        value = entry.get(name)
        if isinstance(value, TensorRef):
            info = matching.source.tensors[value.fqn]
            values[name] = matching.make(info, f"{path}.{name}")
        elif value is not None:
            values[name] = value
    return values


def _choice(
    matching: Matching, by_rank: Mapping[int, list[_Stored]], keys: list[str]
) -> list[_Stored]:
    """The kernel that had a table: any, if all had the same, else the rank's own. Several: it isn't clear."""
    everybody = [one for entries in by_rank.values() for one in entries]
    if len({_text(entry) for _, entry in everybody}) == 1:
        return everybody[:1]
    if matching.source.same_world:
        own = by_rank.get(matching.canonical.rank, [])
        alike = [
            one
            for one in own
            if sorted(map(matching.terms.renamed, one[1][TABLES])) == sorted(keys)
        ]
        if alike or own:
            return alike or own
    return everybody


def _text(entry: Mapping[str, Any]) -> bytes:
    """All but the tables' names, to be compared. Tensors aren't known yet; the host's count is."""
    return canonical(encode_value(without_tensors({k: v for k, v in entry.items() if k != TABLES})))


def _difference(entries: list[Mapping[str, Any]]) -> str:
    for name in dict.fromkeys(n for e in entries for n in e if n != TABLES):
        values = list(dict.fromkeys(repr(e.get(name)) for e in entries))
        if len(values) > 1:
            return f"different {name} ({', '.join(values[:3])})"
    return "different values"
