"""From what differs between two lives of a training to the likely cause, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.equality import Difference

_LAST_BITS = 1e-4  # relative: sums in another order after a few steps
_RATES = ("param_groups", "groups", "_last_lr", "last_epoch", "base_lrs")


@dataclass(frozen=True)
class Cause:
    """name: one word for programs. advice: what it is and what to do, one line."""

    name: str
    advice: str


@dataclass(frozen=True)
class Trail:
    """What two lives did after the step at which the second began, from their traces.

    Each is the first step, or batch position, at which they differ, and how; None: nowhere.
    """

    losses: int
    loss: int | None = None
    batch: int | None = None
    rates: tuple[int, str] | None = None
    generator: tuple[int, str] | None = None
    unsaved: tuple[str, ...] = ()


def trail(at: int, first: Sequence[Lines], second: Sequence[Lines]) -> Trail:
    """Compare what all ranks wrote. `at`: the step from which the second life goes on."""
    losses: set[int] = set()
    differs: dict[str, list[tuple[int, str]]] = {n: [] for n in ("loss", "batch", "rates", "own")}
    unsaved: set[str] = set()
    for a, b in zip(first, second, strict=True):
        steps = [s for s in b.steps if s > at and s in a.steps]
        for s in steps:
            x, y = a.steps[s], b.steps[s]
            unsaved |= {*x["unsaved"], *y["unsaved"]}
            if x["loss"] is not None and y["loss"] is not None:
                losses.add(s)
                if x["loss"] != y["loss"]:
                    differs["loss"].append((s, ""))
            if x["rates"] != y["rates"]:
                differs["rates"].append((s, f"{_first(x['rates'], y['rates'])}"))
            for name in x["generators"]:
                if name in y["generators"] and x["generators"][name] != y["generators"][name]:
                    differs["own"].append((s, name))
                    break
        for position in b.batches:
            if position in a.batches and a.batches[position] != b.batches[position]:
                differs["batch"].append((position, ""))
    found = {name: min(those) if those else None for name, those in differs.items()}
    return Trail(
        len(losses),
        loss=found["loss"][0] if found["loss"] else None,
        batch=found["batch"][0] if found["batch"] else None,
        rates=found["rates"],
        generator=found["own"],
        unsaved=tuple(sorted(unsaved)),
    )


@dataclass(frozen=True)
class Lines:
    """The trace of one rank in one life: batches by position, steps by number."""

    batches: Mapping[int, str]
    steps: Mapping[int, Mapping[str, Any]]


def likely_cause(differences: Sequence[Difference], seen: Trail, world_size: int) -> Cause:
    """The most telling of all that differs."""
    return next(_causes(differences, seen, world_size))


def _causes(differences: Sequence[Difference], seen: Trail, world_size: int) -> Iterator[Cause]:
    keys = [d.key for d in differences]
    if seen.batch is not None:
        yield Cause(
            "reader",
            f"the reader gave other batches, from batch {seen.batch} on: it isn't back where it was; give "
            "the session trainer.LoaderReader(loader) or a trainer.BatchReader, or a reader of your own with "
            "state_at and load_state",
        )
    if any(k.startswith("session.") for k in keys):
        key = next(k for k in keys if k.startswith("session."))
        yield Cause(
            "reader",
            f"{key} differs: the reader isn't where it was; tell step() what is in flight "
            "(in_flight=), and use trainer.LoaderReader or state_at and load_state",
        )
    if seen.unsaved:
        yield Cause(
            "optimizer",
            f"{seen.unsaved[0]} steps and isn't in the state: what it keeps begins anew at each start; put "
            "the optimizer into the session's state",
        )
    late = next((d.key for d in differences if d.only_in is not None and ".state." in d.key), None)
    if late is not None:
        yield Cause(
            "late_state",
            f"{late} is in one of them only: optimizer state that is made after the restore, or in a step "
            "that only one life takes; make it before, as the first step would",
        )
    rates = next((k for k in keys if any(part in _RATES for part in k.split("."))), None)
    if seen.rates is not None or rates is not None:
        told = (
            f"{seen.rates[1]} at step {seen.rates[0]}"
            if seen.rates is not None
            else f"{rates} differs"
        )
        yield Cause(
            "learning_rate",
            f"learning rates differ ({told}): put the scheduler into the session's state, and compute no "
            "rate from a count of this process",
        )
    if seen.generator is not None:
        step, name = seen.generator
        if name.startswith("own "):
            advice = (
                f"the torch.Generator {name.removeprefix('own ')!r} differs at step {step}: it is in no "
                "state; put an object into the state whose state_dict has PerRank(generator.get_state()), "
                "or draw from the global generators, which the session saves"
            )
        else:
            advice = (
                f"{name}'s generator of the process differs at step {step}: one life draws from it where the "
                "other doesn't, such as code that runs once after each start; give such code a generator of "
                "its own"
            )
        yield Cause("generator", advice)
    small = [d.relative for d in differences]
    if world_size >= 3 and small and all(r is not None and r < _LAST_BITS for r in small):
        yield Cause(
            "ddp_buckets",
            f"only last bits differ, on {world_size} ranks: DistributedDataParallel regroups its buckets "
            "after the first iteration of a process; wrap the dense part with find_unused_parameters=True, "
            "static_graph=False",
        )
    yield Cause(
        "unknown",
        "batches, learning rates and generators are the same: something else that a step depends on isn't in "
        "the state, such as an attribute, a buffer with persistent=False, or an operation that isn't "
        "deterministic (torch.use_deterministic_algorithms)",
    )


def _first(x: Sequence[str], y: Sequence[str]) -> str:
    for a, b in zip(x, y, strict=False):
        if a != b:
            return f"{a} and {b.partition(': ')[2]}"
    return "optimizers that step"
