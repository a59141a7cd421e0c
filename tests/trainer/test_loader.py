"""A DataLoader as a session's reader: the order of batches is that of an uninterrupted run, bit for bit."""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from tests.trainer.launch import run_ranks
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
    dataset = range(COUNT)

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


def trained(
    root: Path, loader: Any, until: int, *, save_every: int = 5, epochs: int = 99, **how: Any
) -> list[Any]:
    """The batches of one life in a session; it trains nothing but draws."""
    seen: list[Any] = []
    reader: LoaderReader[Any] = LoaderReader(loader, **how)
    with Session(root, {"w": torch.zeros(2)}, reader, save_every=save_every) as session:
        while session.steps < until and reader.epoch < epochs:
            for batch in session.batches():
                seen.append((reader.epoch, taken(batch)))
                session.step()
                if session.steps == until:
                    break
    return seen


@pytest.mark.parametrize("name", ["shuffled", "shuffled, two workers", "distributed"])
def test_a_session_resumes_at_the_exact_batch(name: str, tmp_path: Path) -> None:
    seed(1)
    whole = trained(tmp_path / "whole", LOADERS[name](), 17)
    seed(1)
    parts = []
    for until in (2, 6, 7, 12, 17):
        parts += trained(tmp_path / "cut", LOADERS[name](), until)
        seed(until)
    assert [b for _, b in parts] == [b for _, b in whole]


def test_a_run_of_epochs_that_has_ended_trains_no_more(tmp_path: Path) -> None:
    assert len(trained(tmp_path, plain(shuffle=True), 99, save_every=6, epochs=2)) == 12
    assert trained(tmp_path, plain(shuffle=True), 99, save_every=6, epochs=2) == []
    assert len(trained(tmp_path, plain(shuffle=True), 99, save_every=6, epochs=3)) == 6


def test_skips_without_loading(tmp_path: Path) -> None:
    trained(tmp_path, plain(shuffle=True), 4)
    loader = plain(shuffle=True)
    trained(tmp_path, loader, 5)
    assert len(loader.dataset.loaded) == 4


def test_batches_in_flight_are_read_again(tmp_path: Path) -> None:
    """A pipeline that reads two ahead, also across the end of an epoch."""

    def run(root: Path, until: int) -> list[Any]:
        reader: LoaderReader[Any] = LoaderReader(plain(shuffle=True, generator=seeded()))
        got = []
        with suppress(KeyboardInterrupt), Session(root, {}, reader, save_every=1) as session:

            def endless() -> Iterator[Any]:
                while True:
                    yield from session.batches()

            batches = endless()
            queue = [next(batches), next(batches)]
            while session.steps < until:
                queue.append(next(batches))
                got.append(queue.pop(0)[:, 0].tolist())
                session.step(in_flight=2)
            raise KeyboardInterrupt
        return got

    whole = run(tmp_path / "whole", 15)
    parts = []
    for until in (3, 5, 6, 7, 11, 15):
        parts += run(tmp_path / "cut", until)
    assert parts == whole


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: plain(shuffle=False), "other samples than those of the checkpoint"),
        (
            lambda: DataLoader(Numbers(24), 4, shuffle=True),
            "counts 23 samples and the loader's dataset has 24: after 4 batches",
        ),
        (
            lambda: DataLoader(Numbers(), 5, shuffle=True),
            "batches of 4 samples and the reader's have 5",
        ),
        (
            lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(8))),
            "first 4 batches of epoch 0, which has only 2 here",
        ),
        (Stateful, "a loader of another kind"),
    ],
)
def test_other_data_or_another_order_is_refused(
    loader: Callable[[], Any], message: str, tmp_path: Path
) -> None:
    trained(tmp_path, plain(shuffle=True), 4)
    before = torch.get_rng_state()
    with pytest.raises(BadInputError, match=message) as e:
        trained(tmp_path, loader(), 9)
    assert "begin the data anew with restore=RestoreTerms(exclude=" in str(e.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_that_draws_while_the_epoch_runs_is_refused_not_wrong(tmp_path: Path) -> None:
    class Lazy:
        def __iter__(self) -> Iterator[int]:
            for _ in range(COUNT):
                yield int(torch.randint(COUNT, ()))

    trained(tmp_path, DataLoader(Numbers(), 4, sampler=Lazy()), 4)
    with pytest.raises(BadInputError, match="a sampler that draws while the epoch runs"):
        trained(tmp_path, DataLoader(Numbers(), 4, sampler=Lazy()), 9)


def test_an_identity_tells_other_samples(tmp_path: Path) -> None:
    trained(tmp_path, plain(), 4, identity="a")
    with pytest.raises(BadInputError, match="identity 'a' there and 'b' here"):
        trained(tmp_path, plain(), 9, identity="b")


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Stream(), 4), "Stream is an IterableDataset, of which nothing can be"),
        (lambda: DataLoader(Numbers(), 4, num_workers=1, in_order=False), "in_order=False"),
        (lambda: [1, 2], "a list is no torch DataLoader and has no state_dict"),
        (
            lambda: DataLoader(Numbers(), batch_size=None),
            "pass batch_size=, that of a global batch",
        ),
    ],
)
def test_loaders_that_cannot_be_resumed_are_refused(
    loader: Callable[[], Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        LoaderReader(loader())


def test_a_global_batch_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    assert LoaderReader(plain()).batch_size == 12
    assert LoaderReader(plain(), batch_size=10).batch_size == 10


def test_a_rank_that_has_joined_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadInputError, match="WORLD_SIZE is 2 and this process is in no process"):
        LoaderReader(plain())


def test_a_loader_whose_workers_died_is_read_again_from_where_it_was() -> None:
    reader = reader_of("workers that stay")
    batches = iter(reader)
    want = [next(batches).tolist() for _ in range(2)]
    reader.seek(reader.position)
    want += [b.tolist() for b in reader]
    assert want == [b.tolist() for b in reader_of("workers that stay")]


def test_a_reader_seeks_only_where_it_has_been() -> None:
    reader = reader_of("shuffled by a generator")
    first = [b[:, 0].tolist() for b in reader]
    reader.seek(3)
    assert reader.epoch == 0
    assert [b[:, 0].tolist() for b in reader] == first[3:]
    with pytest.raises(
        BadInputError, match="after batch 7 isn't kept: this reader has handed out 6"
    ):
        reader.seek(7)


class Counted:
    """A loader with a state of its own, of batches 0, 1, ... It doesn't say how many."""

    batch_size = 1

    def __init__(self, batches: int) -> None:
        self.batches, self.at, self.begin = batches, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]

    def __iter__(self) -> Iterator[int]:
        self.at, self.begin = self.begin, 0
        while self.at < self.batches:
            self.at += 1
            yield self.at - 1


