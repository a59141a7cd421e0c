"""Passes over a loader that has a state of its own, such as torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt.errors import BadInputError
from trainer.generators import Generators, without_own
from trainer.passes import END, Pass, length, set_epoch

_log = logging.getLogger("sidestage")


class StatefulPasses:
    """Of a loader that has a state of its own: torchdata's StatefulDataLoader, or one like it.

    Its state is that after the batches that it has handed out. Where a pipeline reads ahead, states are
    kept for as many batches as it was ahead; before that is known, batches after the state are read again.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.generators = Generators(loader)
        self.ahead = 0
        self.finished: Any = None  # a state after which the next pass begins

    def fresh(self, epoch: int, begins: int) -> Pass:
        return _StatefulPass(self, epoch, begins, None)

    def check(self, state: Mapping[str, Any]) -> None:
        pass  # only the loader knows what it takes

    def resumed(self, state: Mapping[str, Any], begins: int) -> Pass:
        self.finished = state["loader"] if state["ended"] else None
        if not state["ended"] and _workers_have_ended(state["loader"]):
            _log.warning(
                "the loader's state is from the end of epoch %s: if its dataset begins anew there, instead "
                "of ending at once, that epoch is read again; keep a dataset's place in its iterator's state",
                state["epoch"],
            )
        return _StatefulPass(self, int(state["epoch"]), begins, state)


class _StatefulPass:
    def __init__(
        self, passes: StatefulPasses, epoch: int, begins: int, resumed: Mapping[str, Any] | None
    ) -> None:
        self.epoch = epoch
        self.begins = begins
        self.ended = resumed is not None and bool(resumed["ended"])
        self._passes = passes
        self._resumed = resumed
        self._iterator: Iterator[Any] | None = None
        self._handed = int(resumed["batches"]) if resumed is not None else 0
        self._kept: list[tuple[int, Any]] = []  # the first, and the newest
        self._own: dict[str, Any] = {}
        set_epoch(passes.loader, epoch)

    def start(self) -> None:
        p, resumed = self._passes, self._resumed
        finished, p.finished = p.finished, None
        if resumed is None and finished is None:
            self._iterator = iter(p.loader)
        elif resumed is None:
            now = p.generators.state()
            p.loader.load_state_dict(finished)
            self._iterator = iter(p.loader)
            p.generators.set(now)
            # What an iterator draws when it is made. The one of the finished pass has drawn, too.
            seed_of = getattr(p.loader, "generator", None)
            torch.empty((), dtype=torch.int64).random_(generator=seed_of)
        else:
            now = p.generators.state()
            p.loader.load_state_dict(resumed["loader"])
            self._iterator = iter(p.loader)
            p.generators.set(resumed["own"])
            for n in range(int(resumed["again"])):
                if next(self._iterator, END) is END:
                    raise BadInputError(
                        f"the loader goes on from the checkpoint's state with {n} batches in epoch "
                        f"{self.epoch}, and {resumed['again']} of them were consumed: give it the data that "
                        f"it had"
                    )
            p.generators.set(without_own(now))
        self._own = p.generators.own()
        self._keep()

    def next(self) -> Any:
        if self.ended:
            return END
        if self._iterator is None:
            self.start()
        assert self._iterator is not None
        batch = next(self._iterator, END)
        self.ended = batch is END
        if not self.ended:
            self._handed += 1
            if self._passes.ahead or self._handed == length(self._passes.loader):
                self._keep()
        return batch

    def leave(self, batches: int) -> None:
        pass  # the loader has its iterator

    def _keep(self) -> None:
        self._kept.append((self._handed, copy.deepcopy(self._passes.loader.state_dict())))
        while len(self._kept) > self._passes.ahead + 2:
            del self._kept[1]

    def state(self, batches: int) -> dict[str, Any]:
        p, ahead = self._passes, self._handed - batches
        p.ahead = max(p.ahead, ahead)
        if self._iterator is None and self._resumed is not None:
            if batches != self._resumed["batches"]:
                raise BadInputError(
                    f"the loader's state after batch {batches} of epoch {self.epoch} isn't kept: this "
                    f"process has that after batch {self._resumed['batches']} only"
                )
            return {**self._resumed}
        at, loader = next(((k, s) for k, s in reversed(self._kept) if k <= batches), (-1, None))
        ended = at != batches and not ahead and self.ended
        if at != batches and not ahead:
            at, loader = batches, p.loader.state_dict()
        if at < 0:
            raise BadInputError(
                f"the loader's state after batch {batches} of epoch {self.epoch} isn't kept: this process "
                f"began at batch {self._kept[0][0]} of it"
            )
        own = p.generators.own()
        return {
            "epoch": self.epoch,
            "batches": batches,
            "loader": loader,
            "again": batches - at,
            "ended": ended,
            "own": own if own == self._own else {},
        }


def _workers_have_ended(state: Any) -> bool:
    """In a state of torchdata's: has each worker's stream ended? It is asked once more all the same."""
    snapshot = state.get("_snapshot") if isinstance(state, Mapping) else None
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
    ended = [
        (worker.get("fetcher_state") or {}).get("fetcher_ended")
        for worker in (workers or {}).values()
    ]
    return bool(ended) and all(ended)
