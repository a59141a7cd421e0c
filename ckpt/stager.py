"""Takes snapshots: decides for each shard whether it is guarded, fenced or copied, and opens them.

On the trainer's thread. What it makes, a `Snapshot`, then belongs to a persist thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ckpt.attach import Attachment
from ckpt.budget import BUFFERS, share_out
from ckpt.canonical.living import LivingLookups
from ckpt.config import CheckpointConfig
from ckpt.fence import Copy, StepFence, owned_by_steps
from ckpt.forks import forget_in_children
from ckpt.live import SMALL_BYTES, LiveState
from ckpt.native import cuda_used
from ckpt.outcomes import Wait
from ckpt.plan import RankPlan
from ckpt.proof import Prover
from ckpt.ring import Ring
from ckpt.rows import Place, RowGuards, RowSnapshot
from ckpt.snapshot import GuardedItems, Snapshot
from ckpt.staging import Arena, Staged
from ckpt.tree import Shard, identity
from ckpt.types import Clock, EventSink
from ckpt.walk import Show

Waited = Callable[[Wait, float], None]
Untracked = Callable[[int, str, Sequence[int]], None]

_MARK_BYTES = 3  # of a guarded row: its tag (rows.guards) and its print (proof)
_WORTH_A_FENCE_BYTES = 4 << 20  # less than that is copied in a millisecond


class Stager:
    """The guards, the fence and the ring of one checkpointer.

    Args:
        upload_bytes: what a writer of the store holds, part of the staging memory.
        waited: told why ("overlay" or "fence") and how long training waited for a snapshot.
        untracked: told the step, table and rows of a write that no guard saw.
        hurry: speeds up what is being persisted, to its end.
        lift: raises the persist threads for a moment, and changes nothing else.
        living: the table-batched embeddings of this process.
    """

    def __init__(  # noqa: PLR0913 - all are injected by the one caller
        self,
        config: CheckpointConfig,
        clock: Clock,
        sink: EventSink,
        *,
        upload_bytes: int,
        waited: Waited,
        untracked: Untracked,
        hurry: Callable[[], None],
        lift: Callable[[], None],
        living: LivingLookups | None = None,
    ) -> None:
        self._config = config
        self._upload_bytes = upload_bytes
        self._prover = Prover(config.proof, clock, untracked)
        self._guarding = config.snapshot == "guarded"
        self._guards = RowGuards(
            clock, config.stall_limit_s, hurry, lambda wait_s: waited("overlay", wait_s)
        )
        self._attachment = Attachment(self._guards, sink, living)
        self._fence: StepFence | None = None
        if self._guarding:
            self._fence = StepFence(clock, lambda wait_s: waited("fence", wait_s), lift)
        least = share_out(config, 0, 0, upload_bytes).buffer_bytes
        self.ring = Ring(BUFFERS, least, pinned=torch.cuda.is_available())
        forget_in_children(self)

    @property
    def copied_tables(self) -> Mapping[str, str]:
        """Tables that a save copies whole, with the reason."""
        return self._attachment.refused

    def overlay_peak(self) -> tuple[int, float]:
        """The most bytes of old rows kept since the last call, and their part of the overlay."""
        peak, self._guards.peak_bytes = self._guards.peak_bytes, 0
        return peak, peak / max(self._guards.capacity_bytes, 1)

    def guard(self, *objects: Any, early: bool = False) -> None:
        """Find tables and optimizers in modules, optimizers or nests of them; follow what moved.

        Without any: in what has been shown, see `looking`.
        Does nothing while a snapshot is open: what is new then is copied by the saves until after.

        early: training may have begun before this, unseen.
        """
        if not self._guarding or self._guards.busy:
            return
        with _outside_inference():
            self._attachment.add(*objects, early=early)
            self._attachment.refresh()
            self._lay_out()

    def _lay_out(self) -> None:
        if not self._guards.laid_out:
            guards = self._guards
            budget = share_out(
                self._config,
                guards.guarded_bytes,
                guards.longest_row_bytes,
                self._upload_bytes,
                _MARK_BYTES * guards.guarded_rows,
            )
            guards.lay_out(budget.buffer_bytes, budget.overlay_bytes)
            if budget.buffer_bytes != self.ring.buffer_bytes:
                self.ring.resize(budget.buffer_bytes)  # a save may still be writing through it

    def looking(self) -> Show | None:
        """Something to show the objects of a state to, as a walk meets them; `guard` comes after it."""
        if not self._guarding or self._guards.busy:
            return None
        return self._attachment.looking()

    def touched(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> None:
        """`rows` of a tensor, None: all, are about to be changed by hand."""
        self._attachment.touched(tensor, rows)
        if self._fence is not None:
            self._fence.finish()

    def stage(self, step: int, plan: RankPlan, live: LiveState, arena: Arena) -> Snapshot:
        """Fix the state of this rank's shards as it is now."""
        with _outside_inference():
            return self._opened(step, plan, live, arena)

    def _opened(self, step: int, plan: RankPlan, live: LiveState, arena: Arena) -> Snapshot:
        if cuda_used():
            self.ring.device = torch.device("cuda", torch.cuda.current_device())
        if self._guarding and not self._guards.busy:
            shards = zip(plan.plan.items, live.in_order(plan.plan), strict=True)
            if self._attachment.claim((item.index.fqn, s.tensor) for item, s in shards):
                self._lay_out()
        rows = None
        if self._guards.guarded_bytes:
            rows = self._guards.open(without=self._attachment.unsure())
        try:
            snapshot = self._stage(step, plan, live, rows, arena)
        except BaseException:
            if rows is not None:
                rows.close()
            raise
        snapshot.fix_if_copied()
        return snapshot

    def close(self) -> None:
        """Take all hooks off. What is open by then is no longer followed."""
        if self._fence is not None:
            self._fence.finish()
            self._fence.close()
        self._attachment.detach()
        self.ring.close()

    def forget(self) -> None:
        """In a forked child: hooks do nothing, and nobody persists what is open."""
        if self._fence is not None:
            self._fence.close()
        self._attachment.forget()

    def _stage(
        self, step: int, plan: RankPlan, live: LiveState, rows: RowSnapshot | None, arena: Arena
    ) -> Snapshot:
        shards = live.in_order(plan.plan)
        names = [item.index.fqn for item in plan.plan.items]
        tables, rest = _guarded(shards, names, rows)
        if rows is not None:
            rows.watch(_aliases(tables, shards))
        homes = dict(zip(rest, arena.homes([shards[n] for n in rest]), strict=True))
        left = self._fenced([n for n in rest if shards[n].tensor.numel()], shards, plan)
        fenced = sorted(left)
        proof = self._prover.open(step, rows, tables, [shards[n].tensor for n in fenced])
        dense = None
        if fenced:
            assert self._fence is not None
            dense = self._fence.open(
                [
                    Copy(
                        names[n],
                        shards[n].tensor,
                        homes[n],
                        live.wholes.get(names[n]),
                        proof.dense.get(k, ()),
                    )
                    for k, n in enumerate(fenced)
                ]
            )
        now = [n for n in rest if n not in left]
        try:
            arena.stage([shards[n] for n in now], [homes[n] for n in now])
        except BaseException:
            if dense is not None:
                dense.abandon()  # the arena will be another save's
            raise
        return Snapshot(
            tables=tables,
            staged=Staged(rest, list(homes.values())),
            arena=arena,
            rows=rows,
            dense=dense,
            proof=proof,
            pressure_of=self._guards.pressure,
        )

    def _fenced(self, rest: list[int], shards: list[Shard], plan: RankPlan) -> set[int]:
        """Which of these items only optimizers' steps change, if there is enough of them."""
        if self._fence is None:
            return set()
        rest = [n for n in rest if shards[n].tensor.nbytes > SMALL_BYTES]
        if sum(shards[n].tensor.nbytes for n in rest) < _WORTH_A_FENCE_BYTES:
            return set()
        owned = owned_by_steps(
            self._attachment.optimizers, self._attachment.lookup_tensors(), SMALL_BYTES
        )
        unsteady = self._fence.unsteady
        names = [item.index.fqn for item in plan.plan.items]
        found = {
            n for n in rest if names[n] not in unsteady and identity(shards[n].tensor) in owned
        }
        nbytes = sum(shards[n].tensor.nbytes for n in found)
        return found if nbytes >= _WORTH_A_FENCE_BYTES else set()


@contextlib.contextmanager
def _outside_inference() -> Iterator[None]:
    """Whatever the trainer is in: what is allocated in inference mode can't be written outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _aliases(
    tables: Sequence[GuardedItems], shards: list[Shard]
) -> Iterator[tuple[Place, torch.Tensor]]:
    """The state's own tensors of guarded components."""
    for table in tables:
        for k, n in enumerate(table.items):
            if n is not None:
                yield replace(table.place, component=k), shards[n].tensor.detach()


def _guarded(
    shards: list[Shard], names: Sequence[str], rows: RowSnapshot | None
) -> tuple[list[GuardedItems], list[int]]:
    """The items that are guarded, by table, and the others."""
    tables: dict[int, GuardedItems] = {}
    rest = []
    for n, shard in enumerate(shards):
        place = rows.find(shard.tensor) if rows is not None else None
        if place is None:
            rest.append(n)
            continue
        width = len(place.table.components)
        table = tables.setdefault(id(place.table), GuardedItems(names[n], place, [None] * width))
        if table.items[place.component] is None:
            table.items[place.component] = n
        else:  # the state has this tensor under two keys
            rest.append(n)
    return list(tables.values()), rest