def test_a_resumed_loader_of_its_own_state_knows_one_place() -> None:
    reader = LoaderReader(Counted(20))
    batches = iter(reader)
    assert [next(batches) for _ in range(8)] == list(range(8))
    resumed = LoaderReader(Counted(20))
    resumed.load_state(reader.state_at(8), 8)
    with pytest.raises(BadInputError, match="after batch 5 of epoch 0 isn't kept"):
        resumed.seek(5)
    assert next(iter(resumed)) == 8


def test_a_loader_that_ends_before_what_was_consumed_is_refused() -> None:
    reader = LoaderReader(Counted(20))
    batches = iter(reader)
    for _ in range(10):
        next(batches)
    state = reader.state_at(8)  # a pipeline is two ahead
    short = LoaderReader(Counted(5))
    short.check_state(state, 8)
    short.load_state(state, 8)
    with pytest.raises(BadInputError, match="give it the data that it had"):
        next(iter(short))


@pytest.mark.parametrize("state", [{"cursor": 5}, 5, [1], None])
def test_the_state_of_another_kind_of_reader_is_refused(state: Any) -> None:
    with pytest.raises(BadInputError, match="wasn't a LoaderReader"):
        reader_of("shuffled by a generator").check_state(state, 5)


def test_torchdatas_own_loader(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")

    def make(**how: Any) -> Any:
        return torchdata.StatefulDataLoader(Numbers(), 4, **how)

    for how in (
        {},
        {"shuffle": True},
        {"shuffle": True, "num_workers": 2},
        {"shuffle": True, "generator": None, "num_workers": 2, "persistent_workers": True},
    ):
        want, states = lives(lambda how=how: make(**how))
        for position, state, generators in states[::5] + states[5:6]:
            seed(99)
            again = LoaderReader(make(**how))
            RngState().load_state_dict(generators)
            again.check_state(state, position)
            again.load_state(state, position)
            assert rest(again) == want[position:]
    seed(1)
    whole = trained(tmp_path / "whole", make(shuffle=True), 17)
    seed(1)
    parts = []
    for until in (2, 6, 7, 12, 17):
        parts += trained(tmp_path / "cut", make(shuffle=True), until)
        seed(until)
    assert [b for _, b in parts] == [b for _, b in whole]


@pytest.mark.parametrize("name", ["shuffled", "a generator, two workers", "workers that stay"])
def test_a_loop_that_is_left_goes_on_where_it_was(name: str) -> None:
    seed(1)
    want = rest(reader_of(name))
    seed(1)
    reader, got = reader_of(name), []
    while (epoch := reader.epoch) < EPOCHS:
        for batch in reader:
            got.append((epoch, taken(batch)))
            if len(got) % 4 == 0:
                break
    assert got == want


def test_the_example_of_the_documentation_resumes(tmp_path: Path) -> None:
    """docs/training.md: interrupted in the middle of its second epoch, and begun again."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    section = text.partition("## A DataLoader as the reader")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    assert '"/tmp/run"' in example

    def run(root: Path, stop: int | None = None) -> list[Tensor]:
        seen: list[Tensor] = []
        code = example.replace("/tmp/run", str(root)).replace(
            "            loss =", "            note(features)\n            loss ="
        )

        def note(features: Tensor) -> None:
            if stop is not None and len(seen) == stop:
                raise KeyboardInterrupt
            seen.append(features)

        with suppress(KeyboardInterrupt):
            exec(code, {"note": note})
        return seen

    whole = run(tmp_path / "whole")
    parts = run(tmp_path / "cut", 45)[:40] + run(tmp_path / "cut")
    assert len(whole) == 96
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_ranks_whose_pipeline_reads_ahead_resume_exactly_and_only_as_many(tmp_path: Path) -> None:
    """In the middle of an epoch, and at the end of one; TrainPipelineSparseDist at two ranks."""
    out = tmp_path / "told"
    for end in run_ranks("tests.trainer.loader_ranks", tmp_path, out, ranks=2, restarts=0):
        assert end.returncode == 0, end.stderr
    assert [line[:24] for line in out.read_text().splitlines()] == ["exact: 6 of 6 losses and"] * 2
    (end,) = run_ranks("tests.trainer.loader_ranks", tmp_path, out, ranks=1, restarts=0)
    assert end.returncode == 0, end.stderr
    assert "the reader's state belongs to each of the ranks that saved it" in out.read_text()


def test_a_loader_that_begins_with_its_first_batch_is_refused() -> None:
    class Moving(DataLoader[Tensor]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch + 1

    with pytest.raises(BadInputError, match=r"Moving.__iter__ is a generator, which begins with"):
        next(iter(LoaderReader(Moving(Numbers(), 4))))


@pytest.mark.parametrize("make", [lambda: plain(shuffle=True, generator=seeded()), Stateful])
def test_only_the_newest_iterator_gives_batches(make: Callable[[], Any]) -> None:
    seed(1)
    want = [b.tolist() for b in LoaderReader(make())]
    seed(1)
    reader = LoaderReader(make())
    first = iter(reader)
    got = [next(first).tolist()]
    second = iter(reader)
    got.append(next(second).tolist())
    with pytest.raises(BadInputError, match="take batches from the newest iterator only"):
        next(first)
    got += [b.tolist() for b in second]
    assert got == want
    reader.seek(0)
    third = iter(reader)
    next(third)
    reader.seek(0)
    with pytest.raises(BadInputError, match="or has gone elsewhere"):
        next(third)


@pytest.mark.parametrize("generator", [None, 5])
def test_what_workers_draw_is_exact_from_the_end_of_an_epoch(generator: int | None) -> None:
    def make() -> DataLoader[Tensor]:
        own = None if generator is None else torch.Generator().manual_seed(generator)
        return DataLoader(Numbers(noisy=True), 4, shuffle=True, num_workers=2, generator=own)

    want, states = lives(make)
    assert len({noise for _, (samples, _) in want for _, noise in samples}) > COUNT
    position, state, generators = states[5]
    seed(99)
    again = LoaderReader(make())
    RngState().load_state_dict(generators)
    again.check_state(state, position)
    again.load_state(state, position)
    assert rest(again) == want[position:]


class Counting(IterableDataset[Tensor]):
    """Keeps its place in itself, and begins anew where it has ended."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_that_begins_anew_at_its_end_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    for said in (False, True):
        reader: LoaderReader[Any] = LoaderReader(
            torchdata.StatefulDataLoader(Counting(), 4 if said else 2, num_workers=1)
        )
        batches = iter(reader)
        for _ in range(2):
            next(batches)
        again: LoaderReader[Any] = LoaderReader(
            torchdata.StatefulDataLoader(Counting(), 4 if said else 2, num_workers=1)
        )
        again.load_state(reader.state_at(2), 2)
        assert ("is from the end of epoch 0" in caplog.text) == said
