"""A torch DataLoader as the reader of a session: it goes on at the exact batch in another process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ckpt.config import check_joined
from ckpt.errors import BadInputError
from trainer.indexed import IndexedPasses
from trainer.passes import END, Pass, Passes, length
from trainer.stateful import StatefulPasses

B = TypeVar("B")
# What a position's state has, and what each kind of loader adds.
_STATE = {"samples", "epoch", "batches"}
_OF_INDEXED = {"begun", "seeded", "workers", "digest"}
_OF_STATEFUL = {"loader", "again", "ended", "own"}


class LoaderReader(Generic[B]):
    """Reads a torch DataLoader, or a loader with a state such as torchdata's StatefulDataLoader.

    A position counts the batches that were handed out, not those that workers have loaded ahead. A
    DataLoader goes on with the order that its epoch had and skips what was consumed without loading it;
    where its samplers would give another order, a restore is refused before anything changes. A loader
    with `state_dict` and `load_state_dict` is given back its own state.

    Samplers are told the epoch by `set_epoch`. Each rank has a state of its own: another number of ranks is
    refused.

    Args:
        loader: it stays as it is, but for the generators that it holds. A DataLoader over an IterableDataset
            can't be skipped without reading it, and is refused: StatefulDataLoader takes it.
        batch_size: samples of a global batch over all ranks, where the loader doesn't tell: a batch sampler
            without a `batch_size`, or no batching. By default this rank's, times the ranks.
        identity: tells these samples from others, such as a digest or the names and sizes of files.
    """

    def __init__(
        self,
        loader: Iterable[B],
        *,
        batch_size: int | None = None,
        identity: str | None = None,
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        if not joined:
            check_joined("a LoaderReader")
        self._loader: Any = loader
        self._identity = identity
        self._passes = _passes_of(loader)
        self._batch_size = batch_size or _batch_size(loader) * (
            dist.get_world_size() if joined else 1
        )
        self._left: Mapping[str, Any] | None = None  # what the newest goes on from, if it was left
        self._open: deque[Pass] = deque(maxlen=2)  # the newest, and one that is still in flight
        self._position = 0
        self._next_epoch = 0
        self._turn = 0  # the iterator that may take batches

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def position(self) -> int:
        """Global batches handed out so far, those that a pipeline has read ahead included."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next batch belongs to."""
        if not self._open:
            return self._next_epoch
        newest = self._open[-1]
        return newest.epoch + (newest.ended or self._full(newest))

    @property
    def data(self) -> dict[str, Any] | None:
        """What tells these samples from others. How many a rank has is in its own state."""
        return None if self._identity is None else {"identity": self._identity}

    def seek(self, position: int) -> None:
        """Go to the beginning, or to a batch of the epoch in which it stands or of the one before."""
        if position == 0:
            self._forget()
            self._position = self._next_epoch = 0
        else:
            self.load_state(self.state_at(position), position)

    def state_at(self, position: int) -> dict[str, Any]:
        """What this rank needs to hand out the batches after `position`."""
        for a_pass in reversed(self._open):
            if a_pass.begins <= position <= self._position:
                return self._told(a_pass, position)
        if position == self._position == 0:
            return self._told(self._passes.fresh(0, 0), 0)
        raise BadInputError(
            f"the loader's state after batch {position} isn't kept: this reader has handed out "
            f"{self._position}, and knows the epoch of the newest and the one before"
        )

    def check_state(self, state: Mapping[str, Any], position: int) -> None:
        """BadInputError if this loader would go on with other batches. Nothing is changed."""
        kinds = [_STATE | set(k) for k in (_OF_INDEXED, _OF_STATEFUL)]
        if not isinstance(state, Mapping) or not any(k <= set(state) for k in kinds):
            raise BadInputError(
                f"the checkpoint's reader wasn't a LoaderReader: its state after {position} batches is a "
                f"{type(state).__name__} that says nothing of a loader; restore it with the reader that "
                f"saved it"
            )
        if ("loader" in state) != isinstance(self._passes, StatefulPasses):
            raise BadInputError(
                "the checkpoint was saved by a loader of another kind: one is a DataLoader, the other has a "
                "state of its own; use the kind that it was saved with"
            )
        if (had := state["samples"]) != (here := self._samples()):
            counts, has = ("an unknown number of" if n is None else n for n in (had, here))
            raise BadInputError(
                f"the checkpoint's position counts {counts} samples and the loader's dataset has {has}: "
                f"after {position} batches it would point to other data; give it the data that it had"
            )
        self._passes.check(state)

    def load_state(self, state: Mapping[str, Any], position: int) -> None:
        """Go on after `position`, where a reader had this state. In the place of `seek`."""
        self._forget()
        self._open.append(self._passes.resumed(state, position - int(state["batches"])))
        self._position = position

    def __iter__(self) -> Iterator[B]:
        """The batches from the present position to the end of its epoch."""
        self._turn += 1
        turn = self._turn
        if self._left is not None:
            left, self._left = self._left, None
            self._open[-1] = self._passes.resumed(left, self._open[-1].begins)
        if self._open and self._full(self._open[-1]):
            yield from self._rest(self._open[-1], turn)  # nothing, if its length is right
        if not self._open or self._open[-1].ended:
            self._open.append(self._passes.fresh(self.epoch, self._position))
        yield from self._rest(self._open[-1], turn)

    def _rest(self, a_pass: Pass, turn: int) -> Iterator[B]:
        try:
            while (batch := a_pass.next()) is not END:
                self._position += 1
                yield batch
                if turn != self._turn:
                    raise BadInputError(
                        "this iterator's reader was iterated anew, or has gone elsewhere, since it gave its "
                        "last batch: take batches from the newest iterator only"
                    )
        finally:
            if turn == self._turn:
                self._left = a_pass.leave(self._position - a_pass.begins)

    def _forget(self) -> None:
        self._turn += 1
        self._left = None
        self._open.clear()

    def _told(self, a_pass: Pass, position: int) -> dict[str, Any]:
        return {"samples": self._samples(), **a_pass.state(position - a_pass.begins)}

    def _samples(self) -> int | None:
        """Of the dataset, if it tells."""
        with suppress(AttributeError, TypeError, NotImplementedError):
            return len(self._loader.dataset)
        return None

    def _full(self, a_pass: Pass) -> bool:
        """Has it handed out as much as it has, for all that is known?"""
        return self._position - a_pass.begins == length(self._loader)


def _passes_of(loader: Any) -> Passes:
    if callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    ):
        return StatefulPasses(loader)
    if not isinstance(loader, DataLoader):
        raise BadInputError(
            f"loader: a {type(loader).__name__} is no torch DataLoader and has no state_dict and "
            f"load_state_dict; give one of these, or write a reader (trainer.Reader)"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise BadInputError(
            f"loader: {type(loader.dataset).__name__} is an IterableDataset, of which nothing can be skipped "
            f"without reading it: give a torchdata StatefulDataLoader with the same arguments, which goes on "
            f"from the dataset's state_dict, or reads what was consumed again"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise BadInputError(
            "loader: with in_order=False the order of batches depends on how fast workers are, and no resume "
            "is exact; leave it out"
        )
    return IndexedPasses(loader)


def _batch_size(loader: Any) -> int:
    """Of this rank's part."""
    told = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    if told is None:
        raise BadInputError(
            "batch_size: the loader doesn't tell how many samples a batch has; pass batch_size=, that of a "
            "global batch over all ranks"
        )
    return int(told)
