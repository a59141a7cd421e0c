"""Reads ahead: what comes next is fetched by a thread while the last is worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items in the same order; up to `depth` of them wait, and one more is being made.

    An error of `items` is raised in its place. Whoever stops early stops the thread as well.
    """
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    stop = threading.Event()

    def fetch() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                made.put((item, None))
                del item  # not to be held while the next is made
                if stop.is_set():
                    return
        except BaseException as e:
            error = e
        made.put((None, error or StopIteration()))

    thread = threading.Thread(target=fetch, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                if isinstance(error, StopIteration):
                    return
                raise error
            assert item is not None
            yield item
            del item
    finally:
        stop.set()
        while thread.is_alive():
            with suppress(queue.Empty):
                made.get(timeout=0.01)  # it may wait for room
        thread.join()
