"""What the fused kernels of this rank get at a restore, joined by the keys of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ckpt.canonical.alike import comparable, difference, few
from ckpt.canonical.kernels import (
    COUNTS,
    FIRST,
    KERNELS,
    KIND,
    OPTIONS,
    RATE,
    ROWS,
    TABLE,
    TABLES,
    kind_of_kernel,
)
from ckpt.canonical.keyed import GROUPS, is_keyed, nest
from ckpt.conversions import depends_on_count
from ckpt.pieces import Piece
from ckpt.tree import Shard
from ckpt.values import TensorRef

if TYPE_CHECKING:
    from ckpt.restore_plan import Matching

_ALL = (*COUNTS, KIND, RATE, OPTIONS)
_HIGHEST = (
    "max_counter"  # of a kernel's rows, now and then: of all that had the tables, the highest
)
_Stored = tuple[str, Mapping[str, Any]]


def fit_kernels(matching: Matching, stored: Mapping[int, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """(kernel, what `ckpt.canonical.kernels.give_kernel` gets). What can't be decided is told as wrong."""
    matching.claim(stored)
    if matching.terms.excludes(KERNELS):
        return []
    leaves = matching.flat.leaves
    found = matching.canonical.kernels.find(list(leaves), [x.source for x in leaves.values()])
    by_key = _by_key(matching, stored)
    wanted = _wanted(matching)
    fitted = []
    stored_rows = [
        (f"{KERNELS}.{rank}.{i}.{ROWS}.{n}", one)
        for rank, entries in stored.items()
        for i, entry in enumerate(entries)
        for n, one in enumerate(entry.get(ROWS, ()))
    ]
    for one in found:
        names = wanted.get(id(one.kernel), _ALL)
        if not names:
            continue
        values = _values(matching, one.kernel, one.keys, by_key, names)
        if values is not None:
            fitted.append((one.kernel, values))
        for shard in one.rows:
            _fill_rows(matching, shard, stored_rows)
    if found and not stored and not matching.from_dense:
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
    names: tuple[str, ...],
) -> dict[str, Any] | None:
    """The values of `names` that one kernel gets; None: none."""
    chosen: dict[bytes, _Stored] = {}
    told: dict[bytes, str] = {}
    highest: list[float] = []
    for key in keys:
        if key in by_key and not matching.terms.excludes(key):
            for one in _choice(matching, by_key[key], keys, names):
                chosen.setdefault(_text(one[1], names), one)
                told.setdefault(_text(one[1], names), key)
                highest += [v for v in [one[1].get(_HIGHEST)] if isinstance(v, int | float)]
    from_dense = {k: matching.from_dense[k] for k in keys if k in matching.from_dense}
    if not chosen:
        _compare_counts(matching, kernel, from_dense, [])
        return next(iter(from_dense.values()), None)
    if len(chosen) > 1:
        matching.found.wrong.append(
            f"{KERNELS}: {', '.join(dict.fromkeys(told.values()))}: one kernel has them here, and those of "
            f"the save had {_difference([e for _, e in chosen.values()], names)}: restore with as many ranks "
            f"at the same sharding, or leave this out with "
            f"{matching.spell('exclude', KERNELS)}"
        )
        return None
    ((path, entry),) = chosen.values()
    if entry[KIND] != kind_of_kernel(kernel):
        names = COUNTS
    values: dict[str, Any] = {}
    for name in (*names, _HIGHEST):
        value = entry.get(name)
        if isinstance(value, TensorRef):
            info = matching.source.tensors[value.fqn]
            values[name] = matching.make(info, f"{path}.{name}")
        elif value is not None and name != KIND:
            values[name] = max(highest) if name == _HIGHEST and highest else value
    if (count := values.get("iter_cpu", values.get("iter"))) is not None:
        _compare_counts(matching, kernel, from_dense, [torch.as_tensor(count)])
    return values


def _compare_counts(
    matching: Matching,
    kernel: Any,
    from_dense: Mapping[str, Mapping[str, Any]],
    others: list[torch.Tensor],
) -> None:
    """One kernel has one count: those of its tables have to be it, once they are known."""
    counts = [one[COUNTS[0]] for one in from_dense.values() if COUNTS[0] in one]
    if counts and depends_on_count(kind_of_kernel(kernel)):
        why = (
            f"{KERNELS}: {few(list(from_dense))}: one kernel has them here, with one count of steps, and "
            f"they had different ones at the save: restore them to kernels of their own, or leave this out "
            f"with {matching.spell('exclude', KERNELS)}"
        )
        matching.found.alike.append((why, [*counts, *others]))


def _wanted(matching: Matching) -> dict[int, tuple[str, ...]]:
    """By the ids of kernels: what those get whose optimizer, or whose options, are left out."""
    found: dict[int, tuple[str, ...]] = {}
    for path, one in matching.flat.objects.items():
        if is_keyed(one):
            whole = matching.terms.excludes(path)
            if whole or matching.terms.excludes(f"{path}.{GROUPS}"):
                kernels = [getattr(leaf, "_emb_module", None) for _, leaf in nest(one)]
                found.update({id(k): () if whole else COUNTS for k in kernels})
    return found


def _fill_rows(
    matching: Matching, shard: Mapping[str, Any], stored: list[tuple[str, Mapping[str, Any]]]
) -> None:
    """Counts of the rows of one shard, from whatever shards of the table there were.

    Shards of other columns of the same rows have counted the same.
    """
    key = shard[TABLE]
    if matching.terms.excludes(key):
        return
    for name in (n for n in shard if n not in (TABLE, FIRST)):
        live, row = shard[name], shard[FIRST]
        end = row + len(live)
        while row < end:
            at = next(
                (
                    (path, info, one[FIRST])
                    for path, one in stored
                    if matching.terms.renamed(one[TABLE]) == key and name in one
                    if one[FIRST]
                    <= row
                    < one[FIRST] + (info := matching.source.tensors[one[name].fqn]).shape[0]
                ),
                None,
            )
            if at is None:
                matching.found.missing.append(f"{KERNELS}: {name} of {key} from row {row} on")
                break
            path, info, first = at
            until = min(end, first + info.shape[0])
            part = live[row - shard[FIRST] : until - shard[FIRST]]
            box = Shard((row - first,), (until - row,), part)
            matching.found.pieces.append(Piece(f"{path}.{name}", info.fqn, (box,)))
            row = until


def _choice(
    matching: Matching,
    by_rank: Mapping[int, list[_Stored]],
    keys: list[str],
    names: tuple[str, ...],
) -> list[_Stored]:
    """The kernels that had a table: all, if they had the same, else the rank's own. It may stay unclear."""
    everybody = [one for entries in by_rank.values() for one in entries]
    own = by_rank.get(matching.canonical.rank, []) if matching.source.same_world else []
    alike = [
        one for one in own if sorted(map(matching.terms.renamed, one[1][TABLES])) == sorted(keys)
    ]
    if alike:
        return alike
    if own and len({_text(entry, names) for _, entry in everybody}) > 1:
        return own
    return everybody


def _text(entry: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    """To be compared. The host's count is known, a device's isn't yet."""
    return comparable({k: entry.get(k) for k in names})


def _difference(entries: list[Mapping[str, Any]], names: tuple[str, ...]) -> str:
    return f"different {difference(entries, names) or 'values'}"
