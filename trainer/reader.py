"""A batch reader whose whole state is one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt.config import check_joined
from ckpt.errors import BadInputError

B = TypeVar("B")


class BatchReader(Generic[B]):
    """Hands out samples in their order, in global batches of a fixed size.

    Global batch b of an epoch is samples [b * batch_size, (b + 1) * batch_size); rank r of w
    takes the r-th of w equal contiguous parts of it. So what is trained after n global batches
    doesn't depend on the number of ranks, and `position` (global batches handed out, across
    epochs) is all there is to save. The tail of an epoch that fills no batch is left out.

    Args:
        count: number of training samples.
        batch_size: samples of a global batch, over all ranks.
        fetch: makes a batch of the samples at some indices, int64 (batch_size / world_size,).
        rank, world_size: whose part of each batch this reader hands out; by default this
            process's in torch.distributed, or all of it where that isn't initialised.
        event_times_s: when each sample happened, Unix seconds, (count,), for `event_time_s`.
    """

    def __init__(  # noqa: PLR0913 - all but the first three have defaults and are keyword-only
        self,
        count: int,
        batch_size: int,
        fetch: Callable[[Tensor], B],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        event_times_s: Tensor | None = None,
    ) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self._assumed = not joined and (world_size is None or (rank is None and world_size > 1))
        if self._assumed:
            check_joined("a BatchReader")
        if world_size is None:
            world_size = dist.get_world_size() if joined else 1
        if rank is None:
            rank = dist.get_rank() if joined else 0
        if not 0 <= rank < world_size:
            raise BadInputError(f"rank {rank} is outside [0, {world_size})")
        if batch_size < 1 or batch_size % world_size:
            raise BadInputError(
                f"batch_size = {batch_size}: give a multiple of the {world_size} ranks"
            )
        if count < batch_size:
            raise BadInputError(f"batch_size = {batch_size} is more than the {count} samples")
        self._fetch = fetch
        self._rank = rank
        self._part = batch_size // world_size
        self._batch_size = batch_size
        self.batches_per_epoch = count // batch_size
        self._position = 0
        self._newest_s: Tensor | None = None
        if event_times_s is not None:
            if event_times_s.shape != (count,):
                raise BadInputError(
                    f"event_times_s: {tuple(event_times_s.shape)}; give one for each of {count} samples"
                )
            used = event_times_s[: self.batches_per_epoch * batch_size].double()
            self._newest_s = used.view(-1, batch_size).max(1).values.cummax(0).values

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
        return self._position // self.batches_per_epoch

    def event_time_s(self, position: int) -> float | None:
        """The newest event time of the global batches before `position`; None if there is none."""
        if self._newest_s is None or position < 1:
            return None
        return float(self._newest_s[min(position, self.batches_per_epoch) - 1])

    def seek(self, position: int) -> None:
        """Go to a position, for iterators that begin after this."""
        self._check_place()
        if position < 0:
            raise BadInputError(f"reader position {position} is below 0")
        self._position = position

    def indices(self, position: int) -> Tensor:
        """Which samples this rank takes of the global batch at `position`: int64 (part,)."""
        start = position % self.batches_per_epoch * self._batch_size + self._rank * self._part
        return torch.arange(start, start + self._part, device="cpu")

    def __iter__(self) -> Iterator[B]:
        """The batches from the present position to the end of its epoch."""
        self._check_place()
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._fetch(self.indices(self._position))
            self._position += 1
            yield batch

    def _check_place(self) -> None:
        """Refuse a place that was assumed and is wrong: each rank would train on all of each batch."""
        if self._assumed and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
            raise BadInputError(
                f"this BatchReader was made before the process group of {ranks} ranks, and would give each "
                f"rank all of each batch: make it after torch.distributed.init_process_group, or pass rank "
                f"and world_size"
            )
