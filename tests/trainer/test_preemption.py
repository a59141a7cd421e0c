"""Asked to end: all ranks stop at one place and save; nothing hangs, and late is said aloud."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.catalog import Catalog
from ckpt.coordinator import Coordinator, revive
from ckpt.errors import BadInputError, ConflictError
from ckpt.storage import LocalStorage
from ckpt.verify import verify_commit
from tests import warm
from trainer import Session
from trainer.ett import read_report
from trainer.preemption import (
    ENDED_BY_SIGTERM,
    PREEMPTED,
    PREEMPTED_LATE,
    PreemptedError,
    Preemption,
)


def lives(folder: Path, scenario: str, repeats: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.trainer.preempt_ranks", folder, scenario, str(repeats)]
    done = warm.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.distributed
def test_case_d45_one_rank_is_told_and_all_stop_at_one_step(tmp_path: Path) -> None:
    found = lives(tmp_path, "training", 20)
    assert [f["codes"] for f in found] == [[PREEMPTED, PREEMPTED]] * 20
    # What is committed is a step that both ranks saved: a commit needs both.
    assert [len(f["steps"]) for f in found] == [1] * 20
    assert all(f["steps"][0] >= 4 for f in found)


@pytest.mark.distributed
def test_case_d46_during_an_evaluation_that_polls(tmp_path: Path) -> None:
    assert lives(tmp_path, "evaluating", 1) == [{"codes": [PREEMPTED, PREEMPTED], "steps": [3]}]


@pytest.mark.distributed
def test_case_d46_a_phase_that_does_not_poll_costs_nothing_that_was_staged(tmp_path: Path) -> None:
    assert lives(tmp_path, "deaf", 1) == [{"codes": [PREEMPTED_LATE, PREEMPTED_LATE], "steps": [4]}]


@pytest.mark.distributed
def test_case_d46_during_a_save(tmp_path: Path) -> None:
    """Saves take long unless hurried, so one is in flight whenever the signal comes."""
    for n, found in enumerate(lives(tmp_path, "saving", 2)):
        assert found["codes"] == [PREEMPTED, PREEMPTED]
        *before, last = found["steps"]
        assert before == list(range(4, last, 4))
        storage = LocalStorage(tmp_path / str(n))
        for info in Catalog(storage).commits():
            assert info.record is not None
            assert verify_commit(storage, info.record, level="full").ok


@pytest.mark.distributed
def test_case_e14_workers_of_a_loader_die_of_the_same_signal(tmp_path: Path) -> None:
    """The whole process group of each rank is told, as SLURM and torchrun tell it."""
    found = lives(tmp_path, "loader", 8)
    assert [f["codes"] for f in found] == [[PREEMPTED, PREEMPTED]] * 8
    assert [len(f["steps"]) for f in found] == [1] * 8
    for n, life in enumerate(found):
        (attempt,) = read_report(tmp_path / str(n)).attempts
        assert attempt.ended == "preempted"
        assert [attempt.last_step] == life["steps"], "the last whole step"


@pytest.mark.distributed
def test_case_e40_ranks_that_are_superseded_end_at_one_step(tmp_path: Path) -> None:
    """Found out at a commit; neither is left in a collective with the other one gone."""
    found = lives(tmp_path, "superseded", 3)
    assert [f["codes"] for f in found] == [[ConflictError.exit_code] * 2] * 3
    for n in range(3):
        first, *_ = read_report(tmp_path / str(n)).attempts
        assert first.ended == "failed"
        assert first.ranks == 2


@pytest.mark.distributed
def test_case_e40_what_one_rank_knows_first_leaves_no_save_of_another_waiting(
    tmp_path: Path,
) -> None:
    """A save that is due before all have agreed where to stop."""
    began_s = time.monotonic()
    found = lives(tmp_path, "known to one", 1)
    assert [f["codes"] for f in found] == [[ConflictError.exit_code] * 2]
    assert time.monotonic() - began_s < 45, "less than stall_limit_s"


@pytest.mark.distributed
@pytest.mark.crash
def test_case_d47_both_ranks_killed_anywhere_in_a_save(tmp_path: Path) -> None:
    *killed, whole = lives(tmp_path, "killed", 11)
    assert [k["codes"] for k in killed] == [[-9, -9]] * 10
    assert whole["codes"] == [0, 0]
    storage = LocalStorage(tmp_path)
    commits = Catalog(storage).commits()
    assert len(commits) == 2, "as many as are to be kept, whatever was left over"
    listed = {f.key for c in commits if c.record for f in c.record.files}
    stored = {o.key for o in storage.list("data/")}
    assert listed <= stored
    assert {k.split("/")[1] for k in stored} == {k.split("/")[1] for k in listed}


@pytest.mark.distributed
def test_a_rank_that_cannot_begin_does_not_leave_the_other_one_waiting(tmp_path: Path) -> None:
    """The other one's collective fails; nothing is trained, and nothing is committed."""
    assert (
        lives(tmp_path, "one stays out", 2)
        == [{"codes": [BadInputError.exit_code, 1], "steps": []}] * 2
    )


