"""Passes over a torch DataLoader: how one begins, and how another process goes on in it."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash

from ckpt.errors import BadInputError
from trainer.generators import Generators, without_own
from trainer.passes import END, Pass, set_epoch

_DIGEST_BYTES = 8


class Order:
    """The index batches of one pass, with a digest of all before each of them."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices
        self._digests = bytearray(_DIGEST_BYTES)
        self._skipped: deque[Any] = deque()
        self._generators: Generators | None = None
        self._after: dict[str, Any] = {}

    def __iter__(self) -> Order:
        return self

    def __next__(self) -> Any:
        self.go_on()
        if self._skipped:
            return self._skipped.popleft()
        return self._take()

    def _take(self) -> Any:
        index = next(self._indices)
        hasher = xxhash.xxh3_64(self._digests[-_DIGEST_BYTES:])
        hasher.update(_index_bytes(index))
        self._digests += hasher.digest()
        return index

    def digest(self, batches: int) -> str:
        """Of the first so many index batches."""
        start = batches * _DIGEST_BYTES
        return self._digests[start : start + _DIGEST_BYTES].hex()

    def skip(self, batches: int) -> int:
        """Take index batches and drop them. Returns how many there were."""
        for n in range(batches):
            if next(self, END) is END:
                return n
        return batches

    def ends(self) -> bool:
        """Is there no further one? It is kept."""
        if not self._skipped and (index := next(self, END)) is not END:
            self._skipped.append(index)
        return not self._skipped

    def pause(self, generators: Generators, state: dict[str, Any]) -> None:
        """When it goes on, its generators are to have this state."""
        self._generators, self._after = generators, state

    def go_on(self) -> None:
        if self._generators is not None:
            self._generators.set(self._after)
            self._generators = None


