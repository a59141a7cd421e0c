"""E14: errors that come after a request to end. What is whole is saved; what is torn never is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt import Checkpointer
from ckpt.catalog import Catalog
from ckpt.errors import BadInputError, ConflictError
from ckpt.restore import CheckpointReader
from ckpt.storage import LocalStorage, MemoryStorage
from trainer import Session
from trainer.ett import read_report
from trainer.last_step import LastStep
from trainer.ledger import read_ledger
from trainer.preemption import PreemptedError
from trainer.signals import EndSignals

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def told() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Reader:
    """Batches of one number. `fails` is asked before each; what it returns is raised."""

    batch_size = 1

    def __init__(self, fails: Callable[[int], Exception | None] = lambda position: None) -> None:
        self.position = 0
        self.sought: list[int] = []
        self._fails = fails

    def seek(self, position: int) -> None:
        self.sought.append(position)
        self.position = position

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1  # before the batch is there: a failed one must not be counted
            if (error := self._fails(self.position)) is not None:
                raise error
            yield torch.full((1, 2), float(self.position))


class Loop:
    """A plain loop over a model with dropout, in which a test may do something at some point."""

    def __init__(self, root: Path, reader: Reader | None = None) -> None:
        torch.manual_seed(1)
        self.root = root
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.reader = reader or Reader()
        self.seen: list[float] = []
        self.at: dict[str, Callable[[], object]] = {}
        state = {"model": self.model, "optimizer": self.optimizer}
        self.session = Session(str(root), state, self.reader, save_every=1000)

    def do(self, point: str) -> None:
        self.at.get(f"{point} {self.session.steps + 1}", lambda: None)()

    def run(self, until: int = 100) -> None:
        with self.session as session:
            for batch in session.batches():
                self.do("batch")
                self.seen.append(batch[0, 0].item())
                self.optimizer.zero_grad()
                loss = self.model(batch).square().sum()
                self.do("forward")
                loss.backward()
                self.do("backward")
                self.optimizer.step()
                self.do("optimizer")
                session.step()
                self.do("step")
                if session.steps >= until:
                    break

    def check_saved(self, step: int) -> None:
        """The commit is what a loop leaves that is stopped in peace after this step, bit for bit."""
        straight = Loop(self.root.with_name("straight"))
        straight.run(step)
        records = []
        for root in (self.root, straight.root):
            info = Catalog(LocalStorage(root)).latest()
            assert info is not None
            assert info.record is not None
            assert info.ref.step == step
            records.append(CheckpointReader(LocalStorage(root), info.record))
        mine, theirs = records
        assert repr(mine.values()) == repr(theirs.values())
        assert repr(mine.per_rank_values(0)) == repr(theirs.per_rank_values(0))
        assert set(mine.tensors) == set(theirs.tensors)
        for name in mine.tensors:
            assert torch.equal(mine.read(name), theirs.read(name)), name
        assert self.seen[:step] == straight.seen


def commits(root: Path) -> list[int]:
    return [c.ref.step for c in Catalog(LocalStorage(root)).commits()]


def fail(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        told()
        raise error

    return act


@pytest.mark.parametrize("error", [RuntimeError("mine"), SystemExit(3), BadInputError("mine")])
def test_case_e14_an_error_between_two_steps_saves_the_last_one(
    tmp_path: Path, error: BaseException
) -> None:
    loop = Loop(tmp_path / "run")
    loop.at["step 6"] = fail(error)  # after session.step() has counted step 5
    with pytest.raises(PreemptedError, match="stopped after step 5, which is committed") as e:
        loop.run()
    assert e.value.__cause__ is error
    assert e.value.exit_code == 75
    loop.check_saved(5)
    events = read_ledger(loop.root / "events/000001/r00000.jsonl")
    (closing,) = [x for x in events if x["event"] == "closing"]
    assert closing["error"].startswith(type(error).__name__)
    (preempted,) = [x for x in events if x["event"] == "preempted"]
    assert (preempted["step"], preempted["position"], preempted["why"]) == (5, 5, "SIGTERM")
    assert read_report(loop.root).attempts[0].ended == "preempted"


@pytest.mark.parametrize("point", ["batch", "forward", "backward", "optimizer"])
def test_case_e14_a_step_that_has_begun_is_not_saved(tmp_path: Path, point: str) -> None:
    """The generators, buffers or parameters are those of no step any more."""
    loop = Loop(tmp_path / "run")
    loop.at[f"{point} 6"] = fail(RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="mine"):
        loop.run()
    assert commits(loop.root) == []
    assert read_report(loop.root).attempts[0].ended == "failed"


def test_case_e14_an_interrupt_saves_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.at["step 6"] = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert commits(loop.root) == []


def test_an_error_without_a_request_saves_nothing(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")

    def act() -> None:
        raise RuntimeError("mine")

    loop.at["step 6"] = act
    with pytest.raises(RuntimeError, match="mine"):
        loop.run()
    assert commits(loop.root) == []


def test_case_e14_the_request_may_come_right_after_the_error(tmp_path: Path) -> None:
    """They have one cause, and reach the process in either order."""
    loop = Loop(tmp_path / "run")

    def act() -> None:
        threading.Timer(0.05, told).start()
        raise RuntimeError("mine")

    loop.at["step 6"] = act
    with pytest.raises(PreemptedError, match="stopped after step 5"):
        loop.run()
    loop.check_saved(5)


def test_case_e14_an_error_of_the_session_itself(tmp_path: Path) -> None:
    """A step that isn't counted has changed the state all the same: here the model, by hand."""
    loop = Loop(tmp_path / "run")

    def act() -> None:
        with torch.no_grad():
            loop.model[0].weight.add_(1.0)
        told()
        loop.session.step()

    loop.at["step 6"] = act
    with pytest.raises(BadInputError, match="step 6 trained on no batch"):
        loop.run()
    assert commits(loop.root) == []


