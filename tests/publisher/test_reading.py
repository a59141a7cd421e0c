"""Reading ahead changes neither what comes nor what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from ckpt.errors import CorruptError
from publisher.reading import ahead


@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_same_items_in_order(count: int) -> None:
    assert list(ahead(iter(range(count)), 2)) == list(range(count))


def test_an_error_comes_in_its_place() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise CorruptError("chunk 3")

    items = ahead(broken(), 1)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(CorruptError, match="chunk 3"):
        next(items)


def test_no_more_than_the_depth_waits_and_stopping_early_ends_the_thread() -> None:
    before = set(threading.enumerate())
    made: list[int] = []
    may_go_on = threading.Semaphore(0)

    def counted() -> Iterator[int]:
        for n in range(1000):
            may_go_on.acquire()
            made.append(n)
            yield n

    with closing(ahead(counted(), 2)) as items:
        for _ in range(10):
            may_go_on.release()
        assert next(items) == 0
    assert len(made) <= 5  # one was given, two wait, one waits for room, one was made while closing
    assert set(threading.enumerate()) == before