@pytest.mark.distributed
@pytest.mark.crash
def test_a_rank_dies_and_the_other_is_told_to_end(tmp_path: Path) -> None:
    """It must not wait for the grace: its collective fails, or the agreement does."""
    (found,) = lives(tmp_path, "dead", 1)
    assert found["codes"][0] == -9
    assert found["codes"][1] in (1, ENDED_BY_SIGTERM)


@pytest.mark.distributed
@pytest.mark.crash
def test_a_save_that_a_dead_rank_was_part_of_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody tells the survivor to end: its collective fails while the save is still being written."""
    (found,) = lives(tmp_path, "orphan", 1)
    assert found["codes"] == [-9, 1]
    assert found["steps"] in ([4], []), "the save of step 8 had no part of the rank that died"


@pytest.mark.distributed
def test_after_an_error_a_save_is_drained_while_every_rank_is_there(tmp_path: Path) -> None:
    (found,) = lives(tmp_path, "raising", 1)
    assert found == {"codes": [BadInputError.exit_code] * 2, "steps": [4, 8]}


@pytest.mark.distributed
def test_a_rank_that_waits_for_one_that_is_failing_hurries_its_part_of_the_save(
    tmp_path: Path,
) -> None:
    """It waits in a collective, and its part is spread over 1,000 s unless somebody hurries it."""
    (found,) = lives(tmp_path, "one raises", 1)
    assert found == {"codes": [BadInputError.exit_code, 1], "steps": [4, 8]}


# -- the agreement, with threads for ranks ------------------------------------------------------


class Rank:
    """A rank whose signals never come: it is asked by `when`."""

    def __init__(self, rank: int, store: Any, world_size: int = 2, **options: Any) -> None:
        self.ended: list[int] = []
        self.gone = threading.Event()
        self.asks = False
        self.flushed: list[float] = []
        self.preemption = Preemption(
            Coordinator(rank, world_size, store, "t/"),
            options.pop("grace_s", 60.0),
            lambda timeout_s: self.flushed.append(timeout_s) is None,
            when=lambda: self.asks,
            signals=options.pop("signals", ()),
            end=self._end,
            **options,
        )

    def _end(self, code: int) -> None:
        self.ended.append(code)
        self.gone.set()


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def test_two_ranks_far_apart_stop_at_the_same_tick(store: Any) -> None:
    """Nothing holds these ranks together but the agreement: one is many ticks ahead."""
    ranks = [Rank(0, store), Rank(1, store)]
    for _ in range(1000):
        assert not ranks[0].preemption.tick()
    ranks[1].asks = True
    stopped: dict[int, int] = {}

    def run(n: int, at: int) -> None:
        while not ranks[n].preemption.tick():
            at += 1
        stopped[n] = at + 1

    threads = [threading.Thread(target=run, args=(n, at)) for n, at in ((0, 1000), (1, 0))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert stopped[0] == stopped[1] > 1000
    assert [r.preemption.ask.rank for r in ranks if r.preemption.ask] == [1, 1]
    for r in ranks:
        r.preemption.saved()
        r.preemption.close()
        assert r.ended == r.flushed == []


def test_a_rank_that_is_gone_ends_the_others_at_once(store: Any) -> None:
    rank = Rank(0, store, agree_s=0.01)
    rank.asks = True
    assert rank.gone.wait(60)
    assert rank.ended == [ENDED_BY_SIGTERM] == [143]
    rank.preemption.close()


def test_a_rank_that_ends_does_not_wait_for_one_that_is_gone(store: Any) -> None:
    """A crash elsewhere ends this rank's training; the launcher's SIGTERM must not keep it."""
    rank = Rank(0, store, agree_s=3600.0)
    rank.asks = True
    assert store.get("t/preempt-asked/out")  # the agreement has begun
    rank.preemption.close()
    assert rank.ended == []


def test_the_training_threads_waits_for_an_agreement_are_told(store: Any) -> None:
    entered, left = threading.Event(), threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        entered.set()
        yield
        left.set()

    rank = Rank(0, store, agree_s=3600.0, waiting=waiting)

    def train() -> None:
        while not entered.is_set():
            rank.preemption.tick()

    trainer = threading.Thread(target=train)
    trainer.start()
    rank.asks = True
    assert entered.wait(60)
    assert not left.is_set()
    rank.preemption.close()
    trainer.join(60)
    assert left.is_set()


PATIENT: Any = {"answer_s": 3600.0, "agree_s": 3600.0}


def test_ranks_are_called_by_name_after_an_error(store: Any) -> None:
    """The second one fails; the first, in a collective, answers, and hurries what it has pending."""
    ranks = [Rank(0, store, **PATIENT), Rank(1, store, **PATIENT)]
    ranks[1].preemption.failing()
    assert ranks[1].preemption.all_here()
    ranks[0].asks = True  # too late to be asked
    assert ranks[0].preemption.all_here()
    assert not ranks[0].preemption.tick()
    for rank in ranks:
        rank.preemption.close()
        assert rank.ended == []
    assert len(ranks[0].flushed) == 1
    assert ranks[1].flushed == [], "its main thread does that itself"


@pytest.mark.parametrize("mine", [0, 1])
def test_a_silent_rank_is_missed_after_an_error(store: Any, mine: int) -> None:
    rank = Rank(mine, store, agree_s=3600.0, answer_s=0.01)
    rank.asks = True
    assert store.get("t/preempt-asked/out")  # an agreement that the other one never joins
    rank.preemption.failing()
    assert not rank.preemption.all_here()
    rank.preemption.close()
    assert rank.ended == []


def test_a_rank_with_nothing_pending_does_not_wait_for_the_roll_call(store: Any) -> None:
    rank = Rank(0, store, **PATIENT)
    rank.preemption.failing()
    assert json.loads(store.get("t/preempt-asked/out")) == {"rank": 0, "why": "error"}
    rank.preemption.close()
    assert not rank.preemption.all_here()
    assert rank.ended == rank.flushed == []


def test_an_error_after_the_ranks_have_agreed_calls_the_roll_anew(store: Any) -> None:
    """The other one proposed, and then its host vanished."""
    rank = Rank(0, store, agree_s=3600.0, answer_s=0.01)
    Coordinator(1, 2, store, "t/").post("preempt-stop", {"tick": 7})
    rank.asks = True
    assert json.loads(store.get("t/preempt-stop/out")) == {"tick": 7}
    rank.preemption.failing()
    assert not rank.preemption.all_here()
    rank.preemption.close()
    assert rank.ended == []


def test_a_failing_rank_that_does_not_end_in_time_ends_as_a_failure(store: Any) -> None:
    rank = Rank(0, store, grace_s=0.01, answer_s=0.01, signals=(signal.SIGTERM,))
    rank.preemption.failing()
    assert not rank.preemption.all_here()
    os.kill(os.getpid(), signal.SIGTERM)
    assert rank.gone.wait(60)
    assert rank.ended == [ENDED_BY_SIGTERM]
    rank.preemption.close()


def test_a_rank_in_a_collective_ends_at_sigterm_when_another_one_is_failing(store: Any) -> None:
    failing = Rank(1, store, **PATIENT)
    waiting = Rank(0, store, signals=(signal.SIGTERM,), **PATIENT)
    failing.preemption.failing()
    assert failing.preemption.all_here()
    os.kill(os.getpid(), signal.SIGTERM)
    assert waiting.gone.wait(60)
    assert waiting.ended == [ENDED_BY_SIGTERM]
    for rank in (waiting, failing):
        rank.preemption.close()
    assert failing.ended == []


def test_a_rank_that_has_finished_is_not_missed(store: Any) -> None:
    said = threading.Event()
    rank = Rank(1, store, agree_s=0.01, say=lambda event, **_: said.set())
    rank.preemption.finishing()
    rank.asks = True
    assert said.wait(60), "that the ranks could not agree"
    assert not rank.preemption.tick()
    rank.preemption.close()
    assert rank.ended == []


def test_the_end_of_the_grace_flushes_and_ends() -> None:
    said: list[str] = []
    rank = Rank(0, None, 1, grace_s=0.01, say=lambda event, **_: said.append(event))
    rank.asks = True
    assert rank.gone.wait(60)
    assert rank.ended == [PREEMPTED_LATE]
    assert len(rank.flushed) == 1
    assert said == ["preempt_late"]
    rank.preemption.close()


def test_a_callback_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    asked = threading.Event()

    def fail() -> bool:
        asked.set()
        raise OSError("no route to the metadata service")

    p = Preemption(Coordinator(0, 1, None, ""), 1.0, lambda timeout_s: True, when=fail, signals=())
    assert asked.wait(60)
    p.close()
    assert caplog.text.count("it isn't asked any more") == 1
    assert not p.tick()


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """SIGALRM as a profiler of the trainer's own handles it: all that came."""
    came: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_of_others_do_not_wake_the_watcher_up(alarms: list[int]) -> None:
    looks: list[None] = []
    p = Preemption(
        *(Coordinator(0, 1, None, ""), 1.0, lambda timeout_s: True),
        when=lambda: bool(looks.append(None)),  # type: ignore[func-returns-value]
    )
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    while len(alarms) < 300:
        signal.pause()
    p.close()
    assert len(looks) < 100


