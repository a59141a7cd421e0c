"""The daemon's loop, with a wait that a test drives: nothing here sleeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from ckpt.errors import BadInputError, NotFoundError, StorageError
from ckpt.storage import MemoryStorage
from ckpt.trust import TrustList
from publisher import keys
from publisher.daemon import Daemon, Pace
from publisher.pointer import Reason
from publisher.policy import Policy, RetentionPolicy
from publisher.publish import Publisher
from publisher.registry import Registry
from tests.faults import FaultyStorage
from tests.publisher.conftest import Bench, FakeClock, make_bench
from tests.publisher.tiny import TinyRun, flip_byte, random_tensors, stamped_tensors


class Script:
    """Each wait of the daemon runs the next step of a script, then time passes; its end stops it."""

    def __init__(self, clock: FakeClock, *steps: Callable[[], object]) -> None:
        self.clock = clock
        self.steps = list(steps)
        self.waits: list[float] = []

    def __call__(self, timeout_s: float) -> bool:
        if timeout_s == 0.0 and self.waits:
            return False  # only asks whether to stop
        self.waits.append(timeout_s)
        self.clock.now_s += timeout_s
        if not self.steps:
            return True
        self.steps.pop(0)()
        return False


def run_daemon(
    bench: Bench, *steps: Callable[[], object], opens: Callable[[], Publisher] | None = None
) -> list[float]:
    """Run until the script ends; the waits that the daemon asked for."""
    script = Script(bench.clock, *steps)
    Daemon(
        opens or bench.publisher,
        script,
        pace=Pace(interval_s=2.0, max_backoff_s=20.0),
        clock=bench.clock,
        sink=bench.sink,
    ).run()
    return script.waits


def nothing() -> None: ...


def live_steps(bench: Bench) -> list[int]:
    return [m.source.step for m in bench.registry.history()]


def test_publishes_commits_as_they_appear(bench: Bench) -> None:
    waits = run_daemon(
        bench,
        nothing,
        lambda: bench.run.commit(1, random_tensors(1)),
        nothing,
        lambda: bench.run.commit(2, random_tensors(2)),
    )
    assert live_steps(bench) == [1, 2]
    assert waits == [0.0, 2.0, 2.0, 2.0, 2.0]
    assert [e["step"] for e in bench.sink.named("version_live")] == [1, 2]


def test_started_before_the_root_exists(trust: TrustList) -> None:
    storage = MemoryStorage()
    run = TinyRun(storage, trust)
    bench = Bench(run, Registry(storage))

    def opens() -> Publisher:
        if not any(True for _ in storage.list("RUN.json")):
            raise NotFoundError("no such folder")
        return bench.publisher()

    run_daemon(
        bench,
        nothing,
        nothing,
        run.begin,
        lambda: run.commit(1, random_tensors()),
        opens=opens,
    )
    assert live_steps(bench) == [1]
    assert len(bench.sink.named("waiting_for_root")) == 1


def test_a_root_that_cannot_be_one_ends_it(bench: Bench) -> None:
    def opens() -> Publisher:
        raise BadInputError("is a file")

    with pytest.raises(BadInputError, match="is a file"):
        run_daemon(bench, nothing, opens=opens)


def test_behind_takes_the_newest_and_says_what_it_skips(bench: Bench) -> None:
    for step in (1, 2, 3, 4):
        bench.run.commit(step, random_tensors(step))
    run_daemon(bench, nothing, nothing)
    assert live_steps(bench) == [4]
    assert bench.sink.named("commits_skipped") == [{"count": 3, "before_step": 4}]


def test_a_damaged_version_that_never_went_live_is_built_again(bench: Bench) -> None:
    """Sealed, then killed, then damaged: the next one neither fails for ever nor skips the commit."""
    bench.run.commit(1, random_tensors(1))
    faulty = FaultyStorage(bench.run.root)
    faulty.on("create", "*live.json").fail(StorageError("killed"))
    with pytest.raises(StorageError):
        Bench(TinyRun(faulty, bench.run.trust), Registry(faulty)).publish(1)
    bench.run.root.put(bench.registry.key(1, keys.TABLES), b"cut")
    run_daemon(bench, nothing)
    assert [m.to_version for m in bench.registry.history()] == [2]
    assert bench.sink.named("publish_failed") == []


def test_d53_a_rollback_is_left_alone(bench: Bench) -> None:
    for step in (1, 2, 3):
        bench.run.commit(step, stamped_tensors(step))
        bench.publish(step)
    run_daemon(
        bench,
        lambda: bench.registry.rollback(None, Reason("op", "bad")),
        nothing,
        nothing,
        lambda: bench.run.commit(4, stamped_tensors(4)),
        nothing,
    )
    assert live_steps(bench) == [1, 2, 3, 2, 4]


def test_d54_a_truncated_commit_is_quarantined_and_the_next_proceeds(bench: Bench) -> None:
    run = bench.run

    def truncated() -> None:
        run.commit(2, random_tensors(2))
        run.root.put(run.data_key(2), run.root.read(run.data_key(2))[:-100])

    waits = run_daemon(
        bench,
        lambda: run.commit(1, random_tensors(1)),
        truncated,
        *[nothing] * 30,
        lambda: run.commit(3, random_tensors(3)),
        nothing,
    )
    assert live_steps(bench) == [1, 3]
    told = bench.sink.named("commit_refused")
    assert [(e["step"], e["gate"], e["attempt"]) for e in told] == [
        (2, "digests", n) for n in (1, 2, 3)
    ]
    assert [r.attempt for r in bench.registry.refusals()] == [1, 2, 3]
    assert max(waits) == 2.0  # bounded attempts, no busy loop


def test_refusals_are_spaced_out(bench: Bench) -> None:
    tensors = random_tensors()
    tensors["model.over.bias"][0] = float("nan")
    bench.run.commit(1, tensors)
    times: list[float] = []
    seen = 0

    def note() -> None:
        nonlocal seen
        if len(bench.registry.refusals()) > seen:
            seen = len(bench.registry.refusals())
            times.append(bench.clock.now_s)

    run_daemon(bench, *[note] * 20)
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps == [4.0, 8.0]


def test_the_next_older_commit_is_tried_when_the_newest_is_refused(bench: Bench) -> None:
    bench.run.commit(1, random_tensors(1))
    bench.run.commit(2, random_tensors(2))
    flip_byte(bench.run.root, bench.run.data_key(2), 8)
    run_daemon(bench, nothing, nothing)
    assert live_steps(bench) == [1]
    assert {r.source.step for r in bench.registry.refusals()} == {2}


def test_a_restart_does_not_forget_the_attempts(bench: Bench) -> None:
    bench.run.commit(1, random_tensors(1))
    flip_byte(bench.run.root, bench.run.data_key(1), 8)
    for _ in range(5):
        run_daemon(bench, nothing)
    assert len(bench.registry.refusals()) == 3


def test_nothing_new_costs_no_reading(trust: TrustList) -> None:
    faulty = FaultyStorage(MemoryStorage())
    bench = make_bench(faulty, trust)
    for step in (1, 2, 3):
        bench.run.commit(step, random_tensors(step))
    before: list[int] = []
    run_daemon(bench, *[lambda: before.append(len(faulty.calls))] * 4)
    assert [op for op, _ in faulty.calls[before[1] :]] == ["list", "list"] * 3
    assert live_steps(bench) == [3]


def test_storage_failures_are_retried_with_growing_waits(trust: TrustList) -> None:
    faulty = FaultyStorage(MemoryStorage())
    bench = make_bench(faulty, trust)
    bench.run.commit(1, random_tensors())
    faulty.on("writer", "*tables*.bin").times(5).fail(StorageError("503"))
    waits = run_daemon(bench, *[nothing] * 7)
    assert waits == [0.0, 4.0, 8.0, 16.0, 20.0, 20.0, 2.0, 2.0]
    assert live_steps(bench) == [1]
    assert bench.registry.refusals() == []
    assert [e["failures"] for e in bench.sink.named("publish_failed")] == [1, 2, 3, 4, 5]


def test_a_damaged_pointer_does_not_end_it(bench: Bench) -> None:
    for step in (1, 2):
        bench.run.commit(step, random_tensors(step))
        bench.publish(step)
    key = "serving/" + keys.LIVE
    good = bench.run.root.read(key)
    run_daemon(
        bench,
        lambda: bench.run.root.put(key, good[:50]),
        nothing,
        lambda: bench.run.root.put(key, good),
        lambda: bench.run.commit(3, random_tensors(3)),
    )
    assert live_steps(bench) == [1, 2, 3]
    assert "rollback ROOT --to N" in bench.sink.named("publish_failed")[0]["reason"]


def test_a_record_that_cannot_be_read_is_told_once(bench: Bench) -> None:
    from ckpt import layout

    bench.run.commit(1, random_tensors(1))
    bench.run.root.put(layout.commit_key(1, 2), b"{")
    run_daemon(bench, nothing, nothing, nothing)
    assert len(bench.sink.named("commit_corrupt")) == 1
    assert live_steps(bench) == [1]


def test_retention_follows_each_version(bench: Bench) -> None:
    bench.policy = Policy(retention=RetentionPolicy(keep=1))
    run_daemon(
        bench,
        *[
            lambda step=step: bench.run.commit(step, random_tensors(step))  # type: ignore[misc]
            for step in (1, 2, 3, 4)
        ],
    )
    assert bench.registry.numbers() == [3, 4]
    assert [e["versions"] for e in bench.sink.named("versions_deleted")] == [[1], [2]]


def test_a_failure_to_delete_stops_nobody(trust: TrustList) -> None:
    faulty = FaultyStorage(MemoryStorage())
    bench = make_bench(faulty, trust)
    bench.policy = Policy(retention=RetentionPolicy(keep=1))
    faulty.on("delete", "serving/versions/*").fail(StorageError("403"))
    run_daemon(
        bench,
        *[
            lambda step=step: bench.run.commit(step, random_tensors(step))  # type: ignore[misc]
            for step in (1, 2, 3, 4)
        ],
    )
    assert len(bench.sink.named("deleting_failed")) == 1
    assert bench.sink.named("publish_failed") == []
    assert bench.registry.numbers() == [3, 4]


def test_freshness_is_told_when_a_version_goes_live(bench: Bench) -> None:
    annotations = {"serving_description": "d1", "event_time_s": "990.5"}
    bench.run.commit(1, random_tensors(1), annotations=annotations)
    run_daemon(bench, nothing)
    (told,) = bench.sink.named("version_live")
    # Committed at 11 and trained up to 990.5, by the clock that says 1000 now.
    assert (told["commit_to_live_s"], told["event_to_live_s"]) == (989.0, 9.5)


def test_stops_between_two_candidates(bench: Bench) -> None:
    for step in (1, 2):
        bench.run.commit(step, random_tensors(step))
    flip_byte(bench.run.root, bench.run.data_key(2), 8)
    asked: list[float] = []

    def wait(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return len(asked) > 1  # told to stop while step 2 was being tried

    Daemon(bench.publisher, wait, clock=bench.clock, sink=bench.sink).run()
    assert live_steps(bench) == []
    assert torch.tensor(asked[:2]).tolist() == [0.0, 0.0]