class _Indices:
    """In the place of a loader's batch sampler, or sampler: gives what that gives, as an `Order`."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.prepared: Order | None = None
        self._newest: Order | None = None

    def __iter__(self) -> Order:
        self._newest = self.prepared or self.order()
        return self._newest

    def taken(self) -> Order | None:
        """The order of the newest iterator since the last call, if there was one."""
        taken, self._newest, self.prepared = self._newest, None, None
        return taken

    def order(self) -> Order:
        return Order(iter(self._sampler))

    def __len__(self) -> int:
        return len(self._sampler)


class IndexedPasses:
    """Of a DataLoader over a dataset with indices: what was consumed is skipped without loading it.

    The state of a pass is that of the generators when it began, and a digest of the indices that were
    consumed: another order is refused.
    """

    def __init__(self, loader: Any) -> None:
        self._given = loader
        self._generators = Generators(loader)
        self._loader: Any = None
        self._had_workers = False  # that stay, and have got their seed in another process
        self._checked: tuple[Mapping[str, Any], Order, dict[str, Any], bool] | None = None

    def fresh(self, epoch: int, begins: int) -> Pass:
        self._set_epoch(epoch)
        return _IndexedPass(self, epoch, begins)

    def check(self, state: Mapping[str, Any]) -> None:
        self._checked = None
        if state["begun"] is not None:
            self._checked = (state, *self._prepare(state))

    def resumed(self, state: Mapping[str, Any], begins: int) -> Pass:
        epoch = int(state["epoch"])
        if state["begun"] is None:
            return self.fresh(epoch, begins)
        checked, self._checked = self._checked, None
        if checked is not None and checked[0] == state:
            order, at_seed, ended = checked[1:]
        else:
            order, at_seed, ended = self._prepare(state)
        self._loader = None  # workers of another pass, if any
        self._had_workers = bool(self._given.persistent_workers)
        if ended:
            order.go_on()
        self._set_epoch(epoch)
        return _IndexedPass(self, epoch, begins, _Resumption(state, order, at_seed, ended))

    def seeds(self) -> bool:
        """Does the next pass draw a seed for its workers? Persistent ones have theirs."""
        if self._loader is None:
            return not self._had_workers
        return not self._given.persistent_workers

    def order(self) -> Order | None:
        """Of a pass that begins now, where its workers get a seed here and got none elsewhere.

        What is drawn between now and its first index is to leave no trace.
        """
        if self._loader is not None or not self._had_workers:
            return None
        order = _Indices(getattr(self._given, self._name)).order()
        order.pause(self._generators, self._generators.state())
        return order

    def begin(self, prepared: Order | None = None) -> tuple[Iterator[Any], Order]:
        """Iterate the loader, or rather a copy of it whose samplers tell what they give."""
        if self._loader is None:
            self._loader = copy.copy(self._given)
            vars(self._loader)["_iterator"] = None
            # DataLoader refuses another sampler by __setattr__, for its own iterators that exist.
            vars(self._loader)[self._name] = _Indices(getattr(self._given, self._name))
        indices: _Indices = getattr(self._loader, self._name)
        indices.prepared = prepared
        iterator = iter(self._loader)
        order = indices.taken()
        if order is None:
            raise BadInputError(
                f"loader: {type(self._given).__name__}.__iter__ is a generator, which begins with its first "
                f"batch, and what it draws until then can't be told apart; give the DataLoader that it wraps"
            )
        return iterator, order

    @property
    def generators(self) -> Generators:
        return self._generators

    @property
    def workers(self) -> bool:
        return bool(self._given.num_workers)

    @property
    def _name(self) -> str:
        return "sampler" if self._given.batch_sampler is None else "batch_sampler"

    def _prepare(self, state: Mapping[str, Any]) -> tuple[Order, dict[str, Any], bool]:
        """Its order after the batches that were consumed; the generators when its workers got their seed.

        Draws what DataLoader draws, in the same order, and leaves no trace.
        """
        epoch, batches = int(state["epoch"]), int(state["batches"])
        with self._generators.kept():
            self._set_epoch(epoch)
            self._generators.set(state["begun"])
            order = _Indices(getattr(self._given, self._name)).order()
            at_seed = self._generators.state()
            if state["seeded"]:
                torch.empty((), dtype=torch.int64).random_(generator=self._given.generator)
                if state["workers"]:  # with them DataLoader begins its sampler twice
                    order = _Indices(getattr(self._given, self._name)).order()
            had = order.skip(batches)
            if had < batches or order.digest(batches) != state["digest"]:
                raise BadInputError(
                    f"the loader gives other samples than those of the checkpoint in the first {batches} "
                    f"batches of epoch {epoch}"
                    + (f", which has only {had} here" if had < batches else "")
                    + ": give it the same sampler, seed and data; a sampler that draws while the epoch runs, "
                    "or from a generator that it doesn't hold as an attribute, needs one of its own"
                )
            ended = order.ends()
            order.pause(self._generators, self._generators.own())
        return order, at_seed, ended

    def _set_epoch(self, epoch: int) -> None:
        set_epoch(self._given, epoch)


class _Resumption:
    """What another process left of a pass."""

    def __init__(
        self, state: Mapping[str, Any], order: Order, at_seed: dict[str, Any], ended: bool
    ) -> None:
        self.order, self.at_seed, self.ended = order, at_seed, ended
        self.begun, self.seeded, self.workers = state["begun"], state["seeded"], state["workers"]


class _IndexedPass:
    def __init__(
        self, passes: IndexedPasses, epoch: int, begins: int, resumed: _Resumption | None = None
    ) -> None:
        self.epoch = epoch
        self.begins = begins
        self.ended = resumed is not None and resumed.ended
        self._passes = passes
        self._resumed = resumed
        self._iterator: Iterator[Any] | None = None
        self._order = resumed.order if resumed else None
        self._begun: dict[str, Any] | None = resumed.begun if resumed else None
        self._seeded = resumed.seeded if resumed else True
        self._workers = resumed.workers if resumed else passes.workers
        self._trimmed = resumed is not None

    def start(self) -> None:
        generators, resumed = self._passes.generators, self._resumed
        now = generators.state()
        if resumed is None:
            self._begun, self._seeded = now, self._passes.seeds()
            self._iterator, self._order = self._passes.begin(self._passes.order())
            return
        generators.set(resumed.at_seed)
        self._iterator, self._order = self._passes.begin(resumed.order)
        self._order.go_on()  # workers have taken some of it, or there are none
        generators.set(without_own(now))

    def next(self) -> Any:
        if self.ended:
            return END
        if self._iterator is None:
            self.start()
        assert self._iterator is not None
        batch = next(self._iterator, END)
        if batch is END:
            self.ended, self._iterator = True, None
        if not self._trimmed and self._begun is not None:
            # The sampler has begun. Python's and NumPy's are large, and few draw from them.
            now, self._trimmed = self._passes.generators.state(), True
            for name in ("python", "numpy"):
                if self._begun[name] == now[name]:
                    del self._begun[name]
        return batch

    def leave(self, batches: int) -> Mapping[str, Any] | None:
        """A loop's workers end with it, not when the garbage collector finds them: that takes seconds."""
        if self.ended or self._iterator is None:
            return None
        self._iterator = None
        return self.state(batches)

    def state(self, batches: int) -> dict[str, Any]:
        began = self._order is not None and self._begun is not None
        return {
            "epoch": self.epoch,
            "batches": batches,
            "begun": self._begun if began else None,
            "seeded": self._seeded,
            "workers": self._workers,
            "digest": self._order.digest(batches) if self._order is not None else "",
        }


def _index_bytes(index: Any) -> bytes:
    """Different indices give different bytes."""
    plain = index.tolist() if hasattr(index, "tolist") else index
    if isinstance(plain, list):
        try:
            return array("q", plain).tobytes()
        except (TypeError, OverflowError):
            pass
    return repr(plain).encode()