def test_case_e14_a_reader_that_fails_once_is_iterated_anew(tmp_path: Path) -> None:
    """And training goes on to the stop, without missing a batch."""
    errors = [RuntimeError("DataLoader worker is killed"), ConnectionResetError("by peer")]

    def fails(position: int) -> Exception | None:
        if position == 6 and errors:
            told()
            return errors.pop()
        return None

    loop = Loop(tmp_path / "run", Reader(fails))
    with pytest.raises(PreemptedError) as e:
        loop.run()
    assert e.value.__cause__ is None
    assert loop.reader.sought == [0, 5, 5]
    assert loop.session.steps >= 6
    loop.check_saved(loop.session.steps)


def test_case_e14_a_reader_that_fails_for_good(tmp_path: Path) -> None:
    def fails(position: int) -> Exception | None:
        if position == 6:
            told()
            return RuntimeError("no such file")
        return None

    loop = Loop(tmp_path / "run", Reader(fails))
    with pytest.raises(PreemptedError, match="after step 5, which is committed") as e:
        loop.run()
    assert str(e.value.__cause__) == "no such file"
    assert loop.reader.sought == [0, 5, 5]
    loop.check_saved(5)


def test_a_reader_that_fails_unasked_is_not_iterated_again(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run", Reader(lambda p: RuntimeError("no") if p == 6 else None))
    with pytest.raises(RuntimeError, match="^no$"):
        loop.run()
    assert loop.reader.sought == [0]
    assert commits(loop.root) == []


def test_case_e14_a_workers_end_is_told_after_the_step(tmp_path: Path) -> None:
    """The loader's handler of SIGCHLD raises wherever training is; once asked to end, only between steps."""
    ended: list[int] = []

    def of_a_loader(number: int, frame: Any) -> None:
        ended.append(number)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    def act() -> None:
        told()
        os.kill(os.getpid(), signal.SIGCHLD)

    before = signal.signal(signal.SIGCHLD, of_a_loader)
    try:
        loop = Loop(tmp_path / "run")
        loop.at["backward 6"] = act
        with pytest.raises(PreemptedError):
            loop.run()
        assert signal.getsignal(signal.SIGCHLD) is of_a_loader
        assert len(ended) == 1
        loop.check_saved(loop.session.steps)
        with pytest.raises(RuntimeError, match="pid 7"):  # a handler's own business again
            os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("how", ["Terminated", "Killed"])
def test_case_e14_a_worker_may_be_ended_before_the_trainer_is_told(
    tmp_path: Path, how: str
) -> None:
    """By the same signal: then its error waits for the step's end. By another one: it is raised at once."""
    stack: list[str] = []

    def of_a_loader(number: int, frame: Any) -> None:
        raise RuntimeError(f"DataLoader worker (pid 7) is killed by signal: {how}.")

    def begin() -> None:
        stack.append("handler")
        signal.signal(signal.SIGCHLD, of_a_loader)

    def act() -> None:
        try:
            os.kill(os.getpid(), signal.SIGCHLD)
        except RuntimeError:
            stack.append("raised at once")
            raise
        told()

    before = signal.getsignal(signal.SIGCHLD)
    try:
        loop = Loop(tmp_path / "run")
        loop.at = {"step 3": begin, "backward 6": act}
        with pytest.raises(PreemptedError if how == "Terminated" else RuntimeError):
            loop.run()
        assert signal.getsignal(signal.SIGCHLD) is of_a_loader
        if how == "Terminated":
            assert stack == ["handler"]
            loop.check_saved(loop.session.steps)
        else:
            assert stack == ["handler", "raised at once"]
            assert commits(loop.root) == []
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_that_is_ended_by_sigterm_alone_is_told_between_steps(tmp_path: Path) -> None:
    """Nobody asks the trainer to end: it is the reader's error, as without a session."""
    reader = Loading()
    loop = Loop(tmp_path / "run", reader)

    def act() -> None:
        for worker in vars(reader.loading)["_workers"]:
            worker.terminate()
            worker.join()

    loop.at["forward 6"] = act
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            loop.run()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert loop.session.steps == 6
    assert commits(loop.root) == []


class Loading(Reader):
    """Two real workers, which a test ends as SIGTERM to the process group does."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = list(range(self.position + 1, 10_000))
        loader = DataLoader(
            numbers,
            batch_size=1,
            num_workers=2,
            multiprocessing_context="fork",
            generator=torch.Generator(),  # else it would draw from that of training
        )
        self.loading = iter(loader)
        for batch in self.loading:
            self.position += 1
            yield batch.float().reshape(1, 1).repeat(1, 2)

    def end_workers(self) -> None:
        told()
        for worker in vars(self.loading)["_workers"]:
            os.kill(worker.pid, signal.SIGTERM)


@pytest.mark.parametrize("point", ["batch", "forward", "backward", "optimizer", "step"])
def test_case_e14_workers_of_a_loader_end_anywhere_in_a_step(tmp_path: Path, point: str) -> None:
    before = signal.getsignal(signal.SIGCHLD)
    reader = Loading()
    loop = Loop(tmp_path / "run", reader)
    loop.at[f"{point} 6"] = reader.end_workers
    try:
        with pytest.raises(PreemptedError, match="which is committed"):
            loop.run()
    finally:
        signal.signal(signal.SIGCHLD, before)  # torch never gives it back
    assert loop.session.steps >= (5 if point == "step" else 6)
    assert loop.seen == [float(n) for n in range(1, len(loop.seen) + 1)]
    loop.check_saved(loop.session.steps)


def pipelined(loop: Loop, *, fetch_first: bool, fail_in: str) -> None:
    """Reads two batches ahead, as TorchRec's pipelines do; the next one before its forward, or after."""
    model, optimizer = loop.model, loop.optimizer

    def fetch() -> None:
        if fail_in == "read" and loop.session.steps == 5:
            told()
            reader_error.append(RuntimeError("mine"))
        queue.append(next(batches))

    reader_error: list[Exception] = []
    loop.reader._fails = lambda position: reader_error[0] if reader_error else None
    with loop.session as session:
        batches = session.batches()
        queue: list[torch.Tensor] = [next(batches), next(batches)]
        while True:
            if fetch_first:
                fetch()
            loss = model(queue.pop(0)).square().sum()
            if fail_in == "forward" and session.steps == 5:
                fail(RuntimeError("mine"))()
            if not fetch_first:
                fetch()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(in_flight=len(queue))


def test_case_e14_a_pipeline_that_reads_before_it_computes(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    with pytest.raises(PreemptedError, match="after step 5, which is committed"):
        pipelined(loop, fetch_first=True, fail_in="read")
    loop.seen = [1.0, 2.0, 3.0, 4.0, 5.0]
    loop.check_saved(5)


@pytest.mark.parametrize(
    ("fetch_first", "fail_in"), [(False, "read"), (True, "forward"), (False, "forward")]
)
def test_case_e14_a_pipeline_that_has_begun_to_compute(
    tmp_path: Path, fetch_first: bool, fail_in: str
) -> None:  # fmt: skip
    """No batch was handed out since the last step, or no optimizer stepped: it has begun all the same."""
    loop = Loop(tmp_path / "run")
    with pytest.raises(RuntimeError, match="mine"):
        pipelined(loop, fetch_first=fetch_first, fail_in=fail_in)
    assert commits(loop.root) == []


def test_what_may_have_begun_a_step() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = LastStep()
    assert not last.whole, "nothing was counted or restored yet"
    for in_flight in (0, 1):
        last.counted(in_flight)
        assert last.whole
        optimizer.step()
        assert not last.whole
        last.counted(in_flight)
        last.begins()
        assert not last.whole
        last.counted(in_flight)
        with torch.no_grad():
            model(torch.ones(2))
        assert last.whole, "an evaluation"
        model(torch.ones(2))
        assert last.whole == (in_flight == 0), "without a batch it is no step"
    last.close()
    last.counted(0)
    optimizer.step()
    assert last.whole, "its hook is gone"


def test_an_error_in_a_session_inside_of_another_saves_both(tmp_path: Path) -> None:
    """The inner one stops first, which the outer one takes for an error after the request."""
    outer = Session(str(tmp_path / "a"), {"m": torch.zeros(1)}, Reader(), save_every=1000)
    inner = Session(str(tmp_path / "b"), {"m": torch.zeros(1)}, Reader(), save_every=1000)
    with pytest.raises(PreemptedError), outer, inner:  # noqa: PT012
        for session in (outer, inner):
            next(session.batches())
            session.step()
        told()
        while True:
            inner.poll()
    assert commits(tmp_path / "a") == commits(tmp_path / "b") == [1]


def test_an_interrupt_while_the_end_is_saved_gives_signals_back(tmp_path: Path) -> None:
    """SIGINT, in the wait for the last save's commit."""
    # Whatever this process was started with, such as one that ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    loop = Loop(tmp_path / "run")
    flush = loop.session._checkpointer.flush

    def interrupted(timeout_s: float) -> bool:
        if threading.current_thread() is threading.main_thread():
            loop.session._checkpointer.flush = flush  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGINT)
        return flush(timeout_s)

    loop.session._checkpointer.flush = interrupted  # type: ignore[method-assign]
    loop.at["step 6"] = fail(RuntimeError("mine"))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert read_ledger(loop.root / "events/000001/r00000.jsonl")[-1]["event"] == "closed"


def test_an_error_before_the_first_step_is_its_own(tmp_path: Path) -> None:
    """Nothing was trained; a restore that fails after the request isn't a preemption."""

    class Failing(torch.nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            fail(RuntimeError("mine"))()

    root = str(tmp_path / "run")
    with Checkpointer(root) as c:
        c.save(1, {"model": torch.nn.Linear(2, 2)})
    with (
        pytest.raises(BadInputError, match="is in the state but not in the checkpoint"),
        Session(root, {"model": Failing(2, 2)}, Reader()),
    ):
        pass
    assert commits(tmp_path / "run") == [1]


# -- what ends a run for good ---------------------------------------------------------------------


def supersede(root: Any) -> None:
    with Checkpointer(root) as other:
        other.restore({"x": 0}, partial=True)


def test_case_e40_a_superseded_session_ends_at_the_next_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")
    loop.at["step 6"] = lambda: supersede(str(loop.root))
    loop.at["step 8"] = lambda: loop.session.save().committed.exception()  # noqa: PLW0108
    with pytest.raises(ConflictError, match="a newer attempt owns") as e:
        loop.run()
    assert e.value.exit_code == 4
    assert loop.session.steps == 8
    assert read_report(loop.root).attempts[0].ended == "failed"


@pytest.mark.parametrize("grace_s", [25.0, None])
def test_case_e40_it_ends_at_a_poll_and_at_the_end_too(
    tmp_path: Path, grace_s: float | None
) -> None:
    for n, end in enumerate((lambda s: s.poll(), lambda s: s.finish(), lambda s: None)):
        storage, ledger = MemoryStorage(), tmp_path / str(n)
        with (  # noqa: PT012
            pytest.raises(ConflictError, match="a newer attempt owns"),
            Session(storage, {"m": 1}, Reader(), ledger=ledger, grace_s=grace_s) as session,
        ):
            batches = session.batches()
            next(batches)
            session.step()
            supersede(storage)
            assert isinstance(session.save().committed.exception(), ConflictError)
            end(session)


def test_case_e40_a_preemption_of_a_superseded_run_is_told_as_that(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "run")

    def act() -> None:
        supersede(str(loop.root))
        told()

    loop.at["step 6"] = act
    with pytest.raises(ConflictError, match="a newer attempt owns"):
        loop.run()


def test_a_state_that_cannot_be_stored_ends_the_session(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(BadInputError, match="n: a builtins.object can't be stored"),
        Session(str(tmp_path), {"n": 1}, Reader(), save_every=3) as session,
    ):
        for _ in session.batches():
            if session.steps == 4:
                session.state["n"] = object()
            session.step()
            assert session.steps < 10
    assert session.steps == 6
    assert commits(tmp_path) == [3]


@pytest.fixture
def handlers() -> Iterator[list[str]]:
    """Who has handled SIGCHLD, from the first handler on; it and what was there are given back."""
    seen: list[str] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: seen.append("first"))
    yield seen
    signal.signal(signal.SIGCHLD, before)


def end_signals() -> EndSignals:
    return EndSignals([signal.SIGUSR2], lambda _: None, -1)


def test_sessions_that_take_turns_do_not_hand_a_workers_end_round_in_a_circle(
    handlers: list[str],
) -> None:
    one, other = end_signals(), end_signals()
    for _ in range(3):
        one.hold_worker_errors()
        other.hold_worker_errors()
    os.kill(os.getpid(), signal.SIGCHLD)
    assert handlers == ["first"]
    one.close()
    os.kill(os.getpid(), signal.SIGCHLD)
    other.close()
    os.kill(os.getpid(), signal.SIGCHLD)
    assert handlers == ["first"] * 3


def test_a_loader_that_puts_its_handler_over_ours_is_called_once(handlers: list[str]) -> None:
    session = end_signals()
    session.hold_worker_errors()
    ours: Any = signal.getsignal(signal.SIGCHLD)

    def of_a_loader(number: int, frame: Any) -> None:  # as torch's does
        handlers.append("loader")
        ours(number, frame)

    signal.signal(signal.SIGCHLD, of_a_loader)
    session.hold_worker_errors()
    os.kill(os.getpid(), signal.SIGCHLD)
    assert handlers == ["loader", "first"]
    session.close()
    assert signal.getsignal(signal.SIGCHLD) is of_a_loader
    os.kill(os.getpid(), signal.SIGCHLD)
    assert handlers == ["loader", "first"] * 2
