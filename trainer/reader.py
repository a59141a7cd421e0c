"""A batch reader whose whole state is one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt.config import check_joined
from ckpt.errors import BadInputError

B = TypeVar("B")


class _Span(NamedTuple):
    """From a position and an epoch on, epochs have so many samples."""

    position: int
    epoch: int
    samples: int


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
        identity: tells these samples from others, such as a digest or the names and sizes of files. A
            function is asked for the identity of the first n samples.
        grown: what to do where the checkpoint was trained on fewer samples. "append": the new ones come
            after the old ones, so the epoch in which the checkpoint stands is ended with the old ones, and
            those after it have all. That the old ones are the same is certain only if `identity` is a
            function.
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
        identity: str | Callable[[int], str] | None = None,
        grown: Literal["refuse", "append"] = "refuse",
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
        if grown not in ("refuse", "append"):
            raise BadInputError(f'grown = {grown!r}: use "refuse" or "append"')
        self._count = count
        self._identity = identity
        self._identities: dict[int, str] = {}  # each made once: it is part of every save
        self._grown = grown
        self._spans = [_Span(0, 0, count)]
        self._position = 0
        self._newest_s: Tensor | None = None
        if event_times_s is not None:
            if event_times_s.shape != (count,):
                raise BadInputError(
                    f"event_times_s: {tuple(event_times_s.shape)}; give one for each of {count} samples"
                )
            used = event_times_s[: count // batch_size * batch_size].double()
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
        span = self._span(self._position)
        return span.epoch + (self._position - span.position) // self._batches(span)

    @property
    def batches_per_epoch(self) -> int:
        """Of the epoch that the next batch belongs to."""
        return self._batches(self._span(self._position))

    @property
    def data(self) -> dict[str, Any]:
        """What positions count: the samples, and where epochs began to have more, if they did."""
        told: dict[str, Any] = {"samples": self._count}
        if self._identity is not None:
            told["identity"] = self._identity_of(self._count)
        if len(self._spans) > 1:
            told["spans"] = [list(span) for span in self._spans]
        return told

    def continues(self, data: Mapping[str, Any], position: int) -> None:
        """Count on from a position on earlier data. Called before a restore changes anything.

        Raises BadInputError where the position would point to other samples here.
        """
        had = int(data["samples"])
        spans = [_Span(*map(int, s)) for s in data.get("spans", [[0, 0, had]])]
        grown = self._grown == "append" and self._count > had
        way_out = ""
        if self._count > had and self._grown == "refuse":
            way_out = (
                ', or pass grown="append" to BatchReader if the new samples come after the old ones'
            )
        if self._count != had and not grown:
            raise BadInputError(
                f"the checkpoint's position counts {had} samples and the reader has {self._count}: after "
                f"{position} batches it would point to other data; give it the {had}{way_out}"
            )
        self._check_identity(data.get("identity"), had, grown=grown)
        if grown:
            while len(spans) > 1 and spans[-1].position >= position:
                spans.pop()  # nothing was trained in it
            span = spans[-1]
            epochs = -(-(position - span.position) // self._batches(span))
            begins = _Span(
                span.position + epochs * self._batches(span), span.epoch + epochs, self._count
            )
            spans = [*spans, begins] if begins.position > span.position else [*spans[:-1], begins]
        self._spans = spans

    def _check_identity(self, saved: str | None, samples: int, *, grown: bool) -> None:
        if saved is None or self._identity is None:
            return
        if grown and not callable(self._identity):
            raise BadInputError(
                f"the data has grown from {samples} to {self._count} samples, and an identity as text "
                f"doesn't tell whether the first {samples} are the same: pass a function that tells the "
                f"identity of the first n samples"
            )
        if saved != (here := self._identity_of(samples)):
            raise BadInputError(
                f"the checkpoint was trained on {samples} samples of identity {saved!r} and the reader's "
                f"have {here!r}: its position would point to other data; give it that data"
            )

    def _identity_of(self, samples: int) -> str:
        if samples not in self._identities:
            told = self._identity(samples) if callable(self._identity) else self._identity
            self._identities[samples] = str(told)
        return self._identities[samples]

    def _span(self, position: int) -> _Span:
        return next(s for s in reversed(self._spans) if s.position <= position or not s.position)

    def _batches(self, span: _Span) -> int:
        return span.samples // self._batch_size

    def event_time_s(self, position: int) -> float | None:
        """The newest event time of the global batches before `position`; None if there is none."""
        if self._newest_s is None or position < 1:
            return None
        seen = (min(position - s.position, self._batches(s)) for s in self._spans)
        return float(self._newest_s[max(seen) - 1])

    def seek(self, position: int) -> None:
        """Go to a position, for iterators that begin after this."""
        self._check_place()
        if position < 0:
            raise BadInputError(f"reader position {position} is below 0")
        self._position = position

    def indices(self, position: int) -> Tensor:
        """Which samples this rank takes of the global batch at `position`: int64 (part,)."""
        span = self._span(position)
        within = (position - span.position) % self._batches(span)
        start = within * self._batch_size + self._rank * self._part
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
