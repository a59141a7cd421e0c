"""What a restore of a checkpoint into a described state would do: by the plan that a restore itself makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt.description import StateDescription
from ckpt.errors import BadInputError
from ckpt.index import TensorInfo
from ckpt.restore import CheckpointReader
from ckpt.restore_plan import RestorePlan, plan_restore
from ckpt.restorer import payload_of, source_for, verdict
from ckpt.stand_ins import state_of_shapes
from ckpt.terms import RestoreTerms, Spell
from ckpt.tree import FlatState, Shard
from ckpt.types import ITEMSIZE

_AS_DICTS = (
    "the state isn't described by its trainer: parts that save themselves, such as schedulers, are taken for "
    "dicts here, and may take what a dict can't; see Checkpointer.describe"
)


@dataclass(frozen=True)
class Outcome:
    """One entry: its key in the state, of what only the checkpoint has its key there.

    outcome: "restored"; "kept", as a term asks; "missing", only the state has it; "left", only the
    checkpoint has it; "unclaimed", it belongs to single ranks of another number of them; "misfit", both have
    it, and it can't be restored; "unused", both have it, and a term says not to use it. nbytes: of a tensor,
    else 0; over all ranks.
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
    """Plan the restore of a checkpoint into a state. Reads no tensor.

    All that ranks share is planned as if one process had it, and beside it what each rank has for itself.
    """
    step = reader.record.step
    try:
        source = source_for(reader, 0, state.world_size, terms, spell)
        apart = any(state.per_rank) or bool(reader.per_rank_keys())
        plans = []
        for rank in range(state.world_size if apart else 1):
            if source.same_world:
                source = replace(source, per_rank=reader.per_rank_values(rank))
            flat, canonical = state_of_shapes(state, rank, source.values)
            # What a plan allocates takes no memory then.
            with FakeTensorMode(allow_non_fake_inputs=True):
                plans.append((plan_restore(flat, source, terms, canonical, spell), flat))
    except BadInputError as e:
        return Explanation((), (), (str(e),), str(e))
    refused = ""
    try:
        verdict([payload_of(plan) for plan, _ in plans], source, step, terms, spell)
    except BadInputError as e:
        refused = str(e)
    notes = {n for plan, _ in plans for n in plan.notes}
    if refused and state.objects is None:
        notes.add(_AS_DICTS)
    return Explanation(
        tuple(_outcomes(plans, source.tensors, terms)),
        tuple(sorted(notes)),
        tuple(sorted({w for plan, _ in plans for w in plan.wrong})),
        refused,
    )


def _outcomes(
    plans: Sequence[tuple[RestorePlan, FlatState]],
    stored: Mapping[str, TensorInfo],
    terms: RestoreTerms,
) -> Iterator[Outcome]:
    filled: dict[str, int] = {}
    sizes: dict[str, int] = {}
    used: set[str] = set()
    for plan, flat in plans:
        mine: dict[str, int] = {}
        merged = {merge.key for merge in plan.merges}
        for piece in plan.pieces:
            used.add(piece.stored)
            if not (piece.ours and piece.key in merged):
                key, info = piece.key, stored[piece.stored]
                if info.kind == "per_rank":  # an object's has one key on all ranks
                    at = f"@{piece.stored.rpartition('@')[2]}"
                    key = key.removesuffix(at) + at
                mine[key] = mine.get(key, 0) + _nbytes(piece.shards, info)
        for merge in plan.merges:
            mine[merge.key] = mine.get(merge.key, 0) + merge.out.nbytes
        filled = mine | filled
        sizes |= {n: sum(s.tensor.nbytes for s in x.shards) for n, x in flat.leaves.items()}
    for key, nbytes in filled.items():
        yield Outcome(key, "restored", nbytes)
    of_any = {
        what: sorted({k for plan, _ in plans for k in getattr(plan, what)})
        for what in ("kept", "missing", "unclaimed", "claimed")
    }
    for what in ("kept", "missing"):
        for key in of_any[what]:
            yield Outcome(key, what, _below(sizes, key))
    single = {n.rpartition("@")[0]: x.nbytes for n, x in stored.items() if x.kind == "per_rank"}
    for key in of_any["unclaimed"]:
        yield Outcome(key, "unclaimed", _below(single, key))
    claimed, kept = set(of_any["claimed"]), {*of_any["kept"], *of_any["unclaimed"]}
    misfit = "misfit" if any(plan.wrong for plan, _ in plans) else "unused"
    left = set.intersection(*(set(plan.extra) for plan, _ in plans))
    for name, info in stored.items():
        key = terms.renamed(name)
        if name in used or terms.excludes(key) or _is_below(key, kept):
            continue
        if name in claimed:
            yield Outcome(key, misfit, info.nbytes)
        else:
            left.add(name)
    for key in sorted(left):
        yield Outcome(key, "left", stored[key].nbytes if key in stored else 0)


def _below(sizes: Mapping[str, int], key: str) -> int:
    """The bytes of a tensor, or of all that are below a key."""
    if key in sizes:
        return sizes[key]
    return sum(n for k, n in sizes.items() if k.startswith(f"{key}."))


def _is_below(key: str, keys: Set[str]) -> bool:
    key = key.rpartition("@")[0] or key
    while key not in keys:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return False
    return True


def _nbytes(shards: tuple[Shard, ...], info: TensorInfo) -> int:
    return sum(s.tensor.numel() for s in shards) * ITEMSIZE[info.dtype]