def test_a_flood_of_signals_while_the_watcher_is_busy_does_no_harm(alarms: list[int]) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def slow() -> bool:
        asked.set()
        return not goes_on.wait(60)

    p = Preemption(Coordinator(0, 1, None, ""), 1.0, lambda timeout_s: True, when=slow)
    assert asked.wait(60)
    for _ in range(1 << 17):
        signal.raise_signal(signal.SIGALRM)
    p.failing()
    goes_on.set()
    p.close()


# -- a loop that raises after the request -------------------------------------------------------


class Loops:
    """Two ranks that have been asked to end, after so many steps, and have agreed on a tick."""

    def __init__(self, store: Any, *steps: int, **options: Any) -> None:
        options = {"agree_s": 60.0, "together_s": 60.0, "grace_s": 240.0, **options}
        self.ranks = [Rank(r, store, **options) for r in (0, 1)]
        for rank, count in zip(self.ranks, steps, strict=True):
            for step in range(1, count + 1):
                assert not rank.preemption.begins()
                assert not rank.preemption.tick(step, free=True)
        self.ranks[0].asks = True
        assert json.loads(store.get("t/preempt-stop/out")) == {"tick": max(steps) + 1}
        self._pool = ThreadPoolExecutor(2)

    def both(
        self, first: Callable[[Preemption], bool], second: Callable[[Preemption], bool]
    ) -> Any:
        acts = zip((first, second), self.ranks, strict=True)
        futures = [self._pool.submit(act, rank.preemption) for act, rank in acts]
        return [f.result(60) for f in futures]

    def close(self) -> None:
        for rank in self.ranks:
            rank.preemption.close()
            assert rank.ended == []
        self._pool.shutdown()


