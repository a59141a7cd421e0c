"""What a Checkpointer holds on to: the guarded tables of its state, followed from save to save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.optim import Optimizer

from ckpt.attach.finding import Finder
from ckpt.attach.fused import FusedTables, held
from ckpt.attach.sparse import SparseTables
from ckpt.canonical.living import LivingLookups
from ckpt.rows import Group, RowGuards
from ckpt.tree import leaf_of
from ckpt.types import EventSink


class Attachment:
    """Guards what it can of the tables in some objects, and says what it can't.

    living: the table-batched embeddings of this process.
    """

    def __init__(
        self, guards: RowGuards, sink: EventSink, living: LivingLookups | None = None
    ) -> None:
        self._guards = guards
        self._sink = sink
        self._finder = Finder()
        self._living = living or LivingLookups()
        self._fused: list[FusedTables] = []
        self._sparse = SparseTables()
        self._refused: dict[str, str] = {}
        self._said: dict[str, str] = {}

    def add(self, *objects: Any, early: bool = False) -> None:
        """Look through modules, optimizers, or nests of them, such as a whole state.

        Without any: take up what has been shown to `looking()`.
        What was looked through before isn't again, unless a table has gone, as if for another in
        its place; so a state may be added at every save. Call it like `refresh`.

        early: training may have begun before this, unseen.
        """
        if objects:
            look = self.looking()
            for value in objects:
                look(value, "")
        lookups, embeddings, optimizers = self._finder.take()
        if lookups or embeddings or optimizers:
            self._fused += [FusedTables(found, early=early) for found in lookups]
            self._sparse.add(embeddings, optimizers)
            self.refresh()

    def claim(self, state: Iterable[tuple[str, Tensor]]) -> bool:
        """Guard the fused tables whose memory a state has, though no object in it shows them.

        state: its tensors on this rank, with their keys. Call it like `refresh`. True if there were any.
        """
        unknown = [m for m in self._living if not self._finder.knows(m)]
        if not unknown:
            return False
        homes: dict[int, str] = {}
        for key, tensor in state:
            if tensor.numel():
                homes.setdefault(tensor.untyped_storage().data_ptr(), key)
        found = False
        for module in unknown:
            keys = (homes.get(t.untyped_storage().data_ptr()) for t in held(module))
            name = next((k for k in keys if k is not None), None)
            if name is not None:
                self.add({name: module}, early=True)
                found = True
        return found

    def unsure(self) -> set[Group]:
        """Groups to do without now: it isn't known what writes their tables, or those have moved."""
        found = {f.group for f in self._fused if f.group is not None and not f.sure()}
        return found | set(self._sparse.unsure())

    def looking(self) -> Callable[[Any, str], None]:
        """Something to show objects to, each with its path in the state; `add()` takes them up."""
        if self._sparse.any_gone or any(f.gone for f in self._fused):
            self._finder.look_again()
        return self._finder.look

    def refresh(self) -> None:
        """Follow tables and their state to where their memory is now; only what moved is regrouped.

        Call it in the trainer's thread while no snapshot is open.
        """
        self._fused = [f for f in self._fused if f.refresh(self._guards)]
        self._sparse.refresh(self._guards)
        refused: dict[str, str] = {}
        for fused in self._fused:
            if fused.refusal is not None:
                refused |= dict.fromkeys(fused.names, fused.refusal)
                if fused.quiet:
                    self._said |= dict.fromkeys(fused.names, str(fused.refusal))
        refused |= self._sparse.refused
        self._refused = refused
        for name, reason in refused.items():
            if self._said.get(name) != reason:
                self._said[name] = reason
                self._sink.emit("table_copied", table=name, reason=reason)

    @property
    def refused(self) -> Mapping[str, str]:
        """Names of the tables that aren't guarded, with the reason: a save copies them whole."""
        return MappingProxyType(self._refused)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The innermost optimizers that were found, those that change anything themselves."""
        return self._sparse.optimizers

    def lookup_tensors(self) -> Iterator[Tensor]:
        """Memory that lookups change themselves: by their backward pass, or `max_norm` in forward."""
        for fused in self._fused:
            yield from fused.tensors()
        for module in self._living:
            if not self._finder.knows(module):
                yield from held(module)
        yield from self._sparse.renormed()

    def touched(self, tensor: Tensor | ShardedTensor, rows: Tensor | None) -> bool:
        """Announce that rows of a table or of its state are about to be changed by hand.

        `tensor` is the weight or state tensor, rows of it, or the ShardedTensor or DTensor of it;
        `rows` are its row numbers, a mask over them, or None for all. False if nothing of it is
        guarded on this rank.
        """
        if rows is not None and rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        if rows is not None:
            rows = torch.where(rows < 0, rows + tensor.shape[0], rows).long()
        found = False
        for shard in leaf_of("touched()", tensor, per_rank=False).shards:
            local = rows
            if rows is not None and shard.offsets:
                local = rows - shard.offsets[0]
                local = local[(local >= 0) & (local < shard.sizes[0])]
            found |= self._touch(shard.tensor, local)
        return found

    def detach(self) -> None:
        """Take all hooks off and guard nothing any more."""
        for fused in self._fused:
            fused.detach(self._guards)
        self._sparse.detach(self._guards)
        self._living.forget()
        self._fused, self._sparse, self._finder = [], SparseTables(), Finder()
        self._refused = {}

    def forget(self) -> None:
        """In a forked child: take the hooks off, and touch nothing else."""
        for fused in self._fused:
            fused.forget()
        self._sparse.forget()
        self._living.forget()

    def _groups(self) -> Iterator[Group]:
        yield from (f.group for f in self._fused if f.group is not None)
        yield from self._sparse.groups

    def _touch(self, part: Tensor, rows: Tensor | None) -> bool:
        """Announce rows of a local tensor in all guarded memory that it shares."""
        if not part.numel():
            return False
        found = False
        for group in self._groups():
            for number, table in enumerate(group.tables):
                for component in table.components:
                    shared = _shared_rows(part, component)
                    if shared is None:
                        continue
                    group.versions.forgive()
                    numbers = _mapped(rows, part, component) if rows is not None else None
                    if numbers is not None:
                        group.touch_rows(number, numbers)
                    elif len(shared) == table.rows:
                        group.touch_all(number)
                    else:
                        of_part = torch.arange(shared.start, shared.stop, device=part.device)
                        group.touch_rows(number, of_part)
                    found = True
                    break
        return found


def _shared_rows(part: Tensor, whole: Tensor) -> range | None:
    """The rows of `whole` among which `part` has memory, from its first byte to its last."""
    if part.device != whole.device or not whole.numel():
        return None
    last = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    start = part.data_ptr() - whole.data_ptr()
    stop = start + (last + 1) * part.element_size()
    width = whole.nbytes // whole.shape[0]
    rows = range(max(start, 0) // width, -(-min(stop, whole.nbytes) // width))
    return rows if start < whole.nbytes and stop > 0 else None


def _mapped(rows: Tensor, part: Tensor, whole: Tensor) -> Tensor | None:
    """Rows of `part` as rows of `whole`; None if one of the former isn't within one of the latter."""
    width, start = whole.nbytes // whole.shape[0], part.data_ptr() - whole.data_ptr()
    if not part.dim() or not 0 <= start < whole.nbytes:
        return None
    inner = zip(part.shape[1:], part.stride()[1:], strict=True)
    taken = (sum((n - 1) * s for n, s in inner) + 1) * part.element_size()
    stride = part.stride(0) * part.element_size()
    if stride % width or start % width + taken > width:
        return None
    return rows * (stride // width) + start // width
