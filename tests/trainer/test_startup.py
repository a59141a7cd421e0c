"""The start-up graph. Threads meet at barriers and events with a deadline; nothing sleeps."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ckpt.errors import BadInputError, StorageError
from trainer.startup import Startup

_DEADLINE_S = 20


class Spans:
    """Stands in for a ledger: which spans began and ended, and on which thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.main: dict[str, bool] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.main[name] = threading.current_thread() is threading.main_thread()
        self.seen.append(("begin", name))
        try:
            yield
        finally:
            self.seen.append(("end", name))


def met(barrier: threading.Barrier) -> None:
    barrier.wait(_DEADLINE_S)  # broken, hence an error, if the others don't come


@pytest.fixture
def spans() -> Spans:
    return Spans()


def test_independent_stages_run_at_the_same_time_and_results_are_handed_on(spans: Spans) -> None:
    start, together = Startup(spans), threading.Barrier(3)

    def stage(result: Any, *, main: bool = False) -> Any:
        met(together)
        assert (threading.current_thread() is threading.main_thread()) is main
        return result

    start.stage("built", lambda data, place: (place, data), after=("data", "group"))
    start.stage("group", lambda: stage("rank 0"))
    start.stage("data", lambda: stage([1, 2]))
    start.stage("device", lambda: stage("cuda:0", main=True), main_thread=True, span="device_init")
    results = start.run()
    assert results == {
        "group": "rank 0",
        "data": [1, 2],
        "device": "cuda:0",
        "built": ("rank 0", [1, 2]),
    }
    assert spans.main == {"group": False, "data": False, "device_init": True, "built": False}
    first = spans.seen.index(("begin", "built"))
    assert {("end", "group"), ("end", "data")} <= set(spans.seen[:first])


def test_what_becomes_ready_while_the_main_thread_works_begins_at_once(spans: Spans) -> None:
    start, followed = Startup(spans), threading.Event()
    start.stage("long", lambda: followed.wait(_DEADLINE_S), main_thread=True)
    start.stage("first", lambda: None)
    start.stage("second", lambda _: followed.set(), after=("first",))
    assert start.run()["long"] is True


def test_the_first_error_ends_the_start_and_the_others_are_waited_for(spans: Spans) -> None:
    start, both, failed = Startup(spans), threading.Barrier(2), threading.Event()
    ended: list[str] = []

    def fail() -> None:
        met(both)
        failed.set()
        raise StorageError("/data/run: gone")

    def slow() -> None:
        met(both)
        assert failed.wait(_DEADLINE_S)
        ended.append("slow")

    start.stage("restore", fail)
    start.stage("slow", slow)
    start.stage("never", lambda *_: ended.append("never"), after=("restore", "slow"))
    with pytest.raises(StorageError, match=r"^start-up stage restore: /data/run: gone$"):
        start.run()
    assert ended == ["slow"]
    assert ("begin", "never") not in spans.seen


@pytest.mark.parametrize("threads", [True, False])
def test_other_errors_keep_their_kind_and_name_the_stage(spans: Spans, *, threads: bool) -> None:
    start = Startup(spans, threads=threads)
    start.stage("build", lambda: {}["table"])
    with pytest.raises(KeyError, match="table") as raised:
        start.run()
    assert raised.value.__notes__ == ["in the start-up stage build"]


def test_a_main_thread_stage_that_waits_behind_a_failed_one_is_left_out(spans: Spans) -> None:
    start, failed = Startup(spans), threading.Event()

    def fail() -> None:
        failed.set()
        raise BadInputError("no such folder")

    start.stage("data", fail)
    # Its thread ends the stage only after the event, but before the main thread gets to "next":
    # whichever it is, the start ends with data's error.
    start.stage("device", lambda: failed.wait(_DEADLINE_S), main_thread=True)
    start.stage("next", lambda _: None, after=("device",), main_thread=True)
    with pytest.raises(BadInputError, match="stage data: no such folder"):
        start.run()


def test_an_interrupt_of_the_main_thread_waits_for_nothing(spans: Spans) -> None:
    start, let_go, begun = Startup(spans), threading.Event(), threading.Event()
    after: list[str] = []

    def wait_for_peers() -> None:
        begun.set()
        let_go.wait(_DEADLINE_S)

    def interrupted() -> None:
        assert begun.wait(_DEADLINE_S)
        raise KeyboardInterrupt

    start.stage("group", wait_for_peers)
    start.stage("build", lambda _: after.append("build"), after=("group",))
    start.stage("device", interrupted, main_thread=True)
    with pytest.raises(KeyboardInterrupt):
        start.run()
    thread = next(t for t in threading.enumerate() if t.name == "startup-group")
    let_go.set()
    thread.join(_DEADLINE_S)
    assert not thread.is_alive()
    assert after == []


def test_without_threads_the_order_is_always_the_same(spans: Spans) -> None:
    start, order = Startup(spans, threads=False), []
    for name, after in (("c", ("b",)), ("a", ()), ("b", ("a",)), ("d", ())):
        start.stage(name, lambda *_, name=name: order.append(name), after=after)
    start.run()
    assert order == ["a", "b", "c", "d"]
    assert all(spans.main.values())


def test_mistakes_are_named_before_anything_runs(spans: Spans) -> None:
    start = Startup(spans)
    start.stage("a", lambda: None)
    with pytest.raises(BadInputError, match="'a' is there already"):
        start.stage("a", lambda: None)
    start.stage("b", lambda _: None, after=("dat",))
    with pytest.raises(
        BadInputError, match="'b' comes after 'dat', which isn't a stage; there are a, b"
    ):
        start.run()
    start = Startup(spans)
    start.stage("x", lambda _: None, after=("y",))
    start.stage("y", lambda _: None, after=("z",))
    start.stage("z", lambda _: None, after=("y",))
    with pytest.raises(BadInputError, match="wait for each other: y -> z -> y"):
        start.run()
    assert spans.seen == []


def test_it_needs_no_torch() -> None:
    code = "import sys, trainer.startup, trainer.ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
