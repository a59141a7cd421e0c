"""A DataLoader as a session's reader: the order of batches is that of an uninterrupted run, bit for bit."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ckpt import RngState
from ckpt.errors import BadInputError
from trainer import LoaderReader, Session

COUNT = 23
EPOCHS = 3


class Numbers(Dataset[Tensor]):
    """Its samples are their indices; `noisy` ones are changed at random when they are loaded."""

    def __init__(self, count: int = COUNT, *, noisy: bool = False) -> None:
        self.count = count
        self.noisy = noisy
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([float(index), float(torch.rand(())) if self.noisy else 0.0])


class Pairs:
    """A batch sampler of somebody's own: neighbours, in an order that Python's generator gives."""

    batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(0, COUNT - 1, 2))
        random.shuffle(order)
        for first in order:
            yield [first, first + 1]


def plain(**how: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(noisy=not how.get("num_workers")), 4, **how)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def own_generators() -> DataLoader[Tensor]:
    data = Numbers()
    sampler = RandomSampler(data, replacement=True, num_samples=90, generator=seeded())
    return DataLoader(data, 4, sampler=sampler, generator=seeded())


def shared_generator() -> DataLoader[Tensor]:
    data, one = Numbers(), seeded()
    sampler = RandomSampler(data, num_samples=40, generator=one)
    return DataLoader(data, 4, sampler=sampler, generator=one)


def distributed(**how: Any) -> DataLoader[Tensor]:
    data = Numbers()
    return DataLoader(data, 4, sampler=DistributedSampler(data, 2, 1, seed=3, **how))


def batched() -> DataLoader[Tensor]:
    return DataLoader(
        Numbers(), batch_sampler=BatchSampler(SubsetRandomSampler(range(COUNT)), 5, drop_last=False)
    )


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": plain,
    "last one dropped": lambda: plain(drop_last=True),
    "shuffled": lambda: plain(shuffle=True),
    "shuffled by a generator": lambda: plain(shuffle=True, generator=seeded()),
    "shuffled, two workers": lambda: plain(shuffle=True, num_workers=2),
    "a generator, two workers": lambda: plain(shuffle=True, num_workers=2, generator=seeded()),
    "workers that stay": lambda: plain(
        shuffle=True, num_workers=2, persistent_workers=True, generator=seeded()
    ),
    "workers that stay, global": lambda: plain(
        shuffle=True, num_workers=2, persistent_workers=True
    ),
    "with replacement": own_generators,
    "one generator for all": shared_generator,
    "distributed": distributed,
    "distributed, in order": lambda: distributed(shuffle=False, drop_last=True),
    "weighted": lambda: DataLoader(
        Numbers(), 3, sampler=WeightedRandomSampler([1.0] * COUNT, 15, generator=seeded())
    ),
    "batch sampler": batched,
    "batch sampler without a length": lambda: DataLoader(Numbers(), batch_sampler=Pairs()),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
}
SIZES = {"no batches": 1}


def seed(n: int) -> None:
    torch.manual_seed(n)
    random.seed(n)
    np.random.seed(n)


def taken(batch: Any) -> tuple[Any, float]:
    """A batch, and what a step draws on it."""
    return batch.tolist(), float(torch.rand(()))


def reader_of(name: str) -> LoaderReader[Any]:
    return LoaderReader(LOADERS[name](), batch_size=SIZES.get(name))


def rest(reader: LoaderReader[Any], until: int = EPOCHS) -> list[tuple[int, Any]]:
    """What is left of the epochs, each batch with its epoch."""
    got = []
    while (epoch := reader.epoch) < until:
        got += [(epoch, taken(batch)) for batch in reader]
    return got


@pytest.mark.parametrize("name", LOADERS)
def test_hands_out_what_the_loader_does(name: str) -> None:
    loader = LOADERS[name]()
    seed(1)
    want = []
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        want += [(epoch, taken(batch)) for batch in loader]
    seed(1)
    reader = reader_of(name)
    assert rest(reader) == want
    assert (reader.position, reader.epoch) == (len(want), EPOCHS)


@pytest.mark.parametrize("name", LOADERS)
def test_goes_on_from_any_batch_in_another_process(name: str) -> None:
    """States are taken at each boundary, as a session does, with the generators of the process."""
    seed(1)
    reader, states, want = reader_of(name), [], []
    while (epoch := reader.epoch) < EPOCHS:
        for batch in reader:
            want.append((epoch, taken(batch)))
            states.append(
                (reader.position, reader.state_at(reader.position), RngState().state_dict())
            )
    cuts = states if "workers" not in name else states[::4] + states[4:6] + states[10:12]
    for position, state, generators in cuts:
        seed(99)
        again = reader_of(name)
        RngState().load_state_dict(generators)
        again.check_state(state, position)
        again.load_state(state, position)
        assert again.position == position
        assert rest(again) == want[position:], position


class Stateful:
    """A loader with a state of its own, as torchdata's: it draws when it begins, and has no length."""

    batch_size = 4

    def __init__(self, batches: int = 6) -> None:
        self.batches, self.at, self.passes, self.asked = batches, 0, 0, 0
        self.done = False

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at, "passes": self.passes, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes, self.done = state["at"], state["passes"], state["done"]
        self.loaded = not self.done

    loaded = False

    def __iter__(self) -> Iterator[Tensor]:
        torch.rand(())
        if self.loaded:
            self.loaded = False
        else:
            self.at, self.passes, self.done = 0, self.passes + 1, False
        return self.rest()

    def rest(self) -> Iterator[Tensor]:
        while self.at < self.batches:
            self.at += 1
            yield torch.tensor([self.passes, self.at])
        self.done = True


def lives(
    make: Callable[[], Any], in_flight: int = 0
) -> tuple[list[Any], list[tuple[int, dict[str, Any], dict[str, Any]]]]:
    """All batches of a life that nothing interrupts, and its states, taken as by a session."""
    seed(1)
    reader = LoaderReader(make())
    want: list[Any] = []
    states = []
    while (epoch := reader.epoch) < EPOCHS:
        for batch in reader:
            want.append((epoch, taken(batch)))
            if len(want) > in_flight:
                position = reader.position - in_flight
                states.append((position, reader.state_at(position), RngState().state_dict()))
    return want, states


@pytest.mark.parametrize("in_flight", [0, 2])
def test_a_loader_with_a_state_gets_its_own_back(in_flight: int) -> None:
    want, states = lives(Stateful, in_flight)
    for position, state, generators in states:
        again = LoaderReader(Stateful())
        RngState().load_state_dict(generators)
        again.load_state(state, position)
        got = rest(again)
        assert [(e, b[0]) for e, b in got] == [(e, b[0]) for e, b in want[position:]], position
        if not in_flight:
            assert got == want[position:], position