@pytest.fixture
def loops(store: Any) -> Iterator[Callable[..., Loops]]:
    made: list[Loops] = []

    def make(*steps: int, **options: Any) -> Loops:
        made.append(Loops(store, *steps, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def begins(p: Preemption) -> bool:
    return p.begins()


def polls(p: Preemption) -> bool:
    return p.tick()


def ends_step(step: int) -> Callable[[Preemption], bool]:
    """And asks for the next batch, if it goes on."""
    return lambda p: p.tick(step, free=True) or p.begins()


def raises(p: Preemption) -> bool:
    return p.stops_here(whole=True)


def raises_torn(p: Preemption) -> bool:
    return p.stops_here(whole=False)


def nothing(p: Preemption) -> bool:
    return False


def test_case_e14_loops_that_raise_after_one_step_stop_there(loops: Any) -> None:
    assert loops(3, 3).both(raises, raises) == [True, True]


@pytest.mark.parametrize("goes_on", [begins, polls])
def test_case_e14_a_rank_whose_loop_goes_on_stops_where_the_other_one_raised(
    loops: Any, goes_on: Any
) -> None:
    """It has its batch and waits for the other one, or is in an evaluation and stops there."""
    assert loops(3, 3).both(raises, goes_on) == [True, True]


def test_case_e14_a_rank_that_is_a_step_behind_goes_on_to_it(loops: Any) -> None:
    pair = loops(3, 2)
    assert not pair.ranks[1].preemption.begins(), "its next step isn't the last one"
    assert pair.both(raises, ends_step(3)) == [True, True]


def test_case_e14_ranks_that_have_their_batches_begin_the_last_step_together(loops: Any) -> None:
    pair = loops(3, 3)
    assert pair.both(begins, begins) == [False, False]
    assert pair.both(ends_step(4), ends_step(4)) == [True, True]


def test_case_e14_a_rank_that_asks_nobody_for_its_batches_is_not_waited_for(store: Any) -> None:
    """A pipeline, or a reader of its own: `begins` isn't called, or comes too late to tell."""
    ranks = [Rank(r, store, agree_s=60.0, together_s=60.0, grace_s=240.0) for r in (0, 1)]
    for rank in ranks:
        assert not rank.preemption.tick(1, free=rank is ranks[0])
    ranks[0].asks = True
    assert store.get("t/preempt-stop/out")
    assert not ranks[0].preemption.begins()
    for rank in ranks:
        assert rank.preemption.tick(2, free=True)
        rank.preemption.close()
        assert rank.ended == []


def test_case_e14_a_slow_rank_is_waited_for_a_moment_only(loops: Any) -> None:
    pair = loops(3, 3, together_s=0.01)
    assert pair.both(begins, nothing) == [False, False]


def test_case_e14_a_rank_in_the_middle_of_a_step_cannot_stop_there(store: Any) -> None:
    """It is in a collective with the one that raised: nothing that both have is whole."""
    ranks = [Rank(r, store, agree_s=60.0, together_s=60.0, grace_s=240.0) for r in (0, 1)]
    for rank in ranks:
        assert not rank.preemption.tick(1, free=True)
    assert not ranks[1].preemption.begins(), "nobody was asked yet"
    ranks[0].asks = True
    assert store.get("t/preempt-stop/out")
    assert not ranks[0].preemption.stops_here(whole=True)
    assert not ranks[1].preemption.tick(2, free=True), (
        "the agreement is over; it fails with its peer"
    )
    for rank in ranks:
        rank.preemption.close()
        assert rank.ended == []


@pytest.mark.parametrize(
    ("steps", "acts"),
    [
        ((3, 3), (raises_torn, raises)),
        ((3, 3), (raises_torn, raises_torn)),
        ((3, 4), (raises, begins)),
    ],
)
def test_case_e14_a_state_that_is_torn_or_another_step_is_not_saved(
    loops: Any, steps: Any, acts: Any
) -> None:
    pair = loops(*steps)
    assert pair.both(*acts) == [False, False]
    for rank in pair.ranks:
        rank.preemption.failing()
    assert [rank.preemption.all_here() for rank in pair.ranks] == [True, True]


def test_case_e14_ranks_that_raise_after_different_steps(loops: Any, store: Any) -> None:
    """The one behind is out first, so that nobody takes it for one that could go on."""
    pair = loops(4, 3)
    with ThreadPoolExecutor(1) as pool:
        behind = pool.submit(raises, pair.ranks[1].preemption)
        assert store.get("t/preempt-out/out")
        assert not raises(pair.ranks[0].preemption)
        assert not behind.result(60)


def test_case_e14_a_rank_that_fails_after_all_have_agreed_is_not_waited_for(loops: Any) -> None:
    """It could have gone on to the step where the other one is, and raises before: that one saves alone."""
    pair = loops(4, 3)
    first, second = (rank.preemption for rank in pair.ranks)
    assert raises(first), "the other one has a step to go"
    assert first.left_s > 200
    assert not raises(second)
    second.failing()
    for _ in range(2000):
        if first.left_s < 5:
            break
        threading.Event().wait(0.01)
    assert first.left_s < 5


def test_case_e14_an_error_where_all_stop_is_none_to_agree_about(loops: Any) -> None:
    pair = loops(3, 3)
    assert pair.both(polls, polls) == [True, True]
    assert pair.both(raises, nothing) == [False, False]


def test_case_e14_a_rank_that_is_dead_is_not_waited_for(store: Any) -> None:
    rank = Rank(0, store, agree_s=0.01)
    Coordinator(1, 2, store, "t/").post("preempt-stop", {"tick": 1})
    rank.asks = True
    assert json.loads(store.get("t/preempt-stop/out")) == {"tick": 1}
    assert not rank.preemption.stops_here(whole=True)
    rank.preemption.failing()
    assert not rank.preemption.all_here()
    rank.preemption.close()
    assert rank.ended == [], "it ends by its error"


def test_an_error_that_ends_the_run_stops_all_ranks_at_one_tick(store: Any) -> None:
    """However long it takes them: no grace ends them meanwhile."""
    error = ConflictError("commits: a newer attempt owns this root")
    known: list[ConflictError] = []
    ranks = [
        Rank(r, store, grace_s=0.001, fatal=lambda r=r: known[0] if r and known else None)
        for r in (0, 1)
    ]
    for rank in ranks:
        assert not rank.preemption.tick()
    known.append(error)
    assert json.loads(store.get("t/preempt-stop/out")) == {"tick": 2}
    for rank in ranks:
        assert rank.preemption.tick()
        ask = rank.preemption.ask
        assert ask is not None
        assert ask.error is not None
        assert (ask.rank, str(revive(dict(ask.error)))) == (1, str(error))
        assert isinstance(revive(dict(ask.error)), ConflictError)
        assert not rank.preemption.asked_within(0.0)
        rank.preemption.close()
        assert rank.ended == rank.flushed == []


# -- a session ----------------------------------------------------------------------------------


class Reader:
    batch_size = 1

    def __init__(self, on_seek: bool = False) -> None:
        self.position = 0
        self._on_seek = on_seek

    def seek(self, position: int) -> None:
        self.position = position
        if self._on_seek:
            os.kill(os.getpid(), signal.SIGTERM)

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position


class Told(torch.nn.Linear):
    """A model that is restored in the moment of SIGTERM."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().load_state_dict(*args, **kwargs)


def steps_of(root: Path) -> list[int]:
    return [c.ref.step for c in Catalog(LocalStorage(root)).commits()]


def wait_until_told(session: Session[Any]) -> None:
    while True:  # each poll is a place to stop; without the signal this never ends
        session.poll()


def test_case_d46_told_while_it_restores_or_before_the_first_step(tmp_path: Path) -> None:
    before, before_fd = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before_fd)
    model = torch.nn.Linear(2, 2)
    with Session(str(tmp_path), {"model": model}, Reader()) as session:
        next(session.batches())
        session.step()
    for state, reader in (({"model": Told(2, 2)}, Reader()), ({"model": model}, Reader(True))):
        with (
            pytest.raises(
                PreemptedError, match=r"\(SIGTERM\): stopped after step 1, which is com"
            ) as e,
            Session(str(tmp_path), state, reader) as session,
        ):
            wait_until_told(session)
        assert e.value.exit_code == PREEMPTED == 75
        assert steps_of(tmp_path) == [1]
        assert signal.getsignal(signal.SIGTERM) is before
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    assert descriptor == before_fd


def test_a_callback_asks_too_and_the_ledger_says_so(tmp_path: Path) -> None:
    asked = threading.Event()
    model = torch.nn.Linear(2, 2)
    session = Session(
        str(tmp_path), {"model": model}, Reader(), save_every=10**9, preempt_when=asked.is_set
    )
    with pytest.raises(PreemptedError, match=r"rank 0 was asked to end \(callback\)"), session:  # noqa: PT012
        for _ in session.batches():
            session.step()
            if session.steps == 3:
                asked.set()
    assert steps_of(tmp_path) == [session.steps]
    events = [
        json.loads(line) for p in tmp_path.glob("events/*/*") for line in p.read_text().splitlines()
    ]
    (preempted,) = [e for e in events if e["event"] == "preempted"]
    assert (preempted["asked"], preempted["why"], preempted["step"]) == (
        0,
        "callback",
        session.steps,
    )
    assert read_report(tmp_path).ett_percent > 0


def test_without_a_grace_signals_are_left_alone(tmp_path: Path) -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Session(str(tmp_path), {"m": torch.nn.Linear(1, 1)}, Reader(), grace_s=None):
            assert signal.getsignal(signal.SIGTERM) is mine
        with Session(str(tmp_path), {"m": torch.nn.Linear(1, 1)}, Reader()):
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(BadInputError, match="grace_s = 0: give seconds above 0, or None"):
        Session(str(tmp_path), {}, Reader(), grace_s=0)


def test_a_handler_that_was_there_is_called_too(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(PreemptedError), Session(str(tmp_path), {}, Reader()) as session:  # noqa: PT012
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until_told(session)
        assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("error", [SystemExit, TimeoutError])
def test_a_handler_that_was_there_and_ends_the_process_does_not_prevent_the_save(
    tmp_path: Path, ending: bool, error: type[BaseException]
) -> None:
    """Told in training, all stop at a step; told while the session ends, the handler's exit comes then."""

    def end(*_: object) -> None:
        raise error(15)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with (  # noqa: PT012
            pytest.raises(error if ending else PreemptedError),
            Session(str(tmp_path), {}, Reader(), save_every=1000) as session,
        ):
            next(session.batches())
            session.step()
            os.kill(os.getpid(), signal.SIGTERM)
            if not ending:
                wait_until_told(session)
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    newest = Catalog(LocalStorage(tmp_path)).latest()
    assert newest is not None
    assert newest.ref.step == 1
