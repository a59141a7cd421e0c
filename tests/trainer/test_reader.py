import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ckpt.errors import BadInputError
from trainer.reader import BatchReader


def reader(rank: int = 0, world_size: int = 1, count: int = 103) -> BatchReader[Tensor]:
    return BatchReader(count, 24, lambda index: index, rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 24])
def test_samples_do_not_depend_on_the_world_size(world_size: int) -> None:
    ranks = [reader(r, world_size) for r in range(world_size)]
    for epoch in range(2):
        parts = [list(r) for r in ranks]
        assert [len(p) for p in parts] == [4] * world_size
        for b in range(4):
            together = torch.cat([p[b] for p in parts])
            assert together.tolist() == list(range(24 * b, 24 * b + 24))
        assert {r.position for r in ranks} == {4 * (epoch + 1)}


def test_position_counts_what_was_handed_out() -> None:
    r = reader()
    batches = iter(r)
    assert (r.position, r.epoch) == (0, 0)
    next(batches)
    next(batches)
    assert (r.position, r.epoch) == (2, 0)
    assert len(list(batches)) == 2
    assert (r.position, r.epoch) == (4, 1)


def test_seek_goes_on_in_the_middle_of_an_epoch() -> None:
    whole = list(reader()) + list(reader())
    r = reader()
    r.seek(6)
    assert (r.position, r.epoch) == (6, 1)
    rest = list(r)
    assert [t.tolist() for t in rest] == [t.tolist() for t in whole[6:]]
    assert r.position == 8


@pytest.mark.parametrize(
    ("count", "batch_size", "world_size", "message"),
    [
        (100, 0, 1, "batch_size = 0"),
        (100, 25, 2, "a multiple of the 2 ranks"),
        (10, 25, 1, "more than the 10 samples"),
    ],
)
def test_refuses_sizes_that_cannot_be(
    count: int, batch_size: int, world_size: int, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        BatchReader(count, batch_size, lambda i: i, world_size=world_size)


def test_refuses_a_negative_position() -> None:
    with pytest.raises(BadInputError, match="position -1"):
        reader().seek(-1)


def test_takes_its_part_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert next(iter(BatchReader(8, 4, lambda index: index.tolist()))) == [2, 3]
    whole = BatchReader(8, 4, lambda index: index.tolist(), rank=0, world_size=1)
    assert next(iter(whole)) == [0, 1, 2, 3]


def test_refuses_a_rank_outside_of_the_world() -> None:
    with pytest.raises(BadInputError, match=r"rank 2 is outside \[0, 2\)"):
        BatchReader(8, 4, lambda index: index, rank=2, world_size=2)


def test_event_time_is_the_newest_of_all_batches_before_a_position() -> None:
    times = torch.tensor([5, 3, 9, 1, 2, 4, 99])  # the last sample fills no batch
    r = BatchReader(7, 2, lambda index: index, rank=1, world_size=2, event_times_s=times)
    assert [r.event_time_s(p) for p in range(5)] == [None, 5.0, 9.0, 9.0, 9.0]
    assert reader().event_time_s(3) is None


def test_each_sample_needs_an_event_time() -> None:
    with pytest.raises(
        BadInputError, match=r"event_times_s: \(3,\); give one for each of 4 samples"
    ):
        BatchReader(4, 2, lambda index: index, event_times_s=torch.ones(3))


def test_case_e42_refuses_a_launched_rank_that_has_joined_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each rank would train on all of each batch."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for place in ({}, {"rank": 1}, {"world_size": 2}):
        with pytest.raises(BadInputError) as e:
            BatchReader(8, 4, lambda index: index, **place)
        assert "WORLD_SIZE is 2 and this process is in no process group: call " in str(e.value)
        assert "or pass rank and world_size" in str(e.value)
        assert "\n" not in str(e.value)
    assert BatchReader(8, 4, lambda index: index, rank=1, world_size=2).batch_size == 4
    for said in ("1", "many"):
        monkeypatch.setenv("WORLD_SIZE", said)
        assert BatchReader(8, 4, lambda index: index).batch_size == 4


def test_case_e42_refuses_to_read_for_the_only_rank_once_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that no launcher's environment tells of, such as those of torch.multiprocessing.spawn."""
    early = BatchReader(8, 4, lambda index: index)
    explicit = BatchReader(8, 4, lambda index: index.tolist(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for act in (lambda: early.seek(0), lambda: next(iter(early))):
        with pytest.raises(
            BadInputError, match="was made before the process group of 2 ranks.*make it after"
        ):
            act()
    assert next(iter(explicit)) == [0, 1, 2, 3]


def test_appended_samples_begin_with_the_next_epoch() -> None:
    """Wherever the checkpoint stands, also where data has grown again within one epoch."""
    sizes = (40, 47, 65)
    for first in range(12):
        for second in range(first, 14):
            want, now = [], 0
            for grown, until in zip(sizes, (first, second, 30), strict=True):
                # The oracle: epochs one after another, each with what there was when it began.
                while now < until:
                    if not want or want[-1][1] == want[-1][2] - 1:
                        want.append((grown, 0, grown // 10))
                    else:
                        want.append((want[-1][0], want[-1][1] + 1, want[-1][2]))
                    now += 1
            got: list[list[int]] = []
            data, position, epochs = None, 0, []
            for grown, until in zip(sizes, (first, second, 30), strict=True):
                r = BatchReader(grown, 10, lambda index: index.tolist(), grown="append")
                if data is not None:
                    r.continues(data, position)
                r.seek(position)
                while r.position < until:
                    for batch in r:
                        got.append(batch)
                        epochs.append(r.epoch)
                        if r.position == until:
                            break
                data, position = r.data, r.position
            assert [b[0] // 10 for b in got] == [b for _, b, _ in want], (first, second)
            starts = sum(b == 0 for _, b, _ in want)
            assert r.epoch == starts - (want[-1][1] != want[-1][2] - 1), (first, second)


def test_event_times_of_grown_data_are_those_of_what_was_read() -> None:
    times = torch.arange(40.0)
    r = BatchReader(40, 10, lambda index: index, event_times_s=times, grown="append")
    r.continues({"samples": 20}, 3)  # in the second epoch of two batches
    assert [r.event_time_s(p) for p in range(9)] == [None, 9, 19, 19, 19, 19, 19, 29, 39]


def test_an_identity_tells_other_samples() -> None:
    def of(texts: str) -> BatchReader[Tensor]:
        return BatchReader(len(texts), 2, lambda i: i, grown="append", identity=lambda n: texts[:n])

    saved = of("abcd").data
    assert saved == {"samples": 4, "identity": "abcd"}
    of("abcdef").continues(saved, 1)
    of("abcd").continues(saved, 1)
    with pytest.raises(
        BadInputError, match="4 samples of identity 'abcd' and the reader's have 'abXd'"
    ):
        of("abXdef").continues(saved, 1)
    with pytest.raises(
        BadInputError, match="counts 4 samples and the reader has 2.*; give it the 4$"
    ):
        of("ab").continues(saved, 1)
    text = BatchReader(6, 2, lambda i: i, grown="append", identity="monday")
    with pytest.raises(
        BadInputError, match="pass a function that tells the identity of the first n"
    ):
        text.continues({"samples": 4, "identity": "sunday"}, 1)
    with pytest.raises(BadInputError, match="grown = 'shuffle'"):
        BatchReader(6, 2, lambda i: i, grown="shuffle")  # type: ignore[arg-type]
